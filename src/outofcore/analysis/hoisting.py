"""Move ops to earlier places so that arguments are freed earlier, such as a gradient after its update."""

from __future__ import annotations

from collections.abc import Collection

from outofcore.graph import StepGraph


def hoisted_order(graph: StepGraph, movable: Collection[int], failing: Collection[int] = ()) -> tuple[int, ...]:
    """Return the op ids in an order in which movable ops run right after the ops that they depend on.

    An op that mutates persistent state stays behind collectives and ``failing`` ops, so that the step can be undone if
    they fail. Movable ops must not draw random numbers, since the order of draws affects the result.
    """
    may_move = frozenset(movable)
    keys: list[tuple[int, int]] = []
    start = (-1, 0)
    written: dict[int, tuple[int, int]] = {}
    touched: dict[int, tuple[int, int]] = {}
    last_failing = start  # the place of the last op so far that may fail
    for op in graph.ops:
        writes = set(op.mutates) | set(op.creates)
        key = (op.id, 0)
        if op.id in may_move:
            after = max(((touched if s in writes else written).get(s, start) for s in op.touched), default=start)
            if not graph.persistent.isdisjoint(op.mutates):
                after = max(after, last_failing)
            key = (after[0], op.id)
        if op.communicates or op.id in failing:
            last_failing = max(last_failing, key)
        keys.append(key)
        for storage in op.touched:
            touched[storage] = max(touched.get(storage, start), key)
            if storage in writes:
                written[storage] = max(written.get(storage, start), key)
    return tuple(sorted(range(len(keys)), key=keys.__getitem__))
