"""Tests of best-fit placement: the lowest place, and there the longest lifetime."""

from __future__ import annotations

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import LIMITS, costs_for, deep_graphs, graphs

from outofcore.costs import Costs, OpCost
from outofcore.errors import BudgetError
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.planning import plan_step
from outofcore.planning.baselines.profile_guided import ProfileGuided
from outofcore.validator import validate

K64 = 64 * 1024
SIZES = (2, 1, 3, 1)  # of the activations, in units of 64 KiB


def step() -> StepGraph:
    """Return a step in which x0 lives over all ops, x1 over three, x2 over two, and x3 over the last two."""
    storages = [Storage(i, size * K64, StorageKind.ACTIVATION, f"x{i}") for i, size in enumerate(SIZES)]
    storages.append(Storage(4, K64, StorageKind.PARAMETER, "w"))
    ops = (
        Op(0, "a", (4,), (), (0, 1, 2)),
        Op(1, "b", (2,), (), ()),
        Op(2, "c", (1,), (), (3,)),
        Op(3, "d", (0, 3), (), ()),
    )
    return StepGraph(tuple(storages), ops)


def costs(graph: StepGraph) -> Costs:
    return Costs(tuple(OpCost(1.0) for _ in graph.ops))


def test_longest_lifetime_is_placed_lowest() -> None:
    graph = step()
    planned = plan_step(graph, costs(graph), 7 * K64, ProfileGuided())
    validate(graph, planned.program, 7 * K64, costs(graph))
    offsets = {block.storage: block.offset // K64 for block in planned.program.blocks}
    # The parameter; x0 over all ops; x1 above it; x2 above that; then x3 at the lowest free place, where x2 was.
    assert offsets == {4: 0, 0: 1, 1: 3, 2: 4, 3: 4}
    assert planned.plan.policy == "profile-guided" and planned.program.arena_bytes == 7 * K64


def test_budget_below_the_placement_has_no_plan() -> None:
    graph = step()
    # Op 0 needs all but x3 at once, so this height is optimal and one byte less is infeasible.
    with pytest.raises(BudgetError):
        plan_step(graph, costs(graph), 7 * K64 - 1, "profile-guided")


@settings(LIMITS, max_examples=examples(100))
@given(st.data())
def test_placement_is_valid_for_random_steps(data: st.DataObject) -> None:
    graph = data.draw(st.one_of(graphs(), deep_graphs()))
    prices = data.draw(costs_for(graph))
    planned = ProfileGuided().place(graph, prices, 1 << 40)
    assert planned is not None
    validate(graph, planned.program, planned.program.arena_bytes, prices)
    assert ProfileGuided().place(graph, prices, planned.program.arena_bytes - 1) is None or graph.gradients_left
