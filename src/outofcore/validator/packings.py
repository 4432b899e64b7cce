"""Validate packings of rectangles by deliberately simple code, independent of the placement."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from outofcore.errors import ValidationError


@dataclass(frozen=True, slots=True)
class Placed:
    """Bytes [offset, offset + size) that are held over [lower, upper) except the gap, if any."""

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
    """Check that rectangles are aligned, do not overlap and fit the capacity; return the highest end."""
    height = 0
    events: list[tuple[int, int, Placed]] = []  # time, 0: end or 1: begin, rectangle
    for rectangle in placed:
        if rectangle.offset < 0 or rectangle.offset % rectangle.alignment:
            raise ValidationError(
                f"{rectangle.name}: the offset {rectangle.offset} must be a multiple of {rectangle.alignment} and not "
                "negative"
            )
        if capacity is not None and rectangle.offset + rectangle.size > capacity:
            raise ValidationError(f"{rectangle.name} ends above the capacity of {capacity} bytes")
        height = max(height, rectangle.offset + rectangle.size)
        spans = (
            [(rectangle.lower, rectangle.upper)]
            if rectangle.gap is None
            else [(rectangle.lower, rectangle.gap[0]), (rectangle.gap[1], rectangle.upper)]
        )
        for begin, end in spans:
            if rectangle.size and begin < end:
                events += [(begin, 1, rectangle), (end, 0, rectangle)]
    live: list[tuple[int, int, Placed]] = []  # offset and end of the held rectangles, in order of address
    for when, is_start, rectangle in sorted(events, key=lambda event: event[:2]):
        begin, end = rectangle.offset, rectangle.offset + rectangle.size
        at = bisect_left(live, (begin, end), key=lambda entry: entry[:2])
        if not is_start:
            del live[at]
            continue
        for neighbour_begin, neighbour_end, neighbour in live[max(at - 1, 0) : at + 1]:
            if neighbour_begin < end and begin < neighbour_end:
                raise ValidationError(f"{rectangle.name}, overlaps {neighbour.name}, and both are held at {when}")
        live.insert(at, (begin, end, rectangle))
    return height
