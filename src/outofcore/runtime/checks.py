"""Checksums of what is at a home: what is read back must be what was written.

They are of whole slots, or of a few of their pages. They hold within a step: between steps the user may change what is
at home. Copies by native code compare and record them as well (``copying.cpp``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

import torch

from outofcore.errors import TransferError
from outofcore.runtime.checksums import checksum, sampled
from outofcore.runtime.file_io import BUFFER_BYTES, Location, Sums, copy_buffer
from outofcore.runtime.file_ranges import FileRanges
from outofcore.runtime.homes import HomeStore
from outofcore.units import format_bytes


class Check(Enum):
    OFF = "off"  # nothing
    SAMPLED = "sampled"  # a few pages of every copy to and from a disk
    FULL = "full"  # every byte of every copy; what stays at home after a step is read back once


class CheckedHome(HomeStore):
    """A home whose copies are checked; otherwise it behaves like the home that it wraps."""

    def __init__(self, home: HomeStore, check: Check) -> None:
        self.inner = home
        self.check_mode = check
        self.sums = Sums(check is Check.FULL)

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def identity(self) -> str:
        return self.inner.identity

    @property
    def in_memory(self) -> bool:
        return self.inner.in_memory

    @property
    def bytes(self) -> int:
        return self.inner.bytes

    @property
    def capacity(self) -> int:
        return self.inner.capacity

    @property
    def edges(self) -> Sequence[int]:
        return self.inner.edges

    @property
    def files(self) -> FileRanges | None:
        return self.inner.files

    def move_range(self, offset: int, pages: tuple[int, int]) -> None:
        self.inner.move_range(offset, pages)

    def check(self, count: int) -> None:
        self.inner.check(count)

    def ensure(self, count: int) -> None:
        self.inner.ensure(count)

    def grow(self, count: int) -> None:
        self.inner.grow(count)

    def write(self, offset: int, source: memoryview) -> None:
        self.sums.known[offset] = len(source), self._sum_of(source, offset)
        self.inner.write(offset, source)

    def read(self, offset: int, target: memoryview) -> None:
        self.inner.read(offset, target)
        count, known = self.sums.known.get(offset, (-1, 0))
        if count == len(target) and self._sum_of(target, offset) != known:
            raise damaged(self, offset, count)

    def _sum_of(self, memory: memoryview, offset: int) -> int:
        return checksum(memory) if self.sums.full else sampled(memory, offset)

    def discard(self, offset: int, count: int) -> None:
        self.sums.known.pop(offset, None)
        self.inner.discard(offset, count)

    def start(self) -> None:
        """Forget all checksums."""
        self.inner.start()
        self.sums.known.clear()

    def read_back(self, offset: int) -> None:
        """With ``FULL``, compare the slot with what was last written to it; raises ``TransferError`` if it differs."""
        if not self.sums.full or offset not in self.sums.known:
            return
        count, known = self.sums.known[offset]
        buffer, found = copy_buffer(), 0
        for start in range(0, count, BUFFER_BYTES):
            piece = buffer[: min(BUFFER_BYTES, count - start)]
            self.inner.read(offset + start, piece)
            found += checksum(piece, start)
        if found % 2**64 != known:
            raise damaged(self, offset, count)

    def locate(self, offset: int, count: int) -> Location:
        return replace(self.inner.locate(offset, count), sums=self.sums)

    def failed(self, offset: int, count: int, failure: int, *, writes: bool) -> TransferError:
        return self.inner.failed(offset, count, failure, writes=writes)

    def face(self, offset: int, count: int) -> torch.Tensor:
        return self.inner.face(offset, count)

    def drop_cache(self, face: torch.Tensor) -> None:
        self.inner.drop_cache(face)

    def sibling(self, count: int) -> HomeStore:
        """Make a home with the same checks, so that measurements include their time."""
        return CheckedHome(self.inner.sibling(count), self.check_mode)

    def close(self) -> None:
        self.inner.close()


def damaged(home: HomeStore, offset: int, count: int) -> TransferError:
    """Build the error for bytes from a home that are not what was written there."""
    return TransferError(
        f"the {format_bytes(count)} at byte {offset} of the {home.name} home are not what was written there: the "
        "checksum differs, so they were damaged on the way or where they lay; check that disk and its file system, "
        "or name another spill directory"
    )


def checked(home: HomeStore, check: Check) -> HomeStore:
    if check is Check.OFF or (check is Check.SAMPLED and home.in_memory):
        return home
    return CheckedHome(home, check)
