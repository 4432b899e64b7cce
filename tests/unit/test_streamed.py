"""Plans by flows over links: what they choose on a step worked out by hand, and what holds of all of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from strategies import costs_for, graphs

from outofcore.costs import Costs, Home, OpCost
from outofcore.errors import BudgetError
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.lowering import lower, wire
from outofcore.plan import Decision, Gap, Plan, Residency
from outofcore.planning import in_core_budget, lower_bound_seconds, place, plan_step, smallest_budget
from outofcore.planning.flow import flow
from outofcore.planning.laying import lay
from outofcore.planning.model import Model
from outofcore.planning.streamed import rounded, streamed
from outofcore.simulator import simulate
from outofcore.validator import validate

SIZE = 1 << 20


def stack(layers: int) -> StepGraph:
    """As many activations as layers, made one by one and used one by one in reverse."""
    made = tuple(Op(i, "forward", (), (), (i,)) for i in range(layers))
    used = tuple(Op(layers + i, "backward", (layers - 1 - i,), (), ()) for i in range(layers))
    return StepGraph(tuple(Storage(i, SIZE, StorageKind.ACTIVATION) for i in range(layers)), made + used)


def costs(graph: StepGraph, *homes: Home) -> Costs:
    return Costs(tuple(OpCost(1.0) for _ in graph.ops), homes)


def home(seconds: float, most: int | None = None) -> Home:
    """A home to which one storage takes so many seconds, and from which it takes as many."""
    return Home(f"{seconds} s", most, SIZE / seconds, SIZE / seconds)


def test_no_stall_where_links_keep_up() -> None:
    """Eight activations in the room of four: four leave while others are made, and come back in time."""
    graph = stack(8)
    given_ = costs(graph, home(1.0))
    planned = plan_step(graph, given_, 4 * SIZE, "streamed")
    assert planned.timeline.step_seconds == pytest.approx(given_.compute_seconds, rel=0.15)
    assert planned.program.arena_bytes <= 4 * SIZE


def test_two_links_carry_what_one_cannot() -> None:
    """Each link alone is too slow by half; side by side they do."""
    graph = stack(16)
    one, two = costs(graph, home(2.0)), costs(graph, home(2.0), home(2.0))
    alone = plan_step(graph, one, 4 * SIZE, "streamed").timeline.step_seconds
    planned = plan_step(graph, two, 4 * SIZE)
    validate(graph, planned.program, 4 * SIZE, two)
    assert planned.timeline.step_seconds < 0.85 * alone
    assert {d.home for d in planned.plan.decisions} == {0, 1}


def test_what_a_full_home_cannot_hold_goes_to_the_other() -> None:
    graph = stack(8)
    given_ = costs(graph, home(0.5, 2 * SIZE), home(0.6))
    planned = plan_step(graph, given_, 4 * SIZE)
    validate(graph, planned.program, 4 * SIZE, given_)
    assert sum(d.home == 0 for d in planned.plan.decisions) <= 2
    assert any(d.home == 1 for d in planned.plan.decisions)


def test_a_home_that_is_too_far_is_not_offered() -> None:
    """A copy to the second home and back takes longer than any gap lasts."""
    graph = stack(4)
    model = Model.of(graph, costs(graph, home(0.1), home(100.0)), 2 * SIZE)
    found = flow(model)
    assert found is not None
    assert found.shares[:, 1].max() == 0.0
    assert set(rounded(model, found)) <= {-1, 0}


def test_a_copy_has_its_room_until_it_is_done() -> None:
    """Copies out of two seconds each: room is counted on when the link is done, and taken back just in time."""
    graph = stack(4)
    model = Model.of(graph, costs(graph, home(2.0)), 4 * SIZE)
    keep = np.array([info.gap.storage != 0 for info in model.gaps])
    decisions = lay(model, keep, np.zeros(len(keep), dtype=np.int64), np.zeros(len(graph.ops)))
    # Made in [0, 1), copied out in [1, 3), used by op 7 at 7: the copy in starts at 5.
    assert decisions == (Decision(Gap(0, 0, 7), Residency.OFFLOAD, 3, 5, 0),)


def test_an_op_that_lacks_room_waits_for_the_copy_that_is_done_first() -> None:
    """Op 2 finds both of the others still there, and room for one: 0 goes, whose copy ends at 3; 1 stays."""
    graph = stack(3)
    # Op 3 starts at 4: by then the copy of 1 is done, or it is forced to be when 1 is used again.
    for second, release in ((2.0, 3), (5.0, 4)):
        model = Model.of(graph, costs(graph, home(2.0), home(second)), 2 * SIZE)
        keep = np.zeros(len(model.gaps), dtype=np.bool_)
        decisions = lay(model, keep, np.array([0, 1]), np.zeros(len(graph.ops)))
        assert [(d.gap.storage, d.home, d.release_by) for d in decisions] == [(0, 0, 2), (1, 1, release)]
    # With the quicker link to itself, 1 is done before 0 and goes first.
    model = Model.of(graph, costs(graph, home(9.0), home(0.5)), 2 * SIZE)
    decisions = lay(model, np.zeros(len(model.gaps), dtype=np.bool_), np.array([0, 1]), np.zeros(len(graph.ops)))
    assert [(d.gap.storage, d.release_by) for d in decisions] == [(0, 5), (1, 2)]


def test_the_bound_counts_links_side_by_side() -> None:
    graph = stack(16)
    one, two = costs(graph, home(4.0)), costs(graph, home(4.0), home(4.0))
    alone, both = (lower_bound_seconds(graph, given_, 4 * SIZE) for given_ in (one, two))
    assert alone is not None
    assert both is not None
    assert both < alone
    planned = plan_step(graph, two, 4 * SIZE)
    assert both <= planned.timeline.step_seconds * (1 + 1e-9)


Task = tuple[StepGraph, Costs, int]
LIMITS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    """A graph, costs with one home or two that may be small, and a budget below what everything takes."""
    graph = draw(graphs())
    given_ = draw(costs_for(graph))
    everything = sum(s.bytes for s in graph.storages)
    sizes = st.one_of(st.none(), st.integers(0, everything))
    given_ = replace(given_, homes=tuple(replace(place_, bytes=draw(sizes)) for place_ in given_.homes))
    smallest, most = smallest_budget(graph, given_), in_core_budget(graph, given_)
    return graph, given_, draw(st.integers(smallest, max(smallest, most - 1)))


@settings(LIMITS, max_examples=150)
@given(tasks())
def test_every_plan_is_valid_whatever_the_homes_hold(task: Task) -> None:
    graph, given_, budget = task
    for policy in ("streamed", "auto"):
        try:
            planned = plan_step(graph, given_, budget, policy, effort=40)
        except BudgetError:
            event(f"{policy} finds none")
            continue
        event(policy)
        validate(graph, planned.program, budget, given_)
        assert planned.timeline == simulate(graph, given_, planned.program)
        bound = lower_bound_seconds(graph, given_, budget)
        assert bound is not None
        assert bound <= planned.timeline.step_seconds * (1 + 1e-9)


@settings(LIMITS, max_examples=150)
@given(tasks(), st.sampled_from([1.0, 2.0]), st.sampled_from([0.0, 1.0]))
def test_plans_stay_within_their_limit_and_repeat(task: Task, transit: float, spare: float) -> None:
    graph, given_, budget = task
    try:
        plan: Plan = streamed(graph, given_, budget, transit=transit, spare=spare)
    except BudgetError:
        assume(False)
        raise
    assert plan == streamed(graph, given_, budget, transit=transit, spare=spare)
    program = place(lower(graph, given_, plan))
    roomy = replace(given_, homes=tuple(replace(place_, bytes=None) for place_ in given_.homes))
    validate(graph, wire(graph, program), program.arena_bytes, roomy)
