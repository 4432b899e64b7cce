"""The seconds that a step takes at least, on steps worked out by hand; that no plan beats them is a property."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outofcore.costs import Costs, Home, OpCost
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.planning import lower_bound_seconds, plan_step
from outofcore.validator import validate

SIZE = 1 << 20


def step(sizes: tuple[int, ...], *ops: tuple[tuple[int, ...], tuple[int, ...]]) -> StepGraph:
    """A step of ops that each read and create storages, of so many times SIZE."""
    storages = tuple(Storage(i, size * SIZE, StorageKind.ACTIVATION) for i, size in enumerate(sizes))
    return StepGraph(storages, tuple(Op(i, "op", reads, (), creates) for i, (reads, creates) in enumerate(ops)))


def costs(graph: StepGraph, *homes: Home) -> Costs:
    """Op i takes 2^i seconds."""
    return Costs(tuple(OpCost(float(1 << op.id)) for op in graph.ops), homes)


def beyond_ops(graph: StepGraph, given: Costs, budget: int) -> float:
    """Return by how many seconds a step takes longer than its ops at least, which a plan does."""
    bound, planned = lower_bound_seconds(graph, given, budget), plan_step(graph, given, budget)
    validate(graph, planned.program, budget, given)
    assert bound is not None
    assert planned.timeline.step_seconds == pytest.approx(bound, rel=1e-3)
    return bound - given.compute_seconds


def test_bound_counts_runs_for_what_is_not_held_any_more() -> None:
    """To compute storage 1 again takes storage 0, whose last use is over: both ops run again."""
    graph = step((1, 1, 4), ((), (0,)), ((0,), (1,)), ((), (2,)), ((1,), ()))
    assert beyond_ops(graph, costs(graph), 4 * SIZE) == pytest.approx(1 + 2, rel=1e-3)


def test_bound_counts_one_run_for_two_storages() -> None:
    graph = step((1, 1, 4), ((), (0, 1)), ((), (2,)), ((0,), ()), ((1,), ()))
    assert beyond_ops(graph, costs(graph), 4 * SIZE) == pytest.approx(1, rel=1e-3)


def test_bound_counts_a_run_for_each_gap_of_a_storage() -> None:
    graph = step((1, 4, 4), ((), (0,)), ((), (1,)), ((0,), ()), ((), (2,)), ((0,), ()))
    assert beyond_ops(graph, costs(graph), 4 * SIZE) == pytest.approx(1 + 1, rel=1e-3)


def test_bound_lets_a_copy_out_run_beside_ops_that_read() -> None:
    """Storage 0 takes 10 seconds to leave, of which 6 pass while ops read it; storage 1 has no room before."""
    graph = step((1, 4), ((), (0,)), ((0,), ()), ((0,), ()), ((), (1,)), ((0,), ()))
    graph = replace(graph, ops=(replace(graph.ops[0], rerunnable=False), *graph.ops[1:]))
    given = costs(graph, Home("host", None, SIZE / 10, SIZE / 1e-3))
    bound = lower_bound_seconds(graph, given, 4 * SIZE)
    assert bound == pytest.approx(given.compute_seconds + 4, rel=1e-3)
