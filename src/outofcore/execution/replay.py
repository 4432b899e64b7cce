"""Replay op calls with unchanged arguments from native code (``replay.cpp``)."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from array import array
from collections.abc import Iterator, Sequence
from enum import IntEnum

import torch

from outofcore import _torch_internals as internals
from outofcore.errors import StateError
from outofcore.execution.arena import ScopeTable
from outofcore.execution.binding import BoundRun, GeneratorUse
from outofcore.execution.copying import Copying
from outofcore.execution.interrupts import SIGNAL_POLL_SECONDS
from outofcore.runtime.native import Flavor, load_unlocked

# Seconds of a step per op: in a longer step Python's calls, 5 us each, take less than a thousandth of the time.
_MAX_SECONDS_PER_OP = 5e-3


class _Failure(IntEnum):
    """Kind of an op's failure, as ``Failure`` in replay.cpp."""

    RUNTIME = 1
    INDEX = 2
    VALUE = 3
    TYPE = 4
    NOT_IMPLEMENTED = 5
    MEMORY = 6  # of a device
    ALGEBRA = 7
    DEVICE = 8  # the device failed
    NO_MEMORY = 9
    ISSUE = 10  # actions were not issued; there is a status
    STOPPED = 11  # another queue has failed


class NotIssuedError(Exception):
    """A device's runtime refused actions between two ops, with ``status``; never reaches the user."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


_ERRORS: dict[_Failure, type[Exception]] = {
    _Failure.RUNTIME: RuntimeError,
    _Failure.INDEX: IndexError,
    _Failure.VALUE: ValueError,
    _Failure.TYPE: TypeError,
    _Failure.NOT_IMPLEMENTED: NotImplementedError,
    _Failure.MEMORY: torch.OutOfMemoryError,
    _Failure.ALGEBRA: internals.LinAlgError,
    _Failure.DEVICE: torch.AcceleratorError,
    _Failure.NO_MEMORY: MemoryError,
}


def is_worth_replaying(calls: int, seconds: float) -> bool:
    """Return whether calling ``calls`` ops from Python takes a notable share of a step of ``seconds``."""
    return calls * _MAX_SECONDS_PER_OP > seconds


class Replay:
    """Records op calls as numbered entries, and repeats them by native code."""

    def __init__(self, library: ctypes.PyDLL, entries: int) -> None:
        handle = library.replay_new(entries)
        if handle is None:
            raise MemoryError("there is no memory for the calls of a step; end other programs")
        self._library = library
        self._handle: int = handle
        self._end = weakref.finalize(self, library.replay_free, handle)
        self._end.atexit = False
        self._run = load_unlocked(Flavor.CPU).replay_run  # copies run in their own threads

    @contextlib.contextmanager
    def watch_calls(self) -> Iterator[None]:
        """Let native code observe the op calls of this block; ``record_call`` needs that."""
        self._library.replay_watch()
        try:
            yield
        finally:
            self._library.replay_unwatch()

    def expect_call(self, run: BoundRun) -> bool:
        """Prepare to record the next op call with ``record_call``; return whether that is possible."""
        if internals.operator_name(run.func) is None or run.generator_use is not GeneratorUse.UNTOUCHED:
            return False
        self._library.replay_expect()
        return True

    def record_call(self, number: int, run: BoundRun, scope: int) -> bool:
        """Record the op call that was just made as entry ``number``; return whether it can be replayed."""
        name = internals.operator_name(run.func)
        if name is None:
            return False
        tensors = [
            internals.tensor_impl(tensor) for tensor in internals.tensor_leaves([*run.args, *run.kwargs.values()])
        ]
        rows = [(leaf, address, internals.tensor_impl(target)) for leaf, address, target, _ in run.results]
        results = (ctypes.c_int64 * (3 * len(rows)))(*[number for row in rows for number in row])
        recorded = self._library.replay_take(
            self._handle,
            number,
            name[0].encode(),
            name[1].encode(),
            scope,
            run.index,
            len(rows),
            results,
            len(tensors),
            (ctypes.c_int64 * len(tensors))(*tensors),
        )
        return bool(recorded)

    def add_actions(self, number: int, action: tuple[int, int, int, int]) -> None:
        """Make an entry call a native function; ``action`` has its address and three arguments."""
        self._library.replay_issue(self._handle, number, *action)

    def set_waits(self, number: int, waits: Sequence[tuple[int, int]], publishes: int | None) -> None:
        """Set the (queue, number) instructions that an entry waits for, and the number that it reports when done."""
        flat = [part for wait in waits for part in wait]
        flat_waits = (ctypes.c_int64 * len(flat))(*flat)
        if self._library.replay_order(self._handle, number, len(waits), flat_waits, publishes or 0):
            raise MemoryError("there is no memory for the calls of a step; end other programs")

    def run(
        self,
        first: int,
        end: int,
        table: ScopeTable,
        starts: array[float] | None,
        ends: array[float] | None,
        *,
        ends_scopes: bool = False,
        queues: Copying | None = None,
        stops: int | None = None,
    ) -> int:
        """Replay the recorded entries from ``first`` to before ``end``; return the number of the next entry.

        Returns early where an entry waits for another queue, so that signals are handled. ``starts`` and ``ends``
        receive the times of ops, by instruction. With ``ends_scopes`` a scope ends with its op, not when the next one
        begins. ``queues`` serves the waits of ``set_waits``. ``stops`` is the address of a number: the run ends after
        the first op that leaves it not 0. Raises the error of an op, ``NotIssuedError`` if a device refused actions,
        ``StateError`` if another queue failed.
        """
        begin, close, pointer = table.native
        next_entry = self._run(
            self._handle,
            first,
            end,
            SIGNAL_POLL_SECONDS,
            begin,
            close if ends_scopes else None,
            pointer,
            None if starts is None else starts.buffer_info()[0],
            None if ends is None else ends.buffer_info()[0],
            *((None, None, None) if queues is None else (queues.handle, *queues.functions)),
            stops,
        )
        if next_entry < 0:
            raise self._error()
        return int(next_entry)

    @property
    def failed_entry(self) -> int:
        return int(self._library.replay_at(self._handle))

    def _error(self) -> Exception:
        """Return the exception of the entry that failed."""
        failure = _Failure(self._library.replay_failure(self._handle))
        if failure is _Failure.ISSUE:
            return NotIssuedError(self._library.replay_status(self._handle))
        if failure is _Failure.STOPPED:
            return StateError("another queue of the step failed")
        return _ERRORS[failure](self._library.replay_message(self._handle).decode(errors="replace"))

    def release_results(self) -> None:
        """Release op results, which are otherwise kept until the next scope begins."""
        self._library.replay_let_go(self._handle)


def find_span_ends(recorded: Sequence[bool]) -> list[int]:
    """Return, for each op, the index of the first unrecorded op at or after the op."""
    # [True, True, False, True] has the ends [2, 2, 2, 4].
    ends = [*range(len(recorded)), len(recorded)]
    for index in reversed(range(len(recorded))):
        if recorded[index]:
            ends[index] = ends[index + 1]
    return ends[:-1]
