"""From rectangles to addresses: the techniques and their order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outofcore.errors import InputError
from outofcore.planning.placement import canonical, compiled
from outofcore.planning.placement.compiled import CanonicalResult, Deadline
from outofcore.planning.placement.parameters import PlacementParams
from outofcore.planning.placement.rectangles import FAR, Ints, Rectangle, Rectangles
from outofcore.units import round_up

_log = logging.getLogger("outofcore.planning")
# First fit is quadratic, so it is skipped for more rectangles.
_FIRST_FIT_COUNT = 4096


@dataclass(frozen=True)
class Packing:
    """A placement of rectangles.

    Attributes:
        offsets: of each rectangle, in the given order.
        height: the end of the highest rectangle.
        lower_bound: bytes that every placement needs: the peak, or more if the capacity is proved too small.
    """

    offsets: tuple[int, ...]
    height: int
    lower_bound: int


def pack(
    rectangles: Sequence[Rectangle], *, capacity: int | None = None, params: PlacementParams | None = None
) -> Packing:
    """Place rectangles as low as possible; rectangles that are live at the same moment never overlap.

    Rectangles that are always held are placed at the bottom, which loses no solutions. The same rectangles in the same
    order give the same offsets, unless ``params.seconds`` runs out.

    Args:
        rectangles: with unique ids. Those without bytes or lifetime get offset 0.
        capacity: a height that is low enough; None: search down to the lower bound.
        params: techniques and their effort; by default ``PlacementParams()``.

    Returns:
        The lowest placement found. Its height may exceed ``capacity``; the caller compares.

    Raises:
        InputError: a rectangle contradicts itself, two have the same id, or there are more bytes than addresses.
        StateError: ``placement.cpp`` is not compiled and cannot be.

    >>> found = pack([Rectangle("a", 0, 2, 8), Rectangle("b", 1, 4, 4), Rectangle("c", 2, 4, 8)])
    >>> found.offsets, found.height
    ((0, 8, 0), 12)
    """
    chosen = params or PlacementParams()
    return _pack_with(rectangles, lambda layout, bound: _place(layout, bound, capacity, chosen))


def best_fit(rectangles: Sequence[Rectangle]) -> Packing:
    """Place rectangles by the best-fit rule of profile-guided memory optimization alone, without search.

    At the lowest free offset, the rectangle with the longest lifetime among the fitting ones is placed. After
    Sekiyama, Imamichi, Imai & Raymond, "Profile-guided memory optimization for deep neural networks" (arXiv
    1804.10001), section 3.

    Raises:
        InputError, StateError: as ``pack``.

    >>> best_fit([Rectangle("a", 0, 2, 8), Rectangle("b", 1, 4, 4), Rectangle("c", 2, 4, 8)]).offsets
    (4, 0, 4)
    """
    return _pack_with(rectangles, lambda layout, _: compiled.best_fit(layout, _normalize(layout.lifetimes)))


def _pack_with(rectangles: Sequence[Rectangle], place: Callable[[Rectangles, int], tuple[Ints, int] | Ints]) -> Packing:
    """Place rectangles by calling ``place``; empty and always held rectangles are placed without it."""
    _check(rectangles)
    offsets = [0] * len(rectangles)
    segments = [r.segments for r in rectangles]
    solid = [i for i, r in enumerate(rectangles) if r.size and segments[i]]
    start = min((segments[i][0][0] for i in solid), default=0)
    stop = max((segments[i][-1][1] for i in solid), default=0)
    height = base = 0
    lifelong = [i for i in solid if segments[i] == ((start, stop),)]
    for index in sorted(lifelong, key=lambda i: -rectangles[i].alignment):
        offsets[index] = round_up(base, rectangles[index].alignment)
        base = height = offsets[index] + rectangles[index].size
    bound = sum(rectangles[i].size for i in lifelong)
    if len(lifelong) < len(solid):
        always_held = set(lifelong)
        placeable = [i for i in solid if i not in always_held]
        layout = Rectangles.of([rectangles[i] for i in placeable], base, [segments[i] for i in placeable])
        bound += int(layout.live_bytes().max())
        result = place(layout, bound)
        placed, bound = result if isinstance(result, tuple) else (result, bound)
        height = layout.height(placed)
        for index, offset in zip(placeable, placed.tolist(), strict=True):
            offsets[index] = offset
    idle = max((r.size for r, parts in zip(rectangles, segments, strict=True) if not parts), default=0)
    return Packing(tuple(offsets), max(height, idle), bound)


def _check(rectangles: Sequence[Rectangle]) -> None:
    """Raise ``InputError`` if a rectangle is invalid, ids repeat, or there are more bytes than addresses."""
    ids: set[int | str] = set()
    total = 0
    for rectangle in rectangles:
        rectangle.check()
        if rectangle.id in ids:
            raise InputError(f"two rectangles have the id {rectangle.id}; give each its own")
        ids.add(rectangle.id)
        total += rectangle.size + rectangle.alignment
    if total >= FAR:
        raise InputError(
            f"the rectangles have {total} bytes with their alignments, more than there are addresses; the sum must be "
            "below 2**60"
        )


def _place(rectangles: Rectangles, bound: int, capacity: int | None, params: PlacementParams) -> tuple[Ints, int]:
    """Return the offsets of the lowest placement found, and a lower bound of the height of any placement."""
    deadline = Deadline(params.seconds)
    goal = bound if capacity is None else max(bound, capacity)
    # If even the bound exceeds the capacity, the height matters little.
    is_hopeless = capacity is not None and bound > capacity
    best: Ints | None = None
    height = 0
    for rule in _rules(rectangles, params):
        offsets = rule()
        new_height = rectangles.height(offsets)
        if best is None or new_height < height:
            best, height = offsets, new_height
        if height <= goal or (is_hopeless and not params.effort) or deadline.has_passed:
            return best, bound
    if best is None:
        raise InputError("no rectangles to place")
    if is_hopeless or not params.effort:
        return best, bound
    if params.canonical and len(rectangles) <= canonical.MAX_RECTANGLES:
        # Leave half of the time limit for ejection.
        half = Deadline(None if params.seconds is None else params.seconds / 2)
        answer, offsets = canonical.search(rectangles, goal, params, half)
        _log.debug("placing %d rectangles: canonical search within %d: %s", len(rectangles), goal, answer.name)
        if answer is CanonicalResult.FOUND:
            return offsets, bound
        if answer is CanonicalResult.NONE:
            bound = goal + 1
    if params.ejection and height > bound:
        best = compiled.eject(rectangles, best, max(goal, bound), params.effort, deadline)
        _log.debug("placing %d rectangles: from %d by ejection to %d", len(rectangles), height, rectangles.height(best))
    return best, bound


def _rules(layout: Rectangles, params: PlacementParams) -> Iterator[Callable[[], Ints]]:
    """Yield quick placement rules, the most promising first; each is a function that returns offsets."""
    lifetime, size = _normalize(layout.lifetimes), _normalize(layout.sizes)
    area = _normalize(layout.lifetimes * layout.sizes.astype(np.float64))
    yield lambda: compiled.best_fit(layout, area)
    yield lambda: compiled.best_fit(layout, lifetime, 0.1)
    yield lambda: compiled.best_fit(layout, size)
    yield lambda: compiled.best_fit(layout, area, 1.0)
    if params.first_fit and len(layout) <= _FIRST_FIT_COUNT:
        yield lambda: compiled.first_fit(layout, np.argsort(-size, kind="stable"))
        yield lambda: compiled.first_fit(layout, np.argsort(-area, kind="stable"))


def _normalize(values: NDArray[np.int64] | NDArray[np.float64]) -> NDArray[np.float64]:
    return values / values.max()
