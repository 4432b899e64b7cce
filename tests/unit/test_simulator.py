"""Tests of simulated times: worked out by hand, and properties of every program."""

from __future__ import annotations

from dataclasses import replace

import pytest
from effort import examples
from hypothesis import HealthCheck, given, settings
from strategies import naive_programs

from outofcore.costs import Costs, Home, OpCost
from outofcore.errors import ValidationError
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.program import Block, CopyIn, CopyOut, Program, Queue, Run, Timeline, Wait, queue_of
from outofcore.simulator import Stall, resident_bytes, simulate, stalls

GRAPH = StepGraph(
    (
        Storage(0, 100, StorageKind.PARAMETER),
        Storage(1, 40, StorageKind.INPUT),
        Storage(2, 60, StorageKind.ACTIVATION),
    ),
    (Op(0, "double", (1,), (), (2,)), Op(1, "idle", (), (), ()), Op(2, "update", (0, 2), (0,), ())),
)
# A byte takes half a second out and a quarter of a second in; each copy one second more. The far home is half as fast.
NEAR = Home("near", None, bytes_per_s_out=2.0, bytes_per_s_in=4.0, latency_s=1.0)
FAR = Home("far", None, bytes_per_s_out=1.0, bytes_per_s_in=2.0, latency_s=0.0)
COSTS = Costs((OpCost(5.0), OpCost(7.0), OpCost(11.0)), (NEAR, FAR))
PROGRAM = Program(
    (
        CopyIn(1, 0),  # 0 to 11
        Run(0, (1, 2), waits=(Wait(Queue.COPY_IN, 1),)),  # 11 to 16
        CopyIn(0, 0),  # 11 to 37
        Run(1, ()),  # 16 to 23
        Run(2, (0, 2), waits=(Wait(Queue.COPY_IN, 2), Wait(Queue.COMPUTE, 2))),  # 37 to 48
        CopyOut(0, 1, (Wait(Queue.COMPUTE, 3),)),  # 48 to 99
    ),
    (Block(0, 0, 128, 2, 6), Block(1, 1, 64, 0, 2), Block(2, 2, 64, 1, 5)),
    results=(0,),
)
TIMELINE = Timeline((0.0, 11.0, 11.0, 16.0, 37.0, 48.0), (11.0, 16.0, 37.0, 23.0, 48.0, 99.0), 99.0)


def test_instruction_times() -> None:
    assert simulate(GRAPH, COSTS, PROGRAM) == TIMELINE


def test_links_to_different_homes_overlap() -> None:
    first, double, second, idle, update, out = PROGRAM.instructions
    elsewhere = replace(
        PROGRAM,
        instructions=(
            first,  # 0 to 11
            double,  # 11 to 16
            replace(second, home=1),  # 0 to 50
            idle,  # 16 to 23
            replace(update, waits=(Wait(Queue.COPY_IN, 1, 1),)),  # 50 to 61
            replace(out, home=1),  # 61 to 161
        ),
    )
    timeline = simulate(GRAPH, COSTS, elsewhere)
    assert timeline.starts == (0.0, 11.0, 0.0, 16.0, 50.0, 61.0)
    assert timeline.ends == (11.0, 16.0, 50.0, 23.0, 61.0, 161.0)
    assert stalls(elsewhere, timeline)[-1] == Stall(4, 27.0, 2)


def test_unknown_home_is_refused() -> None:
    misdirected = replace(PROGRAM, instructions=(replace(PROGRAM.instructions[0], home=2), *PROGRAM.instructions[1:]))
    with pytest.raises(ValidationError, match="name no home for it"):
        simulate(GRAPH, COSTS, misdirected)


def test_copy_time_depends_on_the_storage_not_the_block() -> None:
    wide = replace(PROGRAM, blocks=tuple(replace(b, bytes=4096) for b in PROGRAM.blocks))
    assert simulate(GRAPH, COSTS, wide) == TIMELINE


def test_empty_step_takes_no_time() -> None:
    assert simulate(StepGraph((), ()), Costs(()), Program((), ())) == Timeline((), (), 0.0)


def test_forward_pointing_waits_are_followed() -> None:
    """Not a valid program, but its queues can run it: the order in the list binds only within a queue."""
    copy, run = PROGRAM.instructions[:2]
    turned = replace(PROGRAM, instructions=(run, copy, *PROGRAM.instructions[2:]))
    assert simulate(GRAPH, COSTS, turned) == Timeline(
        (11.0, 0.0, 11.0, 16.0, 37.0, 48.0), (16.0, 11.0, 37.0, 23.0, 48.0, 99.0), 99.0
    )


def test_deadlock_error_names_the_instructions() -> None:
    instructions = (
        Run(1, (), waits=(Wait(Queue.COPY_OUT, 1),)),
        CopyOut(0, 0, (Wait(Queue.COPY_IN, 1),)),
        CopyIn(0, 0, (Wait(Queue.COMPUTE, 1),)),
    )
    with pytest.raises(
        ValidationError,
        match=r"instruction 0 \(compute\) waits for instruction 1 \(copy-out\); instruction 1 \(copy-out\) waits for "
        r"instruction 2 \(copy-in\); instruction 2 \(copy-in\) waits for instruction 0 \(compute\)",
    ):
        simulate(GRAPH, COSTS, replace(PROGRAM, instructions=instructions))


def test_instruction_waiting_for_itself_deadlocks() -> None:
    with pytest.raises(ValidationError, match=r"instruction 0 .* waits for instruction 0 "):
        simulate(GRAPH, COSTS, replace(PROGRAM, instructions=(Run(1, (), waits=(Wait(Queue.COMPUTE, 1),)),)))


def test_wait_beyond_the_end_of_a_queue_deadlocks() -> None:
    instructions = (CopyIn(0, 0), Run(1, (), waits=(Wait(Queue.COPY_IN, 2),)))
    with pytest.raises(ValidationError, match=r"instruction 1 .* waits for 2 instructions of copy-in, which has 1"):
        simulate(GRAPH, COSTS, replace(PROGRAM, instructions=instructions))


def test_copies_need_a_home() -> None:
    with pytest.raises(ValidationError, match="instruction 2 copies into a block of storage 0, but the costs name no"):
        simulate(GRAPH, replace(COSTS, homes=()), PROGRAM)
    workspace = replace(PROGRAM, blocks=(Block(0, None, 8, 0, 1),), instructions=(CopyOut(0, 0),))
    with pytest.raises(ValidationError, match="instruction 0 copies out of a workspace"):
        simulate(GRAPH, COSTS, workspace)


def test_stalls_name_their_copies() -> None:
    assert stalls(PROGRAM, TIMELINE) == [Stall(1, 11.0, 0), Stall(4, 14.0, 2)]


def test_stall_is_attributed_to_the_last_copy() -> None:
    instructions = (
        CopyIn(1, 0),
        CopyOut(0, 0),
        Run(1, (), waits=(Wait(Queue.COPY_IN, 1), Wait(Queue.COPY_OUT, 1))),
        Run(1, (), waits=(Wait(Queue.COPY_IN, 1),)),
    )
    program = replace(PROGRAM, instructions=instructions)
    timeline = simulate(GRAPH, COSTS, program)
    assert timeline.ends == (11.0, 51.0, 58.0, 65.0)
    assert stalls(program, timeline) == [Stall(2, 51.0, 1)]
    # A measured run may start late for a reason outside the program.
    late = Timeline((0.0, 0.0, 51.0, 60.0), (11.0, 51.0, 58.0, 67.0), 67.0)
    assert stalls(program, late) == [Stall(2, 51.0, 1), Stall(3, 2.0, None)]


def test_program_without_copies_has_no_stalls() -> None:
    program = Program((Run(1, ()), Run(1, ())), ())
    assert stalls(program, simulate(GRAPH, COSTS, program)) == []


def test_resident_bytes_follow_the_blocks() -> None:
    # Input 0 to 16; parameter 11 to 99; activation 11 to 48.
    assert resident_bytes(PROGRAM, TIMELINE) == [(0.0, 64), (11.0, 256), (16.0, 192), (48.0, 128), (99.0, 0)]


def test_resident_bytes_of_wrapping_blocks() -> None:
    whole = replace(PROGRAM, blocks=(Block(0, 0, 128, 0, 0, wraps=True), *PROGRAM.blocks[1:]))
    levels = [(0.0, 192), (11.0, 256), (16.0, 192), (48.0, 128)]
    assert resident_bytes(whole, TIMELINE) == levels
    # Held from the start to its first use, and from its second use to the end.
    instructions = (
        CopyOut(0, 0),  # 0 to 51
        Run(1, ()),  # 0 to 7
        CopyIn(0, 0, (Wait(Queue.COPY_OUT, 1),)),  # 51 to 77
        Run(1, (), waits=(Wait(Queue.COPY_IN, 1),)),  # 77 to 84
    )
    with_eviction = Program(instructions, (Block(0, 0, 128, 2, 1, wraps=True),))
    timeline = simulate(GRAPH, COSTS, with_eviction)
    # It is evicted and fetched at one instant, so the level does not change.
    assert resident_bytes(with_eviction, timeline) == [(0.0, 128)]
    later = Timeline((0.0, 0.0, 60.0, 86.0), (51.0, 7.0, 86.0, 93.0), 93.0)
    assert resident_bytes(with_eviction, later) == [(0.0, 128), (51.0, 0), (60.0, 128)]


def test_workspace_is_resident_while_its_op_runs() -> None:
    program = Program((Run(1, ()), Run(1, (), workspace=0)), (Block(0, None, 32, 1, 2),))
    assert resident_bytes(program, simulate(GRAPH, COSTS, program)) == [(0.0, 0), (7.0, 32), (14.0, 0)]


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(naive_programs())
def test_every_simulated_program_is_consistent(case: tuple[StepGraph, Costs, Program]) -> None:
    graph, costs, program = case
    timeline = simulate(graph, costs, program)
    assert timeline.step_seconds == max(timeline.ends)
    _queues_and_waits_hold(program, timeline)
    # The resident bytes are within the arena, and wrapping blocks are resident at both ends.
    levels = resident_bytes(program, timeline)
    wrapped = sum(b.bytes for b in program.blocks if b.wraps)
    assert max(level for _, level in levels) <= program.arena_bytes
    assert levels[-1][1] == wrapped
    # Compute time is the sum of ops and stalls, and every simulated stall has a cause.
    all_stalls = stalls(program, timeline)
    runs = [i for i in program.instructions if isinstance(i, Run)]
    busy = sum(costs.ops[run.op].seconds for run in runs) + sum(stall.seconds for stall in all_stalls)
    last = max(end for end, i in zip(timeline.ends, program.instructions, strict=True) if isinstance(i, Run))
    assert busy == pytest.approx(last, abs=1e-9)
    assert all(stall.waits_for is not None for stall in all_stalls)


def _queues_and_waits_hold(program: Program, timeline: Timeline) -> None:
    ends: dict[Queue, list[float]] = {queue: [0.0] for queue in Queue}
    for instruction, start, end in zip(program.instructions, timeline.starts, timeline.ends, strict=True):
        queue = queue_of(instruction)
        ready = [ends[queue][-1], *(ends[wait.queue][wait.count] for wait in instruction.waits)]
        assert start == max(ready)
        ends[queue].append(end)
