"""Pinned host buffers for copies between a device and a disk, as neither can access the other.

Each direction has a ring of buffers and two streams: one between the device and a buffer, the other between a buffer
and the file. So the next buffer is filled while one is written. The streams wait for each other; the host never waits.
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
from outofcore.runtime.slots import SlotPiece, share_page
from outofcore.units import MIB, PAGE_BYTES, format_bytes, round_up

BUFFER_BYTES = 8 * MIB
BUFFERS = 4  # for each direction


@dataclass(frozen=True, slots=True)
class StagedChunk:
    """A part of a copy that fits one buffer: its bytes on the device, and their offset in the file."""

    device: torch.Tensor
    offset: int


def first_stream(stream: Stream) -> Stream:
    """Return the stream on which a copy begins. A copy from a disk begins with a read into host memory."""
    return Stream.READ if stream is Stream.DISK_IN else stream


def last_stream(stream: Stream) -> Stream:
    """Return the stream on which a copy ends. A copy to a disk ends with a write from host memory."""
    return Stream.WRITE if stream is Stream.DISK_OUT else stream


class _Ring:
    """The buffers of one direction, each with marks for when it is full and when it is empty."""

    def __init__(self, driver: Driver, memory: torch.Tensor, size: int) -> None:
        self.buffers = [memory[start : start + size] for start in range(0, memory.numel(), size)]
        self.full: list[Mark] = [driver.create_mark() for _ in self.buffers]
        self.empty: list[Mark] = [driver.create_mark() for _ in self.buffers]
        self._turns = 0

    def begin(self) -> None:
        self._turns = 0

    def next(self) -> tuple[int, bool]:
        """Return the index of the next buffer, and whether it was used since ``begin``."""
        turn = self._turns
        self._turns += 1
        return turn % len(self.buffers), turn >= len(self.buffers)


class Staging:
    """Copies between a device and a file through host buffers; raises ``SpillError`` without memory for them."""

    def __init__(
        self, driver: Driver, home: HomeStore, buffer_bytes: int = BUFFER_BYTES, buffers: int = BUFFERS
    ) -> None:
        self._driver = driver
        self._home = home
        self._size = buffer_bytes
        memory = driver.allocate_staging(2 * buffers * buffer_bytes)
        half = buffers * buffer_bytes
        self._out_ring = _Ring(driver, memory[:half], buffer_bytes)
        self._in_ring = _Ring(driver, memory[half:], buffer_bytes)

    def cut_chunks(
        self, view: Callable[[int, int], torch.Tensor], start: int, offset: int, count: int
    ) -> list[StagedChunk]:
        """Cut a copy between ``start`` in the arena and ``offset`` in the file into chunks that fit a buffer."""
        cuts = range(0, count, self._size)
        return [StagedChunk(view(start + cut, min(self._size, count - cut)), offset + cut) for cut in cuts]

    def begin(self) -> None:
        self._out_ring.begin()
        self._in_ring.begin()

    def copy_out(self, index: int, chunks: Sequence[StagedChunk], issuer: Issuer | None = None) -> None:
        """Issue a copy from the device to a file, through buffers in host memory."""
        driver, ring = issuer or self._driver, self._out_ring
        for chunk in chunks:
            buffer, used = ring.next()
            count = chunk.device.numel()
            if used:
                driver.wait(Stream.DISK_OUT, ring.empty[buffer])
            driver.copy(Stream.DISK_OUT, index, ring.buffers[buffer][:count], chunk.device)
            driver.record(Stream.DISK_OUT, ring.full[buffer])
            driver.wait(Stream.WRITE, ring.full[buffer])
            driver.transfer(Stream.WRITE, index, self._home, chunk.offset, _whole_pages(ring.buffers[buffer], count))
            driver.record(Stream.WRITE, ring.empty[buffer])

    def copy_in(
        self, index: int, chunks: Sequence[StagedChunk], waits: Sequence[Mark], issuer: Issuer | None = None
    ) -> None:
        """Issue a copy from a file to the device, through buffers in host memory."""
        driver, ring, pending_waits = issuer or self._driver, self._in_ring, list(waits)
        for chunk in chunks:
            buffer, used = ring.next()
            count = chunk.device.numel()
            if used:
                driver.wait(Stream.READ, ring.empty[buffer])
            driver.transfer(Stream.READ, index, self._home, chunk.offset, _whole_pages(ring.buffers[buffer], count))
            driver.record(Stream.READ, ring.full[buffer])
            driver.wait(Stream.DISK_IN, ring.full[buffer])
            while pending_waits:
                driver.wait(Stream.DISK_IN, pending_waits.pop(0))
            driver.copy(Stream.DISK_IN, index, chunk.device, ring.buffers[buffer][:count])
            driver.record(Stream.DISK_IN, ring.empty[buffer])


def _whole_pages(buffer: torch.Tensor, count: int) -> torch.Tensor:
    # A slot's last page has no other data, so bytes after the slot's end may be overwritten.
    return buffer[: round_up(count, PAGE_BYTES)]


def reads_after_writes(
    copies: Sequence[tuple[int, bool]], slots: Mapping[int, tuple[SlotPiece, ...]]
) -> dict[int, int]:
    """Map reads among ``copies`` (index, is_write) to the earlier writes of the same pages that must end first."""
    # Reads run in order, and so do writes: a read needs no wait if an earlier read has one for the
    # same or a later write.
    write_of: dict[int, int] = {}
    written: list[int] = []
    awaited = 0  # number of writes that earlier reads already wait for
    for index, is_write in copies:
        if is_write:
            written.append(index)
            continue
        for count in range(len(written), awaited, -1):
            if share_page(slots[index], slots[written[count - 1]]):
                write_of[index], awaited = written[count - 1], count
                break
    return write_of


class Posted(Transfer):
    """A transfer posted to a thread, as ``Posted`` in ``lanes.h``; must be kept alive until it has run."""

    _fields_ = (("next", ctypes.c_void_p), ("lane", ctypes.c_void_p))


def create_transfer(
    home: HomeStore, offset: int, address: int, count: int, *, writes: bool, lane: int | None = None
) -> Posted:
    """Create a transfer of whole pages; the thread ``lane`` runs it, or the caller's thread if that is None."""
    place = home.locate(offset, count)
    return Posted(address, count, place.start, place.descriptor, writes, place.cache, lane=lane)


def check_transfers(transfers: Iterable[Transfer]) -> None:
    """Raise ``TransferError`` for the first transfer that has failed."""
    for transfer in transfers:
        if transfer.failure:
            verb = "write" if transfer.writes else "read"
            reason = "the file ends there" if transfer.failure < 0 else os.strerror(transfer.failure)
            remaining, position = transfer.bytes - transfer.done, transfer.offset + transfer.done
            error = TransferError(
                f"could not {verb} {format_bytes(remaining)} at byte {position} of the spill file behind the device: "
                f"{reason}; check that disk, or name another spill directory"
            )
            error.errno = errno.EIO if transfer.failure < 0 else transfer.failure
            raise error
