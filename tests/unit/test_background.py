"""Tests of plans made by another process."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from interrupting import interrupt_everywhere
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
    pid = planner._process.handle.pid
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
    planner._process.handle.kill()
    planner._process.handle.wait()
    answer, new_pid = planned_by(planner, 0)
    assert dead_pid != new_pid
    assert answer.planned is not None
    planner.close()


class _ForkedProcess:
    """A planning process that starts in a millisecond, because it is a fork."""

    def __init__(self, _main: str, work: socket.socket, **_: object) -> None:
        self._status: int | None = None
        self._pid = os.fork()
        if self._pid == 0:
            try:
                sys.settrace(None)
                os.closerange(3, work.fileno())
                os.closerange(work.fileno() + 1, 256)
                background.serve_jobs(work, 1.0)
            finally:
                os._exit(0)

    def kill(self) -> None:
        if self._status is None:
            os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> int:
        if self._status is None:
            self._status = os.waitpid(self._pid, 0)[1]
        return self._status

    def poll(self) -> int | None:
        if self._status is None and (ended := os.waitpid(self._pid, os.WNOHANG))[0]:
            self._status = ended[1]
        return self._status


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forks by processes with threads
def test_planner_works_after_an_interrupt_at_any_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "start_process", _ForkedProcess)
    monkeypatch.setattr(background, "plan_job", lambda job: PlanResult(None, f"budget {job.budget}", 0.0))

    planner: BackgroundPlanner[int] = BackgroundPlanner()

    def plan(budget: int, niceness: int) -> None:
        assert planner.start(budget, replace(JOB, budget=budget), niceness)
        planner.wait()
        result = planner.poll()
        assert result is not None
        assert (result[0], result[1].reason) == (budget, f"budget {budget}")

    def plan_twice() -> None:
        plan(1, 0)  # starts a process, since the last one has another niceness
        plan(2, 0)

    def check() -> None:
        if planner.is_busy:
            planner.wait()
            result = planner.poll()
            assert result is not None
            assert result[0] in (1, 2)
        plan(3, 0)
        plan(4, 1)
        gc.collect()
        assert _open_files() == before

    plan(4, 1)
    before = _open_files()
    names = interrupt_everywhere(plan_twice, check, lambda code: code.co_filename == background.__file__)
    assert {"start", "_send", "poll", "wait", "close", "_has_finished", "_send_files"} <= names
    planner.close()


def test_serve_ends_without_jobs() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, tempfile.TemporaryFile() as job_file, tempfile.TemporaryFile() as answer:
        pickle.dump(JOB, job_file)
        job_file.seek(0)
        background._send_files(ours, b"\7", job_file, answer)
        background.serve_jobs(theirs, 0.01)
        assert ours.recv(1) == b"\7"
        answer.seek(0)
        assert pickle.load(answer).planned == plan_job(JOB).planned
        with pytest.raises(BrokenPipeError):
            background._send_files(ours, b"\7", job_file, answer)


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
