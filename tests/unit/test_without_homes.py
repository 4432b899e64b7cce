"""Tests of plans without homes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from effort import examples, is_exhaustive, some_of
from examples import MIB, network, network_costs
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import LIMITS, costs_for, deep_graphs, graphs

from outofcore.costs import Costs, OpCost
from outofcore.errors import BudgetError
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.plan import Residency
from outofcore.planning import QUICK, Planned, in_core_budget, plan_step, smallest_budget
from outofcore.planning.baselines import DTR
from outofcore.planning.baselines.dtr import evict_online
from outofcore.planning.problem import Problem
from outofcore.planning.remat.chains import Choices
from outofcore.planning.remat.contents import StepContents
from outofcore.validator import validate

# Sums of the same numbers in another order may differ by this factor.
_ROUNDING = 1 + 1e-9


@st.composite
def steps(draw: st.DrawFn) -> tuple[StepGraph, Costs]:
    graph = draw(st.one_of(deep_graphs(max_layers=9), graphs(max_layers=3)))
    return graph, replace(draw(costs_for(graph)), homes=())


def choices_of(graph: StepGraph, costs: Costs, limit: int = 1 << 40) -> Choices:
    return Choices(Problem.of(graph, costs, limit), StepContents.of(graph, costs))


def valid_plan(graph: StepGraph, costs: Costs, budget: int, policy: str = "auto") -> Planned | None:
    try:
        plan = plan_step(graph, costs, budget, policy, params=QUICK)
    except BudgetError:
        return None
    validate(graph, plan.program, budget, costs)
    return plan


@settings(LIMITS, max_examples=examples(25))
@given(steps())
def test_more_memory_has_a_plan_and_is_never_slower(step: tuple[StepGraph, Costs]) -> None:
    graph, costs = step
    smallest, in_core = smallest_budget(graph, costs), in_core_budget(graph, costs)
    assert smallest <= in_core
    parts = 7 if is_exhaustive() else 3
    budgets = [smallest + (in_core - smallest) * part // parts for part in range(parts + 1)]
    plans = [valid_plan(graph, costs, budget) for budget in budgets]
    seconds = [plan.timeline.step_seconds for plan in plans if plan is not None]
    assert len(seconds) == len(budgets)
    assert all(more <= less * _ROUNDING for less, more in pairwise(seconds))
    for budget, auto in zip(budgets, seconds, strict=True):
        evicted = valid_plan(graph, costs, budget, "dtr")
        assert evicted is None or auto <= evicted.timeline.step_seconds * _ROUNDING


@settings(LIMITS, max_examples=examples(25))
@given(steps(), st.floats(0.2, 1))
def test_same_step_and_budget_give_the_same_plan(step: tuple[StepGraph, Costs], part: float) -> None:
    graph, costs = step
    budget = max(int(in_core_budget(graph, costs) * part), smallest_budget(graph, costs))
    assert valid_plan(graph, costs, budget) == valid_plan(graph, costs, budget)


@pytest.mark.parametrize("policy", some_of(["auto", "dtr"], ["auto"]))
def test_refusal_names_a_sufficient_budget(policy: str) -> None:
    graph = network(16)
    costs = network_costs(graph, copy=None)
    smallest = smallest_budget(graph, costs)
    assert smallest < 6 * MIB
    assert valid_plan(graph, costs, smallest) is not None
    with pytest.raises(BudgetError, match="smallest budget that would do is") as refused:
        plan_step(graph, costs, smallest - 1, policy)
    assert refused.value.smallest_budget == smallest
    assert "policy='auto'" not in str(refused.value)


def test_persistent_state_stays_without_a_home() -> None:
    """The largest op needs 2 MiB, but 8 MiB of parameters of other ops cannot be evicted."""
    storages = [Storage(i, MIB, StorageKind.PARAMETER, f"w{i}") for i in range(8)]
    storages += [Storage(8 + i, MIB, StorageKind.ACTIVATION, f"x{i}") for i in range(8)]
    ops = [Op(i, "layer", (i,), (), (8 + i,)) for i in range(8)]
    ops += [Op(8 + i, "back", (15 - i,), (), ()) for i in range(8)]
    graph = StepGraph(tuple(storages), tuple(ops))
    costs = Costs(tuple(OpCost(1.0) for _ in ops))
    smallest = smallest_budget(graph, costs)
    assert 9 * MIB <= smallest < 10 * MIB
    plan = valid_plan(graph, costs, smallest)
    assert plan is not None and plan.timeline.step_seconds == pytest.approx(23.0)  # all but the last run again
    needs = r"no home to evict tensors to: persistent state that stays on the device, and recomputation, need 7\.00 MiB"
    with pytest.raises(BudgetError, match=needs):
        plan_step(graph, costs, smallest - 4096)


def test_greedy_eviction_prefers_cheap_and_old_storages() -> None:
    """Four activations of 1 MiB wait while a fifth is made, with room for four."""
    storages = tuple(Storage(i, MIB, StorageKind.ACTIVATION, f"x{i}") for i in range(5))
    ops = [Op(i, "layer", (), (), (i,)) for i in range(5)] + [Op(5 + i, "back", (4 - i,), (), ()) for i in range(5)]
    graph = StepGraph(storages, tuple(ops))

    def evict(seconds: tuple[float, ...]) -> set[int]:
        costs = Costs(tuple(OpCost(s) for s in (*seconds, 1.0, 1.0, 1.0, 1.0, 1.0)))
        choices = choices_of(graph, costs)
        snapshot = evict_online(choices, 4 * MIB)
        assert snapshot is not None
        return {choices.problem.gaps[g].gap.storage for g, _, _ in snapshot}

    assert evict((1.0, 1.0, 1.0, 1.0, 1.0)) == {0}  # equal costs: the oldest
    assert evict((9.0, 1.0, 9.0, 9.0, 1.0)) == {1}  # nearly as old, and cheaper
    assert evict((1.0, 2.0, 0.001, 2.0, 1.0)) == {2}  # cheap enough to outweigh its age


def test_heuristic_counts_evicted_neighbours() -> None:
    """Once x1 is evicted, recomputing x2 includes x1, so the younger x3 is cheaper."""
    storages = tuple(Storage(i, MIB, StorageKind.ACTIVATION, f"x{i}") for i in range(6))
    made_from = {2: (1,)}
    ops = [Op(i, "layer", made_from.get(i, ()), (), (i,)) for i in range(6)]
    ops += [Op(6 + i, "back", (5 - i,), (), ()) for i in range(6)]
    graph = StepGraph(storages, tuple(ops))
    costs = Costs(tuple(OpCost(s) for s in (50.0, 2.0, 5.0, 1.9, 1.0, 1.0, *[1.0] * 6)))
    choices = choices_of(graph, costs)
    snapshot = evict_online(choices, 4 * MIB)
    assert snapshot is not None
    evicted = {choices.problem.gaps[g].gap.storage for g, _, _ in snapshot}
    assert evicted == {1, 3}


def test_greedy_eviction_fails_if_an_op_does_not_fit() -> None:
    graph = network(8)
    choices = choices_of(graph, network_costs(graph, copy=None))
    assert evict_online(choices, MIB) is None
    assert evict_online(choices, 64 * MIB) == ()


def test_dtr_only_recomputes_even_with_homes() -> None:
    graph = network(24)
    costs = network_costs(graph)
    planned = plan_step(graph, costs, 16 * MIB, DTR())
    validate(graph, planned.program, 16 * MIB, costs)
    assert planned.plan.policy == "dtr"
    assert {decision.residency for decision in planned.plan.decisions} == {Residency.RECOMPUTE}
    [variant] = DTR().variants(graph, costs, 16 * MIB)
    assert variant(16 * MIB).decisions == planned.plan.decisions
    with pytest.raises(BudgetError):
        variant(MIB)
