"""Record ops on parameters that are sharded over processes.

A parameter is gathered from all processes right before its first use; a plan may drop it and gather it again. A final
gradient is divided by the number of processes, exchanged, and added up in the order of the processes. Small parameters,
which every process has whole, are reduced together. The optimizer updates this process's range.

With two processes the bits match ``DistributedDataParallel``, if the optimizer's kernels round alike at range ends (see
``analysis.chunks``). With more they match a sum in the order of the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outofcore._torch_internals import FakeTensorMode, call_after_backward
from outofcore.analysis.chunks import Chunks
from outofcore.capture.captured import Call, Captured, Ref, Value, with_ops
from outofcore.capture.collectives import Collective, CollectiveKind
from outofcore.capture.shards import Shard, Shards
from outofcore.capture.tables import Tables
from outofcore.errors import CaptureError
from outofcore.graph import StorageKind
from outofcore.units import MIB

# Gradients of small parameters are reduced together when they reach this many bytes.
_MIN_GROUP_BYTES = MIB

RunOp = Callable[..., torch.Tensor]


@dataclass
class TracedShard:
    """A sharded parameter in a capture: fakes of its whole contents and of this process's chunk."""

    sharding: Sharding
    shard: Shard
    row: torch.Tensor  # a fake of all elements in memory order, padded to whole chunks
    chunk: torch.Tensor  # a fake of this process's chunk, which is persistent
    own_value: int  # this process's range
    synced_at: int = 0  # number of ops in the trace when row and chunk last agreed
    gradient: torch.Tensor | None = None  # a fake of this process's chunk of the reduced gradient
    gathered_storage: int = -1  # storage of the whole gradient that was gathered from it
    gathered_at: int = 0  # number of ops in the trace at that time
    persistent_gradient: tuple[torch.Tensor, int] | None = (
        None  # a persistent gradient: a fake of the chunk, and its range
    )

    def _is_written(self, storage: int, since: int) -> bool:
        return any(storage in op.mutates for op, _ in self.sharding.tables.ops[since:])

    def sync(self) -> None:
        """Record an op that copies the step's writes to the gathered parameter back into this process's range."""
        tables = self.sharding.tables
        if self._is_written(tables.storage_of(self.row), self.synced_at):
            with torch.no_grad():
                self.chunk.copy_(self._own_chunk(self.row))
        self.synced_at = len(tables.ops)

    def gather_updated(self) -> None:
        """Record an op that gathers the updated parameter from all processes, for later readers."""
        tables, module = self.sharding.tables, self.shard.name.rpartition(".")[0]
        self.sharding.append_collective(
            CollectiveKind.ALL_GATHER, self.row, self.chunk, module, mutates=(tables.storage_of(self.row),)
        )
        self.synced_at = len(tables.ops)

    def own_gradient_value(self, gradient: torch.Tensor) -> int:
        shard = self.shard
        if self.gradient is not None and self._is_reduced(gradient):
            return self._gradient_value(self.gradient)
        return self._gradient_value(self._as_row(gradient), shard.start)

    def end_gradient(self, gradient: torch.Tensor, run: RunOp) -> int | None:
        return run(self._end_gradient, gradient)  # type: ignore[return-value]

    def _end_gradient(self, gradient: torch.Tensor) -> int | None:
        """Return a new gradient chunk's value index; if a chunk existed before the step, update it and return None."""
        if self.gradient is not None and self._is_reduced(gradient):
            chunk = self.gradient
        else:
            chunk = self._own_chunk(self._as_row(gradient)).clone()
        if self.persistent_gradient is None:
            return self._gradient_value(chunk)
        if chunk is not self.persistent_gradient[0]:
            self.persistent_gradient[0].copy_(chunk)
        return None

    def _is_reduced(self, gradient: torch.Tensor) -> bool:
        """Return whether a gradient is unchanged since it was reduced and gathered."""
        shard = self.shard
        return (
            self.sharding.tables.storage_of(gradient) == self.gathered_storage
            and (tuple(gradient.shape), gradient.stride()) == (shard.shape, shard.stride)
            and gradient.storage_offset() == 0
            and not self._is_written(self.gathered_storage, self.gathered_at)
        )

    def _as_row(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient as a one-dimensional tensor, padded so that every process's chunk is equally long."""
        tables, shard = self.sharding.tables, self.shard
        count = tables.storages[tables.storage_of(gradient)].bytes
        if (
            count == shard.chunks.padded_elements * gradient.element_size()
            and gradient.stride() == shard.stride
            and gradient.storage_offset() == 0
        ):
            return gradient.detach().as_strided((shard.chunks.padded_elements,), (1,))
        with torch.no_grad():
            row = torch.empty(shard.chunks.padded_elements, dtype=gradient.dtype, device=gradient.device)
            shard.whole_of(row).copy_(gradient)
        return row

    def _gradient_value(self, memory: torch.Tensor, start: int = 0) -> int:
        """Return the value index of this process's range in ``memory``, and mark its storage as a gradient."""
        tables, shard = self.sharding.tables, self.shard
        storage = tables.storage_of(memory)
        entry = tables.storages[storage]
        if entry.created and entry.kind is StorageKind.ACTIVATION:
            entry.kind, entry.name = StorageKind.GRADIENT, f"{shard.name}.grad"
        return tables.index_of(Value(storage, memory.dtype, (shard.count,), (1,), start))

    def _own_chunk(self, row: torch.Tensor) -> torch.Tensor:
        chunk_elements = self.shard.chunks.chunk_elements
        return row[self.shard.rank * chunk_elements :][:chunk_elements]


class Sharding:
    """The sharded parameters of one capture: records ops that gather them and reduce their gradients."""

    def __init__(self, shards: Shards, mode: FakeTensorMode, tables: Tables) -> None:
        self._shards = shards
        self._mode = mode
        self.tables = tables
        self._group: Any = shards.group
        self._count = shards.group.size()
        self._traced: dict[int, TracedShard] = {}
        self._small: dict[torch.dtype, list[torch.Tensor]] = {}
        self._armed = False

    def shard_of(self, tensor: object) -> Shard | None:
        return self._shards.shard_of(tensor)

    # Before the step

    def fake(self, shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a fake of the parameter, and the padded one-dimensional fake that it is a view of."""
        row = self._new_row(shard.chunks.padded_elements, shard.dtype)
        with self._mode, torch.no_grad():
            return nn.Parameter(shard.whole_of(row), requires_grad=shard.parameter.requires_grad), row

    def begin(self, shard: Shard, row: torch.Tensor) -> TracedShard:
        """Register this process's chunk of a parameter, and record the op that gathers all chunks into ``row``."""
        chunk, value = self._add_persistent_chunk(shard, StorageKind.PARAMETER, shard.name)
        self._gather_first(shard, row, chunk, shard.name)
        traced = self._traced[id(shard.parameter)] = TracedShard(self, shard, row, chunk, value, len(self.tables.ops))
        return traced

    def begin_gradient(self, shard: Shard, fake: torch.Tensor) -> int:
        """Gather a gradient from before the step into ``fake.grad``; return the value index of this process's range."""
        row = self._new_row(shard.chunks.padded_elements, shard.dtype)
        chunk, value = self._add_persistent_chunk(shard, StorageKind.GRADIENT, f"{shard.name}.grad")
        self._gather_first(shard, row, chunk, f"{shard.name}.grad")
        with self._mode, torch.no_grad():
            fake.grad = shard.whole_of(row)
        traced = self._traced[id(shard.parameter)]
        traced.persistent_gradient = chunk, value
        # It is equivalent to a gradient that was just reduced.
        traced.gradient, traced.gathered_storage, traced.gathered_at = (
            chunk,
            self.tables.storage_of(row),
            len(self.tables.ops),
        )
        return value

    def _new_row(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        with self._mode, torch.no_grad():
            return torch.empty(count, dtype=dtype, device=self.tables.device)

    def _add_persistent_chunk(self, shard: Shard, kind: StorageKind, name: str) -> tuple[torch.Tensor, int]:
        """Return a fake of this process's chunk on a new persistent storage, and the value index of its range."""
        chunk = self._new_row(shard.chunks.chunk_elements, shard.dtype)
        storage = self.tables.add(chunk, kind, name)
        return chunk, self.tables.index_of(Value(storage, shard.dtype, (shard.count,), (1,)))

    def _gather_first(self, shard: Shard, row: torch.Tensor, chunk: torch.Tensor, name: str) -> None:
        storage = self.tables.add(row, StorageKind.ACTIVATION, f"{name}, gathered")
        self.append_collective(CollectiveKind.ALL_GATHER, row, chunk, shard.name.rpartition(".")[0], creates=(storage,))

    def add_gradient_hook(self, fake: torch.Tensor, shard: Shard | None, *, reduce_at_once: bool) -> None:
        """Add a hook to a parameter's fake that reduces each new gradient over all processes."""
        if not fake.requires_grad or not fake.is_leaf:
            return

        def reduce_gradient(parameter: torch.Tensor) -> None:
            with torch.no_grad():
                if shard is not None:
                    self._reduce(shard, parameter)
                elif reduce_at_once:
                    self._reduce_together([parameter])
                else:
                    self._queue(parameter)

        fake.register_post_accumulate_grad_hook(reduce_gradient)

    # In the step

    def _reduce(self, shard: Shard, fake: torch.Tensor) -> None:
        """Record the reduction of a gradient over all processes, and replace it by the gathered result."""
        gradient = _gradient_of(fake, shard.name)
        traced = self._traced[id(shard.parameter)]
        chunk = self._reduce_scatter(self._scale(shard, gradient))
        row = torch.empty(shard.chunks.padded_elements, dtype=chunk.dtype, device=chunk.device)
        module = shard.name.rpartition(".")[0]
        self.append_collective(CollectiveKind.ALL_GATHER, row, chunk, module, mutates=(self.tables.storage_of(row),))
        fake.grad = shard.whole_of(row)
        traced.gradient, traced.gathered_storage = chunk, self.tables.storage_of(row)
        traced.gathered_at = len(self.tables.ops)

    def _scale(self, shard: Shard, gradient: torch.Tensor) -> torch.Tensor:
        """Divide a gradient by the number of processes, and return it as a padded one-dimensional tensor."""
        share = 1.0 / self._count
        if shard.chunks.padded_elements == shard.chunks.elements and gradient.stride() == shard.stride:
            scaled = torch.mul(gradient, share)
            if scaled.stride() == shard.stride:
                return scaled.as_strided((shard.chunks.elements,), (1,))
        row = torch.empty(shard.chunks.padded_elements, dtype=gradient.dtype, device=gradient.device)
        torch.mul(gradient, share, out=shard.whole_of(row))
        return row

    def _reduce_scatter(self, row: torch.Tensor) -> torch.Tensor:
        """Return this process's chunk of ``row``, summed over all processes in rank order."""
        received = torch.empty_like(row)
        storage = self.tables.storage_of(received)
        self.append_collective(CollectiveKind.ALL_TO_ALL, received, row, "", mutates=(storage,), rerunnable=False)
        parts = received.view(self._count, -1).unbind()
        total = torch.add(parts[0], parts[1])
        for part in parts[2:]:
            total.add_(part)
        return total

    def _queue(self, fake: torch.Tensor) -> None:
        """Queue a small gradient by dtype; reduce the queue when it is large, or when the backward pass ends."""
        if not self._armed:
            self._armed = True
            call_after_backward(self._reduce_queued)
        _gradient_of(fake, "a parameter")
        queued = self._small.setdefault(fake.dtype, [])
        queued.append(fake)
        if sum(p.numel() * p.element_size() for p in queued) >= _MIN_GROUP_BYTES:
            del self._small[fake.dtype]
            self._reduce_together(queued)

    def _reduce_queued(self) -> None:
        self._armed = False
        queued, self._small = list(self._small.values()), {}
        with torch.no_grad():
            for row in queued:
                self._reduce_together(row)

    def _reduce_together(self, fakes: Sequence[torch.Tensor]) -> None:
        """Average several gradients over all processes, as one tensor, and copy the results back into them."""
        gradients = [_gradient_of(fake, "a parameter") for fake in fakes]
        chunks = Chunks(sum(gradient.numel() for gradient in gradients), self._count)
        first = gradients[0]
        row = torch.empty(chunks.padded_elements, dtype=first.dtype, device=first.device)
        places, start = [], 0
        for gradient in gradients:
            places.append(row[start : start + gradient.numel()].view(gradient.shape))
            torch.mul(gradient, 1.0 / self._count, out=places[-1])
            start += gradient.numel()
        total = self._reduce_scatter(row)
        whole = torch.empty_like(row)
        self.append_collective(CollectiveKind.ALL_GATHER, whole, total, "", mutates=(self.tables.storage_of(whole),))
        start = 0
        for gradient in gradients:
            gradient.copy_(whole[start : start + gradient.numel()].view(gradient.shape))
            start += gradient.numel()

    def append_collective(
        self,
        kind: CollectiveKind,
        row: torch.Tensor,
        source: torch.Tensor,
        module: str,
        *,
        creates: tuple[int, ...] = (),
        mutates: tuple[int, ...] = (),
        rerunnable: bool = True,
    ) -> None:
        """Record a collective from ``source`` into ``row``. The capture drops the op if ``row`` is unused."""
        tables = self.tables
        call = Collective(kind, self._group, row.numel() * row.element_size(), row.dtype)
        place = tables.append(
            f"dist.{kind.value}",
            Call(call, (Ref(tables.value_of(row)), Ref(tables.value_of(source))), {}, ()),
            reads=(tables.storage_of(source),),
            mutates=mutates,
            creates=creates,
            rerunnable=rerunnable,
            communicates=True,
            family=str(call),
            module=module,
        )
        tables.optional_ops.add(place)

    # After the step

    def sync_all(self, run: RunOp) -> None:
        for traced in self._traced.values():
            run(traced.sync)


def _gradient_of(fake: torch.Tensor, name: str) -> torch.Tensor:
    """Return the gradient of a fake; raise ``CaptureError`` if it is missing or sparse."""
    gradient = fake.grad
    if gradient is None:
        raise CaptureError(
            f"the gradient of {name} was removed from .grad before it was reduced: keep it there until backward() has "
            "ended"
        )
    if gradient.layout is not torch.strided:
        raise CaptureError(
            f"the gradient of {name} is sparse, and a step with shard= reduces dense ones only: create the embedding "
            "with sparse=False"
        )
    return gradient


def delay_gathers(captured: Captured) -> Captured:
    """Return the capture with each gather of a parameter moved to shortly before the parameter's first use."""
    # Each gather starts when the previous one is needed, so it overlaps with ops, and at most two gathered parameters
    # wait.
    graph = captured.graph
    early_gathers = [op for op in graph.ops if op.communicates and op.creates and graph.persistent.issuperset(op.reads)]
    if not early_gathers:
        return captured
    first_uses = {op.id: graph.uses[op.creates[0]][1] for op in early_gathers}
    gathers_before: dict[int, list[int]] = {}
    place = 0
    for gathering in sorted(first_uses, key=lambda op: (first_uses[op], op)):
        gathers_before.setdefault(place, []).append(gathering)
        place = first_uses[gathering]
    order: list[int] = gathers_before.pop(0, [])
    for op in graph.ops:
        order += gathers_before.get(op.id, [])
        if op.id not in first_uses:
            order.append(op.id)
    return with_ops(captured, [(graph.ops[old], captured.calls[old]) for old in order])
