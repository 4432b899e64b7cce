"""Stop a step half way with a consistent model, as plain PyTorch does.

If an op raises after parameters were updated, as in a step with two losses, the step cannot be undone. In plain PyTorch
earlier ops have run and later ones have not; outstanding copies of persistent state reproduce that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outofcore.capture.captured import Captured
from outofcore.capture.optimizers import OptimizerUpdate
from outofcore.capture.value_errors import ops_that_may_raise
from outofcore.execution.arena import DeviceArena
from outofcore.execution.undo import StepProgress
from outofcore.program import CopyIn, CopyOut, Program, Run
from outofcore.runtime.slots import SlotPiece, Slots


def find_updates(captured: Captured, program: Program) -> tuple[int, ...]:
    """Return the indices of the instructions that run optimizer updates."""
    return tuple(
        index
        for index, instruction in enumerate(program.instructions)
        if isinstance(instruction, Run) and isinstance(captured.calls[instruction.op].func, OptimizerUpdate)
    )


def matches_plain_pytorch(captured: Captured, program: Program, progress: StepProgress) -> bool:
    """Return whether a failed step has made the same optimizer updates as plain PyTorch before the error."""
    started, ended = progress.started, progress.finished
    if not any(started[index] for index in find_updates(captured, program)):
        return True
    runs = ((i, instruction) for i, instruction in enumerate(program.instructions) if isinstance(instruction, Run))
    half_way = [instruction.op for i, instruction in runs if started[i] and not ended[i]]
    return len(half_way) == 1 and half_way[0] in ops_that_may_raise(captured)


def is_state_complete(captured: Captured, program: Program, progress: StepProgress) -> bool:
    """Return whether all persistent state has valid bytes after a failed step; False if this is uncertain."""
    if captured.ranges or captured.replicas:
        return False
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, Run) and not progress.finished[index]:
            op = captured.graph.ops[instruction.op]
            is_update = isinstance(captured.calls[instruction.op].func, OptimizerUpdate)  # new state has no bytes yet
            overwritten = set(op.mutates) - set(op.reads)  # may have no valid bytes before the op has run
            if not is_update and not captured.graph.persistent.isdisjoint(overwritten):
                return False
    return True


def finish_state_copies(
    captured: Captured,
    program: Program,
    slots: Mapping[int, tuple[SlotPiece, ...]],
    arena: DeviceArena,
    homes: Sequence[Slots],
    progress: StepProgress,
) -> None:
    """Make the copies of persistent state that a failed step did not finish. All queues must be idle."""
    for index, copy in enumerate(program.instructions):
        if not isinstance(copy, CopyIn | CopyOut) or progress.finished[index] or index not in slots:
            continue
        block = program.blocks[copy.block]
        if block.storage not in captured.graph.persistent:
            continue
        offset, home = block.offset, homes[copy.home].home
        move = arena.save if isinstance(copy, CopyOut) else arena.load
        for piece in slots[index]:
            move(offset, piece.bytes, home, piece.offset)
            offset += piece.bytes
