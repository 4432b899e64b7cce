"""Tests that the mutants fit the sources and the tests, and that the runner classifies their outcomes."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import mutants
from mutant_list import MUTANTS, Mutant
from mutants import Outcome, Run, judge

ROOT = mutants.ROOT


@cache
def source_of(mutant: Mutant) -> str:
    return (ROOT / mutants.PACKAGE / mutant.file).read_text(encoding="utf-8")


@cache
def test_names_of(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


test_names_of.__test__ = False  # type: ignore[attr-defined]


def test_fifty_mutants_have_distinct_names() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 50
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", name) for name in names)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_fits_its_source_and_tests(mutant: Mutant) -> None:
    source = source_of(mutant)
    assert source.count(mutant.old) == 1
    assert mutant.new != mutant.old
    assert mutant.new not in source
    if mutant.file.endswith(".py"):
        compile(source.replace(mutant.old, mutant.new), mutant.file, "exec")
    assert mutant.breaks.endswith(".")
    assert 1 <= len(mutant.tests) <= 4
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert (ROOT / file).is_file()
        assert not name or name.partition("[")[0] in test_names_of(file)


COLLECTION_ERROR = """
ERROR tests/unit/test_a.py - ImportError
!!!!!!!!!!!!! Interrupted: 1 error during collection !!!!!!!!!!!!!!
"""
CTRL_C = """
tests/unit/test_a.py::test_one PASSED [ 50%]
tests/unit/test_a.py::test_two[1 2]
!!!!!!!!!!!!! KeyboardInterrupt !!!!!!!!!!!!!!
"""
FAILURE = """
tests/unit/test_a.py::test_one[1 2] FAILED [ 50%]
FAILED is what the test prints
=========== short test summary info ===========
FAILED tests/unit/test_a.py::test_one[1 2] - assert 1 == 2
"""
RUNNING = "tests/unit/test_a.py::test_one PASSED [ 50%]\ntests/unit/test_a.py::test_two "


@pytest.mark.parametrize(
    ("status", "output", "outcome", "killed_by"),
    [
        (0, "1 passed", Outcome.SURVIVED, ""),
        (5, "no tests ran", Outcome.SURVIVED, ""),
        (1, FAILURE, Outcome.KILLED, "tests/unit/test_a.py::test_one[1 2]"),
        (2, COLLECTION_ERROR, Outcome.BROKEN, "pytest exits with 2"),
        (2, CTRL_C, Outcome.KILLED, "KeyboardInterrupt in tests/unit/test_a.py::test_two[1 2]"),
        (4, "usage error", Outcome.BROKEN, "pytest exits with 4"),
        (-11, RUNNING, Outcome.KILLED, "SIGSEGV in tests/unit/test_a.py::test_two"),
        (None, RUNNING, Outcome.KILLED, "time limit after 7 s in tests/unit/test_a.py::test_two"),
    ],
)
def test_judge_classifies_outcomes(status: int | None, output: str, outcome: Outcome, killed_by: str) -> None:
    assert judge(Run(status, output, 7.0)) == (outcome, killed_by)


TESTS = """
from outofcore.sums import add
def test_two_and_three(): assert add(2, 3) == 5
def test_nothing(): assert add(0, 0) == 0
"""


def test_runner_reports_outcomes_and_restores_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    source = root / mutants.PACKAGE / "sums.py"
    source.parent.mkdir(parents=True)
    source.write_text("def add(a, b):\n    return a + b\n")
    (source.parent / "__init__.py").write_text("")
    (root / "tests").mkdir()
    (root / "tests" / "test_sums.py").write_text(TESTS)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    named = "tests/test_sums.py::test_nothing"
    monkeypatch.setattr(mutants, "ROOT", root)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # loading plugins takes most of the time
    listed = (
        Mutant("minus", "sums.py", "a + b", "a - b", "Sums are differences.", (named,)),
        Mutant("one-more", "sums.py", "a + b", "a + b + 1", "Sums are too large.", (named,)),
        Mutant("no-name", "sums.py", "def add", "def plus", "Sums are called otherwise.", (named,)),
    )
    monkeypatch.setattr(mutants, "MUTANTS", listed)
    out = tmp_path / "out.json"
    assert mutants.main(["--out", str(out)]) == 1
    outcomes = {
        entry["name"]: (entry["outcome"], entry["killed_by"]) for entry in json.loads(out.read_text())["mutants"]
    }
    assert outcomes == {
        "minus": ("survived", ""),
        "one-more": ("killed", named),
        "no-name": ("broken mutant", "pytest exits with 4"),
    }
    assert "1 killed, 1 survived, 1 broken mutant" in capsys.readouterr().out
    assert mutants.main(["--only", "minus", "--tests", "suite"]) == 0
    assert mutants.main(["--check"]) == 0
    assert source.read_text() == "def add(a, b):\n    return a + b\n"
