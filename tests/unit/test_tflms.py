"""Tests of the swaps of TFLMS, their times, and the tuning of its three distances."""

import pytest

from outofcore.costs import Costs, Home, OpCost
from outofcore.errors import BudgetError
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.plan import Decision, Gap, Residency
from outofcore.planning import in_core_budget, plan_step
from outofcore.planning.baselines.tflms import TFLMS, Mode, Rewriting, tflms
from outofcore.validator import validate

K64 = 64 * 1024


def graph_with_uses(*uses: int, count: int = 12) -> StepGraph:
    """Return a graph in which op ``uses[0]`` makes storage 0 and the other ``uses`` read it."""
    storages = [Storage(0, K64, StorageKind.ACTIVATION, "x")]
    storages += [Storage(1 + i, K64, StorageKind.ACTIVATION, f"own{i}") for i in range(count)]
    ops = [Op(i, "op", (0,) * (i in uses[1:]), (), (1 + i, *((0,) * (i == uses[0])))) for i in range(count)]
    return StepGraph(tuple(storages), tuple(ops))


def costs(graph: StepGraph, rate: float = K64) -> Costs:
    return Costs(tuple(OpCost(1.0) for _ in graph.ops), (Home("host", None, rate, rate),))


def decisions_of(graph: StepGraph, threshold: int, ahead: int, group: int, mode: Mode = 1) -> list[Decision]:
    return list(Rewriting.of(graph, costs(graph)).decisions(threshold, ahead, group, mode))


def offload(start: int, end: int, release: int, fetch: int) -> Decision:
    return Decision(Gap(0, start, end), Residency.OFFLOAD, release, fetch)


def test_only_consumers_beyond_the_threshold_are_swapped_in() -> None:
    graph = graph_with_uses(1, 4, 9)
    assert decisions_of(graph, 3, 1, 0) == [offload(4, 9, 5, 8)]
    assert decisions_of(graph, 2, 1, 0) == [offload(1, 4, 2, 3), offload(4, 9, 5, 8)]
    assert decisions_of(graph, 8, 1, 0) == []


def test_distance_counts_from_the_last_writer() -> None:
    graph = graph_with_uses(1, 4, 9)
    ops = [Op(4, "relu_", (0,), (0,), ()) if op.id == 4 else op for op in graph.ops]
    written = StepGraph(graph.storages, tuple(ops))
    assert decisions_of(written, 5, 1, 0) == []
    assert decisions_of(graph, 5, 1, 0) == [offload(4, 9, 5, 8)]


def test_swap_in_starts_ahead_and_serves_a_group() -> None:
    graph = graph_with_uses(0, 5, 7, 11)
    assert decisions_of(graph, 4, 3, 0) == [offload(0, 5, 1, 2), offload(5, 7, 6, 6), offload(7, 11, 8, 8)]
    assert decisions_of(graph, 4, 3, 2) == [offload(0, 5, 1, 2), offload(7, 11, 8, 8)]
    # The distance is to the previous consumer, so groups grow: op 11 is 6 ops from the first consumer.
    assert decisions_of(graph, 4, 3, 3) == [offload(0, 5, 1, 2), offload(7, 11, 8, 8)]
    assert decisions_of(graph, 4, 3, 4) == [offload(0, 5, 1, 2)]


def test_near_consumers_are_in_no_group() -> None:
    graph = graph_with_uses(0, 3, 5, 8)
    # Ops 3 and 5 find the bytes on the device; op 8 is far, and does not share its swap-in with them.
    assert decisions_of(graph, 5, 1, 9) == [offload(5, 8, 6, 7)]


def test_each_side_can_be_synchronous() -> None:
    graph = graph_with_uses(0, 5, 11)
    slow = costs(graph, K64 / 2)  # two seconds a copy
    by_mode = {mode: Rewriting.of(graph, slow).decisions(0, 3, 0, mode) for mode in (0, 1, 2, 3)}
    assert by_mode[0] == (offload(0, 5, 2, 2), offload(5, 11, 6, 8))
    assert by_mode[1] == (offload(0, 5, 1, 2), offload(5, 11, 6, 8))
    assert by_mode[2] == (offload(0, 5, 3, 5), offload(5, 11, 6, 11))
    assert by_mode[3] == (offload(0, 5, 1, 5), offload(5, 11, 6, 11))


def test_room_is_free_after_the_copy_or_at_once_if_clean() -> None:
    graph = graph_with_uses(0, 5, 11)
    # A copy takes one second, as each op does.
    decisions = decisions_of(graph, 0, 1, 0, mode=0)
    assert decisions == [offload(0, 5, 2, 4), offload(5, 11, 6, 10)]


def wide(layers: int = 8) -> StepGraph:
    storages = [Storage(i, 4 * K64, StorageKind.ACTIVATION, f"x{i}") for i in range(layers)]
    ops = [Op(0, "first", (), (), (0,)), *(Op(i, "layer", (i - 1,), (), (i,)) for i in range(1, layers))]
    ops += [Op(layers + i, "back", (layers - 1 - i,), (), ()) for i in range(layers)]
    return StepGraph(tuple(storages), tuple(ops))


def test_largest_feasible_threshold_swaps_least() -> None:
    graph = wide()
    step_costs = costs(graph, 1e9)
    all_bytes = 8 * 4 * K64
    assert tflms(graph, step_costs, all_bytes).decisions == ()
    smallest = tflms(graph, step_costs, all_bytes - K64, TFLMS(mode=1))
    # The storage with the most distant reuse is swapped.
    assert [d.gap.storage for d in smallest.decisions] == [0]
    smaller = tflms(graph, step_costs, all_bytes // 2, TFLMS(mode=1))
    assert len(smaller.decisions) > 1
    assert min(d.gap.end - d.gap.start for d in smaller.decisions) > 4
    with pytest.raises(BudgetError):
        tflms(graph, step_costs, 4 * K64)
    with pytest.raises(BudgetError):
        tflms(graph, Costs(step_costs.ops), all_bytes - K64)


def test_tflms_is_a_policy() -> None:
    graph = wide(12)
    step_costs = costs(graph, 1e6)
    budget = in_core_budget(graph, step_costs) * 2 // 3
    planned = plan_step(graph, step_costs, budget, "tflms")
    validate(graph, planned.program, budget, step_costs)
    assert planned.plan.policy == "tflms" and planned.plan.decisions


def test_modes_are_tried_in_order_and_fixed_fields_are_kept() -> None:
    graph = wide()
    step_costs, budget = costs(graph, 1e5), 5 * 4 * K64
    # Copies out take so long that their room is free too late, unless ops wait for it.
    for mode in (0, 2):
        with pytest.raises(BudgetError):
            tflms(graph, step_costs, budget, TFLMS(mode=mode))
    assert tflms(graph, step_costs, budget) == tflms(graph, step_costs, budget, TFLMS(mode=1))
    by_hand = TFLMS(threshold=4, ahead=2, group=0, mode=1)
    assert tflms(graph, step_costs, budget, by_hand).decisions == Rewriting.of(graph, step_costs).decisions(4, 2, 0, 1)
    with pytest.raises(BudgetError):
        tflms(graph, step_costs, budget, TFLMS(threshold=len(graph.ops)))
