"""Placing bytes at addresses: dynamic storage allocation.

``pack`` tries quick ways of placing, each from its own module, and stops at the first that is low enough:
best fit over the skyline (``skyline``), an allocator's sweep over time (``sweep``) and first fit in an
order (``first_fit``). The lowest of them is then lowered further by ejection (``ejection``).

What is held all the time lies at the bottom; the rest is placed as if it were not there, above it. That
loses nothing: in any placement it can be moved to the bottom, and what was below it up by its size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outofcore.errors import InputError
from outofcore.planning.ejection import improve
from outofcore.planning.first_fit import first_fit
from outofcore.planning.rectangles import Ints, Peak, Rectangle, Rectangles, peak
from outofcore.planning.skyline import best_fit
from outofcore.planning.sweep import sweep
from outofcore.units import round_up

__all__ = ["Packing", "Peak", "Rectangle", "pack", "peak"]

# Neighbours that the search looks at: a second or two.
EFFORT = 10_000_000
# Beyond this many rectangles, first fit takes more than its share: each looks at all its neighbours.
_FIRST_FIT_COUNT = 4096


@dataclass(frozen=True)
class Packing:
    """Where everything lies.

    Attributes:
        offsets: of each rectangle, in the order given.
        height: the end of the highest rectangle.
        lower_bound: bytes below which no placement can stay: the most that are live at once.
    """

    offsets: tuple[int, ...]
    height: int
    lower_bound: int


def pack(
    rectangles: Sequence[Rectangle],
    *,
    capacity: int | None = None,
    effort: int = EFFORT,
    seconds: float | None = None,
) -> Packing:
    """Place rectangles so that none that share a moment share an address, as low as is found.

    The same rectangles in the same order give the same offsets, unless ``seconds`` runs out.

    Args:
        rectangles: with ids of their own. One without bytes or without a lifetime gets offset 0.
        capacity: a height that will do; where none is given, the search goes on down to the lower bound.
        effort: how much to search where the quick ways do not do, in neighbours looked at; 0: not at all.
        seconds: stop the search after as many, where effort has not.

    Returns:
        The lowest placement found. Its height may lie above ``capacity``: it is for the caller to compare.

    Raises:
        InputError: a rectangle contradicts itself, or two have the same id.
    """
    _check(rectangles)
    deadline = None if seconds is None else time.monotonic() + seconds
    bound = peak(rectangles).bytes
    offsets = [0] * len(rectangles)
    segments = [r.segments for r in rectangles]
    solid = [i for i, r in enumerate(rectangles) if r.size and segments[i]]
    start = min((segments[i][0][0] for i in solid), default=0)
    stop = max((segments[i][-1][1] for i in solid), default=0)
    idle = max((r.size for r, held in zip(rectangles, segments, strict=True) if not held), default=0)
    height = 0
    others: list[int] = []
    for index in sorted(solid, key=lambda i: -rectangles[i].alignment):
        if segments[index] == ((start, stop),):
            offsets[index] = round_up(height, rectangles[index].alignment)
            height = offsets[index] + rectangles[index].size
        else:
            others.append(index)
    if others:
        others.sort()
        layout = Rectangles.of([rectangles[i] for i in others], height)
        found = _place(layout, bound, capacity, effort, deadline)
        height = layout.height(found)
        for index, offset in zip(others, found.tolist(), strict=True):
            offsets[index] = offset
    return Packing(tuple(offsets), max(height, idle), bound)


def _check(rectangles: Sequence[Rectangle]) -> None:
    known: set[int | str] = set()
    for rectangle in rectangles:
        rectangle.check()
        if rectangle.id in known:
            raise InputError(f"two rectangles have the id {rectangle.id}; give each its own")
        known.add(rectangle.id)


def _place(layout: Rectangles, bound: int, capacity: int | None, effort: int, deadline: float | None) -> Ints:
    goal = bound if capacity is None else max(bound, capacity)
    # Where even the bound does not fit, how far above it things end matters little.
    hopeless = capacity is not None and bound > capacity
    best: Ints | None = None
    height = 0
    for way in _ways(layout):
        offsets = way()
        reached = layout.height(offsets)
        if best is None or reached < height:
            best, height = offsets, reached
        if height <= goal or (hopeless and not effort) or (deadline is not None and time.monotonic() > deadline):
            return best
    if best is None:
        raise InputError("there is nothing to place")
    return best if hopeless else improve(layout, best, goal, effort, deadline)


def _ways(layout: Rectangles) -> Iterator[Callable[[], Ints]]:
    """The quick ways, the most promising first."""
    held, size = _share(layout.held), _share(layout.sizes)
    area = _share(layout.held * layout.sizes.astype(np.float64))
    yield lambda: best_fit(layout, area)
    yield lambda: sweep(layout, tightest=True)
    yield lambda: best_fit(layout, held, 0.1)
    yield lambda: best_fit(layout, size)
    yield lambda: sweep(layout)
    yield lambda: best_fit(layout, area, 1.0)
    yield lambda: sweep(layout, tightest=True, backwards=True)
    if len(layout) <= _FIRST_FIT_COUNT:
        yield lambda: first_fit(layout, _falling(size))
        yield lambda: first_fit(layout, _falling(area))


def _share(values: NDArray[np.int64] | NDArray[np.float64]) -> NDArray[np.float64]:
    return values / values.max()


def _falling(values: NDArray[np.float64]) -> list[int]:
    return np.argsort(-values, kind="stable").tolist()
