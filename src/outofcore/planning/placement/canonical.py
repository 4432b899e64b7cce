"""The canonical search: depth first through placements in canonical order, until one stays within the capacity.

After Moffitt, "MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated Machine Learning" (ASPLOS 2023).
Any placement can be pushed down until each rectangle lies at the bottom or on another one, and such a placement can be
built up in order of offset, and of a given rank where offsets are equal. So it is enough to place next, at the lowest
offset above what is placed, a rectangle that comes later in this order. What cuts the search short:

- *sections* (section 4.1 there): moments whose live set is not part of a neighbour's. In each, above the lowest
  possible offset of any rectangle there must be room for it and for all that cannot lie lower. The paper asks that of
  the lowest of them alone.
- *dominance*: nothing is placed so high that another rectangle would fit below it.
- *decomposition*: stretches of time that no open rectangle connects are solved apart.

Added to that:

- *lifting*: a rectangle that is passed over has to be lifted by one below it, which is placed yet.
- *precedence*: in a section, what cannot lie below all others lies above one of those that can (the not-first rule of
  scheduling on one machine: Carlier & Pinson, "An algorithm for solving the job-shop problem", 1989).
- *restarts*: runs with few nodes, in the order of Luby, Sinclair & Zuckerman ("Optimal speedup of Las Vegas
  algorithms", 1993), each with another rank: the paper's three orders by turns, and from the second turn on with noise.
  How long one run takes depends on luck; the shortest of many does not.

A rectangle over which nothing open lies needs no rule of its own, as the paper's later versions have one: it is a
stretch by itself.

The lots are drawn from fixed seeds and effort is counted in rectangles looked at: the same input gives the same result.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from outofcore.planning.placement.compiled import Answer, Watch, canonical_run
from outofcore.planning.placement.parameters import PlacementParams
from outofcore.planning.placement.rectangles import Ints, Rectangles

# Each placement is a level of recursion in compiled code.
MOST = 4096
# Nodes of the shortest run, for each rectangle.
_NODES_EACH = 4
# How much noise may add to what an order goes by, as a share, and take from it.
_NOISE = 0.3


def search(rectangles: Rectangles, capacity: int, params: PlacementParams, watch: Watch) -> tuple[Answer, Ints]:
    """A placement within a capacity.

    Returns:
        Whether there is one, and if found its offsets.
    """
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
        layout = rectangles.part(part)
        for rank, nodes in _runs(layout, params.restarts):
            if effort <= 0 or watch.over:
                return Answer.STOPPED, offsets
            answer, found, effort = canonical_run(layout, capacity, rank, techniques, nodes, effort, watch)
            if answer is Answer.NONE:
                return answer, offsets
            if answer is Answer.FOUND:
                offsets[part] = found
                break
    return Answer.FOUND, offsets


def components(rectangles: Rectangles) -> list[Ints]:
    """The indices of rectangles that times at which nothing is held divide from the others, the smallest part first."""
    last = np.where(rectangles.over <= rectangles.slots, rectangles.over, rectangles.end)
    order = np.argsort(rectangles.begin, kind="stable")
    reach = np.maximum.accumulate(last[order])
    begins = np.flatnonzero(rectangles.begin[order][1:] >= reach[:-1]) + 1
    return sorted((np.sort(part) for part in np.split(order, begins)), key=len)


def _runs(rectangles: Rectangles, restarts: bool) -> Iterator[tuple[Ints, int]]:
    """Ranks, as the rectangles in order, and how many nodes to search with each."""
    width = rectangles.held.astype(np.float64)
    total = _most_live(rectangles).astype(np.float64)
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


# By falling lifetime (width), area, and the most bytes live at a moment of the lifetime (total).
_ORDERS = ("WAT", "TAW", "TWA")


def _most_live(rectangles: Rectangles) -> Ints:
    """For each, the most bytes that are live at a moment at which it is."""
    live = rectangles.live()
    found = np.empty(len(rectangles), np.int64)
    for i, (begin, end) in enumerate(zip(rectangles.begin.tolist(), rectangles.end.tolist(), strict=True)):
        found[i] = live[begin:end].max()
    for i in rectangles.wrapping.tolist():
        found[i] = max(found[i], live[int(rectangles.again[i]) : int(rectangles.over[i])].max())
    return found


def _luby(index: int) -> int:
    """1, 1, 2, 1, 1, 2, 4, ..., from index 1 on."""
    power = index.bit_length()
    return 1 << (power - 1) if index == (1 << power) - 1 else _luby(index - (1 << (power - 1)) + 1)
