"""Plans a recorded step in a process of its own, so that the loop goes on meanwhile at its pace.

A thread would not do: planning holds Python's lock, which the loop needs for each of its ops.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import IO

from outofcore.errors import OutOfCoreError
from outofcore.follow.records import StepRecord
from outofcore.planning import Planned, PolicyLike
from outofcore.planning.planner import plans_of_step
from outofcore.proving import proved

_log = logging.getLogger("outofcore")

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from outofcore.follow.background import main; main()"
)
# How much less than the loop such a process has to say to the scheduler of the system.
_NICENESS = 10
# What the plan leaves free, as a share of the budget: the loop asks now and then for what it did not when recorded.
_SPARE = 0.02


@dataclass(frozen=True)
class Answer:
    """What became of a record.

    Attributes:
        planned: proved; None where there is no plan.
        reason: why there is none.
        seconds: that planning took.
    """

    planned: Planned | None
    reason: str
    seconds: float


class BackgroundPlanner:
    """Plans one record after the other."""

    def __init__(self, budget: int, policy: PolicyLike) -> None:
        self._budget = int(budget * (1 - _SPARE))
        self._policy = policy
        self._record: StepRecord | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._answer: IO[bytes] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a plan is being made, or waits to be fetched."""
        return self._process is not None

    def start(self, record: StepRecord) -> None:
        """Begin to plan; nothing else may be under way. Where no process can be started, there is no plan."""
        with contextlib.ExitStack() as opened:
            asked = opened.enter_context(tempfile.TemporaryFile())
            answer = opened.enter_context(tempfile.TemporaryFile())
            pickle.dump((record, self._budget, self._policy), asked)
            asked.seek(0)
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            try:
                process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, json.dumps([p for p in sys.path if isinstance(p, str)])],
                    stdin=asked,
                    stdout=answer,
                    stderr=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,  # a Ctrl-C is for the loop
                )
            except OSError as error:
                _log.warning("no plan is made of the loop: %s could not be run: %s", sys.executable, error)
                return
            self._process, self._answer, self._record = process, answer, record
            opened.pop_all()
            asked.close()

    def poll(self) -> tuple[StepRecord, Answer] | None:
        """The record that was being planned, with what became of it; None: not yet."""
        if self._process is None or self._answer is None or self._record is None or self._process.poll() is None:
            return None
        record, file, status = self._record, self._answer, self._process.returncode
        self._process = self._answer = self._record = None
        with file:
            file.seek(0)
            try:
                answer = pickle.load(file) if status == 0 else None
            except (pickle.UnpicklingError, EOFError):
                answer = None
        if not isinstance(answer, Answer):
            answer = Answer(None, f"the process that plans ended with status {status}", 0.0)
        return record, answer

    def close(self) -> None:
        """Give up what is under way."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._answer is not None:
            self._answer.close()
        self._process = self._answer = self._record = None


def plan_record(record: StepRecord, budget: int, policy: PolicyLike) -> Answer:
    """The best plan of a step that the validator passes.

    Args:
        record: the step.
        budget: bytes of the arena.
        policy: how to plan.
    """
    start = time.perf_counter()
    try:
        planned = proved(record.graph, record.costs, budget, plans_of_step(record.graph, record.costs, budget, policy))
    except OutOfCoreError as error:
        return Answer(None, str(error), time.perf_counter() - start)
    return Answer(planned, "", time.perf_counter() - start)


def main() -> None:
    """Plan what standard input says, and write the answer to standard output."""
    _die_with_parent()
    os.nice(_NICENESS)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with out:
        pickle.dump(plan_record(*pickle.load(sys.stdin.buffer)), out)


def _die_with_parent() -> None:
    signal_on_death = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(signal_on_death, signal.SIGKILL)
    if os.getppid() == 1:
        sys.exit(1)
