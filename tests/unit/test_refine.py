"""Tests of costs refined from measured steps: mutual slowdowns of copies and ops are subtracted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import LIMITS

from outofcore.costs import Costs, Home, OpCost
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.program import Block, CopyIn, CopyOut, Program, Queue, Run, Timeline, Wait
from outofcore.refine import find_quiet_steps, is_off, refine_costs
from outofcore.simulator import simulate
from outofcore.units import MIB

HOME = Home("disk", None, 32.0 * MIB, 32.0 * MIB, 0.25, contention=0.5, compute_slowdown=0.2)
COSTS = Costs((OpCost(1.0), OpCost(1.0), OpCost(1.0, 4096)), (HOME,))
GRAPH = StepGraph(
    tuple(Storage(i, 32 * MIB, StorageKind.PARAMETER) for i in range(2)),
    (Op(0, "a", (0,), (0,), ()), Op(1, "b", (1,), (1,), ()), Op(2, "c", (0,), (0,), ())),
)
PROGRAM = Program(
    (
        Run(0, (0,), None),
        CopyOut(0, 1, (Wait(Queue.COMPUTE, 1),)),
        CopyIn(1, 0),
        Run(1, (1,), None),
        Run(2, (0,), None),
    ),
    tuple(Block(i, i, 32 * MIB, 0, 0, True, i * 32 * MIB) for i in range(2)),
    64 * MIB,
)
MOVED = frozenset({0, 1})


def test_prediction_is_off_beyond_a_tenth_of_the_median() -> None:
    def steps(*seconds: float) -> list[Timeline]:
        return [Timeline((), (), s) for s in seconds]

    assert not is_off(1.0, steps(1.09, 0.5, 5.0))
    assert is_off(1.0, steps(1.11, 1.11, 1.0))
    assert is_off(1.0, steps(0.8, 0.8, 1.0))


def test_steps_as_predicted_change_no_cost() -> None:
    timeline = simulate(GRAPH, COSTS, PROGRAM)
    costs = refine_costs(COSTS, PROGRAM, [timeline], MOVED)
    for before, after in zip(COSTS.ops, costs.ops, strict=True):
        assert after.seconds == pytest.approx(before.seconds)
        assert after.workspace_bytes == before.workspace_bytes
    home = costs.homes[0]
    assert (home.bytes_per_s_out, home.bytes_per_s_in) == pytest.approx((32.0 * MIB, 32.0 * MIB))
    assert replace(home, bytes_per_s_out=HOME.bytes_per_s_out, bytes_per_s_in=HOME.bytes_per_s_in) == HOME


def test_slower_ops_and_copies_are_detected() -> None:
    truth = Costs(
        (OpCost(2.0), OpCost(0.5), OpCost(3.0, 4096)),
        (replace(HOME, bytes_per_s_out=16.0 * MIB, bytes_per_s_in=8.0 * MIB),),
    )
    timelines = [simulate(GRAPH, truth, PROGRAM)] * 3
    costs = refine_costs(COSTS, PROGRAM, timelines, MOVED)
    assert [cost.seconds for cost in costs.ops] == pytest.approx([2.0, 0.5, 3.0])
    assert costs.homes[0].bytes_per_s_out == pytest.approx(16.0 * MIB)
    assert costs.homes[0].bytes_per_s_in == pytest.approx(8.0 * MIB)


def test_median_of_steps_counts() -> None:
    usual = simulate(GRAPH, COSTS, PROGRAM)
    slow = simulate(GRAPH, replace(COSTS, ops=(OpCost(50.0),) * 3), PROGRAM)
    costs = refine_costs(COSTS, PROGRAM, [usual, slow, usual], MOVED)
    assert [cost.seconds for cost in costs.ops] == pytest.approx([1.0, 1.0, 1.0])


def test_small_copies_and_copies_of_the_caller_do_not_refine_links() -> None:
    timeline = simulate(GRAPH, replace(COSTS, homes=(replace(HOME, bytes_per_s_out=1.0 * MIB),)), PROGRAM)
    costs = refine_costs(COSTS, PROGRAM, [timeline], frozenset())
    assert costs.homes == COSTS.homes


def test_ops_are_refined_without_a_home() -> None:
    program = Program((Run(0, (0,), None), Run(1, (1,), None), Run(2, (0,), None)), PROGRAM.blocks, 64 * MIB)
    timeline = Timeline((0.0, 2.0, 3.0), (2.0, 3.0, 7.0), 7.0)
    costs = refine_costs(Costs(COSTS.ops), program, [timeline], MOVED)
    assert [cost.seconds for cost in costs.ops] == [2.0, 1.0, 4.0]
    assert costs.homes == ()


# Robust costs

LAYER = 8
MANY = StepGraph(
    tuple(Storage(i, 32 * MIB, StorageKind.PARAMETER) for i in range(2)),
    tuple(Op(i, "layer", (i % 2,), (i % 2,), ()) for i in range(LAYER)),
)
FAMILY = ["layer"] * LAYER
MANY_COSTS = Costs((OpCost(1.0),) * LAYER, (replace(HOME, contention=0.0, compute_slowdown=0.0, latency_s=0.0),))
# Copies of a second each, concurrent with the third, the fifth and the seventh op.
MANY_PROGRAM = Program(
    (
        *(Run(i, (i % 2,), None) for i in range(LAYER)),
        CopyOut(0, 1, (Wait(Queue.COMPUTE, 2),)),
        CopyOut(0, 1, (Wait(Queue.COMPUTE, 4),)),
        CopyOut(0, 1, (Wait(Queue.COMPUTE, 6),)),
    ),
    tuple(Block(i, i, 32 * MIB, 0, 0, True, i * 32 * MIB) for i in range(2)),
    64 * MIB,
)


def slower(costs: Costs, times: float) -> Costs:
    return replace(costs, ops=tuple(OpCost(cost.seconds * times) for cost in costs.ops))


def test_slowdown_by_copies_is_measured_within_a_family() -> None:
    truth = replace(MANY_COSTS, homes=(replace(MANY_COSTS.homes[0], compute_slowdown=0.25),))
    costs = refine_costs(MANY_COSTS, MANY_PROGRAM, [simulate(MANY, truth, MANY_PROGRAM)] * 3, MOVED, FAMILY)
    assert costs.homes[0].compute_slowdown == pytest.approx(0.25, abs=0.02)
    assert [cost.seconds for cost in costs.ops] == pytest.approx([1.0] * LAYER, rel=0.02)
    # A slowdown that was measured too large is corrected, too.
    noisy = replace(MANY_COSTS, homes=(replace(MANY_COSTS.homes[0], compute_slowdown=0.6),))
    costs = refine_costs(noisy, MANY_PROGRAM, [simulate(MANY, MANY_COSTS, MANY_PROGRAM)] * 3, MOVED, FAMILY)
    assert costs.homes[0].compute_slowdown == pytest.approx(0.0, abs=0.02)


def test_op_costs_as_much_as_its_family_unless_an_outlier() -> None:
    seconds = [1.0, 1.1, 0.95, 1.0, 1.05, 2.0, 1.0, 0.9]
    truth = replace(MANY_COSTS, ops=tuple(map(OpCost, seconds)))
    alone = replace(MANY_PROGRAM, instructions=MANY_PROGRAM.instructions[:LAYER])
    costs = refine_costs(MANY_COSTS, alone, [simulate(MANY, truth, alone)] * 3, MOVED, FAMILY)
    assert [cost.seconds for cost in costs.ops] == pytest.approx([1.0] * 5 + [2.0] + [1.0] * 2)


def test_both_runs_of_a_repeated_op_count() -> None:
    program = Program((Run(0, (0,), None), Run(1, (1,), None), Run(0, (0,), None, again=True)), PROGRAM.blocks, 64)
    costs = refine_costs(Costs(COSTS.ops[:2]), program, [Timeline((0.0, 1.0, 3.0), (1.0, 3.0, 6.0), 6.0)], MOVED)
    assert [cost.seconds for cost in costs.ops] == [2.0, 2.0]


@LIMITS
@given(st.lists(st.floats(1.1, 5.0), min_size=1, max_size=6), st.permutations(range(9)))
def test_uniformly_slow_steps_change_no_cost(slow: list[float], order: list[int]) -> None:
    """Three quiet steps suffice: all samples of a noisy step are longer by a common factor."""
    quiet = simulate(GRAPH, COSTS, PROGRAM)

    def scale(times: float) -> Timeline:
        return Timeline(
            tuple(s * times for s in quiet.starts), tuple(s * times for s in quiet.ends), quiet.step_seconds * times
        )

    steps = [quiet] * 3 + [scale(times) for times in slow]
    mixed = [steps[i] for i in order if i < len(steps)]
    assert refine_costs(COSTS, PROGRAM, mixed, MOVED) == refine_costs(COSTS, PROGRAM, [quiet] * 3, MOVED)


@LIMITS
@given(st.floats(0.25, 4.0))
def test_slower_machine_keeps_the_shares_of_ops(times: float) -> None:
    quiet = simulate(GRAPH, COSTS, PROGRAM)
    scaled = Timeline(
        tuple(s * times for s in quiet.starts), tuple(s * times for s in quiet.ends), quiet.step_seconds * times
    )
    before, after = (refine_costs(COSTS, PROGRAM, [timeline] * 3, MOVED) for timeline in (quiet, scaled))
    for first, second in zip(before.ops, after.ops, strict=True):
        assert second.seconds / after.compute_seconds == pytest.approx(first.seconds / before.compute_seconds)


def test_steps_with_slower_ops_are_noisy() -> None:
    quiet = simulate(MANY, MANY_COSTS, MANY_PROGRAM)
    noisy = simulate(MANY, slower(MANY_COSTS, 1.5), MANY_PROGRAM)
    assert find_quiet_steps(MANY_COSTS, MANY_PROGRAM, [quiet, noisy, quiet, noisy]) == [quiet, quiet]
    # A slower link makes steps longer, not noisy.
    waits = replace(MANY_COSTS, homes=(replace(MANY_COSTS.homes[0], bytes_per_s_out=4.0 * MIB),))
    slow = simulate(MANY, waits, MANY_PROGRAM)
    assert slow.step_seconds > 2 * quiet.step_seconds
    assert find_quiet_steps(MANY_COSTS, MANY_PROGRAM, [quiet, slow]) == [quiet, slow]
