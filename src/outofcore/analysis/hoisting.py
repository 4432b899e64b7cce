"""Moving ops up, so that what they read last need not be kept or brought back for them.

An optimizer that runs at the end of a step holds every gradient until then. Its update of one
parameter may as well run when that parameter's gradient is final and nothing later in the step
looks at the parameter: the same numbers, and the gradient is gone. The same holds for the norms of
gradients that clipping takes.
"""

from __future__ import annotations

from collections.abc import Collection

from outofcore.graph import StepGraph


def hoisted_order(graph: StepGraph, movable: Collection[int], failing: Collection[int] = ()) -> tuple[int, ...]:
    """The ops with each movable one right after the last op that it has to follow.

    An op has to follow another that writes what it touches, or touches what it writes. Ops that are
    not movable keep their order; so do movable ones among those that end up in the same place. An op that changes
    what persists does not move above a collective, or another op that may fail: if it does, the step can be undone.

    Args:
        graph: the step.
        movable: ids of ops that may move. An op that draws random numbers must not be among them:
            the order of draws is part of the result.
        failing: ids of other ops that may fail.

    Returns:
        the ids of all ops in their new order.
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
