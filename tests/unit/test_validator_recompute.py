"""What the validator says of ops that run again."""

from dataclasses import replace

import pytest
from mutations import with_instruction, without_instruction

from outofcore.errors import ValidationError
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.program import Block, Program, Run
from outofcore.validator import validate


def refuses(program: Program, graph: StepGraph, match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        validate(graph, program, 32)


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
# x, the running mean, the result, and for the second run scratch memory and the result once more.
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


def test_a_rerun_works_on_scratch_for_what_it_discards() -> None:
    program = Program(NORM_RUNS, NORM_BLOCKS, 32)
    validate(NORM, program, 32)
    # On the real thing, the running mean would be updated twice.
    touching = with_instruction(program, 3, Run(0, (0, 1, 4), again=True))
    refuses(touching, NORM, r"block 1 of storage 1 \(running_mean\) starts the next step")
    kept = replace(NORM, ops=(replace(NORM.ops[0], discards=()), *NORM.ops[1:]))
    refuses(program, kept, r"instruction 3 .* needs version 0, but block 3 .* nothing to rely on")


def test_a_rerun_needs_the_whole_chain() -> None:
    program = Program(NORM_RUNS, NORM_BLOCKS, 32)
    short = without_instruction(program, 4)
    refuses(short, NORM, r"instruction 4 \(run of op 3, look\) needs version 2, but block 4 .* version 1")


def test_a_rerun_need_not_find_what_it_overwrites() -> None:
    ops = (replace(NORM.ops[0], discards=()), replace(NORM.ops[1], reads=()), *NORM.ops[2:])
    graph = replace(NORM, ops=ops)
    blocks = (*NORM_BLOCKS[:3], Block(3, 2, 8, 3, 5, offset=16))
    runs = (*NORM_RUNS[:3], Run(1, (3,), again=True), Run(3, (3,)))
    validate(graph, Program(runs, blocks, 32), 32)
