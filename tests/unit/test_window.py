"""What the adaptive window holds, fetches, waits for and cancels: exact decisions on small steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outofcore.costs import Costs, Home, OpCost
from outofcore.errors import BudgetError
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.planning import plan_step
from outofcore.planning.baselines.window import Window, window
from outofcore.program import CopyIn
from outofcore.validator import validate

K64 = 64 * 1024
ACTIVATION, PARAMETER, BUFFER = StorageKind.ACTIVATION, StorageKind.PARAMETER, StorageKind.BUFFER
Touched = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def step(storages: Sequence[tuple[StorageKind, int]], ops: Sequence[Touched]) -> StepGraph:
    """Storages by kind and size in units of 64 KiB; ops by what they read, mutate and create."""
    made = tuple(Storage(i, size * K64, kind, f"s{i}") for i, (kind, size) in enumerate(storages))
    return StepGraph(made, tuple(Op(i, f"op{i}", *touched) for i, touched in enumerate(ops)))


def costs(graph: StepGraph, workspace: dict[int, int] | None = None) -> Costs:
    ops = tuple(OpCost(1.0, (workspace or {}).get(i, 0) * K64) for i in range(len(graph.ops)))
    return Costs(ops, (Home("host", None, 1e6, 1e6),))


def decided(graph: StepGraph, room: int, reach: float = 1.5, persist: bool = True) -> list[tuple[int, ...]]:
    """Storage, start and end of each gap that is offloaded, when its room is free and when it is taken."""
    plan = window(graph, costs(graph), room * K64, reach=reach, persist=persist)
    return [(d.gap.storage, d.gap.start, d.gap.end, d.release_by, d.fetch_at) for d in plan.decisions]


def chain() -> StepGraph:
    """Four activations, each made from the one before, and looked at in the opposite order."""
    forward: list[Touched] = [((), (), (0,)), *(((i - 1,), (), (i,)) for i in range(1, 4))]
    return step([(ACTIVATION, 1)] * 4, [*forward, *(((i,), (), ()) for i in reversed(range(4)))])


def test_where_all_fits_nothing_leaves() -> None:
    assert decided(chain(), 4) == []


def test_the_oldest_copy_out_is_waited_for_when_its_room_is_needed() -> None:
    assert decided(chain(), 3) == [(0, 1, 7, 3, 5)]
    assert decided(chain(), 2) == [(0, 1, 7, 2, 6), (1, 2, 6, 3, 5)]


def test_a_narrow_window_fetches_no_earlier_than_it_reaches() -> None:
    # 1.8 units: the one of the op itself, and no second one.
    assert decided(chain(), 3, reach=0.6) == [(0, 1, 7, 3, 7)]
    assert decided(chain(), 3, reach=1.0) == [(0, 1, 7, 3, 5)]


def test_a_copy_out_is_cancelled_if_its_storage_enters_the_window_again() -> None:
    # After op 0 the window (1.2 units) ends before op 2, so s0 begins to leave; nobody needs its room before op 2.
    graph = step([(ACTIVATION, 1), (ACTIVATION, 1)], [((), (), (0,)), ((), (), (1,)), ((0,), (), ()), ((1,), (), ())])
    assert decided(graph, 2, reach=0.6) == []


@pytest.mark.parametrize("by_workspace", [False, True])
def test_prefetches_are_cancelled_where_an_op_makes_more_than_is_left(by_workspace: bool) -> None:
    # What the first two ops make is in the window until op 6, and op 4 needs two units.
    makes = () if by_workspace else (2,)
    idle: Touched = ((), (), ())
    ops: list[Touched] = [((), (), (0,)), ((), (), (1,)), idle, idle, ((), (), makes), idle, ((0, 1), (), ())]
    graph = step([(ACTIVATION, 1), (ACTIVATION, 1), (ACTIVATION, 2)], ops)
    given = costs(graph, {4: 2} if by_workspace else {})
    for room, away in ((4, ()), (3, (1,)), (2, (0, 1))):
        plan = window(graph, given, room * K64, reach=4.0)
        # Copied out from the start, waited for at op 4, and back from op 5 on.
        assert [(d.gap.storage, d.release_by, d.fetch_at) for d in plan.decisions] == [(s, 4, 5) for s in away]
    with pytest.raises(BudgetError, match="op4"):
        window(graph, given, K64)


def parameters() -> StepGraph:
    """Two parameters; the second is updated first."""
    ops: list[Touched] = [((0,), (), (2,)), ((1, 2), (), ()), ((1, 2), (1,), ()), ((0,), (0,), ())]
    return step([(PARAMETER, 1), (PARAMETER, 1), (ACTIVATION, 1)], ops)


def test_residency_persists_over_the_end_of_a_step_or_not() -> None:
    assert decided(parameters(), 2) == [(0, 0, 3, 1, 3), (1, 2, 5, 4, 5)]
    assert decided(parameters(), 3) == []
    assert decided(parameters(), 3, persist=False) == [(0, 3, 4, 4, 4), (1, 2, 5, 4, 4)]


def test_what_leaves_for_good_frees_its_room_once_its_copy_was_waited_for() -> None:
    # The parameter is done with after op 1, and op 2 makes as much as there is room for.
    ops: list[Touched] = [((0,), (), ()), ((0,), (0,), ()), ((), (), (1,)), ((1,), (), ())]
    graph = step([(PARAMETER, 2), (ACTIVATION, 3)], ops)
    assert decided(graph, 4, persist=False) == [(0, 1, 4, 2, 4)]


def test_nothing_is_held_for_a_use_that_overwrites() -> None:
    # s0 is read by op 0 and overwritten by op 3; in between op 1 makes s1, which takes all the room.
    ops: list[Touched] = [((0,), (), ()), ((), (), (1,)), ((1,), (), ()), ((), (0,), ()), ((0,), (), ())]
    graph = step([(BUFFER, 2), (ACTIVATION, 3)], ops)
    assert decided(graph, 3) == []
    assert decided(graph, 3, persist=False) == [(0, 4, 5, 5, 5)]


def test_what_is_away_between_steps_is_not_fetched_to_be_overwritten() -> None:
    # The gap over the end of the step is offloaded, since op 2 needs the room, and ends with the use itself.
    ops: list[Touched] = [((), (0,), ()), ((0,), (), ()), ((), (), (1,)), ((1,), (), ())]
    graph = step([(BUFFER, 2), (ACTIVATION, 3)], ops)
    assert decided(graph, 3) == [(0, 1, 4, 2, 4)]
    assert decided(graph, 3, persist=False) == [(0, 1, 4, 2, 4)]
    given = costs(graph)
    planned = plan_step(graph, given, 3 * K64, "window")
    validate(graph, planned.program, 3 * K64, given)
    assert not any(isinstance(instruction, CopyIn) for instruction in planned.program.instructions)


def test_its_fields_reach_the_plan() -> None:
    graph = chain()
    given = costs(graph)
    for policy, fetch in ((Window(), 5), (Window(reach=0.6), 7)):
        planned = plan_step(graph, given, 3 * K64, policy)
        validate(graph, planned.program, 3 * K64, given)
        assert planned.plan.policy == "window"
        assert [d.fetch_at for d in planned.plan.decisions] == [fetch]
    two = Costs(given.ops, (*given.homes, Home("disk", None, 1e6, 1e6)))
    assert [d.home for d in plan_step(graph, two, 3 * K64, Window()).plan.decisions] == [1]
