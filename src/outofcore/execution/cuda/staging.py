"""Pinned buffers through which blocks pass between a device and a disk, as neither can access the other.

Each direction has a ring of buffers and two streams: one moves bytes between the device and a buffer, the other between
a buffer and the file. So the next buffer is filled while one is written, and a read runs ahead of the copy that waits
for room on the device by as much as the ring holds. Streams wait where a buffer changes hands; the host never waits.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from outofcore.errors import TransferError
from outofcore.execution.cuda.interface import Driver, Issuer, Mark, Stream
from outofcore.runtime.file_io import Transfer
from outofcore.runtime.homes import HomeStore
from outofcore.runtime.slots import Piece, meet
from outofcore.units import MIB, PAGE_BYTES, format_bytes, round_up

BUFFER_BYTES = 8 * MIB
BUFFERS = 4  # for each direction


@dataclass(frozen=True, slots=True)
class Part:
    """Some bytes of a block, at most a buffer, and their offset in the file."""

    device: torch.Tensor
    offset: int


def first_stream(stream: Stream) -> Stream:
    """Return the stream on which a queue's copy begins."""
    return Stream.READ if stream is Stream.DISK_IN else stream


def last_stream(stream: Stream) -> Stream:
    """Return the stream on which a queue's copy ends."""
    return Stream.WRITE if stream is Stream.DISK_OUT else stream


class _Ring:
    """The buffers of one direction, with marks for each: when its contents have arrived and when they have left."""

    def __init__(self, driver: Driver, memory: torch.Tensor, size: int) -> None:
        self.buffers = [memory[at : at + size] for at in range(0, memory.numel(), size)]
        self.full: list[Mark] = [driver.mark() for _ in self.buffers]
        self.empty: list[Mark] = [driver.mark() for _ in self.buffers]
        self._turns = 0

    def begin(self) -> None:
        """Treat all buffers as empty: their contents left before the streams began."""
        self._turns = 0

    def next(self) -> tuple[int, bool]:
        """Return the next buffer, and whether it has been used since ``begin``."""
        turn = self._turns
        self._turns += 1
        return turn % len(self.buffers), turn >= len(self.buffers)


class Staging:
    """Issues copies between one device and one file through ``buffers`` buffers of whole pages in each direction.

    Raises ``SpillError`` if the system has no memory for the buffers.
    """

    def __init__(
        self, driver: Driver, home: HomeStore, buffer_bytes: int = BUFFER_BYTES, buffers: int = BUFFERS
    ) -> None:
        self._driver = driver
        self._home = home
        self._size = buffer_bytes
        memory = driver.staging(2 * buffers * buffer_bytes)
        half = buffers * buffer_bytes
        self._out = _Ring(driver, memory[:half], buffer_bytes)
        self._into = _Ring(driver, memory[half:], buffer_bytes)

    def parts(self, view: Callable[[int, int], torch.Tensor], at: int, offset: int, count: int) -> list[Part]:
        """Cut a copy between arena and file into parts that fit a buffer.

        ``view`` gives bytes of the arena; the copy begins at ``at`` in the arena and at ``offset`` in the file.
        """
        cuts = range(0, count, self._size)
        return [Part(view(at + cut, min(self._size, count - cut)), offset + cut) for cut in cuts]

    def begin(self) -> None:
        """Begin new streams that have waited for all that was issued before."""
        self._out.begin()
        self._into.begin()

    def out(self, index: int, parts: Sequence[Part], issuer: Issuer | None = None) -> None:
        """Issue a copy to the file: it has left the device when ``DISK_OUT`` is done, and arrived with ``WRITE``."""
        driver, ring = issuer or self._driver, self._out
        for part in parts:
            which, used = ring.next()
            count = part.device.numel()
            if used:
                driver.wait(Stream.DISK_OUT, ring.empty[which])
            driver.copy(Stream.DISK_OUT, index, ring.buffers[which][:count], part.device)
            driver.record(Stream.DISK_OUT, ring.full[which])
            driver.wait(Stream.WRITE, ring.full[which])
            driver.transfer(Stream.WRITE, index, self._home, part.offset, _pages(ring.buffers[which], count))
            driver.record(Stream.WRITE, ring.empty[which])

    def into(self, index: int, parts: Sequence[Part], waits: Sequence[Mark], issuer: Issuer | None = None) -> None:
        """Issue a copy from the file: ``READ`` takes it to buffers, ``DISK_IN`` to the device.

        ``waits`` are for the room on the device; bytes may be read into the buffers before. The default issuer is the
        device.
        """
        driver, ring, late = issuer or self._driver, self._into, list(waits)
        for part in parts:
            which, used = ring.next()
            count = part.device.numel()
            if used:
                driver.wait(Stream.READ, ring.empty[which])
            driver.transfer(Stream.READ, index, self._home, part.offset, _pages(ring.buffers[which], count))
            driver.record(Stream.READ, ring.full[which])
            driver.wait(Stream.DISK_IN, ring.full[which])
            while late:
                driver.wait(Stream.DISK_IN, late.pop(0))
            driver.copy(Stream.DISK_IN, index, part.device, ring.buffers[which][:count])
            driver.record(Stream.DISK_IN, ring.empty[which])


def _pages(buffer: torch.Tensor, count: int) -> torch.Tensor:
    # A slot has its last page to itself, so that what lies there after the last byte does no harm.
    return buffer[: round_up(count, PAGE_BYTES)]


def reads_after_writes(copies: Sequence[tuple[int, bool]], slots: Mapping[int, tuple[Piece, ...]]) -> dict[int, int]:
    """Return, for each read that has to wait for a write, that write, by instruction index.

    Reads are done in order, and so are writes; a read is left out if an earlier one waits for the same write or a later
    one. A write need not wait for a read: the program delays it until the bytes are on the device. ``copies`` are in
    program order, with whether each writes to the file.
    """
    found: dict[int, int] = {}
    written: list[int] = []
    reached = 0  # so many writes are done by now for whoever reads
    for index, writes in copies:
        if writes:
            written.append(index)
            continue
        for count in range(len(written), reached, -1):
            if meet(slots[index], slots[written[count - 1]]):
                found[index], reached = written[count - 1], count
                break
    return found


class Posted(Transfer):
    """As ``Posted`` in ``lanes.h``; must be kept until it has run."""

    _fields_ = (("next", ctypes.c_void_p), ("lane", ctypes.c_void_p))


def transfer_of(
    home: HomeStore, offset: int, address: int, count: int, *, writes: bool, lane: int | None = None
) -> Posted:
    """Build a transfer that has yet to run; address, offset and count are whole pages.

    ``lane`` selects the thread that does it; None: the one that runs it.
    """
    place = home.locate(offset, count)
    return Posted(address, count, place.start, place.descriptor, writes, place.cache, lane=lane)


def check_transfers(transfers: Iterable[Transfer]) -> None:
    """Raise the ``TransferError`` of the first transfer that has run and failed."""
    for transfer in transfers:
        if transfer.failure:
            verb = "write" if transfer.writes else "read"
            why = "the file ends there" if transfer.failure < 0 else os.strerror(transfer.failure)
            left, at = transfer.bytes - transfer.done, transfer.offset + transfer.done
            error = TransferError(
                f"could not {verb} {format_bytes(left)} at byte {at} of the spill file behind the device: {why}; check "
                "that disk, or name another spill directory"
            )
            error.errno = errno.EIO if transfer.failure < 0 else transfer.failure
            raise error
