"""Move ops up, so that what they read last need not be held or fetched for them.

An optimizer that runs at the end of a step holds every gradient until then. Its update of one parameter may as well run
when that parameter's gradient is final and nothing later in the step reads the parameter: the numbers are the same, and
the gradient is freed. The same holds for the norms of gradients that clipping computes.
"""

from __future__ import annotations

from collections.abc import Collection

from outofcore.graph import StepGraph


def hoisted_order(graph: StepGraph, movable: Collection[int], failing: Collection[int] = ()) -> tuple[int, ...]:
    """Return op ids in an order with each movable op right after the last one that it must follow.

    An op must follow another that writes what it touches, or touches what it writes. Other ops keep their order; so do
    movable ones that end up in the same place. An op that changes persistent state does not move above a collective, or
    another op that may fail (``failing``): if it fails, the step can be undone. Movable ops must not draw random
    numbers, since the order of draws is part of the result.
    """
    may_move = frozenset(movable)
    keys: list[tuple[int, int]] = []
    start = (-1, 0)
    written: dict[int, tuple[int, int]] = {}
    touched: dict[int, tuple[int, int]] = {}
    met = start  # the last op so far that may fail
    for op in graph.ops:
        writes = set(op.mutates) | set(op.creates)
        key = (op.id, 0)
        if op.id in may_move:
            after = max(((touched if s in writes else written).get(s, start) for s in op.touched), default=start)
            if not graph.persistent.isdisjoint(op.mutates):
                after = max(after, met)
            key = (after[0], op.id)
        if op.communicates or op.id in failing:
            met = max(met, key)
        keys.append(key)
        for storage in op.touched:
            touched[storage] = max(touched.get(storage, start), key)
            if storage in writes:
                written[storage] = max(written.get(storage, start), key)
    return tuple(sorted(range(len(keys)), key=keys.__getitem__))
