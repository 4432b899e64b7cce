"""Tests of rules about the source that linters do not check."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "outofcore"
MODULES = sorted(SOURCE.rglob("*.py"))
PRIVATE = re.compile(
    r"(^|[^\w.\"'`])torch\._(?!_)\w|torch\.fx\.experimental|from torch[\w.]* import _\w|from torch\._|import torch\._"
)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_private_torch_names_are_in_one_file(path: Path) -> None:
    if path.name == "_torch_internals.py":
        return
    private_lines = [line for line in path.read_text().splitlines() if PRIVATE.search(line)]
    assert not private_lines


@pytest.mark.parametrize(
    ("attribute", "folder", "writers"),
    [
        ("data", "", ["set_data"]),  # documented in CONTRIBUTING.md
        ("place", "execution", ["become"]),
    ],
)
def test_attributes_have_one_writer(attribute: str, folder: str, writers: list[str]) -> None:
    functions: list[str] = []
    for path in (SOURCE / folder).rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in ast.walk(function):
                targets = node.targets if isinstance(node, ast.Assign) else []
                flat = [t for target in targets for t in (target.elts if isinstance(target, ast.Tuple) else [target])]
                if any(isinstance(t, ast.Attribute) and t.attr == attribute for t in flat):
                    functions.append(function.name)
    assert sorted(functions) == writers


def test_one_module_swaps_tensors() -> None:
    names = [path.name for path in MODULES if "swap_tensors(" in path.read_text(encoding="utf-8")]
    assert names == ["tensor_data.py"]


def test_test_modules_do_not_import_each_other() -> None:
    for path in SOURCE.parents[1].joinpath("tests").rglob("test_*.py"):
        assert not re.search(r"^\s*(from|import) test_", path.read_text(encoding="utf-8"), re.MULTILINE), path
