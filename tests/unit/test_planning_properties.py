"""Tests that every plan of every policy on random graphs is valid, and that broken plans are detected."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from random import Random

import oracle
import pytest
from effort import examples
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from mutations import MUTATIONS
from strategies import LIMITS, Task, deep_graphs, graphs, graphs_with_collectives, tasks

from outofcore.errors import BudgetError, ValidationError
from outofcore.planning import POLICIES, QUICK, Planned, bound, lower_bound_seconds, plan_step, smallest_budget
from outofcore.simulator import simulate
from outofcore.validator import validate

# The policies to compare with ``auto``, with default and other fields.
BASELINES = st.sampled_from(
    [
        *(name for name in POLICIES if name != "auto"),
        "offload-all:strict=true",
        "pooch:effort=1000",
        "sqrt-checkpoint:segments=3",
        "superneurons:recompute=false",
        "tflms:mode=2",
        "tflms:threshold=2,ahead=2,mode=1",
        "window:reach=0.4",
        "window:persist=false",
    ]
)
# Half of the examples use ``auto``.
ANY = st.one_of(st.just("auto"), BASELINES)


def plan_of(task: Task, policy: str) -> Planned | None:
    try:
        return plan_step(*task, policy, params=QUICK)
    except BudgetError:
        # Only ``auto`` must find a plan if there is one.
        assert policy != "auto"
        return None


def check(task: Task, policy: str) -> None:
    graph, costs, budget = task
    planned = plan_of(task, policy)
    if planned is not None:
        event(planned.plan.policy)
        assert planned.program.arena_bytes <= budget
        validate(graph, planned.program, budget, costs)
        assert planned.timeline == simulate(graph, costs, planned.program)


@settings(LIMITS, max_examples=examples(1000))
@given(tasks())
def test_every_auto_plan_is_valid_and_within_budget(task: Task) -> None:
    check(task, "auto")


@settings(LIMITS, max_examples=examples(300))
@given(tasks(st.one_of(graphs(), deep_graphs())), BASELINES)
def test_every_plan_of_other_policies_is_valid_and_within_budget(task: Task, policy: str) -> None:
    check(task, policy)


@settings(LIMITS, max_examples=examples(120))
@given(tasks(), ANY, st.randoms(use_true_random=False))
def test_plans_are_correct_on_every_schedule(task: Task, policy: str, random: Random) -> None:
    planned = plan_of(task, policy)
    if planned is not None:
        assert oracle.faults_on_schedule(task[0], planned.program, random) == []


@settings(LIMITS, max_examples=examples(120))
@given(tasks(), ANY)
def test_same_task_gives_the_same_plan(task: Task, policy: str) -> None:
    assert plan_of(task, policy) == plan_of(task, policy)


@settings(LIMITS, max_examples=examples(60))
@given(tasks())
def test_budget_below_the_smallest_has_no_plan(task: Task) -> None:
    graph, costs, _ = task
    smallest = smallest_budget(graph, costs)
    assume(smallest > 1)
    with pytest.raises(BudgetError) as caught:
        plan_step(graph, costs, smallest - 1)
    assert caught.value.smallest_budget == smallest


@pytest.mark.parametrize("name", MUTATIONS)
@settings(LIMITS, max_examples=examples(50))
@given(task=tasks(), policy=ANY, random=st.randoms(use_true_random=False))
def test_broken_programs_are_refused(name: str, task: Task, policy: str, random: Random) -> None:
    graph, costs, _ = task
    planned = plan_of(task, policy)
    if planned is not None:
        for description, broken in islice(MUTATIONS[name](graph, planned.program, random), 2):
            with pytest.raises(ValidationError):
                validate(graph, broken, planned.program.arena_bytes, costs)
                pytest.fail(f"{description}: accepted")


@settings(LIMITS, max_examples=examples(150))
@given(st.one_of(tasks(), tasks(graphs_with_collectives())), ANY, st.integers(1, 3), st.sampled_from([0.0, 0.3]))
def test_every_plan_takes_at_least_the_bound(task: Task, policy: str, own_ops: int, slowdown: float) -> None:
    graph, costs, budget = task
    homes = tuple(replace(home, contention=slowdown, compute_slowdown=slowdown) for home in costs.homes)
    task = graph, replace(costs, homes=homes), budget
    planned = plan_of(task, policy)
    if planned is None:
        return
    max_seconds = planned.timeline.step_seconds * (1 + 1e-6)
    bound_seconds = lower_bound_seconds(*task)
    assert bound_seconds is not None and bound_seconds <= max_seconds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bound, "_OWN_SPANS", own_ops)
        coarse = lower_bound_seconds(*task)
    assert coarse is not None and coarse <= max_seconds
    event(
        "above the seconds of the ops"
        if bound_seconds > task[1].compute_seconds * (1 + 1e-6)
        else "the seconds of the ops"
    )
