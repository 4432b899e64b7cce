"""Names that programs beside the package import from it, most of which no other test runs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# In the other folders of tests, pytest itself fails on such an import.
FOLDERS = ("benchmarks", "tests/cuda", "tools")


def missing_names(source: str) -> list[str]:
    """List what ``from outofcore... import`` statements, also those in functions, ask for and do not find."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] == "outofcore":
            for alias in node.names:
                try:
                    exec(f"from {node.module} import {alias.name}", {})
                except ImportError:
                    found.append(f"{node.module}.{alias.name}")
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_imported_names_exist(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    found = {str(path.relative_to(ROOT)): missing_names(path.read_text(encoding="utf-8")) for path in paths}
    assert {path: names for path, names in found.items() if names} == {}


def test_missing_names_are_found_in_functions() -> None:
    source = "def f():\n    from outofcore.graph import StepGraph, nothing\n    from outofcore.gone import planning\n"
    assert missing_names(source) == ["outofcore.graph.nothing", "outofcore.gone.planning"]
