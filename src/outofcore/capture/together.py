"""Updates in a row as one op: an optimizer's step has a fixed price, however few parameters it is for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outofcore.capture.captured import Call, Captured
from outofcore.capture.optimizers import OptimizerUpdate, Rehearsal, is_torchs_own
from outofcore.graph import Op, StepGraph
from outofcore.units import MIB

# An op of so many bytes of parameters has no fixed price to speak of, and is still measured in little memory.
TOGETHER_BYTES = 4 * MIB


def together(captured: Captured) -> Captured:
    """The same step, to the bit, with updates that follow one another joined, so far as none needs more scratch memory.

    An optimizer that goes from parameter to parameter needs scratch memory for one at a time; the fused ones need none.
    """
    ops: list[Op] = []
    calls: list[Call] = []
    row: list[int] = []
    updates: list[OptimizerUpdate] = []

    def end_row() -> None:
        if row:
            op, call = _joined(captured, row, updates)
            ops.append(replace(op, id=len(ops)))
            calls.append(call)
            row.clear()
            updates.clear()

    for op, call in zip(captured.graph.ops, captured.calls, strict=True):
        update = _update(captured, op.id)
        if update is None or (updates and not _follows(updates, update)):
            end_row()
        if update is None:
            ops.append(replace(op, id=len(ops)))
            calls.append(call)
        else:
            row.append(op.id)
            updates.append(update)
    end_row()
    graph = captured.graph
    return replace(captured, graph=StepGraph(graph.storages, tuple(ops), graph.outputs), calls=tuple(calls))


def _update(captured: Captured, op: int) -> OptimizerUpdate | None:
    """What an op updates, if it is an update of one parameter after another."""
    update = captured.calls[op].func
    if not isinstance(update, OptimizerUpdate) or not is_torchs_own(update.optimizer) or captured.graph.ops[op].random:
        return None
    for index in {member.group for member in update.members}:
        group = update.optimizer.param_groups[index]
        foreach = group.get("foreach")
        if foreach is None:
            # What torch.optim takes where nothing is said: all at once, but for the CPU.
            foreach = any(member.parameter.device.type != "cpu" for member in update.members)
        if foreach and not group.get("fused"):
            return None
    return update


def _follows(row: Sequence[OptimizerUpdate], update: OptimizerUpdate) -> bool:
    known = [member for each in row for member in each.members]
    if update.optimizer is not row[0].optimizer or update.is_first() != row[0].is_first():
        return False  # those that have yet to make their state ask for other memory
    # A parameter that is updated twice has a second update of its own.
    if {id(m.parameter) for m in known} & {id(m.parameter) for m in update.members}:
        return False
    return sum(m.parameter.numel() * m.parameter.element_size() for m in (*known, *update.members)) <= TOGETHER_BYTES


def _joined(captured: Captured, row: Sequence[int], updates: Sequence[OptimizerUpdate]) -> tuple[Op, Call]:
    if len(row) == 1:
        return captured.graph.ops[row[0]], captured.calls[row[0]]
    parts = [captured.graph.ops[each] for each in row]
    calls = [captured.calls[each] for each in row]
    update = OptimizerUpdate.joined(updates)
    args = tuple([item for call in calls for item in call.args[place]] for place in range(3))
    rehearsal = Rehearsal(update)
    call = Call(update, args, {}, (), rehearsal, rehearsal.first if rehearsal.makes_state else None)
    op = replace(
        parts[0],
        reads=tuple(dict.fromkeys(s for part in parts for s in part.reads)),
        mutates=tuple(dict.fromkeys(s for part in parts for s in part.mutates)),
        family=" ".join(part.family for part in parts),
    )
    return op, call
