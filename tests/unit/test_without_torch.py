"""Tests of planning, validating and placing without PyTorch: every import of it fails here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import outofcore
from outofcore.costs import Costs, Home, OpCost
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.graphfile import GraphFile, write_graph

# An import finder that refuses PyTorch, installed first.
_BLOCK = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, Refuse())
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _BLOCK + code, *arguments], capture_output=True, text=True, check=False
    )


def outofcore_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run("sys.argv[0] = 'outofcore'\nfrom outofcore.cli import main\nmain()", *arguments)


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """Write a graph of two layers, forward and backward: 9 MiB in core, at least 5 MiB."""
    mib = 1 << 20
    storages = [Storage(i, mib, StorageKind.PARAMETER, f"weight {i}") for i in range(2)]
    storages += [Storage(2 + i, 2 * mib, StorageKind.ACTIVATION, f"activation {i}") for i in range(3)]
    ops = (
        Op(0, "forward", (0,), (), (2,)),
        Op(1, "forward", (1, 2), (), (3,)),
        Op(2, "backward", (3,), (1,), (4,)),
        Op(3, "backward", (2, 4), (0,), ()),
    )
    path = tmp_path / "graph.json"
    costs = Costs(tuple(OpCost(0.01) for _ in ops), (Home("disk", None, 1e9, 1e9, 0.0, 0.5, 0.1),))
    write_graph(path, GraphFile.of(StepGraph(tuple(storages), ops), costs))
    return path


def test_torch_cannot_be_imported_here() -> None:
    process = run("import torch")
    assert process.returncode == 1
    assert "No module named 'torch'" in process.stderr


def test_plan_and_validate_run(graph: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    process = outofcore_command("plan", "--graph", str(graph), "--budget", "6MiB", "--save-plan", str(plan), "--json")
    assert process.returncode == 0, process.stderr
    answer = json.loads(process.stdout)
    assert answer["feasible"]
    assert answer["peak_bytes"] <= 6 << 20
    process = outofcore_command("validate", "--graph", str(graph), "--plan", str(plan))
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("valid: ")
    process = outofcore_command("validate", "--graph", str(graph), "--plan", str(plan), "--budget", "1MiB")
    assert process.returncode != 0
    assert f"{plan} is not a valid plan of {graph} within 1.00 MiB: " in process.stderr.replace("\n", " ")
    page = tmp_path / "report.html"
    process = outofcore_command("report", "--graph", str(graph), "--budget", "6MiB", "-o", str(page), "--no-curve")
    assert process.returncode == 0, process.stderr
    assert '"name":"predicted"' in page.read_text(encoding="utf-8")
    process = outofcore_command("plan", "--graph", str(graph), "--compare")
    assert process.returncode in (0, 1), process.stderr
    assert "Traceback" not in process.stderr


def test_pack_runs(tmp_path: Path) -> None:
    file = tmp_path / "rectangles.csv"
    file.write_text("id,lower,upper,size\na,0,4,8\nb,2,6,4\nc,4,8,8\n", encoding="utf-8")
    process = outofcore_command("pack", str(file), "--capacity", "12")
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("id,lower,upper,size,offset\n")


def test_measurement_cache_can_be_cleared(tmp_path: Path) -> None:
    process = outofcore_command("doctor", "--cache", str(tmp_path), "--clear-cache")
    assert process.returncode == 0, process.stderr
    assert "0 files deleted" in process.stdout


def test_doctor_prints_how_to_install_pytorch() -> None:
    process = outofcore_command("doctor")
    assert process.returncode == 1
    assert "ok   CPU " in process.stdout
    assert re.search(
        r"^FAIL PyTorch +not installed; install it with: pip install torch, or", process.stdout, re.MULTILINE
    )
    assert process.stdout.endswith("\n1 problem: PyTorch\n")
    assert process.stderr == ""


@pytest.mark.parametrize("arguments", [("train", "gpt", "--budget", "1GiB"), ("plan", "gpt")])
def test_commands_without_pytorch_name_the_missing_package(arguments: tuple[str, ...]) -> None:
    process = outofcore_command(*arguments)
    assert process.returncode == 2
    assert "needs PyTorch" in process.stderr
    assert "Traceback" not in process.stderr


def test_library_imports_and_compile_names_the_missing_package() -> None:
    process = run(
        "import outofcore\n"
        "assert 'compile' in dir(outofcore)\n"
        "from outofcore import planning, validator, graphfile\n"
        "try: outofcore.compile\n"
        "except ImportError as error: print(error)\n"
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("outofcore.compile needs PyTorch")
    assert "pip install torch" in process.stdout
    process = run("from outofcore import compile")
    assert "outofcore.compile needs PyTorch" in process.stderr


def test_unknown_attribute_is_refused() -> None:
    with pytest.raises(AttributeError, match="'compyle'"):
        outofcore.compyle  # noqa: B018
    assert set(outofcore.__all__) <= set(dir(outofcore))
