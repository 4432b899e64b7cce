"""A deliberately naive proof that rectangles are placed as promised. Shares no code with the placement."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from outofcore.errors import ValidationError


@dataclass(frozen=True, slots=True)
class Placed:
    """Bytes [offset, offset + size), held over [lower, upper) except over the gap, if any."""

    id: int | str
    lower: int
    upper: int
    size: int
    offset: int
    alignment: int = 1
    gap: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return f"rectangle {self.id}, bytes [{self.offset}, {self.offset + self.size})"


def check_packing(placed: Iterable[Placed], capacity: int | None = None) -> int:
    """Prove that no two rectangles held at one time overlap, and that each is aligned and within the capacity.

    Returns the end of the highest rectangle. Raises ``ValidationError`` that names the conflicting rectangles, and
    when.
    """
    height = 0
    events: list[tuple[int, int, Placed]] = []  # when, 0: given back or 1: taken, what
    for one in placed:
        if one.offset < 0 or one.offset % one.alignment:
            raise ValidationError(f"{one.name}: the offset must be a multiple of {one.alignment} and not negative")
        if capacity is not None and one.offset + one.size > capacity:
            raise ValidationError(f"{one.name} ends above the capacity of {capacity} bytes")
        height = max(height, one.offset + one.size)
        held = [(one.lower, one.upper)] if one.gap is None else [(one.lower, one.gap[0]), (one.gap[1], one.upper)]
        for begin, end in held:
            if one.size and begin < end:
                events += [(begin, 1, one), (end, 0, one)]
    live: list[tuple[int, int, Placed]] = []  # offset and end of what is held, in order of address
    for when, taken, one in sorted(events, key=lambda event: event[:2]):
        begin, end = one.offset, one.offset + one.size
        at = bisect_left(live, (begin, end), key=lambda entry: entry[:2])
        if not taken:
            del live[at]
            continue
        for other_begin, other_end, other in live[max(at - 1, 0) : at + 1]:
            if other_begin < end and begin < other_end:
                raise ValidationError(f"{one.name}, overlaps {other.name}, and both are held at {when}")
        live.insert(at, (begin, end, one))
    return height
