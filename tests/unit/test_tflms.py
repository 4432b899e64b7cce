"""Which results TFLMS swaps, when they come back, and how its three distances are tuned."""

import pytest

from outofcore.costs import Costs, Home, OpCost
from outofcore.errors import BudgetError
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.plan import Decision, Gap, Residency
from outofcore.planning import in_core_budget, plan_step
from outofcore.planning.baselines.tflms import TFLMS, Mode, Rewriting, tflms
from outofcore.validator import validate

K64 = 64 * 1024


def made_and_used(*uses: int, count: int = 12) -> StepGraph:
    """One storage, made by the first of these ops and looked at by the others; every op makes one of its own."""
    storages = [Storage(0, K64, StorageKind.ACTIVATION, "x")]
    storages += [Storage(1 + i, K64, StorageKind.ACTIVATION, f"own{i}") for i in range(count)]
    ops = [Op(i, "op", (0,) * (i in uses[1:]), (), (1 + i, *((0,) * (i == uses[0])))) for i in range(count)]
    return StepGraph(tuple(storages), tuple(ops))


def costs(graph: StepGraph, rate: float = K64) -> Costs:
    return Costs(tuple(OpCost(1.0) for _ in graph.ops), (Home("host", None, rate, rate),))


def decided(graph: StepGraph, threshold: int, ahead: int, group: int, mode: Mode = 1) -> list[Decision]:
    return list(Rewriting.of(graph, costs(graph)).decisions(threshold, ahead, group, mode))


def offload(start: int, end: int, release: int, fetch: int) -> Decision:
    return Decision(Gap(0, start, end), Residency.OFFLOAD, release, fetch)


def test_only_consumers_beyond_the_threshold_are_served_by_a_swap_in() -> None:
    graph = made_and_used(1, 4, 9)
    assert decided(graph, 3, 1, 0) == [offload(4, 9, 5, 8)]
    assert decided(graph, 2, 1, 0) == [offload(1, 4, 2, 3), offload(4, 9, 5, 8)]
    assert decided(graph, 8, 1, 0) == []


def test_the_distance_counts_from_the_op_that_wrote_last() -> None:
    graph = made_and_used(1, 4, 9)
    ops = [Op(4, "relu_", (0,), (0,), ()) if op.id == 4 else op for op in graph.ops]
    written = StepGraph(graph.storages, tuple(ops))
    assert decided(written, 5, 1, 0) == []
    assert decided(graph, 5, 1, 0) == [offload(4, 9, 5, 8)]


def test_a_swap_in_starts_so_far_ahead_and_serves_a_group() -> None:
    graph = made_and_used(0, 5, 7, 11)
    assert decided(graph, 4, 3, 0) == [offload(0, 5, 1, 2), offload(5, 7, 6, 6), offload(7, 11, 8, 8)]
    assert decided(graph, 4, 3, 2) == [offload(0, 5, 1, 2), offload(7, 11, 8, 8)]
    # The distance is that to the consumer before, so groups grow: op 11 is 6 ops from the first consumer.
    assert decided(graph, 4, 3, 3) == [offload(0, 5, 1, 2), offload(7, 11, 8, 8)]
    assert decided(graph, 4, 3, 4) == [offload(0, 5, 1, 2)]


def test_near_consumers_are_in_no_group() -> None:
    graph = made_and_used(0, 3, 5, 8)
    # Ops 3 and 5 take the bytes from the device; op 8 is far, and its swap-in is not shared with them.
    assert decided(graph, 5, 1, 9) == [offload(5, 8, 6, 7)]


def test_each_side_can_be_synchronous() -> None:
    graph = made_and_used(0, 5, 11)
    slow = costs(graph, K64 / 2)  # two seconds a copy
    found = {mode: Rewriting.of(graph, slow).decisions(0, 3, 0, mode) for mode in (0, 1, 2, 3)}
    assert found[0] == (offload(0, 5, 2, 2), offload(5, 11, 6, 8))
    assert found[1] == (offload(0, 5, 1, 2), offload(5, 11, 6, 8))
    assert found[2] == (offload(0, 5, 3, 5), offload(5, 11, 6, 11))
    assert found[3] == (offload(0, 5, 1, 5), offload(5, 11, 6, 11))


def test_room_is_counted_on_when_the_copy_should_be_done_and_clean_copies_leave_at_once() -> None:
    graph = made_and_used(0, 5, 11)
    # A copy takes one second, as each op does.
    found = decided(graph, 0, 1, 0, mode=0)
    assert found == [offload(0, 5, 2, 4), offload(5, 11, 6, 10)]


def wide(layers: int = 8) -> StepGraph:
    """Results that wait over the turn, used again in the opposite order."""
    storages = [Storage(i, 4 * K64, StorageKind.ACTIVATION, f"x{i}") for i in range(layers)]
    ops = [Op(0, "first", (), (), (0,)), *(Op(i, "layer", (i - 1,), (), (i,)) for i in range(1, layers))]
    ops += [Op(layers + i, "back", (layers - 1 - i,), (), ()) for i in range(layers)]
    return StepGraph(tuple(storages), tuple(ops))


def test_the_largest_threshold_that_fits_swaps_the_least() -> None:
    graph = wide()
    given = costs(graph, 1e9)
    everything = 8 * 4 * K64
    assert tflms(graph, given, everything).decisions == ()
    least = tflms(graph, given, everything - K64, TFLMS(mode=1))
    # What is used again furthest away goes.
    assert [d.gap.storage for d in least.decisions] == [0]
    less = tflms(graph, given, everything // 2, TFLMS(mode=1))
    assert len(less.decisions) > 1
    assert min(d.gap.end - d.gap.start for d in less.decisions) > 4
    with pytest.raises(BudgetError):
        tflms(graph, given, 4 * K64)
    with pytest.raises(BudgetError):
        tflms(graph, Costs(given.ops), everything - K64)


def test_it_is_a_policy() -> None:
    graph = wide(12)
    given = costs(graph, 1e6)
    budget = in_core_budget(graph, given) * 2 // 3
    planned = plan_step(graph, given, budget, "tflms")
    validate(graph, planned.program, budget, given)
    assert planned.plan.policy == "tflms" and planned.plan.decisions


def test_modes_are_tried_in_order_and_what_is_given_is_not_tuned() -> None:
    graph = wide()
    given, budget = costs(graph, 1e5), 5 * 4 * K64
    # Copies-out take so long that their room comes too late, unless ops wait for it.
    for mode in (0, 2):
        with pytest.raises(BudgetError):
            tflms(graph, given, budget, TFLMS(mode=mode))
    assert tflms(graph, given, budget) == tflms(graph, given, budget, TFLMS(mode=1))
    by_hand = TFLMS(threshold=4, ahead=2, group=0, mode=1)
    assert tflms(graph, given, budget, by_hand).decisions == Rewriting.of(graph, given).decisions(4, 2, 0, 1)
    with pytest.raises(BudgetError):
        tflms(graph, given, budget, TFLMS(threshold=len(graph.ops)))
