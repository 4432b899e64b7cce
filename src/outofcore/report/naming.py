"""Names of storages, ops and instructions for people."""

from __future__ import annotations

from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.program import CopyOut, Instruction, Program, Queue, Run

# Names of the queues' rows, in the order of a page.
LANES = {
    Queue.COMPUTE: "ops",
    Queue.COMMUNICATE: "collectives",
    Queue.COPY_IN: "copies in",
    Queue.COPY_OUT: "copies out",
}
_COMPUTED_KINDS = frozenset({StorageKind.ACTIVATION, StorageKind.OUTPUT})


def storage_text(storage: Storage) -> str:
    """Return a name such as "layer3.2.conv1 convolution output", "layer3.2.conv1.weight" or "storage 7"."""
    if not storage.name:
        return f"{storage.kind.value.replace('_', ' ')} {storage.id}"
    return f"{storage.name} output" if storage.kind in _COMPUTED_KINDS else storage.name


def op_text(op: Op) -> str:
    return f"{op.short_name} in {op.module}" if op.module else op.short_name


def instruction_text(graph: StepGraph, program: Program, instruction: Instruction) -> str:
    """Return a name such as "copy-in of layer3.2.conv1 convolution output" or "convolution, recomputed"."""
    if isinstance(instruction, Run):
        return op_text(graph.ops[instruction.op]) + (", recomputed" if instruction.again else "")
    block = program.blocks[instruction.block]
    name = "scratch memory" if block.storage is None else storage_text(graph.storages[block.storage])
    return f"{'copy-out' if isinstance(instruction, CopyOut) else 'copy-in'} of {name}"
