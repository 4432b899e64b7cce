"""A program bound to memory: each instruction with the very tensors and bytes that it works on.

Addresses are planned, so every tensor that an op will ever see can be made once, before the first
step; a step then makes none. Views cost nothing: they are only other tensors on the same block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from outofcore.analysis.requests import Requests, Result, Scratch
from outofcore.capture.captured import Captured, Ref, Value
from outofcore.errors import GraphError
from outofcore.execution.arena import STOCK, Arena
from outofcore.program import Block, CopyOut, Program, Queue, Run, Wait, queue_of

QUEUES = (Queue.COMPUTE, Queue.COPY_OUT, Queue.COPY_IN)


class Draws(Enum):
    """What has to be done about the random generator around an op."""

    FREELY = "freely"  # nothing: it draws nothing, or is never run again
    FIRST = "first"  # the generator's state is saved before, for the op runs again later in the step
    AGAIN = "again"  # it draws from the saved state, and the generator goes on as if it had not run


@dataclass(frozen=True, slots=True)
class BoundRun:
    """One op, ready to be called."""

    index: int  # of the instruction in the program
    op: int
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[tuple[int, int, torch.Tensor], ...]  # leaf, the address it should have, the tensor to be
    waits: tuple[tuple[int, int], ...]  # queue index, count
    number: int  # place in its queue, from 1
    awaited: bool  # whether an instruction of another queue waits for this one
    draws: Draws


@dataclass(frozen=True, slots=True)
class BoundCopy:
    """One copy between a block and a home."""

    index: int
    storage: int
    offset: int  # of the block in the arena
    bytes: int  # of the block, whole pages where it is large
    waits: tuple[tuple[int, int], ...]
    number: int
    awaited: bool


@dataclass(frozen=True)
class Bound:
    """A program bound to an arena."""

    runs: tuple[BoundRun, ...]
    copies_out: tuple[BoundCopy, ...]
    copies_in: tuple[BoundCopy, ...]


def tensor_on(base: torch.Tensor, value: Value) -> torch.Tensor:
    """A tensor with the metadata of ``value`` on the storage of ``base`` (uint8, from its first byte on)."""
    tensor = torch.empty(0, dtype=value.dtype, device=base.device)
    return tensor.set_(base.untyped_storage(), value.offset, value.shape, value.stride)


class _Binder:
    def __init__(self, captured: Captured, program: Program, arena: Arena) -> None:
        self.captured = captured
        self.program = program
        self.arena = arena
        self.bases: dict[int, torch.Tensor] = {}
        self.tensors: dict[tuple[int, int], torch.Tensor] = {}

    def tensor(self, value_index: int, block: Block) -> torch.Tensor:
        found = self.tensors.get((value_index, block.id))
        if found is None:
            value = self.captured.values[value_index]
            base = self.bases.get(block.id)
            if base is None:
                count = self.captured.graph.storages[value.storage].bytes
                base = self.bases[block.id] = self.arena.view(block.offset, count)
            found = self.tensors[value_index, block.id] = tensor_on(base, value)
        return found

    def argument(self, item: Any, blocks: dict[int, Block]) -> Any:
        if isinstance(item, Ref):
            return self.tensor(item.value, blocks[self.captured.values[item.value].storage])
        if isinstance(item, list):
            return [self.argument(x, blocks) for x in item]
        if isinstance(item, tuple):
            return tuple(self.argument(x, blocks) for x in item)
        return item


def _pairs(waits: tuple[Wait, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((QUEUES.index(wait.queue), wait.count) for wait in waits)


def bind(captured: Captured, program: Program, arena: Arena) -> Bound:
    """Bind a placed and wired program to an arena.

    Args:
        captured: the step.
        program: a program of ``captured.graph``, with offsets within the arena.
        arena: at least ``program.arena_bytes`` large.

    Raises:
        GraphError: the program copies a workspace, or uses another home than the first.
    """
    binder = _Binder(captured, program, arena)
    awaited = {(wait.queue, wait.count) for i in program.instructions for wait in i.waits}
    random_again = {
        i.op for i in program.instructions if isinstance(i, Run) and i.again and captured.graph.ops[i.op].random
    }
    counts = dict.fromkeys(QUEUES, 0)
    runs: list[BoundRun] = []
    copies: dict[Queue, list[BoundCopy]] = {Queue.COPY_OUT: [], Queue.COPY_IN: []}
    for index, instruction in enumerate(program.instructions):
        queue = queue_of(instruction)
        counts[queue] += 1
        number, is_awaited = counts[queue], (queue, counts[queue]) in awaited
        if isinstance(instruction, Run):
            op, call = captured.graph.ops[instruction.op], captured.calls[instruction.op]
            blocks = {s: program.blocks[b] for s, b in zip(op.touched, instruction.blocks, strict=True)}
            results: list[tuple[int, int, torch.Tensor]] = []
            for leaf, value_index in enumerate(call.results):
                if value_index is None:
                    continue
                value = captured.values[value_index]
                target = binder.tensor(value_index, blocks[value.storage])
                if target.numel():
                    results.append((leaf, target.data_ptr(), target))
            draws = Draws.FREELY
            if op.id in random_again:
                draws = Draws.AGAIN if instruction.again else Draws.FIRST
            runs.append(
                BoundRun(
                    index,
                    op.id,
                    call.func,
                    binder.argument(call.args, blocks),
                    {name: binder.argument(item, blocks) for name, item in call.kwargs.items()},
                    tuple(results),
                    _pairs(instruction.waits),
                    number,
                    is_awaited,
                    draws,
                )
            )
        else:
            block = program.blocks[instruction.block]
            if block.storage is None:
                raise GraphError(f"instruction {index} copies a workspace")
            if instruction.home:
                raise GraphError(
                    f"instruction {index} copies to or from home {instruction.home}; a step runs with its first home "
                    "only: plan it with costs that name one home"
                )
            kind = Queue.COPY_OUT if isinstance(instruction, CopyOut) else Queue.COPY_IN
            copies[kind].append(
                BoundCopy(
                    index, block.storage, block.offset, block.bytes, _pairs(instruction.waits), number, is_awaited
                )
            )
    return Bound(tuple(runs), tuple(copies[Queue.COPY_OUT]), tuple(copies[Queue.COPY_IN]))


def scopes(captured: Captured, program: Program, requests: Sequence[Requests]) -> list[list[tuple[int, int]]]:
    """For each op that a placed program runs, in order, the bytes and the offset in the arena of its requests.

    Args:
        captured: the step.
        program: placed.
        requests: for each op the requests for memory that it makes, in order, as measured.
    """
    found: list[list[tuple[int, int]]] = []
    for run in program.instructions:
        if not isinstance(run, Run):
            continue
        blocks = {s: program.blocks[b] for s, b in zip(captured.graph.ops[run.op].touched, run.blocks, strict=True)}
        scratch = program.blocks[run.workspace].offset if run.workspace is not None else STOCK
        results = captured.calls[run.op].results
        scope: list[tuple[int, int]] = []
        for request in requests[run.op].requests:
            offset = STOCK
            match request.placement:
                case Result(leaf):
                    value_index = results[leaf]
                    block = None if value_index is None else blocks[captured.values[value_index].storage]
                    if block is not None and request.bytes <= block.bytes:
                        offset = block.offset
                case Scratch(within) if scratch != STOCK:
                    offset = scratch + within
                case _:
                    pass
            if request.bytes:
                scope.append((request.bytes, offset))
        found.append(scope)
    return found


__all__ = ["QUEUES", "Bound", "BoundCopy", "BoundRun", "Draws", "bind", "scopes", "tensor_on"]
