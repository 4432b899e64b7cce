"""Tests of ops that overwrite whole storages: the old bytes are dropped without copies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outofcore.analysis import full_overwrites_of, gaps_of, is_fetched, live_bytes
from outofcore.analysis.recipes import History, can_recompute, ops_to_recompute
from outofcore.costs import Costs, Home, OpCost
from outofcore.errors import GraphError
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.lowering import lower, wire
from outofcore.plan import Decision, Gap, Plan, Residency
from outofcore.planning import place, plan_step, smallest_budget
from outofcore.program import CopyIn, CopyOut, Instruction, Program, Run
from outofcore.validator import validate

K64 = 64 * 1024
X, W, G, A, B, LOSS = range(6)


def step() -> StepGraph:
    storages = (
        Storage(X, 2 * K64, StorageKind.INPUT, "x"),
        Storage(W, 2 * K64, StorageKind.PARAMETER, "w"),
        Storage(G, 2 * K64, StorageKind.GRADIENT, "w.grad"),
        Storage(A, 4 * K64, StorageKind.ACTIVATION, "a"),
        Storage(B, 4 * K64, StorageKind.ACTIVATION, "b"),
        Storage(LOSS, 4, StorageKind.OUTPUT, "loss"),
    )
    ops = (
        Op(0, "zero_", (), (G,), ()),
        Op(1, "forward", (X, W), (), (A,)),
        Op(2, "loss", (A,), (), (LOSS,)),
        Op(3, "backward", (A,), (), (B,)),
        Op(4, "accumulate", (B, G), (G,), (), rerunnable=False),
        Op(5, "update", (W, G), (W,), (), rerunnable=False),
    )
    return StepGraph(storages, ops, (LOSS,))


def scratch() -> StepGraph:
    """Return a step that reads a large storage, later overwrites it as a whole, and reads it again."""
    storages = (
        Storage(0, 4 * K64, StorageKind.BUFFER, "memory"),
        Storage(1, 4 * K64, StorageKind.INPUT, "x"),
        Storage(2, 4, StorageKind.OUTPUT, "y"),
    )
    ops = (
        Op(0, "sum", (0,), (), ()),
        Op(1, "mean", (1,), (), (2,)),
        Op(2, "copy_", (1,), (0,), ()),
        Op(3, "norm", (0,), (), ()),
    )
    return StepGraph(storages, ops, (2,))


def costs(graph: StepGraph) -> Costs:
    return Costs(tuple(OpCost(1e-3) for _ in graph.ops), (Home("disk", None, 1e9, 1e9),))


def program_of(graph: StepGraph, *decisions: Decision) -> Program:
    program = wire(graph, place(lower(graph, costs(graph), Plan("test", 0, decisions))))
    validate(graph, program, program.arena_bytes, costs(graph))
    return program


def copies(program: Program, storage: int) -> list[Instruction]:
    return [
        replace(i, waits=())
        for i in program.instructions
        if not isinstance(i, Run) and program.blocks[i.block].storage == storage
    ]


def test_overwritten_storage_has_no_gap_before_the_write() -> None:
    graph = scratch()
    assert full_overwrites_of(graph, 0) == (2,)
    assert gaps_of(graph, 0) == (Gap(0, 2, 3), Gap(0, 3, 4))
    assert is_fetched(graph, Gap(0, 2, 3)) and is_fetched(graph, Gap(0, 3, 4))


def test_gap_over_the_end_keeps_the_contents() -> None:
    assert gaps_of(step(), G) == (Gap(G, 0, 4), Gap(G, 4, 5), Gap(G, 5, 6))
    assert not is_fetched(step(), Gap(G, 5, 6))


def test_overwritten_input_is_not_fetched() -> None:
    graph = scratch()
    ops = (Op(0, "fill_", (), (1,), ()), *(replace(op, id=op.id + 1) for op in graph.ops))
    graph = StepGraph(graph.storages, ops, graph.outputs)
    assert gaps_of(graph, 1) == (Gap(1, 0, 2), Gap(1, 2, 3))
    assert copies(program_of(graph), 1) == [CopyOut(copies(program_of(graph), 1)[0].block, 1)]  # type: ignore[union-attr]


def test_small_and_adjacent_overwrites_keep_their_gaps() -> None:
    graph = scratch()
    small = StepGraph((replace(graph.storages[0], bytes=1024), *graph.storages[1:]), graph.ops, graph.outputs)
    assert full_overwrites_of(small, 0) == () and Gap(0, 0, 2) in gaps_of(small, 0)
    ops = (graph.ops[1], graph.ops[0], *graph.ops[2:])
    in_a_row = StepGraph(graph.storages, tuple(replace(op, id=i) for i, op in enumerate(ops)), graph.outputs)
    assert full_overwrites_of(in_a_row, 0) == () and Gap(0, 1, 2) in gaps_of(in_a_row, 0)


def test_overwritten_block_is_free_between_uses_without_copies() -> None:
    graph = scratch()
    program = program_of(graph)
    assert copies(program, 0) == []
    [block] = [block for block in program.blocks if block.storage == 0]
    runs = [index for index, i in enumerate(program.instructions) if isinstance(i, Run)]
    assert block.wraps and (block.dies, block.born) == (runs[0] + 1, runs[2])
    assert live_bytes(graph) == graph.storages[0].bytes + graph.storages[1].bytes


def test_evicted_storage_is_not_fetched_to_be_overwritten() -> None:
    program = program_of(step(), Decision(Gap(G, 5, 6), Residency.OFFLOAD, 6, 6))
    [copy] = copies(program, G)
    assert isinstance(copy, CopyOut) and copy.version == 2
    assert [i for i in copies(program_of(step()), G) if isinstance(i, CopyIn)] == []


def test_overwritten_persistent_storage_cannot_be_recomputed() -> None:
    graph = step()
    assert not can_recompute(History.of(graph), G, 4)
    with pytest.raises(GraphError, match="exists before the step"):
        program_of(graph, Decision(Gap(G, 0, 4), Residency.RECOMPUTE, 1, 4))


def test_overwritten_contents_are_lost_after_their_last_use() -> None:
    history = History.of(scratch())
    assert history.last_op_with((0, 0), 99) == 0 and history.last_op_with((0, 1), 99) == 99
    assert history.always_available(0)((0, 0)) and not history.always_available(1)((0, 0))
    with pytest.raises(GraphError, match="version 0 of storage 0"):
        ops_to_recompute(history, [(0, 0)], history.always_available(2))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.6])
def test_every_budget_has_a_plan(share: float) -> None:
    graph = step()
    smallest, all_bytes = smallest_budget(graph, costs(graph)), sum(s.bytes for s in graph.storages)
    budget = int(smallest + share * (all_bytes - smallest))
    planned = plan_step(graph, costs(graph), budget)
    validate(graph, planned.program, budget, costs(graph))
    assert [i for i in copies(planned.program, G) if isinstance(i, CopyIn) and i.version == 0] == []
