"""Tests of plans made by another process."""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from weights_in_sequence import BUDGET, COSTS, GRAPH, WINDOW

from outofcore import background
from outofcore.background import BackgroundPlanner, PlanJob, PlanResult, RunningPlan, plan_job
from outofcore.child_processes import start_process
from outofcore.costs import OpCost
from outofcore.planning import PolicyLike, plan_step
from outofcore.planning.policy import FunctionPolicy
from outofcore.simulator import simulate
from outofcore.validator import validate

JOB = PlanJob(GRAPH, COSTS, BUDGET, WINDOW)
MOVED = frozenset(range(len(GRAPH.storages)))


def test_another_process_makes_the_same_plan() -> None:
    planner: BackgroundPlanner[str] = BackgroundPlanner()
    assert planner.poll() is None
    assert planner.start("subject", JOB, 19)
    assert planner.is_busy
    planner.wait()
    result = planner.poll()
    assert result is not None
    assert result[0] == "subject"
    assert result[1].planned == plan_job(JOB).planned
    assert not planner.is_busy
    planner.close()


def test_dead_process_leaves_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outofcore.child_processes._PROGRAM", "raise SystemExit(3)")
    planner: BackgroundPlanner[str] = BackgroundPlanner()
    assert planner.start("subject", JOB, 0)
    planner.wait()
    result = planner.poll()
    assert result is not None
    assert result[1].planned is None
    assert "status 3" in result[1].reason


def planned_by(planner: BackgroundPlanner[str], niceness: int) -> tuple[PlanResult, int]:
    assert planner.start("subject", JOB, niceness)
    assert planner._process is not None
    pid = planner._process.pid
    planner.wait()
    result = planner.poll()
    assert result is not None
    assert not planner.is_busy
    return result[1], pid


def test_planner_keeps_process_of_same_priority() -> None:
    planner: BackgroundPlanner[str] = BackgroundPlanner()
    (first, first_pid), (second, second_pid), (third, third_pid) = (
        planned_by(planner, niceness) for niceness in (10, 10, 20)
    )
    assert first_pid == second_pid != third_pid
    assert first.planned == second.planned == third.planned == plan_job(JOB).planned
    # Importing is paid for once.
    assert second.processor_seconds < first.processor_seconds / 2
    planner.close()


def test_planner_replaces_dead_process() -> None:
    planner: BackgroundPlanner[str] = BackgroundPlanner()
    _, dead_pid = planned_by(planner, 0)
    assert planner._process is not None
    planner._process.kill()
    planner._process.wait()
    answer, new_pid = planned_by(planner, 0)
    assert dead_pid != new_pid
    assert answer.planned is not None
    planner.close()


def test_serve_ends_without_jobs() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, tempfile.TemporaryFile() as job_file, tempfile.TemporaryFile() as answer:
        pickle.dump(JOB, job_file)
        job_file.seek(0)
        background._send_files(ours, job_file, answer)
        background.serve_jobs(theirs, 0.01)
        assert ours.recv(1)
        answer.seek(0)
        assert pickle.load(answer).planned == plan_job(JOB).planned
        with pytest.raises(BrokenPipeError):
            background._send_files(ours, job_file, answer)


def test_unpicklable_policy_starts_no_process() -> None:
    unpicklable: PolicyLike = FunctionPolicy("own", lambda *_: plan_step(GRAPH, COSTS, BUDGET).plan)
    planner: BackgroundPlanner[str] = BackgroundPlanner()
    assert not planner.start("subject", replace(JOB, policy=unpicklable), 0)
    assert not planner.is_busy


def test_costs_are_corrected_by_steps_before_planning() -> None:
    before = plan_step(GRAPH, COSTS, BUDGET, "offload-all")
    truth = replace(
        COSTS,
        ops=tuple(OpCost(cost.seconds / 2) for cost in COSTS.ops),
        homes=tuple(replace(h, bytes_per_s_out=2e10, bytes_per_s_in=2e10) for h in COSTS.homes),
    )
    steps = (simulate(GRAPH, truth, before.program),) * 3
    running = RunningPlan(before, steps, MOVED)
    answer = plan_job(replace(JOB, running=running))
    assert answer.costs is not None
    assert answer.costs.compute_seconds == pytest.approx(truth.compute_seconds)
    assert answer.planned is not None
    validate(GRAPH, answer.planned.program, BUDGET, answer.costs)
    assert answer.planned.timeline.step_seconds <= steps[0].step_seconds


def test_running_plan_stays_unless_another_is_clearly_quicker() -> None:
    best = plan_step(GRAPH, COSTS, BUDGET, WINDOW)
    answer = plan_job(replace(JOB, running=RunningPlan(best, (best.timeline,) * 3, MOVED)))
    assert not answer.is_new
    assert answer.planned is not None
    assert answer.planned.program is best.program
    worse = plan_step(GRAPH, COSTS, BUDGET, "offload-all")
    assert worse.timeline.step_seconds > 1.02 * best.timeline.step_seconds
    answer = plan_job(replace(JOB, running=RunningPlan(worse, (worse.timeline,) * 3, MOVED)))
    assert answer.is_new


def test_answer_gives_the_reason_when_no_plan_fits() -> None:
    answer = plan_job(replace(JOB, budget=4096))
    assert answer.planned is None
    assert "cannot hold this step" in answer.reason


def test_niceness_20_gives_the_idle_scheduling_class(tmp_path: Path) -> None:
    with (tmp_path / "answer").open("w+b") as answer:
        start_process(f"{__name__}:say_scheduling", b"", answer, niceness=20).wait()
        answer.seek(0)
        assert answer.read() == f"{os.SCHED_IDLE} 19".encode()


def say_scheduling() -> None:
    os.write(1, f"{os.sched_getscheduler(0)} {os.nice(0)}".encode())
