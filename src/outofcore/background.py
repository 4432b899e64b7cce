"""Plan steps in a process of its own, so that training goes on at its pace.

A thread would not do: planning holds Python's lock, which training needs for each of its ops. The process has a low
priority and imports no PyTorch. It does one job after the other, as starting it takes as long as planning a usual step.
"""

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
from outofcore.proving import proved
from outofcore.refine import refined

_log = logging.getLogger("outofcore")

# A plan takes the place of one that runs if it is quicker by this share of the step.
_CLEARLY = 0.01
# A process that has had no job for so long ends, which gives its memory back: 44 MB and more.
_IDLE_SECONDS = 20.0

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
        processor_seconds: processor time of the planning process; with its start, if this was its first job.
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
    """Plans one job after the other, in a process that ends once it has had no job for a while."""

    _subject: _Subject | None = None
    _answer: IO[bytes] | None = field(default=None, repr=False)
    _process: subprocess.Popen[bytes] | None = None
    _channel: socket.socket | None = field(default=None, repr=False)  # to the process
    _niceness: int = 0

    @property
    def is_busy(self) -> bool:
        """Whether a plan is being made, or waits to be fetched."""
        return self._answer is not None

    def start(self, subject: _Subject, job: PlanJob, niceness: int) -> bool:
        """Begin a job, for which ``poll`` will return ``subject``; return whether a process could be started.

        The process has a ``niceness`` as in ``start_process``. No other job may be under way.
        """
        with contextlib.ExitStack() as opened:
            try:
                answer = opened.enter_context(tempfile.TemporaryFile())
                # In a file: a pipe would block this process until the other one reads.
                with tempfile.TemporaryFile() as given:
                    pickle.dump(job, given)
                    given.seek(0)
                    self._send(given, answer, niceness)
            except (OSError, pickle.PicklingError, AttributeError, TypeError) as error:
                _log.warning("no process could be started that plans: %s", error)
                return False
            self._subject, self._answer = subject, answer
            opened.pop_all()
        return True

    def _send(self, given: IO[bytes], answer: IO[bytes], niceness: int) -> None:
        """Send a job to the process; start another one if it has ended or has another priority, which it keeps."""
        if self._channel is not None and self._niceness == niceness:
            with contextlib.suppress(ConnectionError):
                _send_files(self._channel, given, answer)
                return
        self.close()
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        with theirs:
            _send_files(self._channel, given, answer)
            self._process = start_process(f"{__name__}:main", theirs, niceness=niceness, environment=one_thread)
        self._niceness = niceness

    def poll(self) -> tuple[_Subject, Answer] | None:
        """Return the subject and the answer of the current job; None if it is not done."""
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
        if not isinstance(answer, Answer):
            if is_done:
                self._process.kill()
            status = self._process.wait()
            self.close()
            answer = Answer(None, f"the process that plans ended with status {status}", 0.0)
        return subject, answer

    def wait(self) -> None:
        """Wait until ``poll`` has an answer, or nothing is under way."""
        if self._channel is not None and self.is_busy:
            waiting = select.poll()
            waiting.register(self._channel, select.POLLIN)
            waiting.poll()

    def close(self) -> None:
        """Cancel the current job, and end the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for opened in (self._channel, self._answer):
            if opened is not None:
                opened.close()
        self._process = self._channel = self._answer = self._subject = None


def _send_files(channel: socket.socket, *files: IO[bytes]) -> None:
    numbers = array("i", [file.fileno() for file in files])
    # Without a signal: programs may have SIGPIPE end them.
    channel.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)], socket.MSG_NOSIGNAL)


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
    """Do the jobs that come by the socket on standard input."""
    with socket.socket(fileno=os.dup(0)) as channel:
        serve(channel, _IDLE_SECONDS)


def serve(channel: socket.socket, idle_seconds: float) -> None:
    """Do the jobs that come by a socket, until none has come for so long or its other end is closed."""
    channel.settimeout(idle_seconds)
    before = 0.0
    while True:
        try:
            asked, files, *_ = socket.recv_fds(channel, 1, 2)
        except TimeoutError:
            # Sending a job fails from here on; one that was sent before is still read.
            channel.shutdown(socket.SHUT_RD)
            continue
        if not asked:
            return
        with os.fdopen(files[0], "rb") as given, os.fdopen(files[1], "wb") as out:
            answer = plan_job(pickle.load(given))
            now = time.process_time()
            pickle.dump(replace(answer, processor_seconds=now - before), out)
            before = now
        channel.send(b"\0", socket.MSG_NOSIGNAL)
