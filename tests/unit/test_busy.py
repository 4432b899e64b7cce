"""Tests of how counters detect a busy machine, and the effect on costs and plans."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from weights_in_sequence import BUDGET, COSTS, GRAPH, WINDOW

from outofcore import busy
from outofcore.busy import (
    BusyWatch,
    Counters,
    DiskCounters,
    is_due,
    read_counters,
    read_disk,
    read_loop_counters,
    typical_seconds,
    was_busy,
    was_disk_busy,
)
from outofcore.cli.answer import Subject, print_plan
from outofcore.cli.options import AnswerOptions
from outofcore.costs import Costs
from outofcore.estimation.sweep import Estimate
from outofcore.graphfile import GraphFile
from outofcore.planning import plan_step
from outofcore.step_plans import StepPlans, VariantChoice
from outofcore.variant import LOWEST_MEMORY

BUSY = replace(COSTS, ops=tuple(replace(cost, busy=1) for cost in COSTS.ops))


@pytest.mark.parametrize(
    ("counted", "expected"),
    [
        (Counters(0.1, 0.1, 0.0), False),
        (Counters(0.1, 0.1, 0.004), False),  # one time slice of a short task
        (Counters(0.1, 0.1, 0.02), True),
        (Counters(0.002, 0.0019, 0.0009), False),  # threads that wake up
        (Counters(0.1, 0.01, 0.0), False),  # it waited, but not for a core
        (Counters(0.1, 0.095, None), False),
        (Counters(0.1, 0.05, None), True),
        (Counters(0.0005, 0.0001, None), False),
    ],
)
def test_counters_detect_a_busy_machine(counted: Counters, expected: bool) -> None:
    assert was_busy(counted) is expected


@pytest.mark.parametrize(("other_seconds", "expected"), [(0.0, False), (0.2, False), (0.5, True), (None, True)])
def test_own_waiting_threads_are_not_other_load(other_seconds: float | None, expected: bool) -> None:
    assert was_busy(Counters(1.0, 0.5, 0.3, other_seconds), computes=False) is expected
    assert not was_busy(Counters(1.0, 0.5, 0.0, other_seconds), computes=False)


def test_cpu_time_of_other_processes_is_read(tmp_path: Path) -> None:
    assert read_loop_counters(tmp_path).others_seconds is None
    (tmp_path / "stat").write_text("cpu  100000 20000 3000 999 9 9 9 9 9 9\ncpu0 1 1 1\n")
    (tmp_path / "thread-self").mkdir()
    (tmp_path / "thread-self" / "schedstat").write_text("900 2000000 5\n")
    counters = read_loop_counters(tmp_path)
    assert counters.delayed_seconds == 0.002
    all_seconds = 123_000 / os.sysconf("SC_CLK_TCK")
    assert counters.others_seconds == pytest.approx(all_seconds - time.process_time(), abs=1)


def test_cpu_time_alone_cannot_judge_a_waiting_thread() -> None:
    assert not was_busy(Counters(0.1, 0.01, None), computes=False)
    assert was_busy(Counters(0.1, 0.01, 0.05), computes=False)


def test_counters_add_up_unless_one_is_unknown() -> None:
    span = Counters(5.0, 3.0, 2.0) - Counters(1.0, 1.0, 0.5)
    assert span == Counters(4.0, 2.0, 1.5)
    assert span + span == Counters(8.0, 4.0, 3.0)
    assert (span - Counters(1.0, 1.0, None)).delayed_seconds is None


def test_watch_counts_only_while_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    read = iter([Counters(1.0, 1.0, 1.0), Counters(2.0, 1.5, 1.25), Counters(9.0, 9.0, 9.0), Counters(9.5, 9.5, 9.0)])
    monkeypatch.setattr(busy, "read_counters", lambda: next(read))
    watch = BusyWatch()
    for _ in range(2):
        with watch:
            pass
    assert watch.counted == Counters(1.5, 1.0, 0.25)


def test_typical_seconds_ignore_delayed_repetitions() -> None:
    assert typical_seconds([(1.0, 1.0), (3.0, 1.0), (1.2, 1.2), (1.1, 1.1), (9.0, 2.0)]) == 1.1
    assert typical_seconds([(3.0, 1.0), (2.0, 1.0), (9.0, 1.0)]) == 2.0
    # A clock that reads a little late is not a thread that was held up.
    assert typical_seconds([(1e-5, 0.0), (3e-5, 2e-5), (2e-5, 1e-5)]) == 2e-5


def test_busy_machine_measures_again_a_few_times_and_then_daily() -> None:
    assert not is_due(0, 1e9)
    assert [is_due(count, 1.0) for count in (1, 2, 3, 4, 9)] == [True, True, True, False, False]
    assert is_due(9, 25 * 3600.0)
    assert is_due(9, -60.0)  # the clock was set


def test_waits_of_all_threads_are_read(tmp_path: Path) -> None:
    for task, text in (("7", "900 2000000 5\n"), ("8", "100 1000000 2\n")):
        (tmp_path / "self" / "task" / task).mkdir(parents=True)
        (tmp_path / "self" / "task" / task / "schedstat").write_text(text)
    (tmp_path / "self" / "task" / "9").mkdir()  # it ended
    assert read_counters(tmp_path).delayed_seconds == 0.003


@pytest.mark.parametrize("text", [None, "", "0 0 0\n", "nonsense\n"])
def test_hidden_wait_counters_leave_the_clocks(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "self" / "task" / "7").mkdir(parents=True)
        (tmp_path / "self" / "task" / "7" / "schedstat").write_text(text)
    counters = read_counters(tmp_path)
    assert counters.delayed_seconds is None
    assert counters.seconds > 0


def test_bytes_of_other_processes_show_a_busy_disk(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "io").write_text("rchar: 9\nread_bytes: 1000\nwrite_bytes: 4096\n")
    assert read_disk(tmp_path, tmp_path) is None
    lines = [
        "259 77 other 1 0 9999 0 1 0 9999 0 0 0 0",
        f"{os.major(device)} {os.minor(device)} x 5 0 8 3 6 0 24 1 0 0 0",
    ]
    (tmp_path / "diskstats").write_text("\n".join(lines) + "\n")
    before = read_disk(tmp_path, tmp_path)
    assert before == DiskCounters(5096, 32 * 512)

    def after(own_bytes: int, other_bytes: int) -> bool:
        return was_disk_busy(before, DiskCounters(5096 + own_bytes, 32 * 512 + own_bytes + other_bytes))

    assert not after(1 << 30, 1 << 20)
    assert not after(1 << 30, 100 << 20)
    assert after(1 << 30, 300 << 20)
    assert not after(1 << 20, 4 << 20)  # writes of the file system itself
    assert not was_disk_busy(None, before)


def test_costs_report_a_busy_machine() -> None:
    assert not COSTS.is_busy
    assert BUSY.is_busy
    short_op = replace(COSTS, ops=(replace(COSTS.ops[0], seconds=COSTS.ops[0].seconds / 100, busy=1), *COSTS.ops[1:]))
    assert not short_op.is_busy
    assert replace(COSTS, homes=(replace(COSTS.homes[0], busy=2),)).is_busy


def test_estimates_and_plans_report_a_busy_machine() -> None:
    def texts(costs: Costs) -> list[str]:
        lines: list[str] = []
        wish = AnswerOptions()
        print_plan(Subject("a step", GraphFile.of(GRAPH, costs)), BUDGET, "window", wish, lines.append)
        return [*lines, str(Estimate(1, 2, 3, 0.25, (), costs=costs))]

    assert [busy.NOTE in text for text in texts(COSTS)] == [False, False]
    assert [busy.NOTE in text for text in texts(BUSY)] == [True, True]


def test_busy_plan_is_marked_until_replaced(tmp_path: Path) -> None:
    plans = StepPlans(tmp_path)
    choice = VariantChoice(plans.key(GRAPH, WINDOW), LOWEST_MEMORY)
    planned = plan_step(GRAPH, COSTS, BUDGET, WINDOW)

    def stored_flags(costs: Costs, *, is_quick: bool) -> tuple[bool, bool] | None:
        plans.keep(choice, GRAPH, costs, BUDGET, planned, is_quick=is_quick)
        return plans.find(choice.key, lambda stored: (stored.is_busy, stored.is_quick))

    assert stored_flags(BUSY, is_quick=False) == (True, False)
    assert stored_flags(BUSY, is_quick=True) == (True, False)
    assert stored_flags(COSTS, is_quick=True) == (False, True)
    assert stored_flags(COSTS, is_quick=False) == (False, False)
    assert stored_flags(BUSY, is_quick=True) == (False, False)
