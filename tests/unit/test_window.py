"""Tests of the window policy: its exact evictions, prefetches and cancellations on small steps."""

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
    """Build a step from storages (kind, size in units of 64 KiB) and ops (reads, mutates, creates)."""
    all_storages = tuple(Storage(i, size * K64, kind, f"s{i}") for i, (kind, size) in enumerate(storages))
    return StepGraph(all_storages, tuple(Op(i, f"op{i}", *touched) for i, touched in enumerate(ops)))


def costs(graph: StepGraph, workspace: dict[int, int] | None = None) -> Costs:
    ops = tuple(OpCost(1.0, (workspace or {}).get(i, 0) * K64) for i in range(len(graph.ops)))
    return Costs(ops, (Home("host", None, 1e6, 1e6),))


def decisions_of(graph: StepGraph, room: int, reach: float = 1.5, persist: bool = True) -> list[tuple[int, ...]]:
    """Return storage, start, end, release and fetch of each offloaded gap."""
    plan = window(graph, costs(graph), room * K64, reach=reach, persist=persist)
    return [(d.gap.storage, d.gap.start, d.gap.end, d.release_by, d.fetch_at) for d in plan.decisions]


def chain() -> StepGraph:
    forward: list[Touched] = [((), (), (0,)), *(((i - 1,), (), (i,)) for i in range(1, 4))]
    return step([(ACTIVATION, 1)] * 4, [*forward, *(((i,), (), ()) for i in reversed(range(4)))])


def test_fitting_step_has_no_evictions() -> None:
    assert decisions_of(chain(), 4) == []


def test_oldest_copy_out_is_awaited_when_its_room_is_needed() -> None:
    assert decisions_of(chain(), 3) == [(0, 1, 7, 3, 5)]
    assert decisions_of(chain(), 2) == [(0, 1, 7, 2, 6), (1, 2, 6, 3, 5)]


def test_narrow_window_fetches_no_earlier_than_its_reach() -> None:
    # 1.8 units: the one of the op itself, and less than a second one.
    assert decisions_of(chain(), 3, reach=0.6) == [(0, 1, 7, 3, 7)]
    assert decisions_of(chain(), 3, reach=1.0) == [(0, 1, 7, 3, 5)]


def test_copy_out_is_cancelled_if_its_storage_reenters_the_window() -> None:
    # After op 0 the window (1.2 units) ends before op 2, so s0 starts its copy out; no op before op 2 needs its room.
    graph = step([(ACTIVATION, 1), (ACTIVATION, 1)], [((), (), (0,)), ((), (), (1,)), ((0,), (), ()), ((1,), (), ())])
    assert decisions_of(graph, 2, reach=0.6) == []


@pytest.mark.parametrize("by_workspace", [False, True])
def test_prefetches_are_cancelled_if_an_op_needs_the_room(by_workspace: bool) -> None:
    # The results of the first two ops are in the window until op 6, and op 4 needs two units.
    makes = () if by_workspace else (2,)
    idle: Touched = ((), (), ())
    ops: list[Touched] = [((), (), (0,)), ((), (), (1,)), idle, idle, ((), (), makes), idle, ((0, 1), (), ())]
    graph = step([(ACTIVATION, 1), (ACTIVATION, 1), (ACTIVATION, 2)], ops)
    step_costs = costs(graph, {4: 2} if by_workspace else {})
    for room, evicted in ((4, ()), (3, (1,)), (2, (0, 1))):
        plan = window(graph, step_costs, room * K64, reach=4.0)
        # Copied out from the start, awaited at op 4, and fetched from op 5 on.
        assert [(d.gap.storage, d.release_by, d.fetch_at) for d in plan.decisions] == [(s, 4, 5) for s in evicted]
    with pytest.raises(BudgetError, match="op4"):
        window(graph, step_costs, K64)


def parameters() -> StepGraph:
    ops: list[Touched] = [((0,), (), (2,)), ((1, 2), (), ()), ((1, 2), (1,), ()), ((0,), (0,), ())]
    return step([(PARAMETER, 1), (PARAMETER, 1), (ACTIVATION, 1)], ops)


def test_persist_keeps_residency_over_the_end_of_a_step() -> None:
    assert decisions_of(parameters(), 2) == [(0, 0, 3, 1, 3), (1, 2, 5, 4, 5)]
    assert decisions_of(parameters(), 3) == []
    assert decisions_of(parameters(), 3, persist=False) == [(0, 3, 4, 4, 4), (1, 2, 5, 4, 4)]


def test_dead_storage_frees_its_room_once_its_copy_is_done() -> None:
    # The last use of the parameter is op 1, and the result of op 2 needs most of the room.
    ops: list[Touched] = [((0,), (), ()), ((0,), (0,), ()), ((), (), (1,)), ((1,), (), ())]
    graph = step([(PARAMETER, 2), (ACTIVATION, 3)], ops)
    assert decisions_of(graph, 4, persist=False) == [(0, 1, 4, 2, 4)]


def test_room_is_free_before_an_overwriting_use() -> None:
    # s0 is read by op 0 and overwritten by op 3; op 1 in between makes s1, which needs all the room.
    ops: list[Touched] = [((0,), (), ()), ((), (), (1,)), ((1,), (), ()), ((), (0,), ()), ((0,), (), ())]
    graph = step([(BUFFER, 2), (ACTIVATION, 3)], ops)
    assert decisions_of(graph, 3) == []
    assert decisions_of(graph, 3, persist=False) == [(0, 4, 5, 5, 5)]


def test_evicted_storage_is_not_fetched_to_be_overwritten() -> None:
    # The gap over the end of the step is offloaded, since op 2 needs the room. It ends with the overwriting use.
    ops: list[Touched] = [((), (0,), ()), ((0,), (), ()), ((), (), (1,)), ((1,), (), ())]
    graph = step([(BUFFER, 2), (ACTIVATION, 3)], ops)
    assert decisions_of(graph, 3) == [(0, 1, 4, 2, 4)]
    assert decisions_of(graph, 3, persist=False) == [(0, 1, 4, 2, 4)]
    step_costs = costs(graph)
    planned = plan_step(graph, step_costs, 3 * K64, "window")
    validate(graph, planned.program, 3 * K64, step_costs)
    assert not any(isinstance(instruction, CopyIn) for instruction in planned.program.instructions)


def test_window_fields_reach_the_plan() -> None:
    graph = chain()
    step_costs = costs(graph)
    for policy, fetch in ((Window(), 5), (Window(reach=0.6), 7)):
        planned = plan_step(graph, step_costs, 3 * K64, policy)
        validate(graph, planned.program, 3 * K64, step_costs)
        assert planned.plan.policy == "window"
        assert [d.fetch_at for d in planned.plan.decisions] == [fetch]
    two_homes = Costs(step_costs.ops, (*step_costs.homes, Home("disk", None, 1e6, 1e6)))
    assert [d.home for d in plan_step(graph, two_homes, 3 * K64, Window()).plan.decisions] == [1]
