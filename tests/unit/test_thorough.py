"""Small steps: plans are near the committed optima, never worse than those known, valid, and the same each time."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from strategies import costs_for, graphs
from test_pooch import MIB, costs, network

from outofcore.costs import Costs, OpCost
from outofcore.errors import BudgetError
from outofcore.graphfile import read_graph
from outofcore.planning import POLICIES, in_core_budget, plan_step, smallest_budget
from outofcore.planning.polishing import Polish
from outofcore.planning.thorough import EFFORT, effort_worth, thorough
from outofcore.validator import validate

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
INSTANCES = BENCHMARKS / "instances" / "small"
# Those that are planned within some seconds together; ``make bench-small`` goes through all.
QUICK = (
    "chain-inplace-slow",
    "chain-inplace-none",
    "residual-none",
    "scattered-none",
    "transformer-none",
    "unet-none",
)


@pytest.mark.parametrize("name", QUICK)
def test_auto_is_near_the_committed_optimum(name: str) -> None:
    file = read_graph(INSTANCES / f"{name}.json")
    ratios: list[float] = []
    for entry in json.loads((INSTANCES / "optimum.json").read_text())[name]:
        planned = plan_step(file.graph, file.costs, entry["budget"])
        validate(file.graph, planned.program, entry["budget"], file.costs)
        ratios.append(max(planned.timeline.step_seconds / entry["lower_seconds"], 1.0))
    assert mean(ratios) <= 1.03
    assert max(ratios) <= 1.10


def test_the_committed_results_are_near_all_optima() -> None:
    rows = json.loads((BENCHMARKS / "results" / "small.json").read_text())["rows"]
    optima = json.loads((INSTANCES / "optimum.json").read_text())
    assert len(rows) == sum(map(len, optima.values()))
    ratios = [max(row["auto"], 1.0) for row in rows]
    assert mean(ratios) <= 1.03
    assert max(ratios) <= 1.10


def test_without_effort_nothing_is_looked_for() -> None:
    graph = network()
    given_ = costs(graph, 1.0, 3.0)
    budget = in_core_budget(graph, given_) * 2 // 3
    known = [plan_step(graph, given_, budget, "pooch")]
    assert thorough(graph, given_, budget, known, effort=0) == []


def test_what_is_polished_is_valid_and_no_slower() -> None:
    graph = network()
    given_ = costs(graph, 1.0, 3.0)
    budget = smallest_budget(graph, given_) + MIB
    start = plan_step(graph, given_, budget, "offload-all")
    polished = Polish(graph, given_, budget).improve(start, 300)
    assert polished.timeline.step_seconds < start.timeline.step_seconds
    validate(graph, polished.program, budget, given_)
    again = Polish(graph, given_, budget).improve(start, 300)
    assert again == polished
    good = Polish(graph, given_, budget, goal=start.timeline.step_seconds).improve(start, 300)
    assert good is start


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much], max_examples=15)
@given(st.data())
def test_with_one_home_auto_is_never_slower_even_without_search(data: st.DataObject) -> None:
    graph = data.draw(graphs(max_layers=2))
    drawn = data.draw(costs_for(graph))
    given_ = Costs(drawn.ops, drawn.homes[:1])
    smallest, everything = smallest_budget(graph, given_), in_core_budget(graph, given_)
    assume(smallest < everything)
    budget = data.draw(st.integers(smallest, everything - 1))
    auto = plan_step(graph, given_, budget, effort=0)
    for policy in POLICIES:
        try:
            other = plan_step(graph, given_, budget, policy, effort=0)
        except BudgetError:
            continue
        assert auto.timeline.step_seconds <= other.timeline.step_seconds * (1 + 1e-9), policy


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much], max_examples=20)
@given(st.data())
def test_auto_is_never_slower_than_another_policy(data: st.DataObject) -> None:
    graph = data.draw(graphs(max_layers=2))
    given_ = data.draw(costs_for(graph))
    smallest, everything = smallest_budget(graph, given_), in_core_budget(graph, given_)
    assume(smallest < everything)
    budget = data.draw(st.integers(smallest, everything - 1))
    auto = plan_step(graph, given_, budget, effort=100)
    validate(graph, auto.program, budget, given_)
    for policy in POLICIES:
        try:
            other = plan_step(graph, given_, budget, policy, effort=0)
        except BudgetError:
            continue
        assert auto.timeline.step_seconds <= other.timeline.step_seconds * (1 + 1e-9), policy


@pytest.mark.parametrize(
    ("seconds", "effort"),
    [(0.0, 0), (0.0015, 200), (0.003, 400), (10.0, EFFORT)],
)
def test_a_short_step_is_worth_a_short_search(seconds: float, effort: int) -> None:
    costs = Costs((OpCost(seconds / 2, 0), OpCost(seconds / 2, 0)), ())
    assert effort_worth(costs) == effort
