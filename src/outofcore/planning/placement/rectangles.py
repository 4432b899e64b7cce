"""The rectangles of dynamic storage allocation: bytes by the time over which they are held.

Two rectangles that share a moment may not share an address. To find the lowest arena is NP-hard, in
practice as in theory; ``packing`` says which ways of placing are tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from outofcore.errors import InputError

Ints = NDArray[np.int64]

# The offset of what is not placed: above everything, and far from overflowing when doubled.
FAR = 1 << 60


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Bytes held over [lower, upper), but not over the gap in it, if there is one.

    Attributes:
        id: unique among those packed together.
        lower: when the bytes are taken; any unit, a whole number.
        upper: when they are given back.
        size: bytes.
        alignment: what the offset must be a multiple of.
        gap: half-open; the bytes need not be there meanwhile, but come back at the same address. What wraps
            around the end of a period is held over [0, a) and [b, end): lower 0, upper end, gap (a, b).
    """

    id: int | str
    lower: int
    upper: int
    size: int
    alignment: int = 1
    gap: tuple[int, int] | None = None

    def check(self) -> None:
        """Refuse a rectangle that contradicts itself.

        Raises:
            InputError: its lifetime, size, alignment or gap cannot be.
        """
        if max(abs(self.lower), abs(self.upper), self.size, self.alignment) >= FAR:
            raise InputError(f"rectangle {self.id} has a time, size or alignment of 2**60 or more")
        if self.lower > self.upper:
            raise InputError(f"rectangle {self.id} ends at {self.upper}, before it begins at {self.lower}")
        if self.size < 0 or self.alignment < 1:
            raise InputError(
                f"rectangle {self.id} has size {self.size} and alignment {self.alignment}; at least 0 and 1"
            )
        if self.gap is not None and not self.lower <= self.gap[0] <= self.gap[1] <= self.upper:
            raise InputError(f"the gap {self.gap} of rectangle {self.id} lies outside [{self.lower}, {self.upper})")

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """The one or two stretches of time over which the bytes are held; none is empty."""
        if self.gap is None or self.gap[0] >= self.gap[1]:
            return ((self.lower, self.upper),) if self.lower < self.upper else ()
        found = ((self.lower, self.gap[0]), (self.gap[1], self.upper))
        return tuple((begin, end) for begin, end in found if begin < end)


@dataclass(frozen=True)
class Rectangles:
    """Rectangles as arrays, over times counted from 0 without leaving any out.

    Attributes:
        sizes: bytes; above zero.
        alignments: of each.
        begin: of the first segment, in slots of time.
        end: of the first segment.
        again: when the second segment begins; beyond all times where there is none.
        over: when the second segment ends; likewise.
        slots: how many slots of time there are.
        held: of each, how long it is held in the caller's unit of time.
        base: the lowest offset that may be given.
        wrapping: indices of those that have a second segment.
    """

    sizes: Ints
    alignments: Ints
    begin: Ints
    end: Ints
    again: Ints
    over: Ints
    slots: int
    held: Ints
    base: int
    wrapping: Ints

    @staticmethod
    def of(
        rectangles: Sequence[Rectangle], base: int, segments: Sequence[tuple[tuple[int, int], ...]] | None = None
    ) -> Rectangles:
        """Arrays of rectangles that all have a size and a lifetime; ``segments`` are theirs, where they are known."""
        parts = [r.segments for r in rectangles] if segments is None else segments
        bounds = np.array([(p[0], p[-1]) for p in parts], dtype=np.int64).reshape(-1, 2, 2)
        moments, places = np.unique(bounds, return_inverse=True)
        slot = places.reshape(-1, 2, 2).astype(np.int64)
        two = np.array([len(p) == 2 for p in parts], dtype=np.bool_)
        lengths: Ints = bounds[:, :, 1] - bounds[:, :, 0]
        never = len(moments) + 1
        return Rectangles(
            np.array([r.size for r in rectangles], dtype=np.int64),
            np.array([r.alignment for r in rectangles], dtype=np.int64),
            np.ascontiguousarray(slot[:, 0, 0]),
            np.ascontiguousarray(slot[:, 0, 1]),
            np.where(two, slot[:, 1, 0], never),
            np.where(two, slot[:, 1, 1], never),
            max(len(moments) - 1, 1),
            lengths[:, 0] + np.where(two, lengths[:, 1], 0),
            base,
            np.flatnonzero(two),
        )

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Where in memory the arrays lie that say what is placed: sizes, alignments, begin, end, again, over."""
        arrays = (self.sizes, self.alignments, self.begin, self.end, self.again, self.over)
        return tuple(array.ctypes.data for array in arrays)

    def part(self, indices: Ints) -> Rectangles:
        """Some of them, over the same slots of time."""
        arrays = (self.sizes, self.alignments, self.begin, self.end, self.again, self.over, self.held)
        sizes, alignments, begin, end, again, over, held = (a[indices] for a in arrays)
        wrapping = np.flatnonzero(over <= self.slots)
        return Rectangles(sizes, alignments, begin, end, again, over, self.slots, held, self.base, wrapping)

    def live(self) -> Ints:
        """Bytes held in each slot of time."""
        change = np.zeros(self.slots + 1, np.int64)
        np.add.at(change, self.begin, self.sizes)
        np.subtract.at(change, self.end, self.sizes)
        np.add.at(change, self.again[self.wrapping], self.sizes[self.wrapping])
        np.subtract.at(change, self.over[self.wrapping], self.sizes[self.wrapping])
        return np.cumsum(change)

    def height(self, offsets: Ints) -> int:
        """The end of the highest rectangle."""
        return int((offsets + self.sizes).max(initial=self.base))


@dataclass(frozen=True)
class Peak:
    """The moment at which most bytes are held, the first of them."""

    bytes: int
    time: int
    ids: tuple[int | str, ...]  # whose they are


def peak(rectangles: Sequence[Rectangle]) -> Peak:
    """Where the most bytes are live: no arena can be lower than that.

    Limits: alignment is not counted.
    """
    change: dict[int, int] = {}
    for rectangle in rectangles:
        for begin, end in rectangle.segments:
            change[begin] = change.get(begin, 0) + rectangle.size
            change[end] = change.get(end, 0) - rectangle.size
    held, most, when = 0, 0, min(change, default=0)
    for moment in sorted(change):
        held += change[moment]
        if held > most:
            most, when = held, moment
    ids = tuple(r.id for r in rectangles if r.size and any(begin <= when < end for begin, end in r.segments))
    return Peak(most, when, ids)
