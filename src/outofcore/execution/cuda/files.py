"""Which copies from a file read what copies to it have written in the same step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outofcore.execution.slots import Piece, meet


def reads_after_writes(copies: Sequence[tuple[int, bool]], slots: Mapping[int, tuple[Piece, ...]]) -> dict[int, int]:
    """For each read that has to wait for a write, which one.

    Reads are done in order, and so are writes; a read that follows one that waits for the same write, or for a later
    one, is not named. A write need not wait for a read: the program lets it wait until what was read is on the device.

    Args:
        copies: in the order of the program, the index of each copy and whether it writes to the file.
        slots: by the index, where in the file.
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
