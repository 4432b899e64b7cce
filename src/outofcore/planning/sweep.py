"""First fit and best fit as an allocator would do it that is asked as time goes by.

A list of free stretches, in order of address, is kept while time runs from event to event; whoever is
born takes the first stretch that is large enough (first fit), or the smallest one (best fit). The list
stays short, so this takes a few steps for each rectangle.

What comes back at an address it had before must find it free. Such rectangles are stacked at the bottom,
before all others, and whoever is still there when one of them comes keeps off its bytes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

import numpy as np

from outofcore.planning.rectangles import FAR, Ints, Rectangles
from outofcore.units import round_up


def sweep(rectangles: Rectangles, *, tightest: bool = False, backwards: bool = False) -> Ints:
    """Offsets by a sweep over time.

    Args:
        rectangles: to be placed.
        tightest: take the smallest stretch that is large enough, not the first.
        backwards: from the end of time to its start.
    """
    first = np.stack((rectangles.begin, rectangles.end), axis=1)
    second = np.stack((rectangles.again, rectangles.over), axis=1)
    if backwards:
        first, second = rectangles.slots - first[:, ::-1], rectangles.slots - second[:, ::-1]
        for index in rectangles.wrapping.tolist():
            first[index], second[index] = second[index].copy(), first[index].copy()
    return _Sweep(rectangles, first.tolist(), second.tolist()).run(tightest)


class _Sweep:
    def __init__(self, rectangles: Rectangles, first: list[list[int]], second: list[list[int]]) -> None:
        self.sizes: list[int] = rectangles.sizes.tolist()
        self.alignments: list[int] = rectangles.alignments.tolist()
        self.first, self.second = first, second
        self.wrapping: list[int] = rectangles.wrapping.tolist()
        self.offsets = [0] * len(self.sizes)
        self.free_from = [rectangles.base]
        self.free_to = [FAR]

    def run(self, tightest: bool) -> Ints:
        returning: list[tuple[int, int, int]] = []  # a time at which bytes are taken whose place is fixed, and these
        at = self.free_from[0]
        for index in sorted(self.wrapping, key=lambda i: (-self.alignments[i], -self.sizes[i], i)):
            at = round_up(at, self.alignments[index])
            self.offsets[index] = at
            span = (at, at + self.sizes[index])
            returning += [(self.first[index][0], *span), (self.second[index][0], *span)]
            at += self.sizes[index]
        returning.sort()
        times = [when for when, _, _ in returning]
        spans = np.array([(low, high) for _, low, high in returning], dtype=np.int64).reshape(-1, 2)
        for time, kind, _, index in self._events():
            begin, end = self.offsets[index], self.offsets[index] + self.sizes[index]
            if kind == 0:
                self._give(begin, end)
            elif kind == 1:
                self._take(begin, end)
            else:
                # They come back while this one lives.
                barred = spans[bisect_right(times, time) : bisect_left(times, self.first[index][1])]
                begin = self._find(self.sizes[index], self.alignments[index], barred, tightest)
                self.offsets[index] = begin
                self._take(begin, begin + self.sizes[index])
        return np.array(self.offsets, dtype=np.int64)

    def _events(self) -> list[tuple[int, int, int, int]]:
        """In order of time; at one time first what is given back, then what comes back, then who is new."""
        wraps = set(self.wrapping)
        events: list[tuple[int, int, int, int]] = []
        for index, (begin, end) in enumerate(self.first):
            events.append((end, 0, 0, index))
            events.append((begin, 1 if index in wraps else 2, -self.sizes[index], index))
        for index in self.wrapping:
            events += [(self.second[index][1], 0, 0, index), (self.second[index][0], 1, 0, index)]
        return sorted(events)

    def _find(self, size: int, alignment: int, barred: Ints, tightest: bool) -> int:
        found, room = FAR, 4 * FAR
        # Most stretches are too small: who is not is found out before anything else is done.
        stretches = [(a, b) for a, b in zip(self.free_from, self.free_to, strict=True) if b - a >= size]
        for begin, end in _without(stretches, barred, size) if len(barred) else stretches:
            if end - begin < room:
                offset = round_up(begin, alignment)
                if offset + size <= end:
                    if not tightest:
                        return offset
                    found, room = offset, end - begin
        return found

    def _give(self, begin: int, end: int) -> None:
        at = bisect_left(self.free_from, begin)
        if at < len(self.free_from) and self.free_from[at] == end:
            end = self.free_to[at]
            del self.free_from[at], self.free_to[at]
        if at and self.free_to[at - 1] == begin:
            self.free_to[at - 1] = end
        else:
            self.free_from.insert(at, begin)
            self.free_to.insert(at, end)

    def _take(self, begin: int, end: int) -> None:
        at = bisect_right(self.free_from, begin) - 1
        low, high = self.free_from[at], self.free_to[at]
        pieces = [(a, b) for a, b in ((low, begin), (end, high)) if a < b]
        self.free_from[at : at + 1] = [a for a, _ in pieces]
        self.free_to[at : at + 1] = [b for _, b in pieces]


def _without(stretches: Iterable[tuple[int, int]], barred: Ints, least: int) -> Iterator[tuple[int, int]]:
    """What is left of stretches in order of address, where that is ``least`` bytes or more.

    Args:
        stretches: half-open, in order, and apart from each other.
        barred: rows of begin and end, not empty, in any order; two of them may meet if they are the same.
        least: bytes.
    """
    # Between those that are barred there is room only where one does not begin at the end of the one below.
    order = np.sort(barred, axis=0)
    gaps = np.flatnonzero(order[1:, 0] - order[:-1, 1] >= least)
    starts: list[int] = [-FAR, *order[gaps, 1].tolist(), int(order[-1, 1])]
    ends: list[int] = [int(order[0, 0]), *order[gaps + 1, 0].tolist(), 2 * FAR]
    for begin, end in stretches:
        at = bisect_right(ends, begin)
        while at < len(starts) and starts[at] < end:
            low, high = max(begin, starts[at]), min(end, ends[at])
            if high - low >= least:
                yield low, high
            at += 1
