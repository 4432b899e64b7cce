"""Tests of wheels and sdists: their files, metadata and use. No network is used."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
import torch
from scripts import TRAINING

from outofcore.compiling import wheel_library
from outofcore.runtime.native import library_file

pytest.importorskip("build")
pytest.importorskip("setuptools_scm")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Sources of the libraries without PyTorch and CUDA; the wheel also has one for this version of PyTorch.
COMPILED = ("capture/reads.cpp", "planning/placement/placement.cpp", "planning/remat/remat.cpp")
FALLBACK = re.search(r'fallback_version = "(.*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def files_of(package: Path) -> set[str]:
    return {
        str(path.relative_to(package.parent))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def build(source: Path, kind: str, out: Path, **environment: str) -> Path:
    """Build without isolation, with the build tools that are installed here."""
    code = "import sys; from build import ProjectBuilder; print(ProjectBuilder(sys.argv[1]).build(*sys.argv[2:]))"
    process = subprocess.run(
        [sys.executable, "-c", code, str(source), kind, str(out)],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PIP_NO_INDEX": "1", "GIT_CEILING_DIRECTORIES": str(source.parent), **environment},
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    return Path(process.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build an sdist from a copy without git, and a wheel from the sdist."""
    folder = tmp_path_factory.mktemp("packaging")
    copy, out = folder / "copy", folder / "out"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    copy.mkdir()
    shutil.copytree(ROOT / "src", copy / "src", ignore=ignored)
    for name in ("benchmarks", "tests", "tools", "docs"):  # must not be in the sdist
        (copy / name).mkdir()
        (copy / name / "thing.py").write_text("")
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":  # a file in a worktree
            shutil.copy(path, copy)
    sdist = build(copy, "sdist", out)
    return sdist, build(unpack(sdist, folder / "unpacked"), "wheel", out)


def unpack(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    return root


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_string(archive.read(name).decode("utf-8"))


def test_wheel_has_only_the_package(distributions: tuple[Path, Path]) -> None:
    sdist, wheel = distributions
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = ROOT / "src" / "outofcore"
    libraries = {str(wheel_library(package / source).relative_to(package.parent)) for source in COMPILED}
    libraries.add(str(library_file().relative_to(package.parent)))
    assert names == files_of(package) | libraries
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    with tarfile.open(sdist) as archive:
        top_level = {name.partition("/")[2].split("/")[0] for name in archive.getnames()}
    assert top_level - {""} == {
        *("src", "pyproject.toml", "setup.py", "setup.cfg", "PKG-INFO", "MANIFEST.in"),
        *("README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md"),
    }


def test_wheel_metadata_match_the_project(distributions: tuple[Path, Path]) -> None:
    metadata = metadata_of(distributions[1])
    assert FALLBACK is not None
    assert (metadata["Name"], metadata["Version"]) == ("outofcore", FALLBACK[1])
    assert (metadata["License-Expression"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert str(metadata.get_payload()).strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    assert {"Typing :: Typed", "Operating System :: POSIX :: Linux"} <= set(metadata.get_all("Classifier", []))
    requirements = {
        re.split(r"[^\w-]", requirement)[0]
        for requirement in metadata.get_all("Requires-Dist", [])
        if "extra ==" not in requirement
    }
    assert requirements == {re.split(r"[^\w-]", requirement)[0] for requirement in PROJECT["dependencies"]}


USE = """
import sys
sys.path.insert(0, sys.argv[1])
import outofcore
from outofcore.runtime import native
from outofcore.planning.placement import compiled
assert outofcore.__file__.startswith(sys.argv[1]), outofcore.__file__
print(outofcore.__version__, native.load_native()._name)
from outofcore.report.page import page_text
native._load_once.cache_clear()
import torch
torch.__version__ = "1.0"
try:
    native.load_native()
except outofcore.StateError as error:
    print(error)
"""


def test_wheel_runs_and_refuses_another_version_of_torch(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    target = tmp_path / "target"
    with zipfile.ZipFile(distributions[1]) as archive:  # as an installer does with a pure-Python wheel
        archive.extractall(target)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.run(
        [sys.executable, "-c", USE, str(target)],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**environment, "PATH": "", "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert FALLBACK is not None
    package = ROOT / "src" / "outofcore"
    version_line, refusal = process.stdout.splitlines()
    assert version_line == f"{FALLBACK[1]} {target / library_file().relative_to(package.parent)}"
    assert "native code is missing: outofcore-cpu is not compiled here" in refusal
    built_for = f"torch-{torch.__version__}-{sys.implementation.cache_tag}-{platform.machine()}"
    assert f"The installed wheel was built for {built_for}, and this is torch-1.0-" in refusal


TRAIN = f"""
import sys
sys.path.insert(0, sys.argv[1])
import torch, outofcore
assert outofcore.__file__.startswith(sys.argv[1]), outofcore.__file__
{TRAINING}
with outofcore.compile(step, model, optimizer, budget="8MiB", home="host") as compiled:
    print(compiled(torch.ones(8, 64)).item() > compiled(torch.ones(8, 64)).item())
"""


def test_wheel_compiles_steps_without_a_compiler(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    target = tmp_path / "target"
    with zipfile.ZipFile(distributions[1]) as archive:
        archive.extractall(target)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.run(
        [sys.executable, "-c", TRAIN, str(target)],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**environment, "PATH": "", "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == "True"
    assert not list((tmp_path / "cache").rglob("*.so"))


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_package_builds_without_a_compiler(kind: str, distributions: tuple[Path, Path], tmp_path: Path) -> None:
    wheel = build(unpack(distributions[0], tmp_path / "unpacked"), kind, tmp_path, PATH="")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not list(tmp_path.rglob("*.so"))


def test_editable_installation_builds_no_libraries(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    build(unpack(distributions[0], tmp_path / "unpacked"), "editable", tmp_path)
    assert not list(tmp_path.rglob("*.so"))


def test_citation_names_the_license_of_the_project() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert citation.startswith("cff-version: 1.2.0\n")
    assert f"license: {PROJECT['license']}\n" in citation
