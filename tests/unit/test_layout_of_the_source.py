"""Rules about the source that no linter knows."""

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
def test_private_names_of_torch_stay_in_one_file(path: Path) -> None:
    if path.name == "_torch_internals.py":
        return
    found = [line for line in path.read_text().splitlines() if PRIVATE.search(line)]
    assert not found


@pytest.mark.parametrize(
    ("attribute", "folder", "writers"),
    [
        ("data", "", ["set_data"]),  # as CONTRIBUTING.md has it
        ("place", "execution", ["become"]),
    ],
)
def test_attributes_have_no_other_writers(attribute: str, folder: str, writers: list[str]) -> None:
    found: list[str] = []
    for path in (SOURCE / folder).rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in ast.walk(function):
                targets = node.targets if isinstance(node, ast.Assign) else []
                flat = [t for target in targets for t in (target.elts if isinstance(target, ast.Tuple) else [target])]
                if any(isinstance(t, ast.Attribute) and t.attr == attribute for t in flat):
                    found.append(function.name)
    assert sorted(found) == writers


def test_one_module_swaps_tensors() -> None:
    found = [path.name for path in MODULES if "swap_tensors(" in path.read_text(encoding="utf-8")]
    assert found == ["tensor_data.py"]


def test_no_test_module_imports_another() -> None:
    for path in SOURCE.parents[1].joinpath("tests").rglob("test_*.py"):
        assert not re.search(r"^\s*(from|import) test_", path.read_text(encoding="utf-8"), re.MULTILINE), path
