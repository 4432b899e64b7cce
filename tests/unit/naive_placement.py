"""Slow, obvious versions of best fit and first fit, to compare with ``placement.cpp``."""

from __future__ import annotations

from collections.abc import Iterable

from outofcore.planning.placement.rectangles import Rectangles
from outofcore.units import round_up


def first_fit(rectangles: Rectangles, order: Iterable[int]) -> list[int]:
    """Place each rectangle at the lowest offset that is free over its lifetime."""
    sizes, alignments = rectangles.sizes.tolist(), rectangles.alignments.tolist()
    offsets: dict[int, int] = {}
    for index in order:
        near = [i for i in offsets if moments_of(rectangles, i) & moments_of(rectangles, index)]
        floors = sorted({rectangles.base, *(offsets[i] + sizes[i] for i in near)})
        offsets[index] = next(
            offset
            for offset in (round_up(floor, alignments[index]) for floor in floors)
            if all(offset >= offsets[i] + sizes[i] or offset + sizes[index] <= offsets[i] for i in near)
        )
    return [offsets[index] for index in range(len(rectangles))]


def moments_of(rectangles: Rectangles, index: int) -> set[int]:
    begin, end, second_begin, second_end = (
        int(a[index]) for a in (rectangles.begin, rectangles.end, rectangles.second_begin, rectangles.second_end)
    )
    return {*range(begin, end), *(range(second_begin, second_end) if second_end <= rectangles.slots else ())}


def best_fit(rectangles: Rectangles, worth: Iterable[float], snug: float) -> list[int]:
    """Fill the lowest skyline segment with the most valuable rectangle that fits, else raise it."""
    period, worths = rectangles.slots, list(worth)
    sizes, alignments = rectangles.sizes.tolist(), rectangles.alignments.tolist()
    arcs = {index: _arc(rectangles, index) for index in range(len(rectangles))}
    levels = [rectangles.base] * period
    offsets: dict[int, int] = {}
    while len(offsets) < len(rectangles):
        starts = [slot for slot in range(period) if levels[slot] != levels[slot - 1]]
        start = min(starts, key=lambda slot: (levels[slot], slot), default=0)
        length = next((d for d in range(1, period) if (start + d) % period in starts), period)
        fitting = sorted(
            ((begin - start) % period, -duration, index)
            for index, (begin, duration) in arcs.items()
            if index not in offsets and ((begin - start) % period + duration <= length or not starts)
        )
        if not fitting:
            for slot in range(start, start + length):
                levels[slot % period] = min(levels[start - 1], levels[(start + length) % period])
            continue
        bonus = snug if starts else 0.0
        distance, duration, index = max(
            fitting, key=lambda x: worths[x[2]] + bonus * ((x[0] - x[1] == length) + (x[0] == 0))
        )
        offsets[index] = round_up(levels[start], alignments[index])
        for slot in range(start + distance, start + distance - duration):
            levels[slot % period] = offsets[index] + sizes[index]
    return [offsets[index] for index in range(len(rectangles))]


def _arc(rectangles: Rectangles, index: int) -> tuple[int, int]:
    """Return the start of a rectangle on the circle of time and its length in slots, gap included."""
    begin, end, second_begin, second_end = (
        int(a[index]) for a in (rectangles.begin, rectangles.end, rectangles.second_begin, rectangles.second_end)
    )
    if second_end > rectangles.slots:
        return begin, end - begin
    if begin == 0 and second_end == rectangles.slots:
        return second_begin, end + rectangles.slots - second_begin
    return begin, second_end - begin
