"""Tests of the public names, in ``dir``, in ``help`` and in the reference."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

import outofcore

ROOT = Path(__file__).parents[2]
# In addition to ``outofcore``. Public are the names in ``__all__``, or without it those without an underscore.
PUBLIC_MODULES = (
    "errors",
    "graphfile",
    "integrations.lightning",
    "integrations.metrics",
    "integrations.transformers",
    "onnx",
    "planfile",
    "policies",
    "presets",
    "simulator",
    "units",
    "zoo",
)
# Re-exported for user policies; the reference documents them on the pages of the vocabulary and of errors.
ELSEWHERE = {
    "policies.BudgetError": "errors",
    "policies.Decision": "plan",
    "policies.Gap": "plan",
    "policies.Plan": "plan",
    "policies.Residency": "plan",
}


def source_of(module: str) -> ast.Module:
    path = ROOT / "src" / "outofcore" / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def names_of(module: str) -> list[str]:
    tree = source_of(module)
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return [name for name in defined if not name.startswith("_")]


def documented_names() -> set[str]:
    names: set[str] = set()
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        for name in re.findall(r"^::: outofcore\.([\w.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            names.add(name)
            if name in PUBLIC_MODULES or name == "plan":
                names |= {f"{name}.{member}" for member in names_of(name)}
    return names


def test_dir_shows_only_public_names() -> None:
    import_module("outofcore.cli.app")  # makes its package an attribute
    assert dir(outofcore) == sorted([*outofcore.__all__, "__version__", "onnx"])


def test_help_opens_with_budget_then_compile() -> None:
    text = outofcore.__doc__
    assert text is not None
    head = "\n".join(text.splitlines()[:12])
    assert 0 < head.index('with outofcore.budget("6GiB", model):') < head.index("outofcore.compile(")


@pytest.mark.parametrize("name", outofcore.__all__)
def test_reference_has_each_public_name(name: str) -> None:
    assert {name, f"errors.{name}"} & documented_names()


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_reference_has_each_name_of_public_modules(module: str) -> None:
    missing = {f"{module}.{name}" for name in names_of(module)} - documented_names()
    assert {
        name for name in missing if f"{ELSEWHERE.get(name)}.{name.split('.')[-1]}" not in documented_names()
    } == set()
