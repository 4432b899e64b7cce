"""Costs: what copies take, and which costs fit a graph."""

from __future__ import annotations

from math import nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import budgets_for, costs_for, graphs

from outofcore.costs import Costs, Home, OpCost
from outofcore.errors import GraphError
from outofcore.graph import Op, StepGraph

GRAPH = StepGraph((), (Op(0, "a", (), (), ()), Op(1, "b", (), (), ())))


def test_seconds_of_copies() -> None:
    home = Home("host", None, bytes_per_s_out=100.0, bytes_per_s_in=200.0, latency_s=0.5)
    assert home.out_seconds(400) == 4.5
    assert home.in_seconds(400) == 2.5
    assert home.out_seconds(0) == home.in_seconds(0) == 0.5


def test_latency_is_none_unless_given() -> None:
    assert Home("host", None, 100.0, 200.0).out_seconds(100) == 1.0


def test_compute_seconds() -> None:
    assert Costs((OpCost(1.0), OpCost(2.5))).compute_seconds == 3.5
    assert Costs(()).compute_seconds == 0


def test_costs_that_fit() -> None:
    Costs((OpCost(0.0), OpCost(1.0, 4096))).check(GRAPH)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (Costs((OpCost(1.0),)), "1 op costs for a graph of 2 ops"),
        (Costs((OpCost(1.0),) * 3), "3 op costs for a graph of 2 ops"),
        (Costs((OpCost(1.0), OpCost(-1.0))), "op 1 has a negative cost"),
        (Costs((OpCost(nan), OpCost(1.0))), "op 0 has a negative cost"),
        (Costs((OpCost(1.0), OpCost(1.0, -1))), "op 1 has a negative cost"),
    ],
)
def test_costs_that_do_not_fit(costs: Costs, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        costs.check(GRAPH)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_random_costs_and_budgets_fit(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    costs = data.draw(costs_for(graph))
    costs.check(graph)
    assert data.draw(budgets_for(graph, costs)) > 0


@pytest.mark.parametrize(("contention", "slowdown"), [(1.1, 0.0), (-0.1, 0.0), (0.0, -0.1), (nan, 0.0), (0.0, nan)])
def test_what_copies_take_from_others_must_be_possible(contention: float, slowdown: float) -> None:
    home = Home("disk", None, 1.0, 1.0, 0.0, contention, slowdown)
    with pytest.raises(GraphError, match="contention"):
        Costs((OpCost(1.0), OpCost(1.0)), (home,)).check(GRAPH)
