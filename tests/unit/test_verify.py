"""Tests of the comparisons of ``make verify``."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from verify import (
    Side,
    describe_compared,
    difference,
    failure,
    format_table,
    line_of,
    mask,
    missing_requirement,
    outcomes_of,
    run,
    summary_of,
)
from verify_programs import PROGRAMS, Program

PLAIN = Side(1.0, 0, ("loss 1.5", "loss 1.25"), {"a::b": "passed"}, {"model.pt": "0a"})
REPORT = """<testsuites><testsuite>
<testcase classname="t.A" name="one" time="0.1"/>
<testcase classname="t.A" name="two[x]"><skipped message="net"/></testcase>
<testcase classname="t.B" name="three"><failure>1 != 2</failure></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize(
    ("line", "masked"),
    [
        ("iter 5: loss 3.4441, time 17119.93ms, mfu 0.01%\n", "iter 5: loss 3.4441, time Tms, mfu T"),
        ("| lr 20.00 | ms/batch 12.31 | loss  7.63", "| lr 20.00 | ms/batch T | loss  7.63"),
        ("Time  1.234 ( 2.345)\tData  0.011 ( 0.2)\tLoss 7.1e+00", "Time T\tData T\tLoss 7.1e+00"),
        ("| time:  5.01s | valid loss  6.66", "| time: Ts | valid loss  6.66"),
        ("{'eval_loss': '6.2', 'eval_runtime': '1.5'}", "{'eval_loss': '6.2', 'eval_runtime': 'T'}"),
        ("synthetic data to /tmp/tmpab12 (this", "synthetic data to FOLDER (this"),
        ("loss: 0.50232, step 3", "loss: 0.50232, step 3"),
    ],
)
def test_mask_replaces_only_times(line: str, masked: str) -> None:
    assert mask(line) == masked


def test_outcomes_are_read_from_a_report() -> None:
    assert outcomes_of(REPORT) == {"t.A::one": "passed", "t.A::two[x]": "skipped", "t.B::three": "failure"}


def test_equal_runs_have_no_difference() -> None:
    assert difference(PLAIN, dataclasses.replace(PLAIN, seconds=9.0, peak=5, error="warned")) == ""


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"output": ("loss 1.5", "loss 1.26")}, "line 2: 'loss 1.25' became 'loss 1.26'"),
        ({"output": ("loss 1.5",)}, "line 2: 'loss 1.25' became None"),
        ({"output": ("loss 1.5", "loss 1.25", "more")}, "line 3: None became 'more'"),
        ({"outcomes": {"a::b": "failure"}}, "test a::b: passed became failure"),
        ({"outcomes": {}}, "test a::b: passed became missing"),
        ({"files": {"model.pt": "0b"}}, "file model.pt: 0a became 0b"),
        ({"status": 1}, "exit status 0 became 1"),
        ({"status": None, "seconds": 60.0}, "no end after 60 s"),
    ],
)
def test_difference_names_the_first(changed: dict[str, object], text: str) -> None:
    assert difference(PLAIN, dataclasses.replace(PLAIN, **changed)) == text  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("program", "changed", "text"),
    [
        (Program("p", ("main.py",), "1MiB"), {}, ""),
        (Program("p", ("main.py",), "1MiB"), {"status": 1}, "plain Python failed with exit status 1"),
        (Program("p", ("main.py",), "1MiB"), {"status": None}, "plain Python did not end in 1 s"),
        (Program("p", ("main.py",), "1MiB", lines=2), {"status": -2}, ""),
        (Program("p", ("main.py",), "1MiB", lines=9), {"status": 1}, "plain Python ended after 2 of 9 lines"),
        (Program("p", ("-m", "pytest"), "1MiB"), {"status": 1}, ""),
        (Program("p", ("-m", "pytest"), "1MiB"), {"status": 2}, "plain Python failed with exit status 2"),
    ],
)
def test_failure_explains_an_unusable_plain_run(program: Program, changed: dict[str, object], text: str) -> None:
    assert failure(program, dataclasses.replace(PLAIN, **changed)) == text  # type: ignore[arg-type]


def test_summary_of_a_loop_is_read() -> None:
    stats = pytest.importorskip("outofcore.follow.stats")
    summary = repr(stats.LoopStats(peak_bytes=3 << 20, written_bytes=0, fetched_bytes=5 << 30)).strip("<>")
    assert summary_of(f"a warning\noutofcore: {summary}\n") == (3 << 20, 0, 5 << 30)
    assert summary_of("Traceback") == (0, 0, 0)


def test_missing_sources_and_packages_are_named(tmp_path: Path) -> None:
    program = Program("p", ("main.py",), "1MiB", "who/what", "what", "sub", packages=("no_such_package",))
    assert missing_requirement(program, tmp_path) == "clone github.com/who/what to FOLDER/what"
    (tmp_path / "what" / "sub").mkdir(parents=True)
    assert missing_requirement(program, tmp_path) == "install no_such_package"


def test_run_interrupts_a_program_after_its_lines(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("import itertools\nfor i in itertools.count(): print('step', i)\n")
    program = Program("p", ("endless.py",), "1MiB", lines=3)
    side = run(program, tmp_path, None, limit=60)
    assert side.output == ("step 0", "step 1", "step 2")
    assert side.status not in (0, None)


def test_run_reads_saved_files_and_exit_status(tmp_path: Path) -> None:
    (tmp_path / "saves.py").write_text("open('a.pt', 'w').write('x')\nraise SystemExit(3)\n")
    side = run(Program("p", ("saves.py",), "1MiB", files=("*.pt",)), tmp_path, None, limit=60)
    assert (side.status, list(side.files)) == (3, ["a.pt"])


def test_run_ends_at_its_limit(tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(600)\n")
    assert run(Program("p", ("sleeps.py",), "1MiB"), tmp_path, None, limit=1).status is None


def test_rows_name_the_difference() -> None:
    row = {
        "command": "main.py", "commit": "abc", "budget": 1 << 20, "in_core_peak": 4 << 20, "peak": 1 << 20,
        "evicted": 0, "fetched": 0, "plain_seconds": 2.0, "ratio": 1.5, "difference": "",
        "compared": describe_compared(PLAIN),
    }  # fmt: skip
    assert line_of("p", row).endswith("1 tests: 1 passed: same")
    assert describe_compared(dataclasses.replace(PLAIN, outcomes={})) == "2 lines, 1 file"
    assert line_of("p", row | {"difference": "line 2"}).endswith("line 2")
    assert "| p at abc | `main.py` | 4.00 MiB → 1.00 MiB (1.00 MiB) |" in format_table({"p": row})


def test_program_names_are_unique() -> None:
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS)
