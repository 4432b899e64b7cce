"""The ops at which room may be short first: where memory need not be asked about everywhere.

A linear program that says at each op that what is kept fits has a row for each. Most of these follow from a
neighbour's: what is kept over op p is kept over op i as well, or lies in gaps that are around p and not around i. Where
op p has at least the bytes of those gaps more room than op i, what fits at i fits at p.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# An op speaks for others no further away: so the work for each op is bounded.
_FAR = 64


def tight_ops(
    free: Sequence[int], stays: Iterable[tuple[int, Iterable[tuple[int, int]]]], spans: Sequence[int] | None = None
) -> list[int]:
    """The ops whose room says all that there is to say, in order.

    Args:
        free: for each op the bytes that are left for what may be kept.
        stays: of what may be kept the bytes, and the ranges of ops, half-open, over which it takes them.
        spans: for each op a number, rising; an op speaks only for those with the same. None: all have the same.
    """
    count = len(free)
    begins: list[list[tuple[int, int]]] = [[] for _ in range(count + 1)]  # where a range ends, and its bytes
    ends: list[list[tuple[int, int]]] = [[] for _ in range(count + 1)]  # where a range began, and its bytes
    for size, ranges in stays:
        for first, last in ranges:
            if first < last:
                begins[first].append((last, size))
                ends[last].append((first, size))
    found: list[int] = []
    for i in range(count):
        while found and i - found[-1] <= _FAR and (spans is None or spans[found[-1]] == spans[i]):
            p = found[-1]
            more = free[p] - free[i]
            if more >= 0:
                implied = sum(size for at in range(p + 1, i + 1) for first, size in ends[at] if first <= p) <= more
            else:
                implied = False
                if sum(size for at in range(p + 1, i + 1) for last, size in begins[at] if last > i) <= -more:
                    break
            if not implied:
                found.append(i)
                break
            found.pop()
        else:
            found.append(i)
    return found
