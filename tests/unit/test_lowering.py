"""Tests of the exact instructions to which small plans are lowered."""

from dataclasses import replace
from itertools import accumulate

import pytest
from examples import LOSS, A, G, W, X, step

from outofcore.costs import Costs, Home, OpCost
from outofcore.errors import GraphError
from outofcore.graph import StepGraph
from outofcore.lowering import lower, wire
from outofcore.plan import Decision, Gap, Plan, Residency
from outofcore.planning import place
from outofcore.program import CopyIn, CopyOut, Instruction, Queue, Run, Wait
from outofcore.units import PAGE_BYTES
from outofcore.validator import validate


def costs(count: int = 4) -> Costs:
    return Costs(tuple(OpCost(1.0) for _ in range(count)), (Home("disk", None, 1e6, 1e6),))


def program_of(graph: StepGraph, *decisions: Decision) -> tuple[Instruction, ...]:
    program = wire(graph, place(lower(graph, costs(len(graph.ops)), Plan("test", 0, decisions))))
    validate(graph, program, program.arena_bytes, costs(len(graph.ops)))
    return program.instructions


def offload(storage: int, start: int, end: int, release: int, fetch: int) -> Decision:
    return Decision(Gap(storage, start, end), Residency.OFFLOAD, release, fetch)


# Blocks: w wraps (0), x (1), a (2), loss (3), gradient (4). Only x is copied in, and only the loss is copied out.
WITHOUT_EVICTION: tuple[Instruction, ...] = (
    CopyIn(1, 0),
    Run(0, (1, 0, 2), None, (Wait(Queue.COPY_IN, 1),)),
    Run(1, (2, 3)),
    CopyOut(3, 1, (Wait(Queue.COMPUTE, 2),)),
    Run(2, (2, 1, 4)),
    Run(3, (0, 4)),
)


def test_plan_without_decisions() -> None:
    assert program_of(step()) == WITHOUT_EVICTION


def test_visible_gradient_is_copied_home_or_stays() -> None:
    graph = replace(step(), outputs=(LOSS, G))
    assert program_of(graph) == (*WITHOUT_EVICTION, CopyOut(4, 1, (Wait(Queue.COMPUTE, 3),)))
    program = wire(graph, place(lower(graph, costs(), Plan("test", 0, (), staying=(G,)))))
    validate(graph, program, program.arena_bytes, costs())
    assert (program.instructions, program.results, program.staying) == (WITHOUT_EVICTION, (LOSS,), (G,))
    assert program.blocks[4].dies == len(WITHOUT_EVICTION)


def test_only_visible_gradients_may_stay() -> None:
    graph = replace(step(), outputs=(LOSS, G))
    for storage in (LOSS, W, A, 17):
        with pytest.raises(GraphError, match="not a gradient that the step creates and outputs"):
            lower(graph, costs(), Plan("test", 0, (), staying=(storage,)))
    with pytest.raises(GraphError, match="cannot stay on the device: a decision evicts it"):
        lower(graph, costs(), Plan("test", 0, (offload(G, 2, 3, 3, 3),), staying=(G,)))


@pytest.mark.parametrize("release", [3, 4])
def test_storage_holds_its_room_until_released(release: int) -> None:
    graph = replace(step(), outputs=(LOSS, A))
    program = lower(graph, costs(), Plan("test", 0, (offload(A, 2, 4, release, 4),)))
    [copy_index] = [i for i, x in enumerate(program.instructions) if isinstance(x, CopyOut) and x.block == 2]
    assert program.blocks[2].dies == (copy_index + 1 if release == 3 else len(program.instructions))


def test_visible_storage_goes_to_the_first_home() -> None:
    graph = replace(step(), outputs=(LOSS, A))
    decision = offload(A, 2, 4, 3, 4)
    for wrong in (replace(decision, home=1), replace(decision, residency=Residency.RECOMPUTE)):
        with pytest.raises(GraphError, match="outputs and changed inputs must go to the first home"):
            lower(graph, costs(), Plan("test", 0, (wrong,)))


def test_input_is_dropped_and_fetched_without_a_copy_out() -> None:
    assert program_of(step(), offload(X, 0, 2, 1, 2)) == (
        CopyIn(1, 0),
        Run(0, (1, 0, 2), None, (Wait(Queue.COPY_IN, 1),)),
        Run(1, (2, 3)),
        CopyOut(3, 1, (Wait(Queue.COMPUTE, 2),)),
        # Its new block is where the old one was, which the first op was the last to read.
        CopyIn(4, 0, (Wait(Queue.COMPUTE, 1),)),
        Run(2, (2, 4, 5), None, (Wait(Queue.COPY_IN, 2),)),
        Run(3, (0, 5)),
    )


def test_changed_storage_is_copied_out_before_it_is_copied_in() -> None:
    assert program_of(step(), offload(A, 1, 2, 2, 2)) == (
        CopyIn(1, 0),
        Run(0, (1, 0, 2), None, (Wait(Queue.COPY_IN, 1),)),
        Run(1, (2, 3)),
        CopyOut(3, 1, (Wait(Queue.COMPUTE, 2),)),
        CopyOut(2, 1),
        CopyIn(4, 1, (Wait(Queue.COPY_OUT, 2),)),
        Run(2, (4, 1, 5), None, (Wait(Queue.COPY_IN, 2),)),
        Run(3, (0, 5)),
    )


def test_copy_in_waits_for_its_copy_out_at_any_offset() -> None:
    step_costs = costs()
    lowered = lower(step(), step_costs, Plan("test", 0, (offload(A, 1, 2, 2, 2),)))
    offsets = accumulate((block.bytes for block in lowered.blocks), initial=0)
    blocks = tuple(replace(block, offset=offset) for block, offset in zip(lowered.blocks, offsets, strict=False))
    program = wire(
        step(), replace(lowered, blocks=blocks, arena_bytes=sum(block.bytes for block in blocks)), step_costs
    )
    assert program.instructions[5] == CopyIn(4, 1, (Wait(Queue.COPY_OUT, 2),))
    validate(step(), program, program.arena_bytes, step_costs)


def test_parameter_at_home_between_steps_is_written_back() -> None:
    # Fetched for op 0, it is dropped without a copy and fetched for the update; the new version is copied home.
    assert program_of(step(), offload(W, 0, 3, 1, 3), offload(W, 3, 4, 4, 4)) == (
        CopyIn(0, 0),
        CopyIn(1, 0),
        Run(0, (1, 0, 2), None, (Wait(Queue.COPY_IN, 2),)),
        Run(1, (2, 3)),
        CopyOut(3, 1, (Wait(Queue.COMPUTE, 2),)),
        Run(2, (2, 1, 4)),
        # Its new block is where a or x was.
        CopyIn(5, 0, (Wait(Queue.COMPUTE, 3),)),
        Run(3, (5, 4), None, (Wait(Queue.COPY_IN, 3),)),
        CopyOut(5, 1, (Wait(Queue.COMPUTE, 4),)),
    )


def test_wrapping_parameter_returns_to_its_block() -> None:
    program = lower(step(), costs(), Plan("test", 0, (offload(W, 0, 3, 1, 3),)))
    assert [b.wraps for b in program.blocks] == [True, False, False, False, False]
    weight = program.blocks[0]
    copies = [i for i, x in enumerate(program.instructions) if isinstance(x, CopyIn) and x.block == 0]
    assert weight.born == copies[0]
    assert weight.dies < weight.born
    # The user may have written to it between steps, so it is copied out although the step only read it.
    assert CopyOut(0, 0) in program.instructions
    assert program.results == (LOSS,)


def test_large_blocks_start_on_pages_above_small_ones() -> None:
    blocks = place(lower(step(), costs(), Plan("test", 0, ()))).blocks
    small = [block for block in blocks if block.bytes < PAGE_BYTES]
    large = [block for block in blocks if block.bytes >= PAGE_BYTES]
    assert [block.storage for block in small] == [LOSS]
    assert min(block.offset for block in large) == PAGE_BYTES
    assert all(block.offset % PAGE_BYTES == 0 for block in large)


def test_results_are_the_storages_at_home_at_the_end() -> None:
    program = lower(step(), costs(), Plan("test", 0, (offload(W, 0, 3, 1, 3), offload(W, 3, 4, 4, 4))))
    assert program.results == (LOSS, W)


@pytest.mark.parametrize(
    "decision",
    [
        offload(A, 1, 2, 1, 2),  # released before its last use has run
        offload(A, 1, 2, 2, 3),  # fetched after it is needed
        offload(X, 0, 2, 2, 1),  # fetched before it is released
        offload(W, 3, 4, 4, 3),  # fetched around the end of the step
        offload(A, 0, 2, 1, 2),  # not a gap: op 1 uses it in between
    ],
)
def test_contradictory_decisions_are_refused(decision: Decision) -> None:
    with pytest.raises(GraphError):
        lower(step(), costs(), Plan("test", 0, (decision,)))
