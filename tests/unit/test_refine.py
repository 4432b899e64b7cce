"""Costs from measured steps: what copies and ops took from each other is taken off again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outofcore.costs import Costs, Home, OpCost
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.profiling.refine import is_off, refined
from outofcore.program import Block, CopyIn, CopyOut, Program, Queue, Run, Timeline, Wait
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


def test_a_prediction_is_off_beyond_a_tenth_of_the_median() -> None:
    def steps(*seconds: float) -> list[Timeline]:
        return [Timeline((), (), s) for s in seconds]

    assert not is_off(1.0, steps(1.09, 0.5, 5.0))
    assert is_off(1.0, steps(1.11, 1.11, 1.0))
    assert is_off(1.0, steps(0.8, 0.8, 1.0))


def test_steps_as_foretold_change_nothing() -> None:
    timeline = simulate(GRAPH, COSTS, PROGRAM)
    found = refined(COSTS, PROGRAM, [timeline], MOVED)
    for before, after in zip(COSTS.ops, found.ops, strict=True):
        assert after.seconds == pytest.approx(before.seconds)
        assert after.workspace_bytes == before.workspace_bytes
    home = found.homes[0]
    assert (home.bytes_per_s_out, home.bytes_per_s_in) == pytest.approx((32.0 * MIB, 32.0 * MIB))
    assert replace(home, bytes_per_s_out=HOME.bytes_per_s_out, bytes_per_s_in=HOME.bytes_per_s_in) == HOME


def test_slower_ops_and_copies_are_found() -> None:
    truth = Costs(
        (OpCost(2.0), OpCost(0.5), OpCost(3.0, 4096)),
        (replace(HOME, bytes_per_s_out=16.0 * MIB, bytes_per_s_in=8.0 * MIB),),
    )
    timelines = [simulate(GRAPH, truth, PROGRAM)] * 3
    found = refined(COSTS, PROGRAM, timelines, MOVED)
    assert [cost.seconds for cost in found.ops] == pytest.approx([2.0, 0.5, 3.0])
    assert found.homes[0].bytes_per_s_out == pytest.approx(16.0 * MIB)
    assert found.homes[0].bytes_per_s_in == pytest.approx(8.0 * MIB)


def test_the_median_of_steps_counts() -> None:
    usual = simulate(GRAPH, COSTS, PROGRAM)
    slow = simulate(GRAPH, replace(COSTS, ops=(OpCost(50.0),) * 3), PROGRAM)
    found = refined(COSTS, PROGRAM, [usual, slow, usual], MOVED)
    assert [cost.seconds for cost in found.ops] == pytest.approx([1.0, 1.0, 1.0])


def test_few_bytes_and_the_callers_copies_say_nothing_of_a_link() -> None:
    timeline = simulate(GRAPH, replace(COSTS, homes=(replace(HOME, bytes_per_s_out=1.0 * MIB),)), PROGRAM)
    found = refined(COSTS, PROGRAM, [timeline], frozenset())
    assert found.homes == COSTS.homes


def test_without_a_home_ops_are_refined_alone() -> None:
    program = Program((Run(0, (0,), None), Run(1, (1,), None), Run(2, (0,), None)), PROGRAM.blocks, 64 * MIB)
    timeline = Timeline((0.0, 2.0, 3.0), (2.0, 3.0, 7.0), 7.0)
    found = refined(Costs(COSTS.ops), program, [timeline], MOVED)
    assert [cost.seconds for cost in found.ops] == [2.0, 1.0, 4.0]
    assert found.homes == ()
