"""A program bound to memory: each instruction with its tensors, which are created once, before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

import torch

from outofcore import _torch_internals as internals
from outofcore.capture.captured import Captured, Ref, Value
from outofcore.capture.optimizers import OptimizerUpdate
from outofcore.capture.tables import map_leaves
from outofcore.errors import GraphError
from outofcore.execution.arena import DeviceArena
from outofcore.graph import StepGraph
from outofcore.planning.placement.requests import Requests, ResultStorage, Scratch
from outofcore.program import Block, CopyIn, CopyOut, Program, Queue, Run, Wait, lane_of
from outofcore.transforms.passes import OverwritingOverload


class Lane(IntEnum):
    """Numbers of queues; each home has one queue for copies out and one for copies in, from 1 on."""

    COMPUTE = 0  # the ops
    COMMUNICATE = -1  # the collectives: the last queue, since Python's negative indices count from the end


class GeneratorUse(Enum):
    """How an op treats the random generators, so that a second run draws the same numbers."""

    UNTOUCHED = "untouched"  # leave it alone: the op draws no random numbers, or never runs again
    SAVE = "save"  # save its state before the op, which runs again later in the step
    RESTORE = "restore"  # the op draws from the saved state; afterwards the current state is restored


@dataclass(frozen=True, slots=True)
class BoundRun:
    """An op with its tensors: all that an engine needs to call it."""

    index: int  # of the instruction in the program
    op: int
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    # Index among the result leaves, planned address, planned tensor, and its strides.
    results: tuple[tuple[int, int, torch.Tensor, tuple[int, ...]], ...]
    waits: tuple[tuple[int, int], ...]  # number of the queue, number of the instruction in it
    number: int  # place in its queue, from 1
    awaited: bool  # whether an instruction of another queue waits for this one
    generator_use: GeneratorUse


@dataclass(frozen=True, slots=True)
class BoundCopy:
    """A copy between a block of the arena and a home, or the caller's memory."""

    index: int
    storage: int
    home: int
    offset: int  # of the block in the arena
    bytes: int  # of the block, whole pages where it is large
    waits: tuple[tuple[int, int], ...]
    number: int
    awaited: bool


@dataclass(frozen=True, eq=False)  # hashed by identity, as a key of caches
class BoundProgram:
    """A program bound to an arena; ``copies`` are by queue, in the order of ``queue_number``."""

    graph: StepGraph
    program: Program
    arena: DeviceArena
    runs: tuple[BoundRun, ...]
    copies: tuple[tuple[BoundCopy, ...], ...]
    collectives: tuple[BoundRun, ...] = ()


def queue_number(queue: Queue, home: int) -> int:
    if queue in (Queue.COMPUTE, Queue.COMMUNICATE):
        return Lane.COMPUTE if queue is Queue.COMPUTE else Lane.COMMUNICATE
    return 2 * home + (1 if queue is Queue.COPY_OUT else 2)


def tensor_on(base: torch.Tensor, value: Value) -> torch.Tensor:
    """Return a tensor on the storage of ``base`` (uint8), with the dtype, shape and strides of ``value``."""
    tensor = torch.empty(0, dtype=value.dtype, device=base.device)
    tensor.set_(base.untyped_storage(), value.offset, value.shape, value.stride)
    if value.conjugate:
        tensor = tensor.conj()
    return internals.negative_view(tensor) if value.negated else tensor


class _Binder:
    """Creates the tensors of a program's instructions over the blocks of an arena."""

    def __init__(self, captured: Captured, program: Program, arena: DeviceArena, homes: int) -> None:
        self.captured, self.program, self.arena = captured, program, arena
        self.bases: dict[int, torch.Tensor] = {}
        self.tensors: dict[tuple[int, int], torch.Tensor] = {}
        self.awaited = {pair for i in program.instructions for pair in _wait_pairs(i.waits)}
        self.rerun_random_ops = {
            i.op for i in program.instructions if isinstance(i, Run) and i.again and captured.graph.ops[i.op].random
        }
        self.counts = [0] * (2 + 2 * homes)

    def next_number(self, queue: int) -> tuple[int, bool]:
        """Return the number of the next instruction of a queue, and whether another queue waits for it."""
        self.counts[queue] += 1
        return self.counts[queue], (queue, self.counts[queue]) in self.awaited

    def bind_run(self, index: int, instruction: Run, queue: int) -> BoundRun:
        """Bind an op to the arena: replace its references to values by tensors over the planned blocks."""
        captured, program = self.captured, self.program
        op, call = captured.graph.ops[instruction.op], captured.calls[instruction.op]
        blocks = {s: program.blocks[b] for s, b in zip(op.touched, instruction.blocks, strict=True)}
        results: list[tuple[int, int, torch.Tensor, tuple[int, ...]]] = []
        for leaf, value_index in enumerate(call.results):
            if value_index is None:
                continue
            value = captured.values[value_index]
            target = self.tensor_in_block(value_index, blocks[value.storage])
            # An unused result may be elsewhere, or missing.
            if target.numel() and value.storage not in captured.graph.unused:
                results.append((leaf, target.data_ptr(), target, target.stride()))

        def to_tensor(ref: Ref) -> torch.Tensor:
            return self.tensor_in_block(ref.value, blocks[captured.values[ref.value].storage])

        args, kwargs = map_leaves((call.args, call.kwargs), to_tensor, Ref)
        func = call.func
        if isinstance(func, OptimizerUpdate):
            func = func.bind(*args)
        elif isinstance(func, OverwritingOverload):
            func, kwargs = func.run, func.complete_kwargs(args, kwargs)
        draws = GeneratorUse.UNTOUCHED
        if op.id in self.rerun_random_ops:
            draws = GeneratorUse.RESTORE if instruction.again else GeneratorUse.SAVE
        waits = _wait_pairs(instruction.waits)
        return BoundRun(index, op.id, func, args, kwargs, tuple(results), waits, *self.next_number(queue), draws)

    def bind_copy(self, index: int, instruction: CopyOut | CopyIn, queue: int) -> BoundCopy:
        """Bind a copy; raise ``GraphError`` if it copies a workspace."""
        block, home = self.program.blocks[instruction.block], instruction.home
        if block.storage is None:
            raise GraphError(f"instruction {index} copies a workspace; please report it")
        waits = _wait_pairs(instruction.waits)
        return BoundCopy(index, block.storage, home, block.offset, block.bytes, waits, *self.next_number(queue))

    def tensor_in_block(self, value_index: int, block: Block) -> torch.Tensor:
        """Return the tensor of a value over a block of the arena; create it at its first use."""
        tensor = self.tensors.get((value_index, block.id))
        if tensor is None:
            value = self.captured.values[value_index]
            base = self.bases.get(block.id)
            if base is None:
                count = self.captured.graph.storages[value.storage].bytes
                base = self.host_memory(value.storage, count) if value.foreign else self.arena.view(block.offset, count)
                self.bases[block.id] = base
            tensor = self.tensors[value_index, block.id] = tensor_on(base, value)
        return tensor

    def host_memory(self, storage: int, count: int) -> torch.Tensor:
        """Return host memory for a small tensor that a step on a GPU keeps on the CPU."""
        constant = self.captured.constants.get(storage)
        if constant is not None:
            return internals.view_storage_bytes(constant)
        return torch.zeros(count, dtype=torch.uint8)


def _wait_pairs(waits: tuple[Wait, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((queue_number(wait.queue, wait.home), wait.count) for wait in waits)


def bind(captured: Captured, program: Program, arena: DeviceArena, homes: int = 1) -> BoundProgram:
    """Resolve a program's instructions to tensors and addresses in an arena; raise ``GraphError`` on failure."""
    binder = _Binder(captured, program, arena, homes)
    runs: list[BoundRun] = []
    collectives: list[BoundRun] = []
    copies: list[list[BoundCopy]] = [[] for _ in range(2 * homes)]
    for index, instruction in enumerate(program.instructions):
        if not isinstance(instruction, Run) and not 0 <= instruction.home < homes:
            raise GraphError(
                f"instruction {index} copies to or from home {instruction.home}, but the step has {homes} homes; plan "
                "it with costs of these homes only"
            )
        queue = queue_number(*lane_of(instruction))
        if isinstance(instruction, Run):
            (collectives if instruction.communicates else runs).append(binder.bind_run(index, instruction, queue))
        else:
            copies[queue - 1].append(binder.bind_copy(index, instruction, queue))
    return BoundProgram(captured.graph, program, arena, tuple(runs), tuple(map(tuple, copies)), tuple(collectives))


def requests_by_scope(
    captured: Captured, program: Program, requests: Sequence[Requests] | Mapping[int, Requests]
) -> list[list[tuple[int, int | None]]]:
    """Return the planned memory requests of each op run, as (bytes, offset in the arena or None)."""
    scope_requests: list[list[tuple[int, int | None]]] = []
    for run in program.instructions:
        if not isinstance(run, Run) or run.communicates:  # collectives have no scope
            continue
        blocks = {s: program.blocks[b] for s, b in zip(captured.graph.ops[run.op].touched, run.blocks, strict=True)}
        scratch = program.blocks[run.workspace].offset if run.workspace is not None else None
        results = captured.calls[run.op].results
        scope: list[tuple[int, int | None]] = []
        for request in requests[run.op].requests:
            offset = None
            match request.placement:
                case ResultStorage(leaf):
                    value_index = results[leaf]
                    block = None if value_index is None else blocks[captured.values[value_index].storage]
                    foreign = value_index is not None and captured.values[value_index].foreign
                    if block is not None and not foreign and request.bytes <= block.bytes:
                        offset = block.offset
                case Scratch(within) if scratch is not None:
                    offset = scratch + within
                case _:
                    pass
            if request.bytes:
                scope.append((request.bytes, offset))
        scope_requests.append(scope)
    return scope_requests
