"""Best fit over a skyline: dynamic storage allocation as packing from the ground up.

After Sekiyama, Imamichi, Imai & Raymond, "Profile-guided memory optimization for deep neural networks"
(arXiv 1804.10001), section 3: the skyline is the lowest free offset over time. Take its lowest segment,
the leftmost of equals; of the rectangles whose lifetime lies within it place the best; if there is none,
raise the segment to its lowest neighbour.

Different from the paper: time is a circle, so that what is held over the end of a step and the start of
the next is one rectangle like any other; and what is best may be something else than the longest-lived.
A gap that is not at the ends of time is taken as held.

Every place in time is raised at most as often as rectangles end there, so that it takes about as many turns
as there are rectangles, and each looks only at those that begin within the segment.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right

import numpy as np
from numpy.typing import NDArray

from outofcore.planning.placement.rectangles import Ints, Rectangles
from outofcore.units import round_up


def best_fit(rectangles: Rectangles, worth: NDArray[np.float64], snug: float = 0.0) -> Ints:
    """Offsets by best fit over the skyline.

    Args:
        rectangles: to be placed.
        worth: of each, not negative; of those that fit, the one worth most is placed.
        snug: what it adds to the worth if a rectangle begins where the segment does, or ends where it does.
    """
    return _Skyline(rectangles, worth, snug).place()


class _Skyline:
    """Segments of a circle of time, each from its start to the next one's, and how high each is."""

    def __init__(self, rectangles: Rectangles, worth: NDArray[np.float64], snug: float) -> None:
        self.rectangles, self.snug = rectangles, snug
        self.period = rectangles.slots
        begin, length = _arcs(rectangles)
        order = np.lexsort((-length, begin))
        self.order: list[int] = order.tolist()
        self.length: list[int] = length[order].tolist()
        # All twice, a period apart, so that a segment that runs over the end of time is one stretch of them.
        self.begin = np.concatenate((begin[order], begin[order] + self.period))
        self.end = self.begin + np.tile(length[order], 2)
        self.worth = np.tile(worth[order], 2)
        self.first: list[int] = np.searchsorted(self.begin, np.arange(2 * self.period + 1)).tolist()
        self.starts = [0]
        self.levels = [rectangles.base]
        self.heap = [(rectangles.base, 0)]  # level and start; outdated entries are skipped

    def place(self) -> Ints:
        sizes: list[int] = self.rectangles.sizes.tolist()
        alignments: list[int] = self.rectangles.alignments.tolist()
        count = len(sizes)
        offsets = np.zeros(count, dtype=np.int64)
        left = count
        while left:
            level, start = heapq.heappop(self.heap)
            at = bisect_left(self.starts, start)
            if at == len(self.starts) or self.starts[at] != start or self.levels[at] != level:
                continue
            found = self._best(at)
            if found is None:
                self._raise(at)
                continue
            which = found % count
            self.worth[which] = self.worth[which + count] = -1.0
            chosen = self.order[which]
            offset = round_up(level, alignments[chosen])
            offsets[chosen] = offset
            self._cover(at, int(self.begin[found]), self.length[which], offset + sizes[chosen])
            left -= 1
        return offsets

    def _end_of(self, at: int) -> int:
        return self.starts[at + 1] if at + 1 < len(self.starts) else self.starts[0] + self.period

    def _best(self, at: int) -> int | None:
        if len(self.starts) == 1:  # the skyline is flat: everything fits
            return int(self.worth[: len(self.order)].argmax())
        start, end = self.starts[at], self._end_of(at)
        low, high = self.first[start], self.first[end]
        if low == high:
            return None
        ends, worth = self.end[low:high], self.worth[low:high]
        fits = (ends <= end) & (worth >= 0)
        if self.snug:
            worth = worth + self.snug * ((ends == end).astype(np.float64) + (self.begin[low:high] == start))
        best = int(np.where(fits, worth, -1.0).argmax())
        return low + best if fits[best] else None

    def _cover(self, at: int, begin: int, length: int, level: int) -> None:
        """Put [begin, begin + length) of the segment at ``at`` at a level."""
        former, period = self.levels[at], self.period
        if length == period:
            self.levels[at] = level
            heapq.heappush(self.heap, (level, self.starts[at]))
            return
        flat = len(self.starts) == 1
        start = begin if flat else self.starts[at]
        end = begin + period if flat else self._end_of(at)
        del self.starts[at], self.levels[at]
        if start < begin:
            self._add(start, former)
        self._add(begin % period, level)
        if begin + length < end:
            self._add((begin + length) % period, former)
        self._join(begin % period)
        self._join(end % period)

    def _raise(self, at: int) -> None:
        count = len(self.starts)
        after = (at + 1) % count
        level = min(self.levels[at - 1], self.levels[after])
        start, end = self.starts[at], self.starts[after]
        self.levels[at] = level
        heapq.heappush(self.heap, (level, start))
        self._join(end)
        self._join(start)

    def _add(self, start: int, level: int) -> None:
        start %= self.period
        where = bisect_right(self.starts, start)
        self.starts.insert(where, start)
        self.levels.insert(where, level)
        heapq.heappush(self.heap, (level, start))

    def _join(self, start: int) -> None:
        """Do away with the boundary at ``start`` if it is as high on both sides; one boundary always stays."""
        at = bisect_left(self.starts, start)
        if at == len(self.starts) or len(self.starts) == 1 or self.starts[at] != start:
            return
        if self.levels[at - 1] == self.levels[at]:
            del self.starts[at], self.levels[at]


def _arcs(rectangles: Rectangles) -> tuple[Ints, Ints]:
    """Where each begins on the circle of time, and how long it is."""
    period = rectangles.slots
    begin, last = rectangles.begin.copy(), rectangles.end.copy()
    two = rectangles.wrapping
    around = (rectangles.begin[two] == 0) & (rectangles.over[two] == period)
    begin[two] = np.where(around, rectangles.again[two], rectangles.begin[two])
    last[two] = np.where(around, rectangles.end[two] + period, rectangles.over[two])
    return begin, last - begin
