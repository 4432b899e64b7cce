"""Describe parts of tensors as boxes in their storages.

A storage is viewed as an array; its axes are the dimensions of the tensors on it. A part of a tensor is a box, an
interval on each axis, and the cells of a storage are the boxes between its cuts. A storage stays whole if a window onto
it repeats elements or crosses the boundaries of others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

Interval = tuple[int, int]  # half-open
Box = tuple[Interval, ...]  # an interval for each axis


@dataclass(frozen=True, slots=True)
class TensorWindow:
    """The shape, strides and offset of a tensor in its storage, in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Lines:
    """A storage as a dense array with dimensions (called lines), outermost first, that fit all tensors on it."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def lines_of(elements: int, windows: Iterable[TensorWindow]) -> Lines | None:
    """Return an array layout with a dimension for each stride of some tensors; None if there is no such layout.

    >>> lines_of(24, [TensorWindow((4, 6), (6, 1)), TensorWindow((2, 3), (6, 1), 9)])
    Lines(sizes=(4, 6), strides=(6, 1))
    """
    steps = {1, elements}
    for window in windows:
        steps.update(s for size, s in zip(window.shape, window.stride, strict=True) if size > 1)
    if 0 in steps or elements < 1:
        return None
    descending = sorted(steps, reverse=True)
    if descending[0] != elements or any(outer % inner for outer, inner in pairwise(descending)):
        return None
    strides = tuple(descending[1:])
    return Lines(tuple(outer // inner for outer, inner in pairwise(descending)), strides)


@dataclass(frozen=True, slots=True)
class PlacedWindow:
    """A tensor's window as a box in the array of its storage."""

    box: Box  # an interval for each line
    runs: tuple[Interval, ...]  # the lines of each dimension of the window; (0, 0) for one of size 1


def place_window(lines: Lines, window: TensorWindow) -> PlacedWindow | None:
    """Locate a tensor in an array as a box (an interval per dimension); None if it is not a box."""
    starts: list[int] = []
    remainder = window.offset
    for stride in lines.strides:
        starts.append(remainder // stride)
        remainder %= stride
    lengths = [1] * len(starts)
    runs: list[Interval] = []
    covered: set[int] = set()
    for size, stride in zip(window.shape, window.stride, strict=True):
        if size == 1:
            runs.append((0, 0))
            continue
        if stride not in lines.strides:
            return None
        first = end = lines.strides.index(stride)
        remaining = size
        while remaining > lines.sizes[first] and first and not remaining % lines.sizes[first]:
            lengths[first] = lines.sizes[first]
            remaining //= lines.sizes[first]
            first -= 1
        lengths[first] = remaining
        run = range(first, end + 1)
        if covered.intersection(run):
            return None
        covered.update(run)
        runs.append((first, end + 1))
    box = tuple((start, start + length) for start, length in zip(starts, lengths, strict=True))
    if any(end > size for (_, end), size in zip(box, lines.sizes, strict=True)):
        return None
    return PlacedWindow(box, tuple(runs))


@dataclass(frozen=True)
class Axes:
    """The axes along which a storage is split; each merges array dimensions (lines) between two ``starts``."""

    lines: Lines
    starts: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(prod(self.lines.sizes[first:end]) for first, end in self._spans())

    def _spans(self) -> list[Interval]:
        return list(pairwise((*self.starts, len(self.lines.sizes))))

    def whole_box(self) -> Box:
        return tuple((0, size) for size in self.sizes)

    def box_of(self, window: PlacedWindow) -> Box | None:
        """Return a window as an interval on each axis; None if it needs several intervals on an axis."""
        return self._join_box(window.box)

    def _join_box(self, box: Box) -> Box | None:
        """Convert intervals of array dimensions to an interval per axis; None if an axis needs several intervals."""
        joined: list[Interval] = []
        for first, end in self._spans():
            start, length, is_rest_whole = 0, 1, False
            for line in range(first, end):
                size, (low, high) = self.lines.sizes[line], box[line]
                if is_rest_whole and (low, high) != (0, size):
                    return None
                start = start * size + low
                length *= high - low
                is_rest_whole = is_rest_whole or high - low > 1
            joined.append((start, start + length))
        return tuple(joined)

    def cut_unit(self, window: PlacedWindow, dims: Interval) -> int | None:
        """Return the step between possible cuts along a tensor's merged ``dims``; None if it cannot be cut there."""
        run = self.lines_of_dims(window, dims)
        if run is None:
            return None
        first, end = run
        spans = dict(self._spans())
        if first not in spans:
            return None
        return prod(self.lines.sizes[spans[first] : end])

    @staticmethod
    def lines_of_dims(window: PlacedWindow, dims: Interval) -> Interval | None:
        """Return the range of array dimensions that a window's ``dims`` cover; None if they are not consecutive."""
        runs = [run for run in window.runs[dims[0] : dims[1]] if run != (0, 0)]
        if not runs or any(previous[1] != following[0] for previous, following in pairwise(runs)):
            return None
        return runs[0][0], runs[-1][1]

    def box_of_part(self, window: PlacedWindow, dims: Interval, low: int, high: int) -> Box | None:
        """Return the box (an interval per axis) that a slice of a tensor covers; None if it is not a box."""
        run, box = self.lines_of_dims(window, dims), self.box_of(window)
        if run is None or box is None:
            return None
        first, end = run
        spans = self._spans()
        axis = next((number for number, span in enumerate(spans) if span[0] == first), None)
        if axis is None:
            return None
        ends_at = spans[axis][1]
        inner = prod(self.lines.sizes[end:ends_at])  # elements of other dimensions on the same axis
        outer = prod(self.lines.sizes[ends_at:end])  # elements of these dimensions on later axes
        if low % outer or high % outer:
            return None
        begin = box[axis][0] + low // outer * inner
        return (*box[:axis], (begin, begin + (high - low) // outer * inner), *box[axis + 1 :])

    def strides(
        self, window: PlacedWindow, sizes: Sequence[int], box: Box, dims: Interval | None = None
    ) -> tuple[int, ...] | None:
        """Return the strides of a tensor slice in a dense copy of ``box``; None if no strides describe the slice."""
        widths = [high - low for low, high in box]
        steps = [prod(widths[axis + 1 :]) for axis in range(len(widths))]
        runs = list(window.runs)
        if dims is not None:
            runs[dims[0] : dims[1]] = [self.lines_of_dims(window, dims) or (0, 0)]
        strides: list[int] = []
        for run, size in zip(runs, sizes, strict=True):
            if size == 1 or run == (0, 0):
                strides.append(-1)
                continue
            for axis, (first, end) in enumerate(self._spans()):
                if first < run[1] <= end:
                    # The box must be whole on all further axes of the run except the outermost.
                    outer = [outer_axis for outer_axis, span in enumerate(self._spans()) if run[0] <= span[0] < first]
                    if outer and widths[axis] != self.sizes[axis]:
                        return None
                    if any(widths[outer_axis] != self.sizes[outer_axis] for outer_axis in outer[1:]):
                        return None
                    strides.append(prod(self.lines.sizes[run[1] : end]) * steps[axis])
                    break
            else:
                return None
        # A dimension with one element may have any stride; use that of a dense tensor.
        for number in reversed(range(len(strides))):
            if strides[number] < 0:
                strides[number] = strides[number + 1] * sizes[number + 1] if number + 1 < len(strides) else 1
        return tuple(strides)


def count_elements(box: Box) -> int:
    return prod(high - low for low, high in box)


def clip_box(box: Box, bounds: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    shared = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(box, bounds, strict=True))
    return None if any(high <= low for low, high in shared) else shared


def cells(cuts: Sequence[Sequence[int]], box: Box) -> Iterator[Box]:
    """Yield the cells (boxes between cuts) that overlap a box, in memory order; ``cuts`` has their ends by axis."""
    intervals: list[list[Interval]] = []
    for ends, (low, high) in zip(cuts, box, strict=True):
        first = max(bisect_left(ends, low + 1) - 1, 0)
        intervals.append([(a, b) for a, b in pairwise(ends[first:]) if a < high and b > low])
    yield from product(*intervals)


def window_within(outer: Box, inner: Box) -> TensorWindow:
    """Return the window of the box ``inner`` in memory that contains exactly the box ``outer``."""
    widths = [high - low for low, high in outer]
    strides = tuple(prod(widths[axis + 1 :]) for axis in range(len(widths)))
    offset = sum((low - start) * step for (low, _), (start, _), step in zip(inner, outer, strides, strict=True))
    return TensorWindow(tuple(high - low for low, high in inner), strides, offset)
