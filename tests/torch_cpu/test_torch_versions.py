"""Tests with an untested PyTorch, and with one that lacks a private name used by the library."""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from effort import some_of

from outofcore import _torch_internals as internals
from outofcore._torch_internals import TESTED_TEXT, Feature, is_tested
from outofcore.capture.patching import class_method, patch_attribute
from outofcore.errors import VersionError

SOURCE = Path(str(internals.__file__))
ROOT = Path(__file__).parents[2]


class Number(int):
    """A class that inherits a class method implemented in C."""


def test_patched_replaces_a_c_class_method_in_one_thread() -> None:
    plain = class_method(Number, "from_bytes")

    def negate(cls: type, *args: Any, **kwargs: Any) -> Any:
        return cls(-plain(cls, *args, **kwargs))

    results: list[int] = []
    with patch_attribute(Number, "from_bytes", classmethod(negate)):
        thread = threading.Thread(target=lambda: results.append(Number.from_bytes(b"\x05", "big")))
        thread.start()
        thread.join()
        assert Number.from_bytes(b"\x05", "big") == -5
    assert results == [5]
    assert type(results[0]) is Number
    assert "from_bytes" not in vars(Number)
    assert Number.from_bytes(b"\x05", "big") == 5


def load_without(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    resolve = pkgutil.resolve_name

    def resolve_or_raise(requested: str) -> Any:
        if requested == name:
            raise AttributeError(requested)
        return resolve(requested)

    spec = importlib.util.spec_from_file_location("outofcore._internals_for_a_test", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setattr(pkgutil, "resolve_name", resolve_or_raise)
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        for feature in module.Feature:
            module.missing(feature)
    return module


def test_missing_private_name_disables_only_its_features(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve, names_used = pkgutil.resolve_name, []
    with monkeypatch.context() as patch:
        patch.setattr(pkgutil, "resolve_name", lambda name: names_used.append(name) or resolve(name))
        whole = load_without("", monkeypatch)
    assert not any(whole.missing(feature) for feature in whole.Feature)
    assert len(names_used) > 60
    refused: set[str] = set()
    for name in names_used:
        module = load_without(name, monkeypatch)
        for feature in module.Feature:
            if names := module.missing(feature):
                assert names == (name,)
                refused.add(feature.name)
                with pytest.raises(VersionError, match=re.escape(name)) as raised:
                    module.require(feature)
                assert feature.value in str(raised.value)
                assert TESTED_TEXT in str(raised.value)
    assert refused == {feature.name for feature in Feature}


def test_private_names_are_not_accessed_directly() -> None:
    """A plain import or attribute access would break ``import outofcore`` if the name is missing."""
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    checked_by_types = next(
        node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    )
    tree.body[tree.body.index(checked_by_types)] = ast.If(ast.Constant(True), checked_by_types.orelse, [])
    names = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and re.match(r"torch(\.\w+)*\._(?!_)\w", ast.unparse(node))
    ]
    names += [
        str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and "._" in str(node.module)
    ]
    # Looked up at its call, in a measurement of a GPU.
    assert set(names) <= {"torch.cuda._sleep"}


ENTRY_POINTS = """
import pkgutil, sys
import torch
gone = set(sys.argv[2].split(","))
resolve = pkgutil.resolve_name
def resolved(name):
    if name in gone:
        raise AttributeError(name)
    return resolve(name)
pkgutil.resolve_name = resolved
import outofcore
if sys.argv[3]:
    from outofcore import _torch_internals
    _torch_internals.TESTED = ((1, 0), (1, 1))

def train(door, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss
    x = torch.ones(8, 64)
    if door == "plain":
        return step(x).item()
    if door == "compile":
        with outofcore.compile(step, model, optimizer, budget="1MiB", cache=False, home="host", **options) as run:
            return run(x).item()
    with outofcore.budget("1MiB", model, cache=False, home="host"):
        return step(x).item()

def tried(name, door, **options):
    try:
        print(name, "works" if train(door, **options) == train("plain") else "differs")
    except outofcore.VersionError as error:
        print(name, "refused:", error)

for name in sys.argv[1].split(","):
    if name == "kernels":
        tried(name, "compile", kernels="inductor")
    else:
        tried(name, name)
"""


def try_entry_points(names: str, gone: str = "", untested: str = "") -> tuple[list[str], str]:
    run = subprocess.run(
        [sys.executable, "-c", ENTRY_POINTS, names, gone, untested],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines(), run.stderr


@pytest.mark.parametrize(
    ("gone", "refused"),
    [
        ("torch._subclasses.fake_tensor.FakeTensorMode", {"compile", "kernels"}),
        ("torch.library._impls", {"budget"}),
        *some_of([("torch._inductor.compile_fx.compile_fx_inner", {"kernels"})], []),
    ],
)
def test_only_features_with_a_missing_name_are_refused(gone: str, refused: set[str]) -> None:
    lines, _ = try_entry_points("compile,budget,kernels" if "inductor" in gone else "compile,budget", gone)
    for line in lines:
        name, _, answer = line.partition(" ")
        if name in refused:
            assert any(lost in answer for lost in gone.split(","))
        else:
            assert answer == "works"


def test_untested_torch_gives_one_warning_with_the_tested_range() -> None:
    lines, errors = try_entry_points("compile,budget", untested="untested")
    assert lines == ["compile works", "budget works"]
    assert errors.count(f"PyTorch {torch.__version__}: ") == errors.count(TESTED_TEXT) == 1


@pytest.mark.parametrize(
    ("version", "expected"),
    [("2.10.1", False), ("2.11.0", True), ("2.13.0+cpu", True), ("2.99.0a0+git1", False), ("3.0", False), ("x", False)],
)
def test_is_tested_compares_releases(version: str, expected: bool) -> None:
    assert is_tested(version) is expected
