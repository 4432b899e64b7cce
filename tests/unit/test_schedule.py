"""Tests of the times of copies, by hand and against a naive version, and of tuning."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import pytest
from effort import examples
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from naive_schedule import schedule as naive_schedule
from strategies import LIMITS, costs_for, graphs

from outofcore.costs import Costs, Home, OpCost
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.lowering import lower, wire
from outofcore.plan import Decision, Gap, Plan, Residency
from outofcore.planning import in_core_budget, smallest_budget
from outofcore.planning.guide import solve
from outofcore.planning.placing import place, room_for_large
from outofcore.planning.problem import ON_DEVICE, Problem
from outofcore.planning.remat.chains import OFFLOADED, RECOMPUTED, Choices
from outofcore.planning.remat.contents import StepContents
from outofcore.planning.tuner import TunedState, Tuner, TunerState
from outofcore.validator import validate

SIZE = 1 << 20


def stack(layers: int) -> StepGraph:
    forward = tuple(Op(i, "forward", (), (), (i,)) for i in range(layers))
    backward = tuple(Op(layers + i, "backward", (layers - 1 - i,), (), ()) for i in range(layers))
    return StepGraph(tuple(Storage(i, SIZE, StorageKind.ACTIVATION) for i in range(layers)), forward + backward)


def costs(graph: StepGraph, *homes: Home) -> Costs:
    return Costs(tuple(OpCost(1.0) for _ in graph.ops), homes)


def home(seconds: float, capacity: int | None = None) -> Home:
    return Home(f"{seconds} s", capacity, SIZE / seconds, SIZE / seconds)


def problem(layers: int, room: int, *homes: Home) -> Problem:
    graph = stack(layers)
    return Problem.of(graph, costs(graph, *homes), room * SIZE)


def all_resident(problem_case: Problem) -> Choices:
    return Choices(problem_case, StepContents.of(problem_case.graph, problem_case.costs))


def state_with(problem_case: Problem, homes: dict[int, int]) -> TunerState:
    choices = all_resident(problem_case)
    return TunerState(
        choices.kind, choices.fetch, array("q", [homes.get(info.gap.storage, ON_DEVICE) for info in problem_case.gaps])
    )


def schedule(problem_case: Problem, homes: dict[int, int], slack: float, passes: int = 1) -> TunedState:
    tuned_schedule = Tuner(all_resident(problem_case)).begin(state_with(problem_case, homes), slack, passes)
    assert tuned_schedule is not None
    return tuned_schedule


def test_copy_holds_its_room_until_done_and_returns_just_in_time() -> None:
    """Made in [0, 1), copied out in [1, 3), used by op 7 at 7: without slack the copy in starts at 5."""
    tuned_schedule = schedule(problem(4, 4, home(2.0)), {0: 0}, slack=0.0)
    assert tuned_schedule.decisions == (Decision(Gap(0, 0, 7), Residency.OFFLOAD, 3, 5, 0),)
    assert (tuned_schedule.seconds, tuned_schedule.copy_seconds, tuned_schedule.wait_seconds) == (8.0, 4.0, {})


def test_slack_starts_a_copy_in_earlier() -> None:
    assert schedule(problem(4, 4, home(2.0)), {0: 0}, slack=1.0).decisions[0].fetch_at == 3


def test_op_without_room_waits_for_the_first_copy_to_end() -> None:
    """When op 2 starts, 0 and 1 are being copied out, and it needs the room of one: 0 is done at 3."""
    tuned_schedule = schedule(problem(3, 2, home(2.0), home(5.0)), {0: 0, 1: 1}, slack=0.0)
    assert tuned_schedule.starts[2] == 3.0
    assert [(d.gap.storage, d.home, d.release_by) for d in tuned_schedule.decisions] == [(0, 0, 2), (1, 1, 4)]


def test_copies_to_two_homes_overlap() -> None:
    problem_ = problem(8, 8, home(4.0), home(4.0))
    one_home, two_homes = schedule(problem_, {0: 0, 1: 0}, slack=0.0), schedule(problem_, {0: 0, 1: 1}, slack=0.0)
    assert [d.release_by for d in one_home.decisions] == [5, 9]  # the second starts when the first is done
    assert [d.release_by for d in two_homes.decisions] == [5, 6]


def test_infeasible_state_gets_more_offloads() -> None:
    assert schedule(problem(4, 4, home(2.0)), {}, slack=0.0).decisions == ()
    assert len(schedule(problem(4, 2, home(2.0)), {}, slack=0.0).decisions) >= 2


@pytest.mark.parametrize("home_of_gradient", [ON_DEVICE, 0])
def test_recomputation_may_read_a_gradient_after_its_last_use(home_of_gradient: int) -> None:
    """Op 3 needs the room of the result of op 1, which is recomputed from the gradient for op 4."""
    activation, gradient = StorageKind.ACTIVATION, StorageKind.GRADIENT
    storages = (Storage(0, SIZE, gradient, "w.grad"), Storage(1, SIZE, activation), Storage(2, SIZE, activation))
    ops = (
        Op(0, "backward", (), (), (0,)),
        Op(1, "scale", (0,), (), (1,)),
        Op(2, "idle", (), (), ()),
        Op(3, "other", (), (), (2,)),
        Op(4, "norm", (1, 2), (), ()),
    )
    graph = StepGraph(storages, ops, (0,))
    problem_ = Problem.of(graph, costs(graph, home(0.5)), 3 * SIZE)
    is_recomputed = [info.gap == Gap(1, 1, 4) for info in problem_.gaps]
    state = TunerState(
        array("q", [RECOMPUTED if flag else 0 for flag in is_recomputed]),
        array("q", [info.gap.end for info in problem_.gaps]),
        array("q", [home_of_gradient if info.final else ON_DEVICE for info in problem_.gaps]),
    )
    tuned_schedule = Tuner(all_resident(problem_)).begin(state, 0.25, 8)
    assert tuned_schedule is not None
    assert tuned_schedule.staying == ((0,) if home_of_gradient == ON_DEVICE else ())
    program = wire(
        graph, place(lower(graph, problem_.costs, Plan("test", 0, tuned_schedule.decisions, tuned_schedule.staying)))
    )
    validate(graph, program, program.arena_bytes, problem_.costs)


def test_more_passes_do_not_lengthen_a_schedule() -> None:
    for layers in (4, 8, 12):
        for seconds in (0.5, 1.5, 3.0):
            problem_, homes = problem(layers, layers // 2, home(seconds)), dict.fromkeys(range(layers), 0)
            assert schedule(problem_, homes, 1.5, 8).seconds <= schedule(problem_, homes, 1.5, 1).seconds


def test_too_slow_home_is_not_used() -> None:
    """A copy to the second home and back takes longer than any gap."""
    problem_ = problem(4, 2, home(0.1), home(100.0))
    tuned_schedule = solve(problem_, {}, weight=0.002)
    assert tuned_schedule is not None and tuned_schedule.offloaded[:, 1].max() == pytest.approx(0.0, abs=1e-6)
    choice = tuned_schedule.round_to_choice(problem_)
    assert choice is not None and set(choice.tolist()) <= {ON_DEVICE, 0}


def choice(problem_case: Problem, homes: dict[int, int]) -> np.ndarray:
    return np.array(state_with(problem_case, homes).home, dtype=np.int64)


def test_overflow_of_a_full_home_goes_to_the_next() -> None:
    problem_ = problem(8, 4, home(0.5, 2 * SIZE), home(0.6))
    tuned_schedule = problem_.fit_homes(choice(problem_, dict.fromkeys(range(4), 0)))
    assert tuned_schedule is not None
    assert sorted(tuned_schedule[tuned_schedule != ON_DEVICE].tolist()) == [0, 0, 1, 1]
    assert problem(8, 4, home(0.5, SIZE // 2)).fit_homes(choice(problem_, {0: 0})) is None


@st.composite
def states(draw: st.DrawFn) -> tuple[Choices, TunerState]:
    graph = draw(graphs())
    problem_ = draw(costs_for(graph))
    assume(problem_.homes)
    all_bytes = sum(s.bytes for s in graph.storages)
    sizes = st.one_of(st.none(), st.integers(0, all_bytes))
    problem_ = replace(problem_, homes=tuple(replace(home_, bytes=draw(sizes)) for home_ in problem_.homes))
    budget = draw(st.integers(smallest_budget(graph, problem_), in_core_budget(graph, problem_)))
    choices = all_resident(Problem.of(graph, problem_, room_for_large(graph, problem_, budget)))
    kind, home = array("q", choices.kind), array("q", choices.problem.all_resident().tolist())
    for g in choices.problem.movable:
        if choices.can_recompute[g] and draw(st.booleans()):
            kind[g] = RECOMPUTED
        homes = choices.problem.gaps[g].homes
        home[g] = draw(st.sampled_from((ON_DEVICE, *homes)))
        if (
            kind[g] != RECOMPUTED
            and home[g] != ON_DEVICE
            and not choices.problem.gaps[g].cyclic
            and draw(st.booleans())
        ):
            kind[g] = OFFLOADED
    return choices, TunerState(kind, choices.fetch, home)


@settings(LIMITS, max_examples=examples(150))
@given(states(), st.sampled_from([0.0, 1.5, 30.0]), st.integers(1, 4), st.integers(0, 1 << 62))
def test_schedules_match_python_and_tuning_does_not_slow_them(
    step: tuple[Choices, TunerState], slack: float, passes: int, seed: int
) -> None:
    choices, state = step
    tuner = Tuner(choices)
    tuned_schedule = tuner.begin(state, slack, passes)
    if tuned_schedule is None:
        event("does not fit")
        return
    counted = naive_schedule(choices, tuned_schedule.state, slack, passes)
    assert tuned_schedule.decisions == counted.decisions
    assert (tuned_schedule.seconds, tuned_schedule.starts) == (counted.seconds, counted.starts)
    assert tuned_schedule.copy_seconds == pytest.approx(counted.copied)
    assert tuned_schedule.wait_seconds == pytest.approx(counted.waited)
    assert tuner.begin(tuned_schedule.state, slack, passes) == tuned_schedule
    tuned = tuner.tune(200, seed=seed)
    assert tuned.value <= tuned_schedule.value
    resumed = tuner.begin(tuned.state, slack, passes)
    assert resumed is not None and resumed.state == tuned.state
    problem_ = choices.problem
    plan = Plan("auto", problem_.limit, tuned.decisions)
    program = place(lower(problem_.graph, problem_.costs, plan))
    validate(problem_.graph, wire(problem_.graph, program), program.arena_bytes)
    tuner.begin(tuned_schedule.state, slack, passes)
    assert tuner.tune(200, seed=seed) == tuned
