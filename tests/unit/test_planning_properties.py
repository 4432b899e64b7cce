"""Every plan of every policy on random graphs: valid, within budget, as simulated; and broken ones are caught."""

from __future__ import annotations

from itertools import islice
from random import Random

import oracle
import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from mutations import MUTATIONS
from strategies import costs_for, graphs

from outofcore.costs import Costs
from outofcore.errors import BudgetError, ValidationError
from outofcore.graph import StepGraph
from outofcore.planning import POLICIES, QUICK, Planned, in_core_budget, plan_step, smallest_budget
from outofcore.simulator import simulate
from outofcore.validator import validate

LIMITS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


@st.composite
def tasks(draw: st.DrawFn) -> tuple[StepGraph, Costs, int]:
    """A graph with costs and a budget between the smallest that could do and a little more than everything."""
    graph = draw(graphs())
    costs = draw(costs_for(graph))
    smallest, everything = smallest_budget(graph, costs), in_core_budget(graph, costs)
    budget = draw(
        st.one_of(
            st.just(smallest),
            st.integers(smallest, max(smallest, everything - 1)),
            st.integers(smallest, max(smallest, everything - 1)),
            st.just(max(smallest, everything)),
        )
    )
    return graph, costs, budget


def plans(graph: StepGraph, costs: Costs, budget: int) -> list[Planned]:
    found: list[Planned] = []
    for policy in POLICIES:
        try:
            found.append(plan_step(graph, costs, budget, policy, params=QUICK))
        except BudgetError:
            # Only ``auto`` has to find a plan wherever one could be.
            assert policy != "auto"
    return found


@settings(LIMITS, max_examples=1000)
@given(tasks())
def test_every_plan_is_valid_and_within_budget(task: tuple[StepGraph, Costs, int]) -> None:
    graph, costs, budget = task
    for planned in plans(graph, costs, budget):
        event(planned.plan.policy)
        assert planned.program.arena_bytes <= budget
        validate(graph, planned.program, budget, costs)
        assert planned.timeline == simulate(graph, costs, planned.program)


@settings(LIMITS, max_examples=60)
@given(tasks(), st.randoms(use_true_random=False))
def test_plans_are_right_on_every_schedule(task: tuple[StepGraph, Costs, int], random: Random) -> None:
    graph, costs, budget = task
    for planned in plans(graph, costs, budget):
        assert oracle.faults_on_schedule(graph, planned.program, random) == []


@settings(LIMITS, max_examples=60)
@given(tasks())
def test_the_same_task_gives_the_same_plan(task: tuple[StepGraph, Costs, int]) -> None:
    assert plans(*task) == plans(*task)


@settings(LIMITS, max_examples=60)
@given(tasks())
def test_below_the_smallest_budget_there_is_no_plan(task: tuple[StepGraph, Costs, int]) -> None:
    graph, costs, _ = task
    smallest = smallest_budget(graph, costs)
    assume(smallest > 1)
    with pytest.raises(BudgetError) as caught:
        plan_step(graph, costs, smallest - 1)
    assert caught.value.smallest_budget == smallest


@pytest.mark.parametrize("name", MUTATIONS)
@settings(LIMITS, max_examples=25)
@given(task=tasks(), random=st.randoms(use_true_random=False))
def test_broken_programs_are_caught(name: str, task: tuple[StepGraph, Costs, int], random: Random) -> None:
    graph, costs, budget = task
    for planned in plans(graph, costs, budget):
        for description, broken in islice(MUTATIONS[name](graph, planned.program, random), 2):
            with pytest.raises(ValidationError):
                validate(graph, broken, planned.program.arena_bytes, costs)
                pytest.fail(f"{description}: accepted")
