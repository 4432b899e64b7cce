"""Checksums of what is at a home: what is read back must be what was written.

They are CRC-32 (IEEE 802.3) of whole slots, or fingerprints of a few of their pages (``copying.cpp``). They hold within
a step: between steps the user may change what is at home.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

import torch

from outofcore.errors import TransferError
from outofcore.runtime.file_ranges import FileRanges
from outofcore.runtime.fingerprints import sampled
from outofcore.runtime.homes import HomeStore, Location
from outofcore.runtime.spill import copy_buffer
from outofcore.units import format_bytes


class Check(Enum):
    OFF = "off"  # nothing
    SAMPLED = "sampled"  # a few pages of every copy to and from a disk
    FULL = "full"  # every byte of every copy; what stays at home after a step is read back once


def checksum(memory: memoryview, offset: int, check: Check) -> int:
    """Return the checksum of a slot's bytes, or of its sampled pages, which depend on the offset."""
    return zlib.crc32(memory) if check is Check.FULL or not memory else sampled(memory, offset)


class CheckedHome(HomeStore):
    """A home whose copies are checked; otherwise it behaves like the home that it wraps."""

    def __init__(self, home: HomeStore, check: Check) -> None:
        self.inner = home
        self.check_mode = check
        self._sums: dict[int, tuple[int, int]] = {}  # by offset: bytes, checksum
        self._buffers = threading.local()

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
        self._sums[offset] = (len(source), checksum(source, offset, self.check_mode))
        self.inner.write(offset, source)

    def read(self, offset: int, target: memoryview) -> None:
        self.inner.read(offset, target)
        count, known = self._sums.get(offset, (-1, 0))
        if count == len(target) and checksum(target, offset, self.check_mode) != known:
            raise damaged(self, offset, count)

    def remember(self, offset: int, count: int, found: int) -> None:
        """Record the checksum of what native code has written to a slot."""
        self._sums[offset] = count, found

    def discard(self, offset: int, count: int) -> None:
        self._sums.pop(offset, None)
        self.inner.discard(offset, count)

    def start(self) -> None:
        """Forget all checksums."""
        self.inner.start()
        self._sums.clear()

    def read_back(self, offset: int) -> None:
        """With ``FULL``, compare the slot with what was last written to it; raises ``TransferError`` if it differs."""
        if self.check_mode is not Check.FULL or offset not in self._sums:
            return
        count, known = self._sums[offset]
        buffer: memoryview | None = getattr(self._buffers, "memory", None)
        if buffer is None:
            buffer = self._buffers.memory = copy_buffer()
        found = 0
        for start in range(0, count, len(buffer)):
            piece = buffer[: min(len(buffer), count - start)]
            self.inner.read(offset + start, piece)
            found = zlib.crc32(piece, found)
        if found != known:
            raise damaged(self, offset, count)

    def locate(self, offset: int, count: int) -> Location | None:
        """Return None for checks of every byte, which Python makes; native code checks samples."""
        found = self.inner.locate(offset, count) if self.check_mode is Check.SAMPLED else None
        return None if found is None else replace(found, remember=self.remember)

    def failed(self, offset: int, count: int, code: int | None, *, writes: bool) -> TransferError:
        return self.inner.failed(offset, count, code, writes=writes)

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
