"""Pinned buffers through which blocks pass between a device and a disk, as neither reaches into the other.

Each direction has a ring of buffers and two streams: one moves bytes between the device and a buffer, the other between
a buffer and the file. So while one buffer is on its way to the disk, the next is filled; a read runs ahead of the copy
that waits for room on the device by as much as the ring holds. A stream waits where a buffer changes hands, and for
nothing else: the host waits for neither.

Has run on the double of the tests; not on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from outofcore.execution.cuda.interface import Driver, FileHome, Mark, Stream
from outofcore.units import MIB, PAGE_BYTES, round_up

BUFFER_BYTES = 8 * MIB
BUFFERS = 4  # for each direction


@dataclass(frozen=True, slots=True)
class Part:
    """Some bytes of a block, no more than a buffer holds, and where they are in the file."""

    device: torch.Tensor
    offset: int


def first_stream(stream: Stream) -> Stream:
    """Where a copy of a queue begins."""
    return Stream.READ if stream is Stream.DISK_IN else stream


def last_stream(stream: Stream) -> Stream:
    """Where a copy of a queue ends."""
    return Stream.WRITE if stream is Stream.DISK_OUT else stream


class _Ring:
    """The buffers of one direction.

    Attributes:
        full: by buffer, when what is in it has arrived.
        empty: by buffer, when what was in it has left.
    """

    def __init__(self, driver: Driver, memory: torch.Tensor, size: int) -> None:
        self.buffers = [memory[at : at + size] for at in range(0, memory.numel(), size)]
        self.full: list[Mark] = [driver.mark() for _ in self.buffers]
        self.empty: list[Mark] = [driver.mark() for _ in self.buffers]
        self._turns = 0

    def begin(self) -> None:
        """All buffers are empty: what was in them has left before the streams began."""
        self._turns = 0

    def next(self) -> tuple[int, bool]:
        """The buffer whose turn it is, and whether it has been used since ``begin``."""
        turn = self._turns
        self._turns += 1
        return turn % len(self.buffers), turn >= len(self.buffers)


class Staging:
    """Issues copies between one device and one file.

    Args:
        driver: the device.
        home: the file.
        buffer_bytes: of a buffer, whole pages.
        buffers: for each direction.

    Raises:
        SpillError: the system has no memory for the buffers.
    """

    def __init__(
        self, driver: Driver, home: FileHome, buffer_bytes: int = BUFFER_BYTES, buffers: int = BUFFERS
    ) -> None:
        self._driver = driver
        self._home = home
        self._size = buffer_bytes
        memory = driver.staging(2 * buffers * buffer_bytes)
        half = buffers * buffer_bytes
        self._out = _Ring(driver, memory[:half], buffer_bytes)
        self._into = _Ring(driver, memory[half:], buffer_bytes)

    def parts(self, view: Callable[[int, int], torch.Tensor], at: int, offset: int, count: int) -> list[Part]:
        """Bytes of the arena, and of the file, in parts that go through a buffer each.

        Args:
            view: of bytes of the arena, by their offset and number.
            at: where they begin in the arena.
            offset: where they begin in the file.
            count: how many.
        """
        cuts = range(0, count, self._size)
        return [Part(view(at + cut, min(self._size, count - cut)), offset + cut) for cut in cuts]

    def begin(self) -> None:
        """Called when streams begin that have waited for all that was issued before."""
        self._out.begin()
        self._into.begin()

    def out(self, index: int, parts: Sequence[Part]) -> None:
        """Issue a copy to the file: it has left the device when ``DISK_OUT`` is done, and arrived with ``WRITE``."""
        driver, ring = self._driver, self._out
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

    def into(self, index: int, parts: Sequence[Part], waits: Sequence[Mark]) -> None:
        """Issue a copy from the file: ``READ`` takes it to buffers, ``DISK_IN`` to the device.

        Args:
            index: of the instruction in the program.
            parts: what to copy.
            waits: for the room on the device; bytes may come as far as the buffers before.
        """
        driver, ring, late = self._driver, self._into, list(waits)
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
