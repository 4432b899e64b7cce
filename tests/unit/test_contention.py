"""Tests of instructions that slow each other down: times worked out by hand, and general properties."""

from __future__ import annotations

from dataclasses import replace

import pytest
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import naive_programs

from outofcore.costs import Costs, Home, OpCost
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.program import Block, CopyIn, CopyOut, Program, Queue, Run, Wait
from outofcore.simulator import simulate

GRAPH = StepGraph(
    tuple(Storage(i, 8, StorageKind.PARAMETER) for i in range(2)), (Op(0, "a", (), (), ()), Op(1, "b", (), (), ()))
)
BLOCKS = tuple(Block(i, i, 64, 0, 0, True, 64 * i) for i in range(2))
PLAIN = Home("disk", None, 1.0, 2.0)  # 8 s out, 4 s in


def times(home: Home, *instructions: Run | CopyOut | CopyIn, seconds: float = 6.0) -> list[tuple[float, float]]:
    costs = Costs((OpCost(seconds), OpCost(seconds)), (home,))
    timeline = simulate(GRAPH, costs, Program(instructions, BLOCKS, 128))
    assert timeline.step_seconds == max(timeline.ends)
    return [(pytest.approx(a), pytest.approx(b)) for a, b in zip(timeline.starts, timeline.ends, strict=True)]  # type: ignore[misc]


def test_copies_share_one_link() -> None:
    home = replace(PLAIN, contention=1.0)
    # Half the speed for 8 s; then the copy out has 4 s left, alone.
    assert times(home, CopyOut(0, 0), CopyIn(1, 0)) == [(0, 12), (0, 8)]


def test_copies_slow_each_other_a_little() -> None:
    assert times(replace(PLAIN, contention=0.4), CopyOut(0, 0), CopyIn(1, 0)) == [(0, 9), (0, 5)]


def test_copies_slow_each_other_unequally() -> None:
    home = replace(PLAIN, contention=0.8, contention_out=0.75)
    # In at 0.8 of its speed for 5 s; out at 0.4, and its last 6 s alone.
    assert times(home, CopyOut(0, 0), CopyIn(1, 0)) == [(0, 11), (0, 5)]


def test_ops_are_slowed_by_one_copy_and_by_two() -> None:
    home = replace(PLAIN, compute_slowdown=0.5)
    # Two copies for 4 s at half speed, then one for 4 s at two thirds, then 4/3 s alone.
    expected = [(0, 8 + 6 - 2 - 8 / 3), (0, 8), (0, 4)]
    assert times(home, Run(0, ()), CopyOut(0, 0), CopyIn(1, 0)) == expected


def test_position_of_a_copy_in_the_program_does_not_matter() -> None:
    home = replace(PLAIN, contention=0.3, compute_slowdown=0.5)
    run, out, into = Run(0, ()), CopyOut(0, 0), CopyIn(1, 0)
    first = times(home, run, out, into)
    assert times(home, into, out, run) == list(reversed(first))


def test_waiting_instruction_starts_at_the_slowed_end() -> None:
    home = replace(PLAIN, compute_slowdown=1.0)
    waiting = CopyIn(1, 0, (Wait(Queue.COMPUTE, 1),))
    # The first op: 8 s at half speed, 2 s alone; the second: 4 s at half speed, 4 s alone.
    expected = [(0, 10), (0, 8), (10, 14), (10, 18)]
    assert times(home, Run(0, ()), CopyOut(0, 0), waiting, Run(1, ())) == expected


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(naive_programs(), st.floats(0, 1), st.floats(0, 2))
def test_contention_only_delays_and_within_bounds(
    case: tuple[StepGraph, Costs, Program], contention: float, slowdown: float
) -> None:
    graph, costs, program = case
    if not costs.homes:
        return
    plain = simulate(graph, costs, program)
    home = replace(costs.homes[0], contention=contention, compute_slowdown=slowdown)
    slowed = simulate(graph, replace(costs, homes=(home, *costs.homes[1:])), program)
    slack = 1e-9 * max(plain.step_seconds, 1)
    assert slowed == simulate(graph, replace(costs, homes=(home, *costs.homes[1:])), program)
    assert plain.step_seconds - slack <= slowed.step_seconds
    for index, instruction in enumerate(program.instructions):
        max_slowdown = 1 + 2 * slowdown if isinstance(instruction, Run) else 1 / (1 - contention / 2)
        alone = plain.ends[index] - plain.starts[index]
        took = slowed.ends[index] - slowed.starts[index]
        assert alone - slack <= took <= alone * max_slowdown + slack
        assert slowed.ends[index] >= plain.ends[index] - slack
