"""Checksums of what is at a home: what is read back must be what was written.

They are of whole slots, or of a few of their pages. They hold within a step: between steps the user may change what is
at home. Copies by native code compare and record them as well (``copying.cpp``); eager loops have sums of their own
(``follow/blocks.h``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from outofcore.errors import TransferError
from outofcore.runtime.checksums import checksum, sampled
from outofcore.units import format_bytes


class Check(Enum):
    OFF = "off"  # nothing
    SAMPLED = "sampled"  # a few pages of every copy to and from a disk
    FULL = "full"  # every byte of every copy; what stays at home after a step is read back once


@dataclass(frozen=True, eq=False)
class Sums:
    """Checksums by slot of the bytes last written there; ``full``: of all bytes, not of a few pages."""

    full: bool
    known: dict[int, tuple[int, int]] = field(default_factory=dict)  # by offset: bytes, checksum

    def note(self, offset: int, memory: memoryview) -> None:
        """Record the checksum of bytes that go to a slot."""
        self.known[offset] = len(memory), self._of(memory, offset)

    def matches(self, offset: int, memory: memoryview) -> bool:
        """Return whether bytes have the checksum of their slot, or the slot has none for their size."""
        count, known = self.known.get(offset, (-1, 0))
        return count != len(memory) or self._of(memory, offset) == known

    def _of(self, memory: memoryview, offset: int) -> int:
        return checksum(memory) if self.full else sampled(memory, offset)


def damaged(home: str, offset: int, count: int) -> TransferError:
    """Build the error for bytes from a home that are not what was written there."""
    return TransferError(
        f"the {format_bytes(count)} at byte {offset} of the {home} home are not what was written there: the "
        "checksum differs, so they were damaged on the way or where they lay; check that disk and its file system, "
        "or name another spill directory"
    )
