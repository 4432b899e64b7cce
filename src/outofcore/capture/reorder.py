"""A captured step with its updates, and what measures gradients, moved up to where gradients are final."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outofcore.analysis import is_large
from outofcore.analysis.hoisting import hoisted_order
from outofcore.capture.captured import Captured
from outofcore.capture.optimizers import OptimizerUpdate
from outofcore.graph import Op, StepGraph


def hoisting(captured: Captured) -> tuple[int, ...]:
    """An order of the ops, by their ids, in which some are moved up to where memory is freed soonest.

    Moved are optimizer updates that draw no random numbers, and ops that turn large storages into
    small ones without changing any, such as the norm of a gradient. The results are the same, to the bit.
    """
    graph = captured.graph
    movable = [op.id for op in graph.ops if not op.random and (_updates(captured, op) or _shrinks(graph, op))]
    return hoisted_order(graph, movable)


def reordered(captured: Captured, order: Sequence[int]) -> Captured:
    """A captured step with its ops in another order, in which each must still find what it found before."""
    graph = captured.graph
    ops = tuple(replace(graph.ops[old], id=new) for new, old in enumerate(order))
    calls = tuple(captured.calls[old] for old in order)
    return replace(captured, graph=StepGraph(graph.storages, ops, graph.outputs), calls=calls)


def _updates(captured: Captured, op: Op) -> bool:
    return isinstance(captured.calls[op.id].func, OptimizerUpdate)


def _shrinks(graph: StepGraph, op: Op) -> bool:
    def large(storage: int) -> bool:
        return is_large(graph.storages[storage].bytes)

    return (
        bool(op.creates)
        and not op.mutates
        and not any(large(s) for s in op.creates)
        and any(large(s) for s in op.reads)
    )
