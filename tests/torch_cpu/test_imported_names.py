"""Tests that names imported by benchmarks, tools and GPU tests exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# In other test folders, pytest itself fails on a missing import.
FOLDERS = ("benchmarks", "tests/cuda", "tools")


def missing_names(source: str) -> list[str]:
    """List names in ``from outofcore... import`` statements, also inside functions, that do not exist."""
    missing: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] == "outofcore":
            for alias in node.names:
                try:
                    exec(f"from {node.module} import {alias.name}", {})
                except ImportError:
                    missing.append(f"{node.module}.{alias.name}")
    return missing


@pytest.mark.parametrize("folder", FOLDERS)
def test_imported_names_exist(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    missing = {str(path.relative_to(ROOT)): missing_names(path.read_text(encoding="utf-8")) for path in paths}
    assert {path: names for path, names in missing.items() if names} == {}


def test_missing_names_are_found_in_functions() -> None:
    source = "def f():\n    from outofcore.graph import StepGraph, nothing\n    from outofcore.gone import planning\n"
    assert missing_names(source) == ["outofcore.graph.nothing", "outofcore.gone.planning"]
