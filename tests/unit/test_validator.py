"""Tests of the programs that the validator refuses, one rule at a time, and of its messages."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from mutations import with_block, with_instruction, without_instruction

import outofcore.validator
from outofcore.costs import Costs, OpCost
from outofcore.errors import GraphError, ValidationError
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.program import Block, CopyIn, CopyOut, Program, Queue, Run, Wait
from outofcore.validator import validate

# A small step by hand: "double" reads the input and creates an activation; "update" writes the parameter from it.
GRAPH = StepGraph(
    (
        Storage(0, 100, StorageKind.PARAMETER, "weight"),
        Storage(1, 50, StorageKind.INPUT, "x"),
        Storage(2, 60, StorageKind.ACTIVATION, "doubled"),
    ),
    (
        Op(0, "double", reads=(1,), mutates=(), creates=(2,), module="net.first", source="train.py:3"),
        Op(1, "update", reads=(0, 2), mutates=(0,), creates=(), rerunnable=False, module="net.last"),
    ),
)
PROGRAM = Program(
    (
        CopyIn(1, 0),
        CopyIn(0, 0),
        Run(0, (1, 2), waits=(Wait(Queue.COPY_IN, 1),)),
        Run(1, (0, 2), workspace=3, waits=(Wait(Queue.COPY_IN, 2),)),
        CopyOut(0, 1, (Wait(Queue.COMPUTE, 2),)),
    ),
    (
        Block(0, 0, 100, 1, 5, offset=0),
        Block(1, 1, 50, 0, 3, offset=100),
        Block(2, 2, 60, 2, 4, offset=150),
        Block(3, None, 30, 3, 4, offset=100),
    ),
    arena_bytes=210,
    results=(0,),
)
COSTS = Costs((OpCost(1.0), OpCost(2.0, workspace_bytes=30)))


def refuses(
    program: Program, match: str, budget: int = 210, graph: StepGraph = GRAPH, costs: Costs | None = COSTS
) -> None:
    with pytest.raises(ValidationError, match=match):
        validate(graph, program, budget, costs)


def test_small_step_is_accepted() -> None:
    validate(GRAPH, PROGRAM, 210, COSTS)
    validate(GRAPH, PROGRAM, 210)


def test_budget_and_arena_bounds_are_checked() -> None:
    refuses(PROGRAM, "the arena has 210 bytes, more than the budget of 209", budget=209)
    refuses(
        replace(PROGRAM, arena_bytes=209),
        r"block 2 of storage 2 \(doubled\) ends at byte 210, beyond the end of the arena of 209 bytes",
    )
    refuses(with_block(PROGRAM, replace(PROGRAM.blocks[2], offset=-1)), "is not placed, but other blocks are")
    refuses(with_block(PROGRAM, replace(PROGRAM.blocks[2], offset=-2)), "has offset -2")


def test_overlap_error_names_both_blocks() -> None:
    broken = with_block(PROGRAM, replace(PROGRAM.blocks[2], offset=149))
    refuses(broken, r"block 2 of storage 2 \(doubled\) at bytes \[149, 209\) overlaps block 1 of storage 1 \(x\)")


def test_race_error_names_both_instructions() -> None:
    broken = with_instruction(PROGRAM, 2, replace(PROGRAM.instructions[2], waits=()))
    refuses(
        broken,
        r"instruction 2 \(run of op 0, double of module net.first at train.py:3\) may start before instruction 0 "
        r"\(copy-in of block 1 of storage 1 \(x\)\) has ended",
    )


def test_reused_bytes_need_a_wait() -> None:
    """The workspace is where the input was; a copy in there is not ordered after the run."""
    graph = replace(GRAPH, ops=(GRAPH.ops[0], GRAPH.ops[1], Op(2, "last", (1,), (), ())))
    second = (*PROGRAM.instructions, CopyIn(4, 0), Run(2, (4,), waits=(Wait(Queue.COPY_IN, 3),)))
    reused = replace(PROGRAM, instructions=second, blocks=(*PROGRAM.blocks, Block(4, 1, 50, 5, 7, offset=150)))
    with pytest.raises(ValidationError, match=r"the bytes of block 2 of storage 2 \(doubled\), then of block 4"):
        validate(graph, reused, 210)
    waits = with_instruction(reused, 5, CopyIn(4, 0, (Wait(Queue.COMPUTE, 2),)))
    validate(graph, waits, 210)


def test_reused_bytes_are_checked_across_partial_overlaps() -> None:
    graph = replace(GRAPH, ops=(GRAPH.ops[0], GRAPH.ops[1], Op(2, "last", (1,), (), ())))
    second = (
        *PROGRAM.instructions,
        CopyIn(4, 0, (Wait(Queue.COMPUTE, 1),)),
        Run(2, (4,), waits=(Wait(Queue.COPY_IN, 3),)),
    )
    reused = replace(PROGRAM, instructions=second, blocks=(*PROGRAM.blocks, Block(4, 1, 50, 5, 7, offset=129)))
    # [129, 130) was the workspace of the second run, [130, 150) free since the first, [150, 179) read by the second.
    with pytest.raises(ValidationError, match="the bytes of block 3 of a workspace, then of block 4"):
        validate(graph, reused, 210)
    off_workspace = with_block(reused, replace(reused.blocks[4], offset=130, bytes=50))
    with pytest.raises(ValidationError, match="the bytes of block 2 of storage 2"):
        validate(graph, off_workspace, 210)
    moved = with_block(off_workspace, replace(off_workspace.blocks[2], offset=180))
    validate(graph, replace(moved, arena_bytes=240), 240)


def test_bytes_around_a_new_block_keep_their_history() -> None:
    """A copy in writes the middle of the workspace of a run; the rest is in use until that run is over."""
    graph = StepGraph(
        tuple(Storage(s, 10, StorageKind.INPUT) for s in range(2)),
        (Op(0, "idle", (), (), ()), Op(1, "look", (0, 1), (), ())),
    )
    wait = (Wait(Queue.COMPUTE, 1),)

    def program(begin: int, first: tuple[Wait, ...], second: tuple[Wait, ...]) -> Program:
        last = Run(1, (1, 2), waits=(Wait(Queue.COPY_IN, 1), Wait(Queue.COPY_OUT, 1)))
        instructions = (Run(0, (), workspace=0), CopyIn(1, 0, first), CopyOut(2, 0, second), last)
        blocks = (
            Block(0, None, 30, 0, 1, offset=0),
            Block(1, 0, 10, 1, 4, offset=10),
            Block(2, 1, 10, 1, 4, offset=begin),
        )
        return Program(instructions, blocks, 30)

    # The copy out reads garbage here; the race for its bytes is reported first.
    for begin in (0, 20):
        with pytest.raises(ValidationError, match="the bytes of block 0 of a workspace, then of block 2"):
            validate(graph, program(begin, wait, ()), 30)
        with pytest.raises(ValidationError, match="needs version 0, but block 2"):
            validate(graph, program(begin, wait, wait), 30)


def test_write_waits_for_readers_of_the_block() -> None:
    graph = StepGraph(
        (Storage(0, 8, StorageKind.PARAMETER, "weight"),),
        (Op(0, "update", (0,), (0,), ()),),
    )
    blocks = (Block(0, 0, 8, 0, 0, True, 0),)
    with pytest.raises(ValidationError, match=r"instruction 1 \(run of op 0, update\) may start before instruction 0"):
        validate(graph, Program((CopyOut(0, 0), Run(0, (0,))), blocks, 8), 8)
    validate(graph, Program((CopyOut(0, 0), Run(0, (0,), waits=(Wait(Queue.COPY_OUT, 1),))), blocks, 8), 8)


def test_copy_out_waits_for_readers_of_the_home() -> None:
    """A copy of the parameter is fetched early and not used; the home must not change during that fetch."""
    graph = StepGraph(
        (Storage(0, 8, StorageKind.PARAMETER, "weight"),),
        (Op(0, "update", (0,), (0,), ()),),
    )
    blocks = (Block(0, 0, 8, 0, 4, offset=0), Block(1, 0, 8, 0, 4, offset=8))
    run = Run(0, (0,), waits=(Wait(Queue.COPY_IN, 1),))
    early = CopyOut(0, 1, (Wait(Queue.COMPUTE, 1),))
    with pytest.raises(
        ValidationError, match=r"instruction 3 .* may start before instruction 1 .* the home of storage 0"
    ):
        validate(graph, Program((CopyIn(0, 0), CopyIn(1, 0), run, early), blocks, 16, (0,)), 16)
    late = CopyOut(0, 1, (Wait(Queue.COMPUTE, 1), Wait(Queue.COPY_IN, 2)))
    validate(graph, Program((CopyIn(0, 0), CopyIn(1, 0), run, late), blocks, 16, (0,)), 16)


def test_only_the_reads_of_an_op_must_be_present() -> None:
    """An op that mutates without reading overwrites the whole storage, so its block may hold anything."""
    storages = (Storage(0, 8, StorageKind.PARAMETER, "weight"),)
    program = Program(
        (Run(0, (0,)), CopyOut(0, 1, (Wait(Queue.COMPUTE, 1),))), (Block(0, 0, 8, 0, 2, offset=0),), 8, (0,)
    )
    validate(StepGraph(storages, (Op(0, "zero_", (), (0,), ()),)), program, 8)
    with pytest.raises(ValidationError, match="needs version 0, but block 0"):
        validate(StepGraph(storages, (Op(0, "neg_", (0,), (0,), ()),)), program, 8)


def test_storage_named_twice_is_written_once() -> None:
    graph = StepGraph((Storage(0, 8, StorageKind.PARAMETER, "weight"),), (Op(0, "update", (), (0, 0), ()),))
    program = Program(
        (Run(0, (0,)), CopyOut(0, 1, (Wait(Queue.COMPUTE, 1),))), (Block(0, 0, 8, 0, 0, True, 0),), 8, (0,)
    )
    validate(graph, program, 8)


def test_home_slots_need_waits_both_ways() -> None:
    graph = replace(GRAPH, ops=(*GRAPH.ops, Op(2, "look", (0,), (), ())))
    instructions = (
        *PROGRAM.instructions,
        CopyIn(4, 1, (Wait(Queue.COPY_OUT, 1),)),
        Run(2, (4,), waits=(Wait(Queue.COPY_IN, 3),)),
    )
    good = replace(
        PROGRAM,
        instructions=instructions,
        blocks=(*PROGRAM.blocks, Block(4, 0, 100, 5, 7, offset=210)),
        arena_bytes=310,
    )
    validate(graph, good, 310)
    with pytest.raises(ValidationError, match=r"both touch the home of storage 0 \(weight\)"):
        validate(graph, with_instruction(good, 5, CopyIn(4, 1)), 310)
    with pytest.raises(ValidationError, match=r"both touch the home of storage 0|both touch block 0"):
        validate(graph, with_instruction(good, 4, CopyOut(0, 1)), 310)


def test_versions_are_checked() -> None:
    refuses(
        with_instruction(PROGRAM, 1, CopyIn(0, 1)),
        r"needs version 1, but the home of storage 0 \(weight\) holds version 0",
    )
    refuses(with_instruction(PROGRAM, 4, CopyOut(0, 2, (Wait(Queue.COMPUTE, 2),))), "needs version 2, but block 0")
    refuses(without_instruction(PROGRAM, 4), "the home of storage 0 .* is a result and must end at version 1")
    refuses(replace(PROGRAM, results=()), "storage 0 .* is seen after the step, but is not a result")


def test_activation_has_no_home_before_its_copy_out() -> None:
    broken = replace(PROGRAM, results=(0, 2))
    refuses(broken, r"the home of storage 2 \(doubled\) is a result .* holds undefined bytes")


def test_blocks_of_a_run_are_checked() -> None:
    refuses(with_instruction(PROGRAM, 2, replace(PROGRAM.instructions[2], blocks=(2, 1))), "but its blocks are of")
    refuses(with_instruction(PROGRAM, 2, replace(PROGRAM.instructions[2], blocks=(1,))), "but its blocks are of")
    refuses(with_instruction(PROGRAM, 2, replace(PROGRAM.instructions[2], blocks=(1, 9))), "uses block 9")
    refuses(with_instruction(PROGRAM, 3, replace(PROGRAM.instructions[3], workspace=None)), "a workspace of 0 bytes")
    refuses(with_instruction(PROGRAM, 3, replace(PROGRAM.instructions[3], workspace=0)), "as its workspace")
    refuses(with_instruction(PROGRAM, 3, replace(PROGRAM.instructions[3], op=7)), "runs op 7")
    refuses(with_instruction(PROGRAM, 4, CopyOut(3, 0)), "copies a block that has no home")
    refuses(with_block(PROGRAM, replace(PROGRAM.blocks[1], dies=2)), r"instruction 2 .* which is not held then")
    refuses(with_block(PROGRAM, replace(PROGRAM.blocks[1], bytes=49)), "has 49 bytes, fewer than")
    refuses(with_block(PROGRAM, replace(PROGRAM.blocks[3], bytes=29)), "a workspace of 29 bytes and needs 30")


def test_ids_and_lifetimes_of_blocks_are_checked() -> None:
    moved = (PROGRAM.blocks[1], PROGRAM.blocks[0], *PROGRAM.blocks[2:])
    refuses(replace(PROGRAM, blocks=moved), "block at index 0 has id 1")
    refuses(with_block(PROGRAM, replace(PROGRAM.blocks[0], storage=9)), "is of storage 9")
    refuses(with_block(PROGRAM, replace(PROGRAM.blocks[0], born=5)), r"is held over \[5, 5\)")
    refuses(with_block(PROGRAM, replace(PROGRAM.blocks[0], dies=6)), r"is held over \[1, 6\)")
    refuses(
        with_block(PROGRAM, replace(PROGRAM.blocks[0], born=1, dies=2, wraps=True)), "wraps with born = 1, dies = 2"
    )
    refuses(
        with_block(PROGRAM, replace(PROGRAM.blocks[2], born=2, dies=1, wraps=True)), "neither persistent nor a constant"
    )
    refuses(replace(PROGRAM, results=(0, 3)), r"the results .* name storages that the graph does not have")


def test_ops_run_once_in_order() -> None:
    unrun = replace(without_instruction(PROGRAM, 3), blocks=PROGRAM.blocks[:3])
    unrun = with_block(unrun, replace(unrun.blocks[0], dies=4))
    refuses(unrun, "op 1, update of module net.last never runs")
    first, second = PROGRAM.instructions[2:4]
    swapped = with_instruction(with_instruction(PROGRAM, 2, second), 3, first)
    wide = replace(swapped, blocks=tuple(replace(b, born=0, dies=5, offset=-1) for b in PROGRAM.blocks))
    refuses(wide, r"comes before the first run of op 0, double", budget=1000)
    wide = replace(PROGRAM, blocks=tuple(replace(b, dies=6, offset=-1) for b in PROGRAM.blocks))
    last = PROGRAM.instructions[3]
    assert isinstance(last, Run)
    recomputation = replace(last, again=True)
    refuses(replace(wide, instructions=(*PROGRAM.instructions, recomputation)), "the op is not rerunnable", 1000)
    refuses(replace(wide, instructions=(*PROGRAM.instructions, last)), "is not marked as a recomputation", 1000)
    refuses(with_instruction(PROGRAM, 3, recomputation), "comes before the first run of op 1, update")


def test_rerun_may_read_the_first_inputs() -> None:
    instructions = (*PROGRAM.instructions[:3], Run(0, (1, 4), again=True), *PROGRAM.instructions[3:])
    instructions = (
        *instructions[:4],
        Run(1, (0, 4), 3, (Wait(Queue.COPY_IN, 2),)),
        CopyOut(0, 1, (Wait(Queue.COMPUTE, 3),)),
    )
    blocks = (
        Block(0, 0, 100, 1, 6, offset=0),
        Block(1, 1, 50, 0, 4, offset=100),
        Block(2, 2, 60, 2, 3, offset=150),
        Block(3, None, 30, 4, 5, offset=100),
        Block(4, 2, 60, 3, 5, offset=150),
    )
    program = Program(instructions, blocks, 210, (0,))
    validate(GRAPH, program, 210, COSTS)
    once = replace(GRAPH, ops=(replace(GRAPH.ops[0], rerunnable=False), GRAPH.ops[1]))
    refuses(program, "runs again, but the op is not rerunnable", graph=once)


def test_rerun_must_find_the_versions_of_the_first_run() -> None:
    graph = StepGraph(
        (Storage(0, 8, StorageKind.PARAMETER, "weight"), Storage(1, 8, StorageKind.ACTIVATION, "doubled")),
        (Op(0, "double", (0,), (), (1,)), Op(1, "update", (0, 1), (0,), ()), Op(2, "look", (1,), (), ())),
    )
    blocks = (Block(0, 0, 8, 0, 0, True, 0), Block(1, 1, 8, 0, 2, offset=8), Block(2, 1, 8, 2, 4, offset=8))
    program = Program((Run(0, (0, 1)), Run(1, (0, 1)), Run(0, (0, 2), again=True), Run(2, (2,))), blocks, 16)
    with pytest.raises(ValidationError, match=r"instruction 2 .* needs version 0, but block 0 .* holds version 1"):
        validate(graph, program, 16)


def test_waits_point_back_and_count_from_one() -> None:
    for count in (0, -1, 3):
        broken = with_instruction(PROGRAM, 2, replace(PROGRAM.instructions[2], waits=(Wait(Queue.COPY_IN, count),)))
        refuses(broken, f"instruction 2 waits for {count} instructions of copy-in, of which 2 come before it")


WRAPPED = StepGraph(
    (Storage(0, 8, StorageKind.PARAMETER, "weight"), Storage(1, 8, StorageKind.CONSTANT, "table")),
    (Op(0, "read", (0, 1), (), ()), Op(1, "idle", (), (), ()), Op(2, "update", (0,), (0,), ())),
)


def test_permanent_wrapping_blocks() -> None:
    blocks = (Block(0, 0, 8, 0, 0, True, 0), Block(1, 1, 8, 0, 0, True, 8))
    program = Program((Run(0, (0, 1)), Run(1, ()), Run(2, (0,))), blocks, 16)
    validate(WRAPPED, program, 16)
    # The parameter stays, so its home is stale when the step starts.
    fetched = replace(program, instructions=(CopyIn(0, 0), *program.instructions))
    with pytest.raises(ValidationError, match=r"the home of storage 0 .* holds undefined bytes"):
        validate(WRAPPED, fetched, 16)
    with pytest.raises(ValidationError, match="wraps, and so does block 0"):
        validate(WRAPPED, replace(program, blocks=(*blocks, Block(2, 0, 8, 0, 0, True, 16)), arena_bytes=24), 24)


def test_wrapping_blocks_with_an_eviction() -> None:
    blocks = (Block(0, 0, 8, 3, 2, True, 0), Block(1, 1, 8, 0, 0, True, 8))
    program = Program(
        (
            Run(0, (0, 1)),
            CopyOut(0, 0, (Wait(Queue.COMPUTE, 1),)),
            Run(1, ()),
            CopyIn(0, 0, (Wait(Queue.COPY_OUT, 1),)),
            Run(2, (0,), waits=(Wait(Queue.COPY_IN, 1),)),
        ),
        blocks,
        16,
    )
    validate(WRAPPED, program, 16)
    # Without the fetch, the block is empty at its last use.
    unfetched = without_instruction(program, 3)
    with pytest.raises(ValidationError, match=r"instruction 3 .* needs version 0, but block 0 .* undefined bytes"):
        validate(WRAPPED, unfetched, 16)
    # Used while it is evicted.
    early = with_block(program, replace(program.blocks[0], dies=1))
    with pytest.raises(ValidationError, match=r"instruction 1 .* which is not held then"):
        validate(WRAPPED, early, 16)
    # The step must end with the last version in the block.
    unwritten = replace(WRAPPED, ops=(*WRAPPED.ops[:2], replace(WRAPPED.ops[2], mutates=())))
    validate(unwritten, program, 16)
    other_block = replace(
        program, instructions=(*program.instructions[:4], Run(2, (2,), waits=(Wait(Queue.COPY_IN, 1),)))
    )
    other_block = replace(other_block, blocks=(*blocks, Block(2, 0, 8, 3, 5, offset=16)), arena_bytes=24)
    other_block = with_instruction(other_block, 3, CopyIn(2, 0, (Wait(Queue.COPY_OUT, 1),)))
    with pytest.raises(ValidationError, match=r"block 0 .* starts the next step .* holds undefined bytes"):
        validate(WRAPPED, other_block, 24)


def test_block_reborn_at_its_death_is_empty() -> None:
    blocks = (Block(0, 0, 8, 1, 1, True, 0), Block(1, 1, 8, 0, 0, True, 8))
    program = Program((Run(0, (0, 1)), Run(1, ()), Run(2, (0,))), blocks, 16)
    with pytest.raises(ValidationError, match=r"instruction 2 .* block 0 of storage 0 \(weight\) holds undefined"):
        validate(WRAPPED, program, 16)


def test_mutated_input_is_a_result() -> None:
    graph = StepGraph((Storage(0, 8, StorageKind.INPUT, "x"),), (Op(0, "scale_", (0,), (0,), ()),))
    program = Program(
        (CopyIn(0, 0), Run(0, (0,), waits=(Wait(Queue.COPY_IN, 1),)), CopyOut(0, 1, (Wait(Queue.COMPUTE, 1),))),
        (Block(0, 0, 8, 0, 3, offset=0),),
        8,
        (0,),
    )
    validate(graph, program, 8)
    with pytest.raises(ValidationError, match=r"storage 0 \(x\) is seen after the step"):
        validate(graph, replace(program, results=()), 8)


def test_costs_must_fit_the_graph() -> None:
    with pytest.raises(GraphError, match="1 op costs for a graph of 2 ops"):
        validate(GRAPH, PROGRAM, 210, Costs((OpCost(1.0),)))


def test_contradictory_graph_is_refused() -> None:
    with pytest.raises(GraphError):
        validate(replace(GRAPH, outputs=(9,)), PROGRAM, 210)


def test_empty_step_is_checked() -> None:
    validate(StepGraph((), ()), Program((), ()), 0)
    table = StepGraph((Storage(0, 8, StorageKind.CONSTANT),), ())
    validate(table, Program((), (Block(0, 0, 8, 0, 0, wraps=True),)), 8)
    with pytest.raises(ValidationError, match="8 bytes are held at the start of the step, more than the budget of 7"):
        validate(table, Program((), (Block(0, 0, 8, 0, 0, wraps=True),)), 7)


def test_validator_imports_no_planner_code() -> None:
    """The validator is independent only if it shares no code with the planner."""
    imported: set[str] = set()
    for path in Path(outofcore.validator.__file__).parent.glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        imported |= {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    ours = {name for name in imported if name.startswith("outofcore") and not name.startswith("outofcore.validator.")}
    assert ours == {f"outofcore.{name}" for name in ("costs", "errors", "graph", "program")}


NORM = StepGraph(
    (
        Storage(0, 8, StorageKind.PARAMETER, "x"),
        Storage(1, 8, StorageKind.BUFFER, "running_mean"),
        Storage(2, 8, StorageKind.ACTIVATION, "normed"),
    ),
    (
        Op(0, "batch_norm", (0, 1), (1,), (2,), discards=(1,)),
        Op(1, "relu_", (2,), (2,), ()),
        Op(2, "idle", (), (), ()),
        Op(3, "look", (2,), (), ()),
    ),
)
# x, the running mean, the result; for the second run scratch memory and the result again.
NORM_BLOCKS = (
    Block(0, 0, 8, 0, 0, True, 0),
    Block(1, 1, 8, 0, 0, True, 8),
    Block(2, 2, 8, 0, 2, offset=16),
    Block(3, 1, 8, 3, 4, offset=24),
    Block(4, 2, 8, 3, 6, offset=16),
)
NORM_RUNS = (
    Run(0, (0, 1, 2)),
    Run(1, (2,)),
    Run(2, ()),
    Run(0, (0, 3, 4), again=True),
    Run(1, (4,), again=True),
    Run(3, (4,)),
)


def test_rerun_writes_scratch_for_discarded_storages() -> None:
    program = Program(NORM_RUNS, NORM_BLOCKS, 32)
    validate(NORM, program, 32)
    # Without scratch memory, the running mean would be updated twice.
    touching = with_instruction(program, 3, Run(0, (0, 1, 4), again=True))
    refuses(touching, r"block 1 of storage 1 \(running_mean\) starts the next step", 32, NORM, None)
    without_discards = replace(NORM, ops=(replace(NORM.ops[0], discards=()), *NORM.ops[1:]))
    refuses(program, r"instruction 3 .* needs version 0, but block 3 .* undefined bytes", 32, without_discards, None)


def test_rerun_needs_the_whole_sequence() -> None:
    program = Program(NORM_RUNS, NORM_BLOCKS, 32)
    short = without_instruction(program, 4)
    refuses(short, r"instruction 4 \(run of op 3, look\) needs version 2, but block 4 .* version 1", 32, NORM, None)


def test_rerun_need_not_find_overwritten_contents() -> None:
    ops = (replace(NORM.ops[0], discards=()), replace(NORM.ops[1], reads=()), *NORM.ops[2:])
    graph = replace(NORM, ops=ops)
    blocks = (*NORM_BLOCKS[:3], Block(3, 2, 8, 3, 5, offset=16))
    runs = (*NORM_RUNS[:3], Run(1, (3,), again=True), Run(3, (3,)))
    validate(graph, Program(runs, blocks, 32), 32)
