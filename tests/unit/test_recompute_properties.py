"""Tests of random plans that recompute, offload and keep."""

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
Case = tuple[StepGraph, Costs, Plan, Program]


@st.composite
def planned_steps(draw: st.DrawFn, max_layers: int = 4) -> Case:
    graph = draw(graphs(max_layers))
    costs = draw(costs_for(graph))
    plan = draw(plans_for(graph))
    return graph, costs, plan, wire(graph, place(lower(graph, costs, plan)))


@settings(LIMITS, max_examples=examples(500))
@given(planned_steps())
def test_every_plan_is_valid(case: Case) -> None:
    graph, costs, plan, program = case
    reruns = [i for i in program.instructions if isinstance(i, Run) and i.again]
    event(f"runs again: {min(len(reruns), 5)}")
    validate(graph, program, program.arena_bytes, costs)
    assert bool(reruns) == any(d.residency is Residency.RECOMPUTE for d in plan.decisions)
    assert recompute_seconds(costs, program) == pytest.approx(sum(costs.ops[run.op].seconds for run in reruns))
    ops = costs.compute_seconds + recompute_seconds(costs, program)
    assert simulate(graph, costs, program).step_seconds >= ops * (1 - 1e-9)


@settings(LIMITS, max_examples=examples(100))
@given(planned_steps(), st.randoms(use_true_random=False))
def test_plans_are_correct_on_every_schedule(case: Case, random: Random) -> None:
    graph, _, _, program = case
    assert not oracle.is_broken(graph, program)
    assert oracle.faults_on_schedule(graph, program, random) == []


@settings(LIMITS, max_examples=examples(60))
@given(planned_steps())
def test_recomputation_sequence_runs_once_for_one_fetch_time(case: Case) -> None:
    graph, _, _, program = case
    reruns: list[int] = []
    for instruction in program.instructions:
        if isinstance(instruction, Run) and instruction.again:
            assert graph.ops[instruction.op].rerunnable
            reruns.append(instruction.op)
        elif isinstance(instruction, Run):
            assert reruns == sorted(set(reruns))
            reruns = []


@pytest.mark.parametrize("name", MUTATIONS)
@settings(LIMITS, max_examples=examples(20))
@given(case=planned_steps(max_layers=3), random=st.randoms(use_true_random=False))
def test_broken_programs_are_refused(name: str, case: Case, random: Random) -> None:
    graph, costs, _, program = case
    for description, broken in islice(MUTATIONS[name](graph, program, random), 2):
        with pytest.raises(ValidationError):
            validate(graph, broken, program.arena_bytes, costs)
            pytest.fail(f"{description}: accepted")
