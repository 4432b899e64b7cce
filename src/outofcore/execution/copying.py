"""The copies of a step on the CPU in native threads (``copying.cpp``), one for each queue.

Where all cores compute, overhead of copies beyond the transfer itself is taken from ops. Native threads need little,
and neither wait for the interpreter's lock nor make ops wait for it. They copy between memory and open files. Copies
that only Python can make, such as ranges of others' files or slots that are checked byte by byte, are calls to Python.

Where a step only copies between the arena and the caller's memory, it needs no threads: waking them would take longer
than to copy a batch. The thread of the ops then makes each copy when it waits for it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from outofcore.compiling import native_callback
from outofcore.errors import StateError, TransferError
from outofcore.execution.arena import Arena
from outofcore.execution.binding import Bound, BoundCopy
from outofcore.execution.interrupts import SIGNALS_SECONDS
from outofcore.runtime.checks import damaged
from outofcore.runtime.fingerprints import secrets
from outofcore.runtime.homes import HomeStore, Location, Remember
from outofcore.runtime.native import without_lock
from outofcore.runtime.slots import Piece

_NOT_SUMMED = -1  # in place of the row of a piece in ``_Work.sums``


class _Outside(IntEnum):
    """What is in place of a file's descriptor; as ``kMemory`` and ``kCalled`` in copying.cpp."""

    MEMORY = -1  # the piece is at an address
    CALLED = -2  # Python makes the copy


class _Failure(IntEnum):
    """Why a copy failed, in place of the system's error; as ``kEnded`` and those below it in copying.cpp."""

    NONE = 0
    ENDED = -1  # the file ended, or took nothing
    DAMAGED = -2  # the bytes are not those that were written
    RAISED = -3  # a copy by Python raised
    STOPPED = -4  # ``Copying.fail`` gave the step up


class _Piece(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("outside", ctypes.c_int64),
        ("slot", ctypes.c_int64),
        ("sum", ctypes.c_int64),
        ("descriptor", ctypes.c_int32),
        ("forgets", ctypes.c_int32),
    )


class _Copy(ctypes.Structure):
    _fields_ = (
        ("index", ctypes.c_int64),
        ("number", ctypes.c_int64),
        ("first_piece", ctypes.c_int64),
        ("pieces", ctypes.c_int64),
        ("first_wait", ctypes.c_int64),
        ("waits", ctypes.c_int64),
        ("awaited", ctypes.c_int32),
        ("writes", ctypes.c_int32),
    )


class _Wait(ctypes.Structure):
    _fields_ = (("queue", ctypes.c_int64), ("number", ctypes.c_int64))


class _Sum(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_int64), ("found", ctypes.c_uint64))


class _Queue(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int64), ("copies", ctypes.c_int64), ("first", ctypes.POINTER(_Copy)))


class _Work(ctypes.Structure):
    _fields_ = (
        ("pieces", ctypes.POINTER(_Piece)),
        ("waits", ctypes.POINTER(_Wait)),
        ("sums", ctypes.POINTER(_Sum)),
        ("summed", ctypes.c_int64),
        ("queues", ctypes.POINTER(_Queue)),
        ("count", ctypes.c_int64),
        ("threaded", ctypes.c_int64),
    )


class _Source(NamedTuple):
    """The slot of a piece."""

    home: HomeStore
    offset: int
    writes: bool  # whether the copy writes there


@dataclass(frozen=True, eq=False)
class Copies:
    """The copies of a bound program in native form.

    Attributes:
        slots: by instruction, what they were made from.
        given: the structure passed to native code, which refers to the arrays in ``parts``.
        pieces: of all copies.
        sampled: for each slot with sampled checks who records what was written, and the offset.
        sums: of these, what native code has written there.
        ports: of each copy between the arena and the caller's memory, its storage and its piece.
        sources: the home of each piece; None if it is in the caller's memory.
        called: by instruction, the copies that Python makes, and whether they go out.
        places: of each home in use, a slot and its location, which keeps memory and files alive.
    """

    slots: Mapping[int, tuple[Piece, ...]]
    given: _Work
    parts: tuple[object, ...]
    pieces: ctypes.Array[_Piece]
    sampled: tuple[tuple[Remember, int], ...]
    sums: ctypes.Array[_Sum]
    ports: tuple[tuple[int, int], ...]
    sources: tuple[_Source | None, ...]
    called: Mapping[int, tuple[bool, BoundCopy]]
    places: tuple[tuple[HomeStore, int, int, Location], ...]


@dataclass
class _Rows:
    """The rows of the native arrays while they are collected."""

    pieces: list[_Piece] = field(default_factory=list)
    sources: list[_Source | None] = field(default_factory=list)
    copies: list[_Copy] = field(default_factory=list)
    waits: list[_Wait] = field(default_factory=list)
    ports: list[tuple[int, int]] = field(default_factory=list)
    sums: dict[tuple[int, int], int] = field(default_factory=dict)
    sampled: list[tuple[Remember, int]] = field(default_factory=list)
    places: dict[int, tuple[HomeStore, int, int, Location]] = field(default_factory=dict)
    called: dict[int, tuple[bool, BoundCopy]] = field(default_factory=dict)

    def add(self, piece: _Piece, source: _Source | None) -> None:
        self.pieces.append(piece)
        self.sources.append(source)


def copies_of(
    bound: Bound, arena: Arena, slots: Mapping[int, tuple[Piece, ...]], homes: Sequence[HomeStore], queues: int
) -> Copies:
    """Locate everything that a bound program copies.

    ``slots`` has by copy index its pieces at home; a copy without any goes to or comes from the caller. The last of
    ``queues`` is that of collectives. Raises ``TransferError``, ``ArenaError`` or ``StateError`` if a slot is not in
    its home, a block not in the arena, or a home closed.
    """
    rows = _Rows()
    lanes: list[tuple[int, int, int]] = []  # number of the queue, first copy, copies
    for number, work in enumerate(bound.copies, 1):
        if work:
            lanes.append((number, len(rows.copies), len(work)))
        for copy in work:
            first_piece, first_wait = len(rows.pieces), len(rows.waits)
            rows.waits += [_Wait(queue % queues, count) for queue, count in copy.waits]
            at = arena.address + copy.offset
            arena.memory(copy.offset, copy.bytes)  # refuses what does not lie there
            found = slots.get(copy.index)
            if found is None:
                rows.ports.append((copy.storage, first_piece))
                rows.add(_Piece(at, 0, 0, 0, _NOT_SUMMED, _Outside.MEMORY, 0), None)
            else:
                _add_pieces(rows, homes[copy.home], copy, at, found, writes=number % 2 == 1)
            rows.copies.append(
                _Copy(
                    copy.index,
                    copy.number,
                    first_piece,
                    len(rows.pieces) - first_piece,
                    first_wait,
                    len(rows.waits) - first_wait,
                    copy.awaited,
                    number % 2 == 1,
                )
            )
    pieces, waits = (_Piece * len(rows.pieces))(*rows.pieces), (_Wait * len(rows.waits))(*rows.waits)
    copies, sums = (_Copy * len(rows.copies))(*rows.copies), (_Sum * len(rows.sums))()
    table = (_Queue * len(lanes))()
    size = ctypes.sizeof(_Copy)
    for row, (number, first, count) in zip(table, lanes, strict=True):
        row.number, row.copies = number, count
        row.first = ctypes.cast(ctypes.addressof(copies) + first * size, ctypes.POINTER(_Copy))
    threaded = bool(slots or bound.collectives)
    given = _Work(pieces, waits, sums, len(sums), table, len(lanes), threaded)
    parts = (pieces, waits, copies, sums, table)
    return Copies(
        dict(slots),
        given,
        parts,
        pieces,
        tuple(rows.sampled),
        sums,
        tuple(rows.ports),
        tuple(rows.sources),
        rows.called,
        tuple(rows.places.values()),
    )


def _add_pieces(
    rows: _Rows, home: HomeStore, copy: BoundCopy, at: int, found: Sequence[Piece], *, writes: bool
) -> None:
    """Add the pieces of a copy; all are Python's if one is."""
    places = [home.locate(piece.offset, piece.bytes) for piece in found]
    by_python = None in places
    for piece, place in zip(found, places, strict=True):
        source = _Source(home, piece.offset, writes)
        if by_python or place is None:
            rows.add(_Piece(at, piece.bytes, 0, piece.offset, _NOT_SUMMED, _Outside.CALLED, 0), source)
            rows.called[copy.index] = writes, copy
            return
        descriptor = _Outside.MEMORY if place.descriptor is None else place.descriptor
        row = _NOT_SUMMED
        if place.remember is not None:
            row = rows.sums.setdefault((copy.home, piece.offset), len(rows.sums))
            if row == len(rows.sampled):
                rows.sampled.append((place.remember, piece.offset))
        rows.places.setdefault(copy.home, (home, piece.offset, piece.bytes, place))
        made = _Piece(at, piece.bytes, place.start, piece.offset, row, descriptor, place.forgets)
        rows.add(made, source)
        at += piece.bytes


class Copying:
    """The copies of each step, and the progress of all its queues.

    The first of ``queues`` is that of ops, the last that of collectives. ``copy`` makes a copy that native code cannot
    make, given whether it goes out. ``handle`` and ``functions`` (wait, publish) are for other native code.
    """

    def __init__(self, library: ctypes.PyDLL, queues: int, copy: Callable[[bool, BoundCopy], None]) -> None:
        self._library = library
        self._queues = queues
        self._copy = copy
        self._raised: BaseException | None = None
        self._copies: Copies | None = None
        this = weakref.ref(self)

        def called(index: int) -> int:
            copying = this()
            return 1 if copying is None else copying._call(index)

        # Kept with the threads: they may call it as long as they live.
        callback = native_callback(called, ctypes.c_int64, failed=1)
        self._wait = without_lock(library, "outofcore_copying_wait")
        self._idle = without_lock(library, "outofcore_copying_idle")
        self._pause = without_lock(library, "outofcore_copying_pause")
        handle = library.outofcore_copying_new(queues, ctypes.cast(callback, ctypes.c_void_p), secrets())
        if handle is None:
            raise MemoryError("there is no memory for the copies of a step")
        self.handle: int = handle
        self._pointer = ctypes.c_void_p(handle)
        wait, publish = library.outofcore_copying_wait, library.outofcore_copying_publish
        self.functions = ctypes.cast(wait, ctypes.c_void_p), ctypes.cast(publish, ctypes.c_void_p)
        self._release = weakref.finalize(self, _free, library, handle, callback, os.getpid())
        self._release.atexit = False

    def begin(
        self, copies: Copies, ports: Mapping[int, tuple[int, int, object]], starts: array[float], ends: array[float]
    ) -> None:
        """Begin the copies of a step; the arguments must stay unchanged until ``finish`` has returned.

        ``ports`` gives by storage address and bytes of the caller's memory; ``starts`` and ``ends`` receive the times
        of each instruction. Raises ``StateError`` if a home is closed, ``TransferError`` if the system gives no thread
        or memory.
        """
        self._copies = None
        for home, offset, count, place in copies.places:
            if home.locate(offset, count) != place:
                raise StateError("a home has been moved since its copies were prepared; please report it")
        for storage, number in copies.ports:
            address, count, _ = ports[storage]
            copies.pieces[number].outside, copies.pieces[number].bytes = address, count
        self._raised = None
        self._copies = copies
        begun = self._library.outofcore_copying_begin(
            self.handle, ctypes.addressof(copies.given), starts.buffer_info()[0], ends.buffer_info()[0]
        )
        if begun != 0:
            what = "memory" if begun == errno.ENOMEM else "thread"
            error = TransferError(
                f"the system gives no {what} for the {copies.given.count} threads that copy ({os.strerror(begun)}); "
                "raise the limit on processes (ulimit -u), or end other programs"
            )
            error.errno = begun
            raise error

    def wait(self, waits: Sequence[tuple[int, int]]) -> None:
        """Wait until queues have come as far; raises ``StateError`` if the step was given up (see ``failure``)."""
        for queue, number in waits:
            at = queue % self._queues
            if self._library.outofcore_copying_reached(self._pointer, ctypes.c_int64(at), ctypes.c_int64(number)):
                continue
            while status := self._wait(self.handle, at, number, SIGNALS_SECONDS):
                if status > 1:
                    raise StateError("another queue of the step failed") from self.failure

    def publish(self, queue: int, number: int) -> None:
        """Publish how far a queue has come."""
        self._library.outofcore_copying_publish(self.handle, queue % self._queues, number)

    def pause(self) -> None:
        """Stop copies from beginning, and return when none is under way."""
        self._pause(self.handle, 1)

    def resume(self) -> None:
        self._pause(self.handle, 0)

    def fail(self, error: BaseException) -> None:
        """Give the step up, unless it was given up before."""
        if self._library.outofcore_copying_stop(self.handle):
            self._raised = error

    def let_go(self) -> None:
        """Forget the exception, which holds the frames of the caller."""
        self._raised = None

    @property
    def failure(self) -> BaseException | None:
        """Why the step was given up; None if it was not."""
        told = (ctypes.c_int64 * 4)()
        self._library.outofcore_copying_failure(self.handle, told)
        index, piece, done, code = told
        if code in (_Failure.NONE, _Failure.RAISED, _Failure.STOPPED) or self._copies is None:
            return self._raised
        source = self._copies.sources[piece]
        if source is None:
            return StateError(f"copy {index} between arena and caller failed; please report it")
        count = self._copies.pieces[piece].bytes
        if code == _Failure.DAMAGED:
            return damaged(source.home, source.offset, count)
        return source.home.failed(
            source.offset + done, count - done, None if code == _Failure.ENDED else code, writes=source.writes
        )

    def finish(self) -> None:
        """Return when all copies are made, or the step was given up and none is under way."""
        while self._idle(self.handle, SIGNALS_SECONDS):
            pass
        if self._copies is not None:
            for (remember, offset), found in zip(self._copies.sampled, self._copies.sums, strict=True):
                if found.bytes >= 0:
                    remember(offset, found.bytes, found.found)

    def close(self) -> None:
        """End the idle threads. May be called again."""
        self._release()

    def _call(self, index: int) -> int:
        if self._copies is None:
            return 1
        try:
            self._copy(*self._copies.called[index])
        except BaseException as error:  # the thread of the ops raises it
            self._raised = self._raised or error
            return 1
        return 0


def _free(library: ctypes.PyDLL, handle: int, callback: object, process: int) -> None:
    # The child of a fork has none of the threads, and would wait for them for ever.
    if os.getpid() == process:
        library.outofcore_copying_free(handle)
    del callback
