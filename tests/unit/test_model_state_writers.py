"""Whatever moves a model passes through one place."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "outofcore"


@pytest.mark.parametrize(("attribute", "writers"), [("data", ["set_data"]), ("place", ["become"])])
def test_there_is_one_writer(attribute: str, writers: list[str]) -> None:
    found: list[str] = []
    for path in (SOURCE / "execution").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in ast.walk(function):
                targets = node.targets if isinstance(node, ast.Assign) else []
                flat = [t for target in targets for t in (target.elts if isinstance(target, ast.Tuple) else [target])]
                if any(isinstance(t, ast.Attribute) and t.attr == attribute for t in flat):
                    found.append(function.name)
    assert found == writers
