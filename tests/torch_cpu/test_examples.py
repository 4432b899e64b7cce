"""Tests that the examples in the README, the docs and docstrings run."""

from __future__ import annotations

import doctest
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import outofcore
from outofcore import graphfile, planfile, presets, progress, units
from outofcore.onnx import loading

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def load_tool() -> object:
    spec = importlib.util.spec_from_file_location("readme_blocks", ROOT / "tools" / "readme_blocks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = load_tool()
WITH_BLOCKS = [page for page in PAGES if "```python\n" in page.read_text(encoding="utf-8")]


def test_pages_have_code_blocks() -> None:
    assert len(WITH_BLOCKS) >= 8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.read_text(encoding="utf-8")
    for name in ("transformers", "accelerate", "lightning", "peft", "trl", "datasets", "tensorboard", "onnx"):
        if re.search(rf"^(import|from) {name}\b", text, re.MULTILINE):
            pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ran = TOOL.run_blocks(page)  # type: ignore[attr-defined]
    assert ran > 0 or page not in WITH_BLOCKS


# Modules with public functions for users, in addition to the exports of the package.
MODULES: tuple[ModuleType, ...] = (graphfile, loading, planfile, presets, progress, units)


def find_public() -> Iterator[tuple[str, Any]]:
    for name in outofcore.__all__:
        if name.endswith("Error"):
            continue
        yield f"outofcore.{name}", getattr(outofcore, name)
    for module in MODULES:
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_"):
                yield f"{module.__name__}.{name}", value


def find_examples(name: str, value: Any) -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(recurse=inspect.isclass(value))
    space = {**vars(inspect.getmodule(value)), "outofcore": outofcore}  # type: ignore[arg-type]
    return [test for test in finder.find(value, name, globs=space) if test.examples]


PUBLIC = dict(find_public())


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # for examples that write files
    doctests = find_examples(name, PUBLIC[name])
    assert doctests, f"{name} has no example (>>>) in its docstring"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in doctests:
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


def test_modules_do_not_hide_public_functions() -> None:
    modules = {path.stem for path in Path(next(iter(outofcore.__path__))).iterdir()}
    assert modules.isdisjoint(outofcore.__all__)
