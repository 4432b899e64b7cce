"""Tests of the lower bound of step times, on steps worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outofcore.costs import Costs, Home, OpCost
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.planning import lower_bound_seconds, plan_step
from outofcore.validator import validate

SIZE = 1 << 20


def step(sizes: tuple[int, ...], *ops: tuple[tuple[int, ...], tuple[int, ...]]) -> StepGraph:
    """Return a step of ops given as (reads, creates), with storage sizes in units of SIZE."""
    storages = tuple(Storage(i, size * SIZE, StorageKind.ACTIVATION) for i, size in enumerate(sizes))
    return StepGraph(storages, tuple(Op(i, "op", reads, (), creates) for i, (reads, creates) in enumerate(ops)))


def costs(graph: StepGraph, *homes: Home) -> Costs:
    return Costs(tuple(OpCost(float(1 << op.id)) for op in graph.ops), homes)


def beyond_ops(graph: StepGraph, step_costs: Costs, budget: int) -> float:
    """Return the seconds of the bound beyond the ops, after checking that a plan reaches the bound."""
    bound, planned = lower_bound_seconds(graph, step_costs, budget), plan_step(graph, step_costs, budget)
    validate(graph, planned.program, budget, step_costs)
    assert bound is not None
    assert planned.timeline.step_seconds == pytest.approx(bound, rel=1e-3)
    return bound - step_costs.compute_seconds


def test_bound_counts_reruns_of_dead_inputs() -> None:
    """Recomputing storage 1 needs storage 0, which by dead: both ops run again."""
    graph = step((1, 1, 4), ((), (0,)), ((0,), (1,)), ((), (2,)), ((1,), ()))
    assert beyond_ops(graph, costs(graph), 4 * SIZE) == pytest.approx(1 + 2, rel=1e-3)


def test_bound_counts_one_run_for_two_storages() -> None:
    graph = step((1, 1, 4), ((), (0, 1)), ((), (2,)), ((0,), ()), ((1,), ()))
    assert beyond_ops(graph, costs(graph), 4 * SIZE) == pytest.approx(1, rel=1e-3)


def test_bound_counts_a_run_for_each_gap_of_a_storage() -> None:
    graph = step((1, 4, 4), ((), (0,)), ((), (1,)), ((0,), ()), ((), (2,)), ((0,), ()))
    assert beyond_ops(graph, costs(graph), 4 * SIZE) == pytest.approx(1 + 1, rel=1e-3)


def test_bound_lets_copies_out_overlap_reading_ops() -> None:
    """Storage 0 takes 10 seconds to evict, 6 of them during ops that read it."""
    graph = step((1, 4), ((), (0,)), ((0,), ()), ((0,), ()), ((), (1,)), ((0,), ()))
    graph = replace(graph, ops=(replace(graph.ops[0], rerunnable=False), *graph.ops[1:]))
    step_costs = costs(graph, Home("host", None, SIZE / 10, SIZE / 1e-3))
    bound = lower_bound_seconds(graph, step_costs, 4 * SIZE)
    assert bound == pytest.approx(step_costs.compute_seconds + 4, rel=1e-3)
