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
from dataclasses import dataclass, replace
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
# Limit on the numbers of finished jobs that are read from the socket at once.
_MAX_NUMBERS = 256

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


@dataclass(frozen=True)
class _Process:
    handle: subprocess.Popen[bytes]
    channel: socket.socket  # to the process
    niceness: int


@dataclass(frozen=True)
class _RunningJob(Generic[_Subject]):
    subject: _Subject
    number: bytes  # one byte, which the process sends back once the result is in the file
    result_file: IO[bytes]


class BackgroundPlanner(Generic[_Subject]):
    """Runs planning jobs one at a time in a process that ends when it has been idle for a while."""

    def __init__(self) -> None:
        # A signal handler may raise anywhere. One assignment replaces each of these, so that none is ever half changed.
        self._process: _Process | None = None
        self._job: _RunningJob[_Subject] | None = None  # until its result is polled
        self._job_count = 0

    @property
    def is_busy(self) -> bool:
        """Whether a job is running, or its result has not been polled yet."""
        return self._job is not None

    def start(self, subject: _Subject, job: PlanJob, niceness: int) -> bool:
        """Start a planning job, which ``subject`` identifies in ``poll``; return False if it cannot be started."""
        self._job_count += 1
        number = bytes([self._job_count % 256])
        with contextlib.ExitStack() as opened:
            try:
                result_file = opened.enter_context(tempfile.TemporaryFile())
                # A pipe would block this process until the other one reads.
                with tempfile.TemporaryFile() as job_file:
                    pickle.dump(job, job_file)
                    job_file.seek(0)
                    self._send(number, job_file, result_file, niceness)
            except (OSError, pickle.PicklingError, AttributeError, TypeError) as error:
                _log.warning("could not start the planning process: %s", error)
                return False
            opened.pop_all()
        self._job = _RunningJob(subject, number, result_file)
        return True

    def _send(self, number: bytes, job_file: IO[bytes], result_file: IO[bytes], niceness: int) -> None:
        """Send a job to the planning process; start a process if there is no process with this niceness."""
        if self._process is not None and self._process.niceness == niceness:
            with contextlib.suppress(ConnectionError):
                _send_files(self._process.channel, number, job_file, result_file)
                return
        self.close()
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with contextlib.ExitStack() as opened:
            ours, theirs = map(opened.enter_context, socket.socketpair())
            ours.setblocking(False)
            _send_files(ours, number, job_file, result_file)
            handle = start_process(f"{__name__}:main", theirs, niceness=niceness, environment=one_thread)
            theirs.close()
            opened.pop_all()
        self._process = _Process(handle, ours, niceness)

    def poll(self) -> tuple[_Subject, PlanResult] | None:
        """Return the subject and result of a job that has ended since the last call; None if there is no such job."""
        process, job = self._process, self._job
        if process is None or job is None or (is_done := _has_finished(process, job.number)) is None:
            return None
        result = None
        if is_done:
            job.result_file.seek(0)
            with contextlib.suppress(pickle.UnpicklingError, EOFError):
                result = pickle.load(job.result_file)
        if not isinstance(result, PlanResult):
            if is_done:
                process.handle.kill()
            result = PlanResult(None, f"the planning process ended with status {process.handle.wait()}", 0.0)
            self.close()
        self._job = None
        job.result_file.close()
        return job.subject, result

    def wait(self) -> None:
        """Wait until the current job, if any, has finished."""
        process, job = self._process, self._job
        while process is not None and job is not None and _has_finished(process, job.number) is None:
            waiting = select.poll()
            waiting.register(process.channel, select.POLLIN)
            waiting.poll()

    def close(self) -> None:
        """End the process and drop the current job."""
        process, job = self._process, self._job
        self._job = self._process = None
        if process is not None:
            process.handle.kill()
            process.channel.close()
            process.handle.wait()
        if job is not None:
            job.result_file.close()


def _has_finished(process: _Process, number: bytes) -> bool | None:
    """Return True for a finished job, None for a running one, and False if the process ended before."""
    try:
        # The number stays in the socket, so that the caller can ask again after an exception.
        numbers = process.channel.recv(_MAX_NUMBERS, socket.MSG_PEEK)
        if numbers and not numbers.endswith(number):
            process.channel.recv(len(numbers))  # of earlier jobs
            return None
    except BlockingIOError:
        return None if process.handle.poll() is None else False
    except ConnectionError:
        return False
    return bool(numbers)


def _send_files(channel: socket.socket, number: bytes, *files: IO[bytes]) -> None:
    descriptors = array("i", [file.fileno() for file in files])
    # Without SIGPIPE, which ends programs that do not handle it.
    channel.sendmsg([number], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)], socket.MSG_NOSIGNAL)


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
            number, files, *_ = socket.recv_fds(channel, 1, 2)
        except TimeoutError:
            # From here on sending fails; a job that is already in the socket is still read.
            channel.shutdown(socket.SHUT_RD)
            continue
        if not number:
            return
        with os.fdopen(files[0], "rb") as job_file, os.fdopen(files[1], "wb") as result_file:
            result = plan_job(pickle.load(job_file))
            now = time.process_time()
            pickle.dump(replace(result, processor_seconds=now - before), result_file)
            before = now
        channel.send(number, socket.MSG_NOSIGNAL)
