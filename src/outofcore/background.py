"""Plan steps in a process of its own, so that training goes on at its pace.

A thread would not do: planning holds Python's lock, which training needs for each of its ops. The process has the
lowest priority and imports no PyTorch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from typing import IO, Generic, TypeVar

from outofcore import planning
from outofcore.child_processes import start_process
from outofcore.costs import Costs
from outofcore.errors import OutOfCoreError
from outofcore.graph import StepGraph
from outofcore.planning import Planned, PolicyLike
from outofcore.program import Timeline
from outofcore.proving import proved
from outofcore.refine import refined

_log = logging.getLogger("outofcore")

# A plan takes the place of one that runs if it is quicker by this share of the step.
_CLEARLY = 0.01

_Subject = TypeVar("_Subject")


@dataclass(frozen=True)
class Running:
    """A running plan, and its steps.

    ``timelines`` were measured in whole consecutive steps; ``spilled`` are the storages whose copies went to a home and
    not to the caller's memory.
    """

    planned: Planned
    timelines: tuple[Timeline, ...]
    spilled: frozenset[int]


@dataclass(frozen=True)
class PlanJob:
    """What to plan; the steps of the ``running`` plan first correct the costs."""

    graph: StepGraph
    costs: Costs
    budget: int
    policy: PolicyLike
    running: Running | None = None


@dataclass(frozen=True)
class Answer:
    """The result of a job.

    Attributes:
        planned: the best plan, proved; None where there is none, and ``reason`` says why.
        seconds: that planning took.
        processor_seconds: processor time of the planning process, with its start.
        costs: that it was made with; None: those of the job.
        is_new: whether it differs from the running plan.
    """

    planned: Planned | None
    reason: str
    seconds: float
    costs: Costs | None = None
    is_new: bool = True
    processor_seconds: float = 0.0


@dataclass
class BackgroundPlanner(Generic[_Subject]):
    """Plans one job after the other."""

    _subject: _Subject | None = None
    _process: subprocess.Popen[bytes] | None = None
    _answer: IO[bytes] | None = field(default=None, repr=False)

    @property
    def is_busy(self) -> bool:
        """Whether a plan is being made, or waits to be fetched."""
        return self._process is not None

    def start(self, subject: _Subject, job: PlanJob, niceness: int) -> bool:
        """Begin a job, for which ``poll`` will return ``subject``; return whether a process could be started.

        The process has a ``niceness`` as in ``start_process``. No other job may be under way.
        """
        with contextlib.ExitStack() as opened:
            try:
                answer = opened.enter_context(tempfile.TemporaryFile())
                one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
                process = start_process(
                    f"{__name__}:main", pickle.dumps(job), answer, niceness=niceness, environment=one_thread
                )
            except (OSError, pickle.PicklingError, AttributeError, TypeError) as error:
                _log.warning("no process could be started that plans: %s", error)
                return False
            self._process, self._answer, self._subject = process, answer, subject
            opened.pop_all()
        return True

    def poll(self) -> tuple[_Subject, Answer] | None:
        """Return the subject and the answer of the current job; None if it is not done."""
        if self._process is None or self._answer is None or self._subject is None or self._process.poll() is None:
            return None
        subject, file, status = self._subject, self._answer, self._process.returncode
        self._process = self._answer = self._subject = None
        with file:
            file.seek(0)
            try:
                answer = pickle.load(file) if status == 0 else None
            except (pickle.UnpicklingError, EOFError):
                answer = None
        if not isinstance(answer, Answer):
            answer = Answer(None, f"the process that plans ended with status {status}", 0.0)
        return subject, answer

    def wait(self) -> None:
        """Wait until ``poll`` has an answer, or nothing is under way."""
        if self._process is not None:
            self._process.wait()

    def close(self) -> None:
        """Cancel the current job."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._answer is not None:
            self._answer.close()
        self._process = self._answer = self._subject = None


def plan_job(job: PlanJob) -> Answer:
    """Return the best plan that the validator passes; the running one, if no other is clearly faster."""
    start = time.perf_counter()
    costs, running = job.costs, job.running
    if running is not None:
        families = [op.family for op in job.graph.ops]
        costs = refined(costs, running.planned.program, running.timelines, running.spilled, families)
    try:
        planned = proved(job.graph, costs, job.budget, planning.plans_of_step(job.graph, costs, job.budget, job.policy))
    except OutOfCoreError as error:
        return Answer(None, str(error), time.perf_counter() - start)
    if running is not None:
        now = planning.resimulated(job.graph, costs, running.planned)
        if planned.timeline.step_seconds > now.timeline.step_seconds * (1 - _CLEARLY):
            return Answer(now, "", time.perf_counter() - start, costs, is_new=False)
    return Answer(planned, "", time.perf_counter() - start, costs)


def main() -> None:
    """Do the job on standard input, and write the answer to standard output."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with out:
        answer = plan_job(pickle.load(sys.stdin.buffer))
        pickle.dump(replace(answer, processor_seconds=time.process_time()), out)
