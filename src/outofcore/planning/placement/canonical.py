"""The canonical search: depth first through placements in canonical order, until one fits.

After Moffitt, "MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated Machine Learning" (ASPLOS 2023). Any
placement can be pushed down until each rectangle is at the bottom or on another one. It can be built up in order of
offset, and of a given rank for equal offsets. So it suffices to place next, at its lowest free offset, a rectangle that
comes later in this order. Pruning:

- *sections* (4.1 there): above the lowest possible offset of each rectangle in a section there must be room for it and
  for all that cannot be lower. The paper requires that only of the lowest of them.
- *dominance*: no rectangle is placed so high that another one would fit below it.
- *decomposition*: intervals of time that no open rectangle connects are solved separately.

Added to that:

- *lifting*: a rectangle that is passed over must be lifted by one below it that is not placed yet.
- *precedence*: in a section, a rectangle that cannot be below all others is above one that can (the not-first rule of
  scheduling: Carlier & Pinson, "An algorithm for solving the job-shop problem", 1989).
- *restarts*: runs with few nodes, in the sequence of Luby, Sinclair & Zuckerman ("Optimal speedup of Las Vegas
  algorithms", 1993), each with another rank: the paper's three orders in turn, later with noise.

Random numbers have fixed seeds and effort counts rectangles inspected: the same input gives the same result.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from outofcore.planning.placement.compiled import CanonicalResult, Deadline, canonical_run
from outofcore.planning.placement.parameters import PlacementParams
from outofcore.planning.placement.rectangles import Ints, Rectangles

# Maximum number of rectangles, since each placement is a level of recursion in native code.
MAX_RECTANGLES = 4096
# Nodes of the shortest run per rectangle.
_NODES_EACH = 4
# The most that noise changes the sort keys, as a share.
_NOISE = 0.3


def search(
    rectangles: Rectangles, capacity: int, params: PlacementParams, deadline: Deadline
) -> tuple[CanonicalResult, Ints]:
    """Search for a placement within a capacity; return the result and the offsets (valid only if FOUND)."""
    offsets, effort = np.zeros(len(rectangles), np.int64), params.effort
    techniques = sum(
        bit
        for bit, on in (
            (1, params.dominance),
            (2, params.lifting),
            (4, params.precedence),
            (8, params.decomposition),
        )
        if on
    )
    for part in components(rectangles) if params.decomposition else [np.arange(len(rectangles))]:
        layout = rectangles.subset(part)
        for rank, nodes in _search_runs(layout, params.restarts):
            if effort <= 0 or deadline.has_passed:
                return CanonicalResult.STOPPED, offsets
            answer, part_offsets, effort = canonical_run(layout, capacity, rank, techniques, nodes, effort, deadline)
            if answer is CanonicalResult.NONE:
                return answer, offsets
            if answer is CanonicalResult.FOUND:
                offsets[part] = part_offsets
                break
    return CanonicalResult.FOUND, offsets


def components(rectangles: Rectangles) -> list[Ints]:
    """Group rectangles so that groups do not overlap in time; return the indices of each, the smallest first."""
    last = np.where(rectangles.second_end <= rectangles.slots, rectangles.second_end, rectangles.end)
    order = np.argsort(rectangles.begin, kind="stable")
    reach = np.maximum.accumulate(last[order])
    begins = np.flatnonzero(rectangles.begin[order][1:] >= reach[:-1]) + 1
    return sorted((np.sort(part) for part in np.split(order, begins)), key=len)


def _search_runs(rectangles: Rectangles, restarts: bool) -> Iterator[tuple[Ints, int]]:
    """Yield placement orders without end, each with a maximum number of nodes to search."""
    width = rectangles.lifetimes.astype(np.float64)
    total = _peak_during(rectangles).astype(np.float64)
    run = 0
    while True:
        run += 1
        noise = 1.0
        if run > len(_ORDERS):
            draw = random.Random(run).random
            noise = np.array([1 + _NOISE * (2 * draw() - 1) for _ in range(len(rectangles))])
        keys = {"W": width * noise, "A": width * rectangles.sizes * noise, "T": total}
        nodes = _NODES_EACH * len(rectangles) * _luby((run - 1) // len(_ORDERS) + 1)
        rank = np.lexsort([-keys[key] for key in reversed(_ORDERS[run % len(_ORDERS)])])
        yield rank, nodes if restarts else np.iinfo(np.int64).max


# Sort keys, descending: lifetime (width), area, and the most bytes live at a moment of the lifetime (total).
_ORDERS = ("WAT", "TAW", "TWA")


def _peak_during(rectangles: Rectangles) -> Ints:
    """Return for each rectangle the most bytes that are held at once during its lifetime."""
    live = rectangles.live_bytes()
    peaks = np.empty(len(rectangles), np.int64)
    for i, (begin, end) in enumerate(zip(rectangles.begin.tolist(), rectangles.end.tolist(), strict=True)):
        peaks[i] = live[begin:end].max()
    for i in rectangles.wrapping.tolist():
        peaks[i] = max(peaks[i], live[int(rectangles.second_begin[i]) : int(rectangles.second_end[i])].max())
    return peaks


def _luby(index: int) -> int:
    """Return the element at ``index`` (from 1) of the Luby sequence 1, 1, 2, 1, 1, 2, 4, ..."""
    power = index.bit_length()
    return 1 << (power - 1) if index == (1 << power) - 1 else _luby(index - (1 << (power - 1)) + 1)
