"""The rectangles of dynamic storage allocation: bytes by the time over which they are held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from outofcore.errors import InputError

Ints = NDArray[np.int64]

# The offset of unplaced rectangles: above all others, and far from overflow when doubled.
FAR = 1 << 60


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Bytes held over [lower, upper), except during an optional gap.

    Attributes:
        id: unique among those packed together.
        lower: when the bytes are taken; a whole number in any unit.
        upper: when they are freed.
        size: bytes.
        alignment: the offset is a multiple of this.
        gap: half-open; a rectangle that wraps around the end of a period has lower 0, and a gap from its end to its
            begin.
    """

    id: int | str
    lower: int
    upper: int
    size: int
    alignment: int = 1
    gap: tuple[int, int] | None = None

    def check(self) -> None:
        """Raise ``InputError`` if the lifetime, size, alignment or gap is invalid."""
        if max(abs(self.lower), abs(self.upper), self.size, self.alignment) >= FAR:
            raise InputError(f"rectangle {self.id} has a time, size or alignment of 2**60 or more; use smaller values")
        if self.lower > self.upper:
            raise InputError(
                f"rectangle {self.id} ends at {self.upper}, before it begins at {self.lower}; ``upper`` must not be "
                "less than ``lower``"
            )
        if self.size < 0 or self.alignment < 1:
            raise InputError(
                f"rectangle {self.id} has size {self.size} and alignment {self.alignment}; use at least 0 and 1"
            )
        if self.gap is not None and not self.lower <= self.gap[0] <= self.gap[1] <= self.upper:
            raise InputError(
                f"the gap {self.gap} of rectangle {self.id} is outside [{self.lower}, {self.upper}), or reversed; give "
                "its begin and its end, in this order, within these bounds"
            )

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """The one or two non-empty intervals over which the bytes are held."""
        if self.gap is None or self.gap[0] >= self.gap[1]:
            return ((self.lower, self.upper),) if self.lower < self.upper else ()
        intervals = ((self.lower, self.gap[0]), (self.gap[1], self.upper))
        return tuple((begin, end) for begin, end in intervals if begin < end)


@dataclass(frozen=True)
class Rectangles:
    """Rectangles as arrays, over consecutive slots of time."""

    sizes: Ints
    alignments: Ints
    begin: Ints  # the slot where the first segment begins
    end: Ints
    second_begin: Ints  # the slot where the second segment begins, or more than ``slots``
    second_end: Ints  # the slot where the second segment ends
    slots: int  # number of slots
    lifetimes: Ints  # lifetimes in the caller's unit of time
    base: int  # the lowest offset to use
    wrapping: Ints  # indices of those with a second segment

    @staticmethod
    def of(
        rectangles: Sequence[Rectangle], base: int, segments: Sequence[tuple[tuple[int, int], ...]] | None = None
    ) -> Rectangles:
        """Convert rectangles to arrays; each must have bytes and a lifetime."""
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
        """The memory addresses of the first six arrays, in the order of the native structure."""
        arrays = (self.sizes, self.alignments, self.begin, self.end, self.second_begin, self.second_end)
        return tuple(array.ctypes.data for array in arrays)

    def subset(self, indices: Ints) -> Rectangles:
        """Return the rectangles with these indices, over the same slots of time."""
        arrays = (self.sizes, self.alignments, self.begin, self.end, self.second_begin, self.second_end, self.lifetimes)
        sizes, alignments, begin, end, second_begin, second_end, lifetimes = (a[indices] for a in arrays)
        wrapping = np.flatnonzero(second_end <= self.slots)
        return Rectangles(
            sizes, alignments, begin, end, second_begin, second_end, self.slots, lifetimes, self.base, wrapping
        )

    def live_bytes(self) -> Ints:
        """Return the bytes held in each slot of time."""
        change = np.zeros(self.slots + 1, np.int64)
        np.add.at(change, self.begin, self.sizes)
        np.subtract.at(change, self.end, self.sizes)
        np.add.at(change, self.second_begin[self.wrapping], self.sizes[self.wrapping])
        np.subtract.at(change, self.second_end[self.wrapping], self.sizes[self.wrapping])
        return np.cumsum(change)

    def height(self, offsets: Ints) -> int:
        return int((offsets + self.sizes).max(initial=self.base))


@dataclass(frozen=True)
class Peak:
    """The first moment at which the most bytes are held."""

    bytes: int
    time: int
    ids: tuple[int | str, ...]  # the rectangles held then


def peak(rectangles: Sequence[Rectangle]) -> Peak:
    """Return the most bytes that are held at once, with the moment and the rectangles held then."""
    change: dict[int, int] = {}
    for rectangle in rectangles:
        for begin, end in rectangle.segments:
            change[begin] = change.get(begin, 0) + rectangle.size
            change[end] = change.get(end, 0) - rectangle.size
    live, peak_bytes, peak_time = 0, 0, min(change, default=0)
    for moment in sorted(change):
        live += change[moment]
        if live > peak_bytes:
            peak_bytes, peak_time = live, moment
    ids = tuple(r.id for r in rectangles if r.size and any(begin <= peak_time < end for begin, end in r.segments))
    return Peak(peak_bytes, peak_time, ids)
