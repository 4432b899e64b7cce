"""The public names: what ``dir`` and ``help`` show, and that the reference has each of them."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

import outofcore

ROOT = Path(__file__).parents[2]
# Besides ``outofcore`` itself. Of a module with ``__all__`` those names are public, else all without an underscore.
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
# Re-exported for policies of one's own; the page of the vocabulary and that of the errors have them.
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


def documented() -> set[str]:
    """Dotted names in the reference, below ``outofcore``; of a whole module, those that it defines."""
    names: set[str] = set()
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        for name in re.findall(r"^::: outofcore\.([\w.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            names.add(name)
            if name in PUBLIC_MODULES or name == "plan":
                names |= {f"{name}.{each}" for each in names_of(name)}
    return names


def test_dir_shows_public_names_alone() -> None:
    import_module("outofcore.cli.app")  # makes its package an attribute
    assert dir(outofcore) == sorted([*outofcore.__all__, "__version__", "onnx"])


def test_help_opens_with_budget_then_compile() -> None:
    text = outofcore.__doc__
    assert text is not None
    head = "\n".join(text.splitlines()[:12])
    assert 0 < head.index('with outofcore.budget("6GiB", model):') < head.index("outofcore.compile(")


@pytest.mark.parametrize("name", outofcore.__all__)
def test_reference_has_each_public_name(name: str) -> None:
    assert {name, f"errors.{name}"} & documented()


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_reference_has_each_name_of_public_modules(module: str) -> None:
    missing = {f"{module}.{name}" for name in names_of(module)} - documented()
    assert {name for name in missing if f"{ELSEWHERE.get(name)}.{name.split('.')[-1]}" not in documented()} == set()
