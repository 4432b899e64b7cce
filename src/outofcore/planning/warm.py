"""Placing where it is warm: each block on the bytes given back most recently, which may still be in the caches.

Memory that was just freed is still in the processor's caches, changed and not yet written back. Who writes there next
neither has to fetch it nor lets its old contents go to memory for nothing. That is why allocators reuse last what
was freed first. It costs height, so it is for when there is room to spare.

How warm a byte is goes by how much memory was handed out since it was given back (its stack distance, as in Mattson
et al., IBM Systems Journal 1970), which is blind to what ops read again and again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

import numpy as np

from outofcore.planning.rectangles import Ints, Rectangles
from outofcore.units import MIB, round_up

# A byte that was given back so many bytes ago is half as warm as one given back just now.
_HALF = 16 * MIB
# Where in memory blocks lie at the end of a step matters at its start: it is gone through so often.
_ROUNDS = 2
# Offsets that are looked at for one block.
_LOOKED_AT = 256


def warmest(rectangles: Rectangles, capacity: int) -> Ints | None:
    """Offsets on what was given back last, within a capacity; None where some block then finds no place.

    Args:
        rectangles: to be placed.
        capacity: the height that they may reach.
    """
    memory = _Memory(rectangles.base, capacity)
    found: Ints | None = None
    for _ in range(_ROUNDS):
        found = _once(rectangles, memory)
        if found is None:
            return None
        memory.empty()
    return found


def _once(rectangles: Rectangles, memory: _Memory) -> Ints | None:
    sizes, alignments = rectangles.sizes.tolist(), rectangles.alignments.tolist()
    offsets = [0] * len(sizes)
    wraps = set(rectangles.wrapping.tolist())
    barred: list[tuple[int, int, int]] = []  # bytes whose place is fixed, and a time at which they are taken
    at = rectangles.base
    for index in sorted(wraps, key=lambda i: (-alignments[i], -sizes[i], i)):
        at = round_up(at, alignments[index])
        offsets[index] = at
        span = (at, at + sizes[index])
        barred += [(*span, int(rectangles.begin[index])), (*span, int(rectangles.again[index]))]
        at += sizes[index]
    if at > memory.end:
        return None
    for _, kind, _, index in _events(rectangles):
        begin, end = offsets[index], offsets[index] + sizes[index]
        if kind == 0:
            memory.give(begin, end)
        elif index in wraps:
            memory.take(begin, end)
        else:
            born, dies = int(rectangles.begin[index]), int(rectangles.end[index])
            keep_off = [(low, high) for low, high, when in barred if born < when < dies]
            place = memory.warmest(sizes[index], alignments[index], keep_off)
            if place is None:
                return None
            offsets[index] = place
            memory.take(place, place + sizes[index])
    return np.array(offsets, dtype=np.int64)


def _events(rectangles: Rectangles) -> list[tuple[int, int, int, int]]:
    """In order of time; at one time first what is given back, then what comes back, then who is new."""
    wraps = set(rectangles.wrapping.tolist())
    events: list[tuple[int, int, int, int]] = []
    for index, (begin, end) in enumerate(zip(rectangles.begin.tolist(), rectangles.end.tolist(), strict=True)):
        events.append((end, 0, 0, index))
        events.append((begin, 1 if index in wraps else 2, -int(rectangles.sizes[index]), index))
    for index in sorted(wraps):
        events += [(int(rectangles.over[index]), 0, 0, index), (int(rectangles.again[index]), 1, 0, index)]
    return sorted(events)


class _Memory:
    """Addresses in pieces, in order: whether each is free, and since when.

    Time is counted in bytes handed out.
    """

    def __init__(self, base: int, end: int) -> None:
        self.base, self.end = base, end
        self.starts = [base]
        self.since: list[float] = [-np.inf]  # when it was given back
        self.taken = [False]
        self.now = 0

    def empty(self) -> None:
        """Give everything back, each piece when it was last."""
        self.taken = [False] * len(self.starts)

    def _cut(self, at: int) -> int:
        """The index of the piece that begins at an address, which is cut off if need be."""
        index = bisect_left(self.starts, at)
        if index == len(self.starts) or self.starts[index] != at:
            self.starts.insert(index, at)
            self.since.insert(index, self.since[index - 1])
            self.taken.insert(index, self.taken[index - 1])
        return index

    def _set(self, begin: int, end: int, taken: bool) -> None:
        last = self._cut(end) if end < self.end else len(self.starts)
        first = self._cut(begin)
        last += len(self.starts) - last if end >= self.end else bisect_left(self.starts, end) - last
        self.starts[first:last] = [begin]
        self.since[first:last] = [float(self.now)]
        self.taken[first:last] = [taken]

    def take(self, begin: int, end: int) -> None:
        """Hand bytes out."""
        self.now += end - begin
        self._set(begin, end, True)

    def give(self, begin: int, end: int) -> None:
        """Take bytes back."""
        self._set(begin, end, False)

    def warmest(self, size: int, alignment: int, barred: list[tuple[int, int]]) -> int | None:
        """The offset at which ``size`` free bytes are warmest, the lowest of equals."""
        starts = np.array([*self.starts, self.end], dtype=np.int64)
        ages = self.now - np.array(self.since)
        warmth = np.where(self.taken, 0.0, 1.0 / (1.0 + ages / _HALF))
        # The warmth of all bytes below an address, from that below the pieces.
        below = np.concatenate(([0.0], np.cumsum(warmth * np.diff(starts))))
        offsets = np.array([*self._candidates(size, alignment, barred)], dtype=np.int64)
        if not len(offsets):
            return None
        offsets = np.unique(offsets)
        scores = np.interp(offsets + size, starts, below) - np.interp(offsets, starts, below)
        return int(offsets[np.argmax(np.round(scores / size, 6))])

    def _candidates(self, size: int, alignment: int, barred: list[tuple[int, int]]) -> Iterator[int]:
        """Offsets worth a look: those at which a piece begins, and those from which bytes end with a piece."""
        for low, high in self._free(barred):
            if round_up(low, alignment) + size > high:
                continue
            first, last = bisect_right(self.starts, low), bisect_left(self.starts, high)
            yield round_up(low, alignment)
            for start in [*self.starts[first:last], high][:_LOOKED_AT]:
                for offset in (round_up(start, alignment), (start - size) // alignment * alignment):
                    if low <= offset and offset + size <= high:
                        yield offset

    def _free(self, barred: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Free stretches without what is barred, in order."""
        walls = [
            (start, stop)
            for start, stop, taken in zip(self.starts, [*self.starts[1:], self.end], self.taken, strict=True)
            if taken
        ]
        low = self.base
        for begin, end in sorted(walls + barred):
            if begin > low:
                yield low, begin
            low = max(low, end)
        if low < self.end:
            yield low, self.end
