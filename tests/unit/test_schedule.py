"""When copies run, worked out by hand on small steps and in Python on random ones; and tuning."""

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
    """As many activations as layers, made one by one and used one by one in reverse."""
    made = tuple(Op(i, "forward", (), (), (i,)) for i in range(layers))
    used = tuple(Op(layers + i, "backward", (layers - 1 - i,), (), ()) for i in range(layers))
    return StepGraph(tuple(Storage(i, SIZE, StorageKind.ACTIVATION) for i in range(layers)), made + used)


def costs(graph: StepGraph, *homes: Home) -> Costs:
    return Costs(tuple(OpCost(1.0) for _ in graph.ops), homes)


def home(seconds: float, most: int | None = None) -> Home:
    """A home to which one storage takes so many seconds, and from which it takes as many."""
    return Home(f"{seconds} s", most, SIZE / seconds, SIZE / seconds)


def problem(layers: int, room: int, *homes: Home) -> Problem:
    graph = stack(layers)
    return Problem.of(graph, costs(graph, *homes), room * SIZE)


def kept(given: Problem) -> Choices:
    return Choices(given, StepContents.of(given.graph, given.costs))


def away(given: Problem, homes: dict[int, int]) -> TunerState:
    """The state in which these storages are at these homes, and all others stay."""
    choices = kept(given)
    return TunerState(
        choices.kind, choices.fetch, array("q", [homes.get(info.gap.storage, ON_DEVICE) for info in given.gaps])
    )


def schedule(given: Problem, homes: dict[int, int], slack: float, passes: int = 1) -> TunedState:
    found = Tuner(kept(given)).begin(away(given, homes), slack, passes)
    assert found is not None
    return found


def test_a_copy_holds_its_room_until_it_is_done_and_comes_back_just_in_time() -> None:
    """Made in [0, 1), copied out in [1, 3), used by op 7 at 7: without slack the copy in starts at 5."""
    found = schedule(problem(4, 4, home(2.0)), {0: 0}, slack=0.0)
    assert found.decisions == (Decision(Gap(0, 0, 7), Residency.OFFLOAD, 3, 5, 0),)
    assert (found.seconds, found.copy_seconds, found.wait_seconds) == (8.0, 4.0, {})


def test_slack_lets_a_copy_in_start_earlier() -> None:
    assert schedule(problem(4, 4, home(2.0)), {0: 0}, slack=1.0).decisions[0].fetch_at == 3


def test_an_op_that_lacks_room_waits_for_the_copy_that_is_done_first() -> None:
    """Op 2 finds 0 and 1 on their way out, and room for one of them: 0 is done at 3, and 2 starts then."""
    found = schedule(problem(3, 2, home(2.0), home(5.0)), {0: 0, 1: 1}, slack=0.0)
    assert found.starts[2] == 3.0
    assert [(d.gap.storage, d.home, d.release_by) for d in found.decisions] == [(0, 0, 2), (1, 1, 4)]


def test_copies_to_two_homes_run_side_by_side() -> None:
    given_ = problem(8, 8, home(4.0), home(4.0))
    one, two = schedule(given_, {0: 0, 1: 0}, slack=0.0), schedule(given_, {0: 0, 1: 1}, slack=0.0)
    assert [d.release_by for d in one.decisions] == [5, 9]  # the second starts when the first is done
    assert [d.release_by for d in two.decisions] == [5, 6]


def test_a_state_that_does_not_fit_has_more_offloaded() -> None:
    assert schedule(problem(4, 4, home(2.0)), {}, slack=0.0).decisions == ()
    assert len(schedule(problem(4, 2, home(2.0)), {}, slack=0.0).decisions) >= 2


@pytest.mark.parametrize("home_of_gradient", [ON_DEVICE, 0])
def test_a_chain_may_read_a_gradient_after_its_last_use(home_of_gradient: int) -> None:
    """Op 3 needs the room of what op 1 makes of the gradient, which is made again for op 4."""
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
    given_ = Problem.of(graph, costs(graph, home(0.5)), 3 * SIZE)
    again = [info.gap == Gap(1, 1, 4) for info in given_.gaps]
    state = TunerState(
        array("q", [RECOMPUTED if each else 0 for each in again]),
        array("q", [info.gap.end for info in given_.gaps]),
        array("q", [home_of_gradient if info.final else ON_DEVICE for info in given_.gaps]),
    )
    found = Tuner(kept(given_)).begin(state, 0.25, 8)
    assert found is not None
    assert found.staying == ((0,) if home_of_gradient == ON_DEVICE else ())
    program = wire(graph, place(lower(graph, given_.costs, Plan("test", 0, found.decisions, found.staying))))
    validate(graph, program, program.arena_bytes, given_.costs)


def test_passes_never_make_a_schedule_longer() -> None:
    for layers in (4, 8, 12):
        for seconds in (0.5, 1.5, 3.0):
            given_, homes = problem(layers, layers // 2, home(seconds)), dict.fromkeys(range(layers), 0)
            assert schedule(given_, homes, 1.5, 8).seconds <= schedule(given_, homes, 1.5, 1).seconds


def test_a_home_that_is_too_far_gets_nothing() -> None:
    """A copy to the second home and back takes longer than any gap lasts."""
    given_ = problem(4, 2, home(0.1), home(100.0))
    found = solve(given_, {}, weight=0.002)
    assert found is not None and found.offloaded[:, 1].max() == pytest.approx(0.0, abs=1e-6)
    choice = found.round_to_choice(given_)
    assert choice is not None and set(choice.tolist()) <= {ON_DEVICE, 0}


def choice(given: Problem, homes: dict[int, int]) -> np.ndarray:
    return np.array(away(given, homes).home, dtype=np.int64)


def test_what_a_full_home_cannot_hold_goes_to_the_next() -> None:
    given_ = problem(8, 4, home(0.5, 2 * SIZE), home(0.6))
    found = given_.fit_homes(choice(given_, dict.fromkeys(range(4), 0)))
    assert found is not None
    assert sorted(found[found != ON_DEVICE].tolist()) == [0, 0, 1, 1]
    assert problem(8, 4, home(0.5, SIZE // 2)).fit_homes(choice(given_, {0: 0})) is None


@st.composite
def states(draw: st.DrawFn) -> tuple[Choices, TunerState]:
    """A step with homes under a limit, and what becomes of each of its gaps, which need not fit."""
    graph = draw(graphs())
    given_ = draw(costs_for(graph))
    assume(given_.homes)
    everything = sum(s.bytes for s in graph.storages)
    sizes = st.one_of(st.none(), st.integers(0, everything))
    given_ = replace(given_, homes=tuple(replace(place, bytes=draw(sizes)) for place in given_.homes))
    budget = draw(st.integers(smallest_budget(graph, given_), in_core_budget(graph, given_)))
    choices = kept(Problem.of(graph, given_, room_for_large(graph, given_, budget)))
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
def test_schedules_are_what_python_counts_and_tuning_makes_them_no_slower(
    step: tuple[Choices, TunerState], slack: float, passes: int, seed: int
) -> None:
    choices, state = step
    tuner = Tuner(choices)
    found = tuner.begin(state, slack, passes)
    if found is None:
        event("does not fit")
        return
    counted = naive_schedule(choices, found.state, slack, passes)
    assert found.decisions == counted.decisions
    assert (found.seconds, found.starts) == (counted.seconds, counted.starts)
    assert found.copy_seconds == pytest.approx(counted.copied)
    assert found.wait_seconds == pytest.approx(counted.waited)
    assert tuner.begin(found.state, slack, passes) == found
    tuned = tuner.tune(200, seed=seed)
    assert tuned.value <= found.value
    again = tuner.begin(tuned.state, slack, passes)
    assert again is not None and again.state == tuned.state
    problem_ = choices.problem
    plan = Plan("auto", problem_.limit, tuned.decisions)
    program = place(lower(problem_.graph, problem_.costs, plan))
    validate(problem_.graph, wire(problem_.graph, program), program.arena_bytes)
    tuner.begin(found.state, slack, passes)
    assert tuner.tune(200, seed=seed) == tuned
