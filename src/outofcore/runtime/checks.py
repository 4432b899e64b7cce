"""Compare bytes that are read from a home with the bytes written there, by checksums.

They are valid within a step, since between steps the user may change a home. Eager loops have their own (``blocks.h``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from outofcore.errors import TransferError
from outofcore.runtime.checksums import checksum, sampled_checksum
from outofcore.units import format_bytes


class Check(Enum):
    OFF = "off"
    SAMPLED = "sampled"  # a few pages of every copy to and from a disk
    FULL = "full"  # every byte of every copy; slots that stay at home after a step are read back once


@dataclass(frozen=True, eq=False)
class SlotChecksums:
    """The checksums of the bytes last written to each slot: of all bytes if ``full``, else of a few pages."""

    full: bool
    recorded: dict[int, tuple[int, int]] = field(default_factory=dict)  # by offset: bytes, checksum

    def record(self, offset: int, memory: memoryview) -> None:
        self.recorded[offset] = len(memory), self._compute(memory, offset)

    def matches(self, offset: int, memory: memoryview) -> bool:
        """Return whether bytes match the checksum of their slot; True if no write of their size was recorded."""
        count, expected = self.recorded.get(offset, (-1, 0))
        return count != len(memory) or self._compute(memory, offset) == expected

    def _compute(self, memory: memoryview, offset: int) -> int:
        return checksum(memory) if self.full else sampled_checksum(memory, offset)


def damage_error(home: str, offset: int, count: int) -> TransferError:
    return TransferError(
        f"the {format_bytes(count)} at byte {offset} of the {home} home are not what was written there: the "
        "checksum differs, so they were damaged in transit or in storage; check that disk and its file system, "
        "or name another spill directory"
    )
