"""Every public function has an example in its docstring, and each example runs."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import outofcore
from outofcore import graphfile, planfile, presets, progress, units

# Modules whose public functions users call, besides what the package itself exports.
MODULES: tuple[ModuleType, ...] = (graphfile, planfile, presets, progress, units)


def public() -> Iterator[tuple[str, Any]]:
    for name in outofcore.__all__:
        if name.endswith("Error"):
            continue
        yield f"outofcore.{name}", getattr(outofcore, name)
    for module in MODULES:
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_"):
                yield f"{module.__name__}.{name}", value


def examples(name: str, value: Any) -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(recurse=inspect.isclass(value))
    space = {**vars(inspect.getmodule(value)), "outofcore": outofcore}  # type: ignore[arg-type]
    return [test for test in finder.find(value, name, globs=space) if test.examples]


PUBLIC = dict(public())


@pytest.mark.parametrize("name", PUBLIC)
def test_an_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # for examples that write files
    found = examples(name, PUBLIC[name])
    assert found, f"{name} has no example (>>>) in its docstring"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in found:
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


def test_no_module_hides_a_public_function() -> None:
    modules = {path.stem for path in Path(next(iter(outofcore.__path__))).iterdir()}
    assert modules.isdisjoint(outofcore.__all__)
