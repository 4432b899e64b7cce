"""How one window onto a storage is made of another by views: so that a compiler need not know of storages.

A captured step knows a tensor by where its elements lie. A compiler that is to fuse what makes a tensor with what looks
at it otherwise wants to be told that the second is, say, the first transposed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from outofcore.analysis.chunks import is_dense


@dataclass(frozen=True, slots=True)
class Window:
    """Where the elements of a tensor lie in its storage.

    Attributes:
        shape: elements along each dimension.
        stride: in elements.
        offset: in elements, from the start of the storage.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Derivation:
    """How to make a window of another one, in this order.

    Attributes:
        order: the dimensions of the tensor given, as they follow one another in memory; it is permuted so.
        factors: the shape that it then gets.
        ranges: of each factor, from where on how many elements are taken.
        places: for each dimension of the result the factor that it is; None: it has one element, or repeats one.
        shape: of the result.
    """

    order: tuple[int, ...]
    factors: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    places: tuple[int | None, ...]
    shape: tuple[int, ...]


def derivation(given: Window, wanted: Window) -> Derivation | None:
    """How ``wanted`` is made of ``given``, onto the same storage and of the same dtype; None: not by views alone.

    The elements given have to lie one after the other, in any order of the dimensions, and those wanted in regular
    steps among them that do not overlap.

    >>> derivation(Window((2, 3), (3, 1)), Window((3, 2), (1, 3)))
    Derivation(order=(0, 1), factors=(2, 3), ranges=((0, 2), (0, 3)), places=(1, 0), shape=(3, 2))
    """
    count, start = prod(given.shape), wanted.offset - given.offset
    if not count or not prod(wanted.shape) or not is_dense(given.shape, given.stride):
        return None
    order = tuple(sorted(range(len(given.shape)), key=lambda dim: -given.stride[dim] if given.shape[dim] > 1 else 0))
    # A number in a mixed radix: how far one step goes along each dimension wanted is a place's worth.
    extents = [(step, size, dim) for dim, (size, step) in enumerate(zip(wanted.shape, wanted.stride, strict=True))]
    steps = sorted((entry for entry in extents if entry[1] > 1 and entry[0] != 0), reverse=True)
    factors: list[int] = []
    ranges: list[tuple[int, int]] = []
    places: list[int | None] = [None] * len(wanted.shape)
    above, left = count, start
    if start < 0:
        return None
    for step, size, dim in steps:
        if step < 0 or above % step:
            return None
        factor, first = above // step, left // step
        if first + size > factor:
            return None
        places[dim] = len(factors)
        factors.append(factor)
        ranges.append((first, size))
        above, left = step, left % step
    if left >= above:
        return None
    if above > 1:
        factors.append(above)
        ranges.append((left, 1))
    return Derivation(order, tuple(factors), tuple(ranges), tuple(places), wanted.shape)
