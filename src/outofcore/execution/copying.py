"""The copies of a step on the CPU, in one native thread per queue, which verifies checksums (``copying.cpp``)."""

from __future__ import annotations

import ctypes
import errno
import os
import weakref
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from outofcore.errors import StateError, TransferError
from outofcore.execution.arena import Arena
from outofcore.execution.binding import BoundCopy, BoundProgram
from outofcore.execution.interrupts import SIGNAL_POLL_SECONDS
from outofcore.runtime.checks import SlotChecksums, damage_error
from outofcore.runtime.file_io import MEMORY, Location
from outofcore.runtime.file_ranges import FIRST_RANGE
from outofcore.runtime.homes import HomeStore
from outofcore.runtime.native import Flavor, load_unlocked
from outofcore.runtime.slots import SlotPiece

_NOT_SUMMED = -1  # in place of the row of a piece in ``_Work.sums``


class _CopyFailure(IntEnum):
    """Causes of a failed copy that have no errno value, as in file_io.h and copying.cpp."""

    NONE = 0
    DAMAGED = -2  # the bytes differ from the written ones
    STOPPED = -3  # ``Copying.fail`` cancelled the step


class _Piece(ctypes.Structure):
    """A part of a copy that is contiguous on both sides, as ``Piece`` in copying.cpp."""

    _fields_ = (
        ("address", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("outside", ctypes.c_int64),
        ("slot", ctypes.c_int64),
        ("sum", ctypes.c_int64),
        ("descriptor", ctypes.c_int32),
        ("cache", ctypes.c_int32),
    )

    def set_location(self, place: Location) -> None:
        self.descriptor, self.outside, self.bytes, self.cache = place.descriptor, place.start, place.bytes, place.cache


class _Copy(ctypes.Structure):
    """A copy, with the ranges of its pieces and waits in their tables, as ``Copy`` in copying.cpp."""

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
    """The checksum of a slot, as ``Sum`` in copying.cpp."""

    _fields_ = (("bytes", ctypes.c_int64), ("found", ctypes.c_uint64), ("full", ctypes.c_int64))


class _Queue(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int64), ("copies", ctypes.c_int64), ("first", ctypes.POINTER(_Copy)))


class _Work(ctypes.Structure):
    """All tables of a step's copies, as ``Work`` in copying.cpp."""

    _fields_ = (
        ("pieces", ctypes.POINTER(_Piece)),
        ("waits", ctypes.POINTER(_Wait)),
        ("sums", ctypes.POINTER(_Sum)),
        ("queues", ctypes.POINTER(_Queue)),
        ("count", ctypes.c_int64),
        ("threaded", ctypes.c_int64),
    )


class _Source(NamedTuple):
    """The slot at a home from which or to which a piece is copied."""

    home: HomeStore
    offset: int
    writes: bool  # whether the copy writes there


@dataclass(frozen=True, eq=False)
class Copies:
    """The copies of a bound program in native form; each has one or more pieces, which are contiguous at home."""

    slots: Mapping[int, tuple[SlotPiece, ...]]  # pieces at home by copy index, from which these were made
    work: _Work  # passed to native code; refers to the arrays
    arrays: tuple[object, ...]
    pieces: ctypes.Array[_Piece]  # of all copies
    summed: tuple[tuple[SlotChecksums, int], ...]  # checksums of the home and offset, of each slot with a checksum
    sums: ctypes.Array[_Sum]  # checksum of each of these slots in this step
    ports: tuple[tuple[int, int], ...]  # storage and piece of each copy to or from the caller's memory
    ranges: tuple[int, ...]  # pieces in files that the home does not own; a write moves them to its own file
    sources: tuple[_Source | None, ...]  # slot of each piece; None in the caller's memory
    places: tuple[tuple[HomeStore, int, int, Location], ...]  # a slot of each home, kept alive with its memory or file


@dataclass
class _Rows:
    """The rows of the native tables, collected copy by copy."""

    pieces: list[_Piece] = field(default_factory=list)
    sources: list[_Source | None] = field(default_factory=list)
    copies: list[_Copy] = field(default_factory=list)
    waits: list[_Wait] = field(default_factory=list)
    ports: list[tuple[int, int]] = field(default_factory=list)
    ranges: list[int] = field(default_factory=list)
    sums: dict[tuple[int, int], int] = field(default_factory=dict)  # by home and offset: the row
    summed: list[tuple[SlotChecksums, int]] = field(default_factory=list)
    places: dict[int, tuple[HomeStore, int, int, Location]] = field(default_factory=dict)

    def add(self, piece: _Piece, source: _Source | None) -> None:
        self.pieces.append(piece)
        self.sources.append(source)


def prepare_copies(
    bound: BoundProgram,
    arena: Arena,
    slots: Mapping[int, tuple[SlotPiece, ...]],
    homes: Sequence[HomeStore],
    queues: int,
) -> Copies:
    """Convert a program's copies to native form; raise ``OutOfCoreError`` for bytes out of range."""
    rows = _Rows()
    lanes: list[tuple[int, int, int]] = []  # number of the queue, first copy, copies
    for number, work in enumerate(bound.copies, 1):
        if work:
            lanes.append((number, len(rows.copies), len(work)))
        for copy in work:
            first_piece, first_wait = len(rows.pieces), len(rows.waits)
            rows.waits += [_Wait(queue % queues, count) for queue, count in copy.waits]
            address = arena.address + copy.offset
            arena.memory(copy.offset, copy.bytes)  # raises for bytes outside of the arena
            pieces_at_home = slots.get(copy.index)
            if pieces_at_home is None:  # the other side is the caller's memory
                rows.ports.append((copy.storage, first_piece))
                rows.add(_Piece(address, 0, 0, 0, _NOT_SUMMED, MEMORY), None)
            else:
                _add_pieces(rows, homes[copy.home], copy, address, pieces_at_home, writes=number % 2 == 1)
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
    copies = (_Copy * len(rows.copies))(*rows.copies)
    sums = (_Sum * len(rows.summed))(*(_Sum(-1, 0, stored.full) for stored, _ in rows.summed))
    table = (_Queue * len(lanes))()
    size = ctypes.sizeof(_Copy)
    for row, (number, first, count) in zip(table, lanes, strict=True):
        row.number, row.copies = number, count
        row.first = ctypes.cast(ctypes.addressof(copies) + first * size, ctypes.POINTER(_Copy))
    # Copies to and from the caller's memory alone need no threads: to wake them takes longer than to copy a batch. The
    # thread of the ops makes each of them when it waits for it.
    threaded = bool(slots or bound.collectives)
    native_work = _Work(pieces, waits, sums, table, len(lanes), threaded)
    parts = (pieces, waits, copies, sums, table)
    return Copies(
        dict(slots),
        native_work,
        parts,
        pieces,
        tuple(rows.summed),
        sums,
        tuple(rows.ports),
        tuple(rows.ranges),
        tuple(rows.sources),
        tuple(rows.places.values()),
    )


def _add_pieces(
    rows: _Rows, home: HomeStore, copy: BoundCopy, address: int, pieces_at_home: Sequence[SlotPiece], *, writes: bool
) -> None:
    """Add one copy between the arena and a home to the native tables, piece by piece."""
    for piece in pieces_at_home:
        place = home.locate(piece.offset, piece.bytes)
        row = _NOT_SUMMED
        if home.sums is not None:
            row = rows.sums.setdefault((copy.home, piece.offset), len(rows.summed))
            if row == len(rows.summed):
                rows.summed.append((home.sums, piece.offset))
        entry = _Piece(address=address, slot=piece.offset, sum=row)
        entry.set_location(place)
        if piece.offset >= FIRST_RANGE:
            rows.ranges.append(len(rows.pieces))
        else:
            rows.places.setdefault(copy.home, (home, piece.offset, piece.bytes, place))
        rows.add(entry, _Source(home, piece.offset, writes))
        address += piece.bytes


class Copying:
    """Makes the copies of a step in native threads, and tracks the progress of every queue of the step."""

    def __init__(self, library: ctypes.PyDLL, queues: int) -> None:
        self._library = library
        self._queues = queues
        self._error: BaseException | None = None
        self._copies: Copies | None = None
        unlocked = load_unlocked(Flavor.CPU)
        self._wait = unlocked.outofcore_copying_wait
        self._idle = unlocked.outofcore_copying_idle
        self._pause = unlocked.outofcore_copying_pause
        handle = library.outofcore_copying_new(queues)
        if handle is None:
            raise MemoryError("there is no memory for the copies of a step; end other programs")
        self.handle: int = handle
        self._pointer = ctypes.c_void_p(handle)
        wait, publish = library.outofcore_copying_wait, library.outofcore_copying_publish
        self.functions = ctypes.cast(wait, ctypes.c_void_p), ctypes.cast(publish, ctypes.c_void_p)
        self._release = weakref.finalize(self, _free, library, handle, os.getpid())
        self._release.atexit = False

    def begin(
        self, copies: Copies, ports: Mapping[int, tuple[int, int, object]], starts: array[float], ends: array[float]
    ) -> None:
        """Start the copies of a step; raise ``TransferError`` if their threads cannot start."""
        self._copies = None
        for home, offset, count, place in copies.places:
            if home.locate(offset, count) != place:
                raise StateError("a home has moved since its copies were prepared; please report it")
        for number in copies.ranges:
            source, piece = copies.sources[number], copies.pieces[number]
            if source is not None:
                piece.set_location(source.home.locate(source.offset, piece.bytes))
        for (stored, offset), current in zip(copies.summed, copies.sums, strict=True):
            current.bytes, current.found = stored.recorded.get(offset, (-1, 0))
        for storage, number in copies.ports:
            address, count, _ = ports[storage]
            copies.pieces[number].outside, copies.pieces[number].bytes = address, count
        self._error = None
        self._copies = copies
        # Native code uses the arguments until ``finish`` returns, so they must not change before.
        status = self._library.outofcore_copying_begin(
            self.handle, ctypes.addressof(copies.work), starts.buffer_info()[0], ends.buffer_info()[0]
        )
        if status != 0:
            resource = "memory" if status == errno.ENOMEM else "thread"
            error = TransferError(
                f"the system gives no {resource} for the {copies.work.count} threads that copy "
                f"({os.strerror(status)}); raise the limit on processes (ulimit -u), or end other programs"
            )
            error.errno = status
            raise error

    def wait(self, targets: Sequence[tuple[int, int]]) -> None:
        """Wait until other queues reach the given instruction numbers; raise ``StateError`` if a queue has failed."""
        for queue, number in targets:
            index = queue % self._queues
            if self._library.outofcore_copying_reached(self._pointer, ctypes.c_int64(index), ctypes.c_int64(number)):
                continue
            while status := self._wait(self.handle, index, number, SIGNAL_POLL_SECONDS):
                if status > 1:
                    raise StateError("another queue of the step failed") from self.failure

    def publish(self, queue: int, number: int) -> None:
        """Record that a queue has run its instructions up to this number, and wake the queues that wait."""
        self._library.outofcore_copying_publish(self.handle, queue % self._queues, number)

    def pause(self) -> None:
        """Hold back further copies, and return once no copy is running."""
        self._pause(self.handle, 1)

    def resume(self) -> None:
        self._pause(self.handle, 0)

    def fail(self, error: BaseException) -> None:
        """Cancel the step with an error, unless it was cancelled before."""
        if self._library.outofcore_copying_stop(self.handle):
            self._error = error

    def release_error(self) -> None:
        """Release the exception, which keeps the caller's frames alive."""
        self._error = None

    @property
    def failure(self) -> BaseException | None:
        """The error that stopped the queues of this step, or None."""
        report = (ctypes.c_int64 * 4)()
        self._library.outofcore_copying_failure(self.handle, report)
        index, piece, done_bytes, code = report
        if code in (_CopyFailure.NONE, _CopyFailure.STOPPED) or self._copies is None:
            return self._error
        source = self._copies.sources[piece]
        if source is None:
            return StateError(f"copy {index} between arena and caller failed; please report it")
        count = self._copies.pieces[piece].bytes
        if code == _CopyFailure.DAMAGED:
            return damage_error(source.home.name, source.offset, count)
        return source.home.transfer_error(source.offset + done_bytes, count - done_bytes, code, writes=source.writes)

    def finish(self) -> None:
        """Wait until the copies of a step have ended, then record the checksums of their slots."""
        while self._idle(self.handle, SIGNAL_POLL_SECONDS):
            pass
        if self._copies is not None:
            for (stored, offset), current in zip(self._copies.summed, self._copies.sums, strict=True):
                if current.bytes >= 0:
                    stored.recorded[offset] = current.bytes, current.found

    def close(self) -> None:
        self._release()


def _free(library: ctypes.PyDLL, handle: int, process: int) -> None:
    # A forked child does not have the threads, and would wait for them forever.
    if os.getpid() == process:
        library.outofcore_copying_free(handle)
