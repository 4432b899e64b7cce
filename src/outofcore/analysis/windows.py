"""Derive one window onto a storage from another by views, such as a transposition, for a compiler."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from outofcore.analysis.boxes import TensorWindow
from outofcore.analysis.chunks import is_dense


@dataclass(frozen=True, slots=True)
class Derivation:
    """The views that turn one window into another, in the order of the fields."""

    order: tuple[int, ...]  # the permutation of the base's dimensions to memory order
    factors: tuple[int, ...]  # the shape to view the result with
    ranges: tuple[tuple[int, int], ...]  # first element and number of elements along each factor
    places: tuple[int | None, ...]  # factor of each dimension of the target; None if it has one element or repeats it
    shape: tuple[int, ...]  # the shape of the target


def derive_window(base: TensorWindow, target: TensorWindow) -> Derivation | None:
    """Return the view operations that turn ``base`` into ``target``; None if views do not suffice.

    >>> derive_window(TensorWindow((2, 3), (3, 1)), TensorWindow((3, 2), (1, 3)))
    Derivation(order=(0, 1), factors=(2, 3), ranges=((0, 2), (0, 3)), places=(1, 0), shape=(3, 2))
    """
    count, start = prod(base.shape), target.offset - base.offset
    if not count or not prod(target.shape) or not is_dense(base.shape, base.stride):
        return None
    order = tuple(sorted(range(len(base.shape)), key=lambda dim: -base.stride[dim] if base.shape[dim] > 1 else 0))
    # The strides of the target are the place values of a mixed-radix number.
    extents = [(step, size, dim) for dim, (size, step) in enumerate(zip(target.shape, target.stride, strict=True))]
    steps = sorted((entry for entry in extents if entry[1] > 1 and entry[0] != 0), reverse=True)
    factors: list[int] = []
    ranges: list[tuple[int, int]] = []
    places: list[int | None] = [None] * len(target.shape)
    above, remainder = count, start
    if start < 0:
        return None
    for step, size, dim in steps:
        if step < 0 or above % step:
            return None
        factor, first = above // step, remainder // step
        if first + size > factor:
            return None
        places[dim] = len(factors)
        factors.append(factor)
        ranges.append((first, size))
        above, remainder = step, remainder % step
    if remainder >= above:
        return None
    if above > 1:
        factors.append(above)
        ranges.append((remainder, 1))
    return Derivation(order, tuple(factors), tuple(ranges), tuple(places), target.shape)
