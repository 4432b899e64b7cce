"""Call ops again and again with the same arguments from native code (``replay.cpp``).

Addresses are planned, so an op gets the same tensors at every step. Python's overhead for each call of an op, some
microseconds, is paid once: the call is recorded in one step and replayed in later ones.
"""

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
from outofcore.execution.binding import BoundRun, Draws
from outofcore.execution.copying import Copying
from outofcore.execution.interrupts import SIGNALS_SECONDS
from outofcore.runtime.native import Flavor, load_unlocked

# Of a step, for each of its ops: in longer ones the calls by Python, 5 us each, take less than a thousandth.
_WORTH_SECONDS = 5e-3


class _Failure(IntEnum):
    """What an op failed with; as ``Failure`` in replay.cpp."""

    RUNTIME = 1
    INDEX = 2
    VALUE = 3
    TYPE = 4
    NOT_IMPLEMENTED = 5
    MEMORY = 6  # of a device
    ALGEBRA = 7
    DEVICE = 8  # it fails
    NO_MEMORY = 9
    ISSUE = 10  # what was to be issued was not: there is a status
    STOPPED = 11  # another queue has failed


class NotIssuedError(Exception):
    """A device's runtime refused, with ``status``, what was to be issued between two ops; never reaches the user."""

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


def is_worth_it(calls: int, seconds: float) -> bool:
    """Return whether a step with so many op calls and of that length gains from native calls."""
    return calls * _WORTH_SECONDS > seconds


class Replay:
    """The calls of ops that were recorded, by number. It keeps all their tensors alive."""

    def __init__(self, library: ctypes.PyDLL, entries: int) -> None:
        handle = library.replay_new(entries)
        if handle is None:
            raise MemoryError("there is no memory for the calls of a step")
        self._library = library
        self._handle: int = handle
        self._end = weakref.finalize(self, library.replay_free, handle)
        self._end.atexit = False
        self._run = load_unlocked(Flavor.CPU).replay_run  # copies have threads of their own

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which this thread's calls can be recorded."""
        self._library.replay_watch()
        try:
            yield
        finally:
            self._library.replay_unwatch()

    def expect(self, run: BoundRun) -> bool:
        """Return whether the next op call may be recorded; then ``take`` must follow it."""
        if internals.operator_name(run.func) is None or run.draws is not Draws.FREELY:
            return False
        self._library.replay_expect()
        return True

    def take(self, number: int, run: BoundRun, scope: int) -> bool:
        """Record the one op that was called since ``expect``; return whether it can be replayed."""
        name = internals.operator_name(run.func)
        if name is None:
            return False
        known = [internals.tensor_impl(tensor) for tensor in internals.tensor_leaves([*run.args, *run.kwargs.values()])]
        rows = [(leaf, address, internals.tensor_impl(target)) for leaf, address, target, _ in run.results]
        results = (ctypes.c_int64 * (3 * len(rows)))(*[number for row in rows for number in row])
        taken = self._library.replay_take(
            self._handle,
            number,
            name[0].encode(),
            name[1].encode(),
            scope,
            run.index,
            len(rows),
            results,
            len(known),
            (ctypes.c_int64 * len(known))(*known),
        )
        return bool(taken)

    def issue(self, number: int, given: tuple[int, int, int, int]) -> None:
        """Let an entry issue actions to a device.

        ``given`` is the address of a function such as ``outofcore_issue``, and its three arguments.
        """
        self._library.replay_issue(self._handle, number, *given)

    def order(self, number: int, waits: Sequence[tuple[int, int]], publishes: int | None) -> None:
        """Let an entry wait for other queues and publish its own number, where queues are given to ``run``.

        ``waits`` are (queue, number); ``publishes`` is None if nobody waits for it.
        """
        flat = [part for wait in waits for part in wait]
        given = (ctypes.c_int64 * len(flat))(*flat)
        if self._library.replay_order(self._handle, number, len(waits), given, publishes or 0):
            raise MemoryError("there is no memory for the calls of a step")

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
        """Run entries from ``first`` to before ``end``; return the one after the last that has run.

        It may stop early, even at once, where an entry waits for another queue, so that signals are handled.

        Args:
            first: an entry that was recorded or issues something, like all before ``end``.
            starts: receives by instruction when its op began.
            ends: receives by instruction when it ended.
            ends_scopes: whether each scope ends with its op, or when the next begins.
            queues: for the waits of ``order``; None: the caller sees to them.
            stops: the address of a number; once it is not 0 after an op, that op is the last and not published.

        Raises:
            Exception: as the op that failed raised.
            NotIssuedError: a device refused actions between ops.
            StateError: another queue has failed.
        """
        begin, close, pointer = table.native
        reached = self._run(
            self._handle,
            first,
            end,
            SIGNALS_SECONDS,
            begin,
            close if ends_scopes else None,
            pointer,
            None if starts is None else starts.buffer_info()[0],
            None if ends is None else ends.buffer_info()[0],
            *((None, None, None) if queues is None else (queues.handle, *queues.functions)),
            stops,
        )
        if reached < 0:
            raise self._error()
        return int(reached)

    @property
    def at(self) -> int:
        """The entry that failed."""
        return int(self._library.replay_at(self._handle))

    def _error(self) -> Exception:
        failure = _Failure(self._library.replay_failure(self._handle))
        if failure is _Failure.ISSUE:
            return NotIssuedError(self._library.replay_status(self._handle))
        if failure is _Failure.STOPPED:
            return StateError("another queue of the step failed")
        return _ERRORS[failure](self._library.replay_message(self._handle).decode(errors="replace"))

    def let_go(self) -> None:
        """Release results that were kept until the next scope began."""
        self._library.replay_let_go(self._handle)


def spans(taken: Sequence[bool]) -> list[int]:
    """Return for each op the end of the stretch from it on that can be replayed at once; itself if it cannot.

    ``taken`` tells whether each op's call was recorded.

    >>> spans([True, True, False, True])
    [2, 2, 2, 4]
    """
    found = [*range(len(taken)), len(taken)]
    for at in reversed(range(len(taken))):
        if taken[at]:
            found[at] = found[at + 1]
    return found[:-1]
