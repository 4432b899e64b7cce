"""When copies run: worked out by hand on small steps."""

from __future__ import annotations

import numpy as np
import pytest

from outofcore.costs import Costs, Home, OpCost
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.plan import Decision, Gap, Residency
from outofcore.planning.problem import KEPT, Problem
from outofcore.planning.relaxation import solve
from outofcore.planning.schedule import schedule, settled

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


def away(given: Problem, homes: dict[int, int]) -> np.ndarray:
    """The choice in which these storages are at these homes, and all others stay."""
    return np.array([homes.get(info.gap.storage, KEPT) for info in given.gaps], dtype=np.int64)


def test_a_copy_holds_its_room_until_it_is_done_and_comes_back_just_in_time() -> None:
    """Made in [0, 1), copied out in [1, 3), used by op 7 at 7: without slack the copy in starts at 5."""
    given = problem(4, 4, home(2.0))
    found = schedule(given, away(given, {0: 0}), slack=0.0)
    assert found is not None
    assert found.decisions == (Decision(Gap(0, 0, 7), Residency.OFFLOAD, 3, 5, 0),)
    assert (found.seconds, found.copied, found.waited) == (8.0, 4.0, {})


def test_slack_lets_a_copy_in_start_earlier() -> None:
    given = problem(4, 4, home(2.0))
    found = schedule(given, away(given, {0: 0}), slack=1.0)
    assert found is not None
    assert found.decisions[0].fetch_at == 3


def test_an_op_that_lacks_room_waits_for_the_copy_that_is_done_first() -> None:
    """Op 2 finds 0 and 1 on their way out, and room for one of them: 0 is done at 3, and 2 starts then."""
    given = problem(3, 2, home(2.0), home(5.0))
    found = schedule(given, away(given, {0: 0, 1: 1}), slack=0.0)
    assert found is not None
    assert found.starts[2] == 3.0
    assert [(d.gap.storage, d.home, d.release_by) for d in found.decisions] == [(0, 0, 2), (1, 1, 4)]


def test_copies_to_two_homes_run_side_by_side() -> None:
    given = problem(8, 8, home(4.0), home(4.0))
    one = schedule(given, away(given, {0: 0, 1: 0}), slack=0.0)
    two = schedule(given, away(given, {0: 0, 1: 1}), slack=0.0)
    assert one is not None and two is not None
    assert [d.release_by for d in one.decisions] == [5, 9]  # the second starts when the first is done
    assert [d.release_by for d in two.decisions] == [5, 6]


def test_a_schedule_that_takes_too_long_is_broken_off() -> None:
    given = problem(4, 2, home(9.0))
    choice = away(given, {0: 0, 1: 0})
    found = schedule(given, choice, slack=0.0)
    assert found is not None
    assert schedule(given, choice, 0.0, most=found.seconds - 0.1) is None
    assert schedule(given, choice, 0.0, most=found.seconds) is not None
    assert schedule(given, choice, 0.0, most=found.seconds, weight=1.0) is None


def test_passes_never_make_a_schedule_longer() -> None:
    for layers in (4, 8, 12):
        for seconds in (0.5, 1.5, 3.0):
            given = problem(layers, layers // 2, home(seconds))
            choice = away(given, dict.fromkeys(range(layers), 0))
            once, often = settled(given, choice, 1.5, 1), settled(given, choice, 1.5, 8)
            assert once is not None and often is not None
            assert often.seconds <= once.seconds


def test_a_home_that_is_too_far_gets_nothing() -> None:
    """A copy to the second home and back takes longer than any gap lasts."""
    given = problem(4, 2, home(0.1), home(100.0))
    found = next(solve(given, {}, weight=0.002))
    assert found.away[:, 1].max() == pytest.approx(0.0, abs=1e-6)
    choice = found.rounded(given)
    assert choice is not None and set(choice.tolist()) <= {KEPT, 0}


def test_what_a_full_home_cannot_hold_goes_to_the_next() -> None:
    given = problem(8, 4, home(0.5, 2 * SIZE), home(0.6))
    choice = given.within_homes(away(given, dict.fromkeys(range(4), 0)))
    assert choice is not None
    assert sorted(choice[choice != KEPT].tolist()) == [0, 0, 1, 1]
    kept = given.within_homes(away(given, dict.fromkeys(range(4), 0)), but=int(np.argmax(choice == 1)))
    assert kept is not None and kept[int(np.argmax(choice == 1))] == 0  # that one stays, and another one moves
    assert problem(8, 4, home(0.5, SIZE // 2)).within_homes(away(given, {0: 0})) is None
