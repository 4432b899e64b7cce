"""Move ops to earlier places, so that their arguments can be freed earlier.

For example, an optimizer updates parameters at the end of a step. Its update of one parameter can run as soon as the
gradient is final and no later op reads the parameter; the results are the same, and the gradient is freed. The same
holds for the norms of gradient clipping.
"""

from __future__ import annotations

from collections.abc import Collection

from outofcore.graph import StepGraph


def hoisted_order(graph: StepGraph, movable: Collection[int], failing: Collection[int] = ()) -> tuple[int, ...]:
    """Return op ids in an order with each movable op right after the last op that it depends on.

    An op depends on earlier ops that write a storage that it touches, or touch a storage that it writes. Other ops, and
    movable ones at the same place, keep their order. An op that mutates persistent state stays behind collectives and
    ``failing`` ops, which may fail, so that the step can be undone. Movable ops must not draw random numbers, since the
    order of draws affects the result.
    """
    may_move = frozenset(movable)
    keys: list[tuple[int, int]] = []
    start = (-1, 0)
    written: dict[int, tuple[int, int]] = {}
    touched: dict[int, tuple[int, int]] = {}
    met = start  # the place of the last op so far that may fail
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
