"""Random plans that recompute, offload and keep: valid, right on every schedule, and broken ones are caught."""

from __future__ import annotations

from itertools import islice
from random import Random

import oracle
import pytest
from effort import examples
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from mutations import MUTATIONS
from strategies import costs_for, graphs, plans_for

from outofcore.costs import Costs
from outofcore.errors import ValidationError
from outofcore.graph import StepGraph
from outofcore.lowering import lower, wire
from outofcore.plan import Plan, Residency
from outofcore.planning import place
from outofcore.program import Program, Run
from outofcore.simulator import recompute_seconds, simulate
from outofcore.validator import validate

LIMITS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
Made = tuple[StepGraph, Costs, Plan, Program]


@st.composite
def planned(draw: st.DrawFn, max_layers: int = 4) -> Made:
    graph = draw(graphs(max_layers))
    costs = draw(costs_for(graph))
    plan = draw(plans_for(graph))
    return graph, costs, plan, wire(graph, place(lower(graph, costs, plan)))


@settings(LIMITS, max_examples=examples(500))
@given(planned())
def test_every_plan_is_valid(made: Made) -> None:
    graph, costs, plan, program = made
    again = [i for i in program.instructions if isinstance(i, Run) and i.again]
    event(f"runs again: {min(len(again), 5)}")
    validate(graph, program, program.arena_bytes, costs)
    assert bool(again) == any(d.residency is Residency.RECOMPUTE for d in plan.decisions)
    assert recompute_seconds(costs, program) == pytest.approx(sum(costs.ops[run.op].seconds for run in again))
    ops = costs.compute_seconds + recompute_seconds(costs, program)
    assert simulate(graph, costs, program).step_seconds >= ops * (1 - 1e-9)


@settings(LIMITS, max_examples=examples(100))
@given(planned(), st.randoms(use_true_random=False))
def test_plans_are_right_on_every_schedule(made: Made, random: Random) -> None:
    graph, _, _, program = made
    assert not oracle.is_broken(graph, program)
    assert oracle.faults_on_schedule(graph, program, random) == []


@settings(LIMITS, max_examples=examples(60))
@given(planned())
def test_a_chain_runs_once_for_all_that_is_wanted_at_the_same_time(made: Made) -> None:
    graph, _, _, program = made
    again: list[int] = []
    for instruction in program.instructions:
        if isinstance(instruction, Run) and instruction.again:
            assert graph.ops[instruction.op].rerunnable
            again.append(instruction.op)
        elif isinstance(instruction, Run):
            assert again == sorted(set(again))
            again = []


@pytest.mark.parametrize("name", MUTATIONS)
@settings(LIMITS, max_examples=examples(20))
@given(made=planned(max_layers=3), random=st.randoms(use_true_random=False))
def test_broken_programs_are_caught(name: str, made: Made, random: Random) -> None:
    graph, costs, _, program = made
    for description, broken in islice(MUTATIONS[name](graph, program, random), 2):
        with pytest.raises(ValidationError):
            validate(graph, broken, program.arena_bytes, costs)
            pytest.fail(f"{description}: accepted")
