"""Tests of the exact instructions to which plans with recomputation are lowered."""

from dataclasses import replace

import pytest

from outofcore.costs import Costs, Home, OpCost
from outofcore.errors import GraphError
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.lowering import lower, wire
from outofcore.plan import Decision, Gap, Plan, Residency
from outofcore.planning import place
from outofcore.program import CopyIn, CopyOut, Instruction, Program, Queue, Run, Wait
from outofcore.simulator import recompute_seconds
from outofcore.validator import validate

K64 = 64 * 1024
X, W, A, B, MASK, C, MEAN, D = range(8)
LAST = 11


def step() -> StepGraph:
    """Return a step of conv, relu_, dropout and batch norm that uses all results again."""
    activation = StorageKind.ACTIVATION
    storages = (
        Storage(X, 2 * K64, StorageKind.INPUT, "x"),
        Storage(W, K64, StorageKind.PARAMETER, "w"),
        Storage(A, 2 * K64, activation, "a"),
        Storage(B, 2 * K64, activation, "b"),
        Storage(MASK, 2 * K64, activation, "mask"),
        Storage(C, 2 * K64, activation, "c"),
        Storage(MEAN, 64, StorageKind.BUFFER, "running_mean"),
        Storage(D, 2 * K64, activation, "d"),
    )
    ops = (
        Op(0, "conv", (X, W), (), (A,)),
        Op(1, "relu_", (A,), (A,), ()),
        Op(2, "empty_like", (A,), (), (MASK,)),
        Op(3, "bernoulli_", (), (MASK,), (), random=True),
        Op(4, "mul", (A, MASK), (), (B,)),
        Op(5, "batch_norm", (B, MEAN), (MEAN,), (C,), discards=(MEAN,)),
        Op(6, "loss", (C,), (), (D,)),
        Op(7, "look at c", (C, D), (), ()),
        Op(8, "look at b", (B, D), (), ()),
        Op(9, "look at mask", (MASK, D), (), ()),
        Op(10, "look at a", (A, D), (), ()),
        Op(LAST, "update", (W, D), (W,), (), rerunnable=False),
    )
    return StepGraph(storages, ops)


def costs(graph: StepGraph) -> Costs:
    return Costs(tuple(OpCost(1.0 + op.id) for op in graph.ops), (Home("disk", None, 1e6, 1e6),))


def program_of(*decisions: Decision, graph: StepGraph | None = None) -> Program:
    graph = graph or step()
    program = wire(graph, place(lower(graph, costs(graph), Plan("test", 0, decisions))))
    validate(graph, program, program.arena_bytes, costs(graph))
    return program


def recompute(storage: int, start: int, end: int, fetch: int) -> Decision:
    return Decision(Gap(storage, start, end), Residency.RECOMPUTE, start + 1, fetch)


def offload(storage: int, start: int, end: int, release: int, fetch: int) -> Decision:
    return Decision(Gap(storage, start, end), Residency.OFFLOAD, release, fetch)


def backward(program: Program) -> tuple[Instruction, ...]:
    loss = next(i for i, x in enumerate(program.instructions) if isinstance(x, Run) and x.op == 6)
    return tuple(replace(x, waits=()) for x in program.instructions[loss:])


# Blocks of the forward pass: w wraps (0), the running mean wraps (1), x (2), a (3), mask (4), b (5), c (6), d (7).


def test_recomputation_reads_resident_storages_in_place() -> None:
    # The mask is drawn into a new block, whose former contents do not matter: empty_like does not run again.
    program = program_of(recompute(MASK, 4, 9, 9))
    assert backward(program) == (
        Run(6, (6, 7)),
        Run(7, (6, 7)),
        Run(8, (5, 7)),
        Run(3, (8,), again=True),
        Run(9, (8, 7)),
        Run(10, (3, 7)),
        Run(LAST, (0, 7)),
    )
    assert recompute_seconds(costs(step()), program) == 4.0


def test_recomputation_copies_in_before_prefetches() -> None:
    program = program_of(recompute(A, 4, 10, 8), offload(MASK, 4, 9, 5, 8))
    instructions = [x for x in backward(program) if not isinstance(x, CopyOut)]
    assert [type(x).__name__ + (f" {x.op}" if isinstance(x, Run) else "") for x in instructions[2:7]] == [
        "CopyIn",
        "Run 0",
        "Run 1",
        "CopyIn",
        "Run 8",
    ]
    blocks = [program.blocks[x.block].storage for x in instructions if isinstance(x, CopyIn)]
    assert blocks == [X, MASK]


def test_rerun_of_batch_norm_writes_scratch() -> None:
    program = program_of(recompute(C, 6, 8, 8), graph=_with_idle_op(7))
    # The scratch block of the running mean is 8, that of c is 9.
    assert backward(program)[:4] == (
        Run(6, (6, 7)),
        Run(7, ()),
        Run(5, (5, 8, 9), again=True),
        Run(8, (9, 7)),
    )
    runs = [i for i, x in enumerate(program.instructions) if isinstance(x, Run) and x.again]
    scratch = program.blocks[8]
    assert (scratch.storage, scratch.born, scratch.dies) == (MEAN, runs[0], runs[0] + 1)


def _with_idle_op(at: int) -> StepGraph:
    graph = step()
    ops = (*graph.ops[:at], Op(at, "idle", (), (), ()), *graph.ops[at:])
    return replace(graph, ops=tuple(replace(op, id=i) for i, op in enumerate(ops)))


def test_recomputation_across_an_in_place_op_starts_at_home() -> None:
    # x is at home only. It is copied into a block of its own, which dies at once.
    program = program_of(recompute(A, 4, 10, 10))
    assert backward(program) == (
        Run(6, (6, 7)),
        Run(7, (6, 7)),
        Run(8, (5, 7)),
        Run(9, (4, 7)),
        CopyIn(8, 0),
        Run(0, (8, 0, 9), again=True),
        Run(1, (9,), again=True),
        Run(10, (9, 7)),
        Run(LAST, (0, 7)),
    )
    copied = next(i for i, x in enumerate(program.instructions) if isinstance(x, CopyIn) and x.block == 8)
    assert program.blocks[8] == replace(program.blocks[8], storage=X, born=copied, dies=copied + 2, wraps=False)
    rerun = program.instructions[copied + 1]
    assert rerun.waits == (Wait(Queue.COPY_IN, 2),)


def test_recomputation_sequence_runs_once_for_one_fetch_time() -> None:
    # The speed-centric mode: the whole sequence runs before the first op that needs a part of it.
    plan = (recompute(A, 4, 10, 8), recompute(MASK, 4, 9, 8), recompute(B, 5, 8, 8))
    assert backward(program_of(*plan)) == (
        Run(6, (6, 7)),
        Run(7, (6, 7)),
        CopyIn(8, 0),
        Run(0, (8, 0, 9), again=True),
        Run(1, (9,), again=True),
        Run(3, (10,), again=True),
        Run(4, (9, 10, 11), again=True),
        Run(8, (11, 7)),
        Run(9, (10, 7)),
        Run(10, (9, 7)),
        Run(LAST, (0, 7)),
    )


def test_recomputation_sequence_runs_for_each_fetch_time() -> None:
    # The memory-centric mode: several copies of one value at different times, each held only while it is needed.
    plan = (recompute(A, 4, 10, 10), recompute(MASK, 4, 9, 9), recompute(B, 5, 8, 8))
    program = program_of(*plan)
    assert backward(program) == (
        Run(6, (6, 7)),
        Run(7, (6, 7)),
        CopyIn(8, 0),
        Run(0, (8, 0, 9), again=True),
        Run(1, (9,), again=True),
        Run(3, (10,), again=True),
        Run(4, (9, 10, 11), again=True),
        Run(8, (11, 7)),
        Run(3, (12,), again=True),
        Run(9, (12, 7)),
        CopyIn(13, 0),
        Run(0, (13, 0, 14), again=True),
        Run(1, (14,), again=True),
        Run(10, (14, 7)),
        Run(LAST, (0, 7)),
    )
    # The copies of a and of the mask from which b was made die when b exists.
    assert program.blocks[9].dies == program.blocks[10].dies == program.blocks[11].born + 1


def test_offloaded_input_is_fetched_instead_of_recomputed() -> None:
    program = program_of(recompute(B, 5, 8, 8), offload(A, 4, 10, 5, 10))
    assert CopyOut(3, 2) in [replace(x, waits=()) for x in program.instructions]
    assert backward(program)[2:5] == (CopyIn(8, 2), Run(4, (8, 4, 9), again=True), Run(8, (9, 7)))


def test_input_during_its_copy_out_is_read_in_place() -> None:
    program = program_of(recompute(B, 5, 8, 8), offload(A, 4, 10, 9, 10))
    assert Run(4, (3, 4, 8), again=True) in backward(program)


def test_input_fetched_at_the_same_time_is_used() -> None:
    program = program_of(recompute(B, 5, 8, 8), offload(A, 4, 10, 5, 8))
    assert backward(program)[2:5] == (CopyIn(8, 2), Run(4, (8, 4, 9), again=True), Run(8, (9, 7)))
    assert Run(10, (8, 7)) in backward(program)


def test_extra_results_of_a_rerun_die_at_once() -> None:
    graph = step()
    split = replace(graph.ops[4], name="dropout", creates=(B, 8))
    ops = (*graph.ops[:4], split, *graph.ops[5:9], replace(graph.ops[9], reads=(MASK, D, 8)), *graph.ops[10:])
    graph = StepGraph((*graph.storages, Storage(8, K64, StorageKind.ACTIVATION, "seed")), ops)
    program = program_of(recompute(B, 5, 8, 8), graph=graph)
    rerun_index = next(i for i, x in enumerate(program.instructions) if isinstance(x, Run) and x.again)
    run = program.instructions[rerun_index]
    assert isinstance(run, Run)
    copies = [program.blocks[b] for b in run.blocks if program.blocks[b].storage == 8]
    assert [(b.born, b.dies) for b in copies] == [(rerun_index, rerun_index + 1)]


def test_recomputed_storage_may_be_offloaded_and_recomputed_again() -> None:
    graph = step()
    ops = (*graph.ops, Op(LAST + 1, "again a", (A,), (), ()), Op(LAST + 2, "idle", (), (), ()))
    ops = (*ops, Op(LAST + 3, "once more a", (A,), (), ()))
    graph = replace(graph, ops=ops)
    plan = (recompute(A, 4, 10, 10), offload(A, 10, LAST + 1, 11, LAST + 1))
    assert [type(x) for x in backward(program_of(*plan, graph=graph))[-6:]] == [CopyOut, Run, CopyIn, Run, Run, Run]
    # After the update, the weight of the first version is lost.
    with pytest.raises(GraphError, match=r"version 0 of storage 1 \(w\) .* no op creates it"):
        program_of(recompute(A, LAST + 1, LAST + 3, LAST + 3), graph=graph)


def test_blocks_of_two_versions_are_held_at_once() -> None:
    # b was made before a was written again: the former a is recomputed for b while the current a is resident.
    graph = _with_idle_op(6)
    ops = (*graph.ops[:6], Op(6, "tanh_", (A,), (A,), ()), *graph.ops[7:])
    program = program_of(recompute(B, 5, 9, 9), graph=replace(graph, ops=ops))
    blocks = [b for b in program.blocks if b.storage == A]
    assert len(blocks) == 2
    assert blocks[0].born < blocks[1].born < blocks[1].dies < blocks[0].dies


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        (recompute(W, 0, LAST, LAST), r"storage 1 \(w\) cannot be recomputed: it exists before the step"),
        (recompute(MEAN, 5, 17, 17), r"storage 6 \(running_mean\) cannot be recomputed"),
        (recompute(X, -1, 0, 0), r"storage 0 \(x\) cannot be recomputed"),
        (Decision(Gap(A, 4, 10), Residency.RECOMPUTE, 6, 10), "released right after the use before its gap"),
        (recompute(A, 4, 10, 4), "out of order"),
        (recompute(A, 4, 10, 11), "out of order"),
        (recompute(A, 4, 9, 9), "a gap that the graph does not have"),
    ],
)
def test_invalid_recomputation_is_refused(decision: Decision, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        program_of(decision)


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        (
            1,
            {"rerunnable": False},
            r"version 2 of storage 2 \(a\) .* op 1 \(relu_\), which writes it, may run only once",
        ),
        (
            0,
            {"rerunnable": False},
            r"version 1 of storage 2 \(a\) .* op 0 \(conv\), which writes it, may run only once",
        ),
        (1, {"discards": (A,)}, r"op 1 \(relu_\), which writes it, discards its former contents"),
        (
            0,
            {"reads": (X, W, MEAN), "mutates": (MEAN,)},
            r"version 0 of storage 6 \(running_mean\) .* no op creates it",
        ),
    ],
)
def test_recomputation_error_names_the_blocking_op(op: int, change: dict[str, object], message: str) -> None:
    graph = step()
    ops = (*graph.ops[:op], replace(graph.ops[op], **change), *graph.ops[op + 1 :])  # type: ignore[arg-type]
    with pytest.raises(GraphError, match=message):
        program_of(recompute(A, 4, 10, 10), graph=replace(graph, ops=ops))
