"""Tests of the proved optimum of small steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from effort import examples
from examples import MIB, network, network_costs
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from optimum import optimum
from optimum.prices import price_choices
from strategies import LIMITS, costs_for, graphs

from outofcore.costs import Costs
from outofcore.errors import BudgetError
from outofcore.graph import StepGraph
from outofcore.plan import Residency
from outofcore.planning import fit_plan, in_core_budget, lower_bound_seconds, plan_step, smallest_budget
from outofcore.validator import validate

POLICIES = ("keep-all", "offload-all", "pooch", "sqrt-checkpoint", "superneurons", "tflms")


def best_of_policies(graph: StepGraph, step_costs: Costs, budget: int) -> float | None:
    all_seconds: list[float] = []
    for policy in POLICIES:
        try:
            if step_costs.homes or policy in ("keep-all", "sqrt-checkpoint", "superneurons"):
                planned = plan_step(graph, step_costs, budget, policy)
                # The optimum considers only plans whose visible gradients do not stay.
                placed = fit_plan(graph, step_costs, budget, replace(planned.plan, staying=()))
                all_seconds += [] if placed is None else [placed.timeline.step_seconds]
        except BudgetError:
            pass
    return min(all_seconds, default=None)


@pytest.mark.parametrize("copy", [0.5, 2.0, 10.0, None])
@pytest.mark.parametrize("layers", [4, 6])
def test_optimum_is_between_the_bound_and_every_plan_and_reached(layers: int, copy: float | None) -> None:
    graph = network(layers)
    step_costs = network_costs(graph, copy=copy)
    for budget in range(smallest_budget(graph, step_costs) + MIB, in_core_budget(graph, step_costs), 2 * MIB):
        best = optimum(graph, step_costs, budget)
        assert best is not None and best.proved and best.seconds is not None
        bound = lower_bound_seconds(graph, step_costs, budget)
        assert bound is not None and bound <= best.seconds * (1 + 1e-6)
        policies = best_of_policies(graph, step_costs, budget)
        assert policies is None or best.seconds <= policies * (1 + 1e-9)
        placed = [fit_plan(graph, step_costs, budget, plan) for plan in best.plans]
        assert any(p is not None and p.timeline.step_seconds == pytest.approx(best.seconds) for p in placed)
        for planned in placed:
            if planned is not None:
                validate(graph, planned.program, budget, step_costs)


def test_cheapest_activations_are_recomputed_without_homes() -> None:
    graph = network(4)
    step_costs = network_costs(graph, copy=None)
    best = optimum(graph, step_costs, in_core_budget(graph, step_costs) - MIB)
    assert best is not None and best.seconds == pytest.approx(len(graph.ops) + 1)
    assert {d.residency for plan in best.plans for d in plan.decisions} == {Residency.RECOMPUTE}


def test_known_plan_and_effort_limit_the_search() -> None:
    graph = network(4)
    step_costs = network_costs(graph, copy=10.0)
    budget = smallest_budget(graph, step_costs) + MIB
    best = optimum(graph, step_costs, budget)
    assert best is not None and best.seconds is not None
    same = optimum(graph, step_costs, budget, known=best.seconds)
    assert same is not None and same.proved and same.plans == () and same.seconds == best.seconds
    stopped = optimum(graph, step_costs, budget, effort=3)
    assert stopped is not None and not stopped.proved and stopped.lower_seconds <= best.seconds
    assert optimum(graph, step_costs, smallest_budget(graph, step_costs) - 1) is None


@settings(LIMITS, max_examples=examples(60))
@given(st.data())
def test_optimum_is_at_least_as_good_as_every_policy(data: st.DataObject) -> None:
    # The search ignores valid copies at home when a step begins, and uses that need no bytes.
    graph = data.draw(graphs(max_layers=2)).unwatched()
    step_costs = data.draw(costs_for(graph))
    smallest, in_core = smallest_budget(graph, step_costs), in_core_budget(graph, step_costs)
    assume(smallest < in_core and not graph.overwrites)
    budget = data.draw(st.integers(smallest, in_core - 1))
    priced = price_choices(graph, step_costs, budget)
    assert priced is not None
    assert all(penalty >= 0 for choices in priced.penalties.values() for penalty in choices.values())
    best = optimum(graph, step_costs, budget, effort=5000)
    assert best is not None
    policies = best_of_policies(graph, step_costs, budget)
    if policies is not None:
        assert best.lower_seconds <= policies * (1 + 1e-6)
    for plan in best.plans:
        planned = fit_plan(graph, step_costs, budget, plan)
        if planned is not None:
            validate(graph, planned.program, budget, step_costs)
            assert planned.timeline.step_seconds >= best.lower_seconds * (1 - 1e-6)
