"""Stop a step half way with a consistent model.

If an op raises after parameters were updated, as the second forward pass of a step with two losses may, the step cannot
be undone. Plain PyTorch stops there: earlier ops have run, later ones have not. This module reproduces that state. It
makes the outstanding copies of persistent state in program order, and runs no more ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outofcore.capture.captured import Captured
from outofcore.capture.optimizers import OptimizerUpdate
from outofcore.capture.value_errors import ops_that_may_raise
from outofcore.execution.arena import Memory
from outofcore.execution.undo import Reached
from outofcore.program import CopyIn, CopyOut, Program, Run
from outofcore.runtime.slots import Piece, Slots


def updates_of(captured: Captured, program: Program) -> tuple[int, ...]:
    """Return the indices of the instructions that run an optimizer's code."""
    return tuple(
        index
        for index, instruction in enumerate(program.instructions)
        if isinstance(instruction, Run) and isinstance(captured.calls[instruction.op].func, OptimizerUpdate)
    )


def stops_as_plain(captured: Captured, program: Program, progress: Reached) -> bool:
    """Return whether plain PyTorch would have made the same updates before it raised at the same op.

    It would if no update has started, or if updates are never scheduled earlier than that op.
    """
    started, ended = progress.started, progress.done
    if not any(started[index] for index in updates_of(captured, program)):
        return True
    runs = ((i, instruction) for i, instruction in enumerate(program.instructions) if isinstance(instruction, Run))
    half_way = [instruction.op for i, instruction in runs if started[i] and not ended[i]]
    return len(half_way) == 1 and half_way[0] in ops_that_may_raise(captured)


def can_stop(captured: Captured, program: Program, progress: Reached) -> bool:
    """Return whether the bytes of all persistent state still exist.

    They do not where an op was about to overwrite a whole storage: the program has dropped its contents.
    """
    if captured.ranges or captured.replicas:
        return False
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, Run) and not progress.done[index]:
            op = captured.graph.ops[instruction.op]
            is_update = isinstance(captured.calls[instruction.op].func, OptimizerUpdate)  # new state has no bytes yet
            overwritten = set(op.mutates) - set(op.reads)
            if not is_update and not captured.graph.persistent.isdisjoint(overwritten):
                return False
    return True


def stop(
    captured: Captured,
    program: Program,
    slots: Mapping[int, tuple[Piece, ...]],
    arena: Memory,
    homes: Sequence[Slots],
    progress: Reached,
) -> None:
    """Make the outstanding copies of persistent state.

    ``slots`` maps a copy's index to the block's pieces at home. All queues of the step must be idle.
    """
    for index, copy in enumerate(program.instructions):
        if not isinstance(copy, CopyIn | CopyOut) or progress.done[index] or index not in slots:
            continue
        block = program.blocks[copy.block]
        if block.storage not in captured.graph.persistent:
            continue
        offset, home = block.offset, homes[copy.home].home
        move = arena.save if isinstance(copy, CopyOut) else arena.load
        for piece in slots[index]:
            move(offset, piece.bytes, home, piece.offset)
            offset += piece.bytes
