"""Stop a step half way with a consistent model: move persistent state to where the step's end has it.

If an op raises after parameters were updated, as the second forward pass of a step with two losses may, the step cannot
be undone. Plain PyTorch stops there: what came before is done, and the rest is not. This module reproduces that: it
makes the outstanding copies of persistent state, in their order and with no op between them.
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
    """Return the instructions that run an optimizer's code."""
    return tuple(
        index
        for index, one in enumerate(program.instructions)
        if isinstance(one, Run) and isinstance(captured.calls[one.op].func, OptimizerUpdate)
    )


def stops_as_plain(captured: Captured, program: Program, reached: Reached) -> bool:
    """Return whether plain PyTorch would have made the same updates before it raised at the same op.

    It would if no update has begun, or if updates are never moved up past that op.
    """
    started, done = reached.started, reached.done
    if not any(started[index] for index in updates_of(captured, program)):
        return True
    runs = ((i, one) for i, one in enumerate(program.instructions) if isinstance(one, Run))
    half_way = [one.op for i, one in runs if started[i] and not done[i]]
    return len(half_way) == 1 and half_way[0] in ops_that_may_raise(captured)


def can_stop(captured: Captured, program: Program, reached: Reached) -> bool:
    """Return whether the bytes of all persistent state still exist.

    They do not where an op would have overwritten all of a storage, so that the program dropped its contents.
    """
    if captured.ranges or captured.replicas:
        return False
    for index, one in enumerate(program.instructions):
        if isinstance(one, Run) and not reached.done[index]:
            op = captured.graph.ops[one.op]
            is_update = isinstance(captured.calls[one.op].func, OptimizerUpdate)  # what it has yet to make has no bytes
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
    reached: Reached,
) -> None:
    """Make the outstanding copies of persistent state.

    ``slots`` has by copy index the block's pieces at home. Nothing of the step is under way any more.
    """
    for index, copy in enumerate(program.instructions):
        if not isinstance(copy, CopyIn | CopyOut) or reached.done[index] or index not in slots:
            continue
        block = program.blocks[copy.block]
        if block.storage not in captured.graph.persistent:
            continue
        at, home = block.offset, homes[copy.home].home
        move = arena.save if isinstance(copy, CopyOut) else arena.load
        for piece in slots[index]:
            move(at, piece.bytes, home, piece.offset)
            at += piece.bytes
