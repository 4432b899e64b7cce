"""The proved optimum of small steps: never above any plan, never below any bound, and reached by its own plans."""

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


def best_of_policies(graph: StepGraph, given: Costs, budget: int) -> float | None:
    found: list[float] = []
    for policy in POLICIES:
        try:
            if given.homes or policy in ("keep-all", "sqrt-checkpoint", "superneurons"):
                planned = plan_step(graph, given, budget, policy)
                # The optimum is one over plans in which no gradient that is left stays.
                alike = fit_plan(graph, given, budget, replace(planned.plan, staying=()))
                found += [] if alike is None else [alike.timeline.step_seconds]
        except BudgetError:
            pass
    return min(found, default=None)


@pytest.mark.parametrize("copy", [0.5, 2.0, 10.0, None])
@pytest.mark.parametrize("layers", [4, 6])
def test_it_lies_between_the_bound_and_every_plan_and_is_reached(layers: int, copy: float | None) -> None:
    graph = network(layers)
    given = network_costs(graph, copy=copy)
    for budget in range(smallest_budget(graph, given) + MIB, in_core_budget(graph, given), 2 * MIB):
        best = optimum(graph, given, budget)
        assert best is not None and best.proved and best.seconds is not None
        bound = lower_bound_seconds(graph, given, budget)
        assert bound is not None and bound <= best.seconds * (1 + 1e-6)
        policies = best_of_policies(graph, given, budget)
        assert policies is None or best.seconds <= policies * (1 + 1e-9)
        placed = [fit_plan(graph, given, budget, plan) for plan in best.plans]
        assert any(p is not None and p.timeline.step_seconds == pytest.approx(best.seconds) for p in placed)
        for planned in placed:
            if planned is not None:
                validate(graph, planned.program, budget, given)


def test_without_homes_the_cheapest_maps_run_again() -> None:
    graph = network(4)
    given = network_costs(graph, copy=None)
    best = optimum(graph, given, in_core_budget(graph, given) - MIB)
    assert best is not None and best.seconds == pytest.approx(len(graph.ops) + 1)
    assert {d.residency for plan in best.plans for d in plan.decisions} == {Residency.RECOMPUTE}


def test_only_better_plans_than_a_known_one_are_looked_for() -> None:
    graph = network(4)
    given = network_costs(graph, copy=10.0)
    budget = smallest_budget(graph, given) + MIB
    best = optimum(graph, given, budget)
    assert best is not None and best.seconds is not None
    same = optimum(graph, given, budget, known=best.seconds)
    assert same is not None and same.proved and same.plans == () and same.seconds == best.seconds
    stopped = optimum(graph, given, budget, effort=3)
    assert stopped is not None and not stopped.proved and stopped.lower_seconds <= best.seconds
    assert optimum(graph, given, smallest_budget(graph, given) - 1) is None


@settings(LIMITS, max_examples=examples(60))
@given(st.data())
def test_no_policy_beats_it(data: st.DataObject) -> None:
    # The search knows of no copy at home that is still good when a step begins, nor of a use that needs no bytes.
    graph = data.draw(graphs(max_layers=2)).unwatched()
    given = data.draw(costs_for(graph))
    smallest, everything = smallest_budget(graph, given), in_core_budget(graph, given)
    assume(smallest < everything and not graph.overwrites)
    budget = data.draw(st.integers(smallest, everything - 1))
    priced = price_choices(graph, given, budget)
    assert priced is not None
    assert all(penalty >= 0 for choices in priced.penalties.values() for penalty in choices.values())
    best = optimum(graph, given, budget, effort=5000)
    assert best is not None
    policies = best_of_policies(graph, given, budget)
    if policies is not None:
        assert best.lower_seconds <= policies * (1 + 1e-6)
    for plan in best.plans:
        planned = fit_plan(graph, given, budget, plan)
        if planned is not None:
            validate(graph, planned.program, budget, given)
            assert planned.timeline.step_seconds >= best.lower_seconds * (1 - 1e-6)
