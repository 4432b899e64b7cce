"""Plan steps in another process of low priority, which does not need the GIL of the training process."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
import socket
import subprocess
import tempfile
import time
from array import array
from dataclasses import dataclass, field, replace
from typing import IO, Generic, TypeVar

from outofcore import planning
from outofcore.child_processes import start_process
from outofcore.costs import Costs
from outofcore.errors import OutOfCoreError
from outofcore.graph import StepGraph
from outofcore.planning import Planned, PolicyLike
from outofcore.program import Timeline
from outofcore.proving import prove_plan
from outofcore.refine import refine_costs

_log = logging.getLogger("outofcore")

# A new plan replaces the running one if it is faster by this share of the step.
_CLEARLY = 0.01
# An idle process ends after this time to free its memory (at least 44 MB).
_IDLE_SECONDS = 20.0

_Subject = TypeVar("_Subject")


@dataclass(frozen=True)
class RunningPlan:
    """The plan that runs now, and its measured steps."""

    planned: Planned
    timelines: tuple[Timeline, ...]  # of whole consecutive steps
    spilled: frozenset[int]  # storages that were copied to a home and not to the caller's memory


@dataclass(frozen=True)
class PlanJob:
    """A step to plan; the measured steps of its ``running`` plan, if any, correct the costs."""

    graph: StepGraph
    costs: Costs
    budget: int
    policy: PolicyLike
    running: RunningPlan | None = None


@dataclass(frozen=True)
class PlanResult:
    """The result of a planning job."""

    planned: Planned | None  # the best valid plan
    reason: str  # why there is no plan
    seconds: float  # elapsed planning time
    costs: Costs | None = None  # corrected costs; None: those of the job
    is_new: bool = True  # whether the plan differs from the running one
    processor_seconds: float = 0.0  # CPU time, including the start of the process for its first job


@dataclass
class BackgroundPlanner(Generic[_Subject]):
    """Runs planning jobs one at a time in a process that ends when it has been idle for a while."""

    _subject: _Subject | None = None
    _answer: IO[bytes] | None = field(default=None, repr=False)
    _process: subprocess.Popen[bytes] | None = None
    _channel: socket.socket | None = field(default=None, repr=False)  # to the process
    _niceness: int = 0

    @property
    def is_busy(self) -> bool:
        """Whether a job is running, or its result has not been polled yet."""
        return self._answer is not None

    def start(self, subject: _Subject, job: PlanJob, niceness: int) -> bool:
        """Start a planning job, which ``subject`` identifies in ``poll``; return False if it cannot be started."""
        with contextlib.ExitStack() as opened:
            try:
                answer_file = opened.enter_context(tempfile.TemporaryFile())
                # A pipe would block this process until the other one reads.
                with tempfile.TemporaryFile() as job_file:
                    pickle.dump(job, job_file)
                    job_file.seek(0)
                    self._send(job_file, answer_file, niceness)
            except (OSError, pickle.PicklingError, AttributeError, TypeError) as error:
                _log.warning("could not start the planning process: %s", error)
                return False
            self._subject, self._answer = subject, answer_file
            opened.pop_all()
        return True

    def _send(self, job_file: IO[bytes], answer_file: IO[bytes], niceness: int) -> None:
        """Send a job to the planning process; start a new process if none with this niceness is running."""
        if self._channel is not None and self._niceness == niceness:
            with contextlib.suppress(ConnectionError):
                _send_files(self._channel, job_file, answer_file)
                return
        self.close()
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        with theirs:
            _send_files(self._channel, job_file, answer_file)
            self._process = start_process(f"{__name__}:main", theirs, niceness=niceness, environment=one_thread)
        self._niceness = niceness

    def poll(self) -> tuple[_Subject, PlanResult] | None:
        """Return the subject and result of a job that has ended since the last call; None if there is no such job."""
        if self._process is None or self._channel is None or self._answer is None or self._subject is None:
            return None
        try:
            is_done = bool(self._channel.recv(1))
        except BlockingIOError:
            if self._process.poll() is None:
                return None
            is_done = False
        except ConnectionError:
            is_done = False
        subject, file = self._subject, self._answer
        self._subject = self._answer = None
        with file:
            file.seek(0)
            try:
                answer = pickle.load(file) if is_done else None
            except (pickle.UnpicklingError, EOFError):
                answer = None
        if not isinstance(answer, PlanResult):
            if is_done:
                self._process.kill()
            status = self._process.wait()
            self.close()
            answer = PlanResult(None, f"the planning process ended with status {status}", 0.0)
        return subject, answer

    def wait(self) -> None:
        """Wait until the current job, if any, has finished."""
        if self._channel is not None and self.is_busy:
            waiting = select.poll()
            waiting.register(self._channel, select.POLLIN)
            waiting.poll()

    def close(self) -> None:
        """End the process and drop the current job."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for opened in (self._channel, self._answer):
            if opened is not None:
                opened.close()
        self._process = self._channel = self._answer = self._subject = None


def _send_files(channel: socket.socket, *files: IO[bytes]) -> None:
    """Send open files to the process at the other end of a socket."""
    numbers = array("i", [file.fileno() for file in files])
    # Without SIGPIPE, which ends programs that do not handle it.
    channel.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)], socket.MSG_NOSIGNAL)


def plan_job(job: PlanJob) -> PlanResult:
    """Plan a step with its measured costs; keep its running plan unless the new one is 1 % faster."""
    start = time.perf_counter()
    costs, running = job.costs, job.running
    if running is not None:
        families = [op.family for op in job.graph.ops]
        costs = refine_costs(costs, running.planned.program, running.timelines, running.spilled, families)
    try:
        planned = prove_plan(
            job.graph, costs, job.budget, planning.plans_of_step(job.graph, costs, job.budget, job.policy)
        )
    except OutOfCoreError as error:
        return PlanResult(None, str(error), time.perf_counter() - start)
    if running is not None:
        now = planning.resimulate(job.graph, costs, running.planned)
        if planned.timeline.step_seconds > now.timeline.step_seconds * (1 - _CLEARLY):
            return PlanResult(now, "", time.perf_counter() - start, costs, is_new=False)
    return PlanResult(planned, "", time.perf_counter() - start, costs)


def main() -> None:
    """Run planning jobs from the socket that is the standard input of this process."""
    with socket.socket(fileno=os.dup(0)) as channel:
        serve_jobs(channel, _IDLE_SECONDS)


def serve_jobs(channel: socket.socket, idle_seconds: float) -> None:
    """Plan the jobs that arrive at a socket, until it is closed or idle for ``idle_seconds``."""
    channel.settimeout(idle_seconds)
    before = 0.0
    while True:
        try:
            received, files, *_ = socket.recv_fds(channel, 1, 2)
        except TimeoutError:
            # From here on sending fails; a job that is already in the socket is still read.
            channel.shutdown(socket.SHUT_RD)
            continue
        if not received:
            return
        with os.fdopen(files[0], "rb") as job_file, os.fdopen(files[1], "wb") as answer_file:
            answer = plan_job(pickle.load(job_file))
            now = time.process_time()
            pickle.dump(replace(answer, processor_seconds=now - before), answer_file)
            before = now
        channel.send(b"\0", socket.MSG_NOSIGNAL)
