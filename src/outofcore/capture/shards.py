"""Shard a model's parameters, gradients and optimizer state by ranges over processes.

This is ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020,
section 5). Large parameters are split by elements in memory order into ranges of one length (``analysis.chunks``).
Small ones and buffers stay whole in every process. A range is a one-dimensional tensor with its gradient in ``.grad``.
While sharded, the user's parameter is on the device ``meta``, so PyTorch refuses to read it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from outofcore._torch_internals import gather_into, storage_key
from outofcore.analysis import is_large
from outofcore.analysis.chunks import Chunks, is_dense
from outofcore.capture.mirror import states_of
from outofcore.capture.optimizers import updates_elementwise
from outofcore.capture.replicas import parallel_models
from outofcore.errors import CommunicationError, InputError, StateError
from outofcore.graph import StorageKind
from outofcore.tensor_data import set_data, swap


@dataclass(frozen=True)
class AssumedGroup:
    """A hypothetical group of ``count`` processes, for planning; this is process 0."""

    count: int

    def size(self) -> int:
        return self.count

    def rank(self) -> int:
        return 0


@dataclass(eq=False)
class Shard:
    """One process's range of one parameter."""

    key: str
    name: str
    parameter: nn.Parameter  # the user's object
    chunks: Chunks  # the division of its elements in memory order
    rank: int
    shape: tuple[int, ...]  # of the whole parameter, like ``stride`` and ``dtype``
    stride: tuple[int, ...]
    dtype: torch.dtype
    own_range: torch.Tensor  # this process's range, of shape (count,), on memory for a whole chunk
    original: nn.Parameter | None = None  # the original parameter; without contents while it is sharded
    # The user's ``parameter.grad``, and the versions of the two at the last check.
    meta_gradient: torch.Tensor | None = None
    versions: tuple[int, int] = (0, 0)

    @property
    def count(self) -> int:
        return self.chunks.count(self.rank)

    @property
    def start(self) -> int:
        return self.chunks.start(self.rank)

    @property
    def chunk_bytes(self) -> int:
        return self.chunks.chunk_elements * self.dtype.itemsize

    @property
    def is_row_major(self) -> bool:
        return torch.empty(self.shape, device="meta").stride() == self.stride

    def whole_of(self, row: torch.Tensor) -> torch.Tensor:
        """View a row of all elements in memory order with the parameter's shape."""
        return row.as_strided(self.shape, self.stride, row.storage_offset())

    def show_gradient(self) -> None:
        """Set the user's ``parameter.grad`` to a meta tensor if this range has a gradient, else to None."""
        if self.own_range.grad is None:
            self.meta_gradient = None
        elif self.meta_gradient is None:
            self.meta_gradient = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        self.parameter.grad = self.meta_gradient
        self.accept_writes()

    def accept_writes(self) -> None:
        self.versions = self.parameter._version, 0 if self.meta_gradient is None else self.meta_gradient._version

    def check(self) -> None:
        """Clear this range's gradient if the user has cleared ``.grad``; raise ``StateError`` for other changes."""
        parameter, gradient = self.parameter, self.parameter.grad
        if gradient is None:
            self.own_range.grad = self.meta_gradient = None
        elif gradient is not self.meta_gradient or gradient._version != self.versions[1]:
            raise StateError(
                f"the gradient of {self.name} was changed between two steps, and its bytes are spread over the "
                "processes: the write was lost; change it inside of the step, or clear it by zero_grad()"
            )
        if not parameter.is_meta or parameter._version != self.versions[0]:
            raise StateError(
                f"{self.name} was changed between two steps, and its bytes are spread over the processes: the write "
                "was lost; change it inside of the step, load it with step.load(), or close the step first. "
                "(optimizer.step() belongs in the step too.)"
            )


class Shards:
    """All parameters that are split into ranges over processes. Raises ``InputError`` if that is impossible."""

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], group: Any) -> None:
        self.group = group
        self.entries: list[Shard] = []
        self.is_sharded = False  # whether the user's parameters are without contents
        self._optimizers = list(optimizers)
        if parallel_models(models):
            raise InputError(
                "the model is wrapped in DistributedDataParallel, and shard= reduces gradients itself: pass and call "
                "the wrapped module, model.module"
            )
        entries_by_id = {id(entry[3]): entry for entry in reversed(list(states_of(models, optimizers)))}
        entries = list(reversed(entries_by_id.values()))
        owners: dict[int, int] = {}
        for *_, tensor in entries:
            owners[storage_key(tensor)] = owners.get(storage_key(tensor), 0) + 1
        self._whole: list[torch.Tensor] = []  # tensors that every process has in full
        for key, name, kind, tensor in entries:
            if kind is StorageKind.PARAMETER and owners[storage_key(tensor)] == 1 and _can_shard(tensor):
                self.entries.append(self._new_shard(key, name, tensor))
            else:
                self._whole.append(tensor)
        self._by_id = {id(shard.parameter): shard for shard in self.entries}
        for optimizer in optimizers:
            spread = [
                s.name for g in optimizer.param_groups for p in g["params"] if (s := self.shard_of(p)) is not None
            ]
            if spread and not updates_elementwise(optimizer):
                raise InputError(
                    f"the optimizer {type(optimizer).__name__} updates {spread[0]}, which is spread over the "
                    "processes, and is not known to be elementwise: its update of a range could differ; use SGD, Adam, "
                    "AdamW, RMSprop or the like, or remove 'shard'. (An elementwise class of your own declares this "
                    "with outofcore_elementwise = True.)"
                )

    def _new_shard(self, key: str, name: str, parameter: Any) -> Shard:
        chunks, rank = Chunks(parameter.numel(), self.group.size()), self.group.rank()
        shape, stride = tuple(parameter.shape), parameter.stride()
        own_range = torch.empty(chunks.count(rank), dtype=parameter.dtype, device="meta")
        return Shard(key, name, parameter, chunks, rank, shape, stride, parameter.dtype, own_range)

    @property
    def rank(self) -> int:
        return self.group.rank()

    def shard_of(self, tensor: object) -> Shard | None:
        return self._by_id.get(id(tensor))

    def check(self) -> None:
        for shard in self.entries:
            shard.check()

    def show_gradients(self) -> None:
        for shard in self.entries:
            shard.show_gradient()

    # All processes at once

    def shard(self) -> None:
        """Split all parameters over the processes, with the values of process 0. All processes call this together.

        Raises ``InputError`` if models differ, and ``StateError`` if a process cannot release a parameter's contents.
        """
        error = ""
        try:
            self._detach_contents()
        except RuntimeError as raised:
            error = str(raised)
        reports: list[Any] = [None] * self.group.size()
        with translate_group_errors():
            torch.distributed.all_gather_object(reports, (error, self._describe()), group=self.group)
        for rank, (other_error, described) in enumerate(reports):
            if not other_error and described == reports[0][1]:
                continue
            self._restore_contents()
            if other_error:
                raise StateError(
                    f"the parameters of rank {rank} cannot be spread over the processes: {other_error}; delete "
                    "references to them, such as losses of earlier steps, or build the model again"
                )
            raise InputError(
                f"rank {rank} and rank 0 have different models: {_difference(described, reports[0][1])}; build the "
                "same model in all processes, with the same options"
            )
        with translate_group_errors(), torch.no_grad():
            for tensor in self._whole:
                if tensor.numel():
                    self._broadcast(tensor.detach())
            for shard in self.entries:
                self._keep_own_range(shard)
        self.is_sharded = True
        self.show_gradients()

    def gather(self) -> None:
        """Restore the whole contents of all parameters. All processes call this, while no tensor is in an arena.

        Raises ``CommunicationError`` if another process has ended; ungathered parameters stay without contents.
        """
        with translate_group_errors(), torch.no_grad():
            for shard in self.entries:
                if shard.original is not None:
                    self._make_whole(shard, shard.original)
        self.is_sharded = False

    def assemble(self, shard: Shard, own_range: torch.Tensor) -> torch.Tensor:
        """Gather the ranges of a parameter, or of a tensor of its shape, and return the whole tensor on the CPU."""
        wire = self._transfer_device
        chunk = torch.zeros(shard.chunks.chunk_elements, dtype=own_range.dtype, device=wire)
        chunk[: shard.count].copy_(own_range)
        row = torch.empty(shard.chunks.padded_elements, dtype=own_range.dtype, device=wire)
        with translate_group_errors():
            gather_into(row, chunk, self.group)
        assembled = torch.empty_strided(shard.shape, shard.stride, dtype=own_range.dtype)
        return assembled.copy_(shard.whole_of(row))

    def range_of(self, shard: Shard, whole: torch.Tensor) -> torch.Tensor:
        """Return a copy of this process's range of ``whole``, a tensor with the shape of a parameter."""
        if whole.stride() != shard.stride:
            whole = torch.empty_strided(shard.shape, shard.stride, dtype=whole.dtype).copy_(whole)
        row = whole.as_strided((shard.chunks.elements,), (1,), whole.storage_offset())
        part = torch.zeros(shard.chunks.chunk_elements, dtype=whole.dtype)[: shard.count]
        return part.copy_(row[shard.start : shard.start + shard.count])

    def states(self, shard: Shard) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
        """Yield (state dict, name, tensor) for each tensor of a parameter's optimizer state, except scalars."""
        for optimizer in self._optimizers:
            entries = optimizer.state.get(shard.parameter, {})
            for name, value in list(entries.items()):
                if isinstance(value, torch.Tensor) and value.ndim > 0:
                    yield entries, name, value

    def send(self, part: torch.Tensor, rank: int) -> None:
        with translate_group_errors():
            torch.distributed.send(part.contiguous().to(self._transfer_device), group=self.group, group_dst=rank)

    def receive(self, count: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
        part = torch.empty(count, dtype=dtype, device=self._transfer_device)
        with translate_group_errors():
            torch.distributed.recv(part, group=self.group, group_src=rank)
        return part.cpu()

    def raise_any_error(self, error: BaseException | None, action: str) -> None:
        """Raise ``error`` if given, or ``StateError`` if another process failed. All processes call this together."""
        self.exchange_error(error, action)
        if error is not None:
            raise error

    def finish_together(self, action: str) -> _SharedOutcome:
        """Return a context that all processes leave together, and that calls ``exchange_error`` at its end."""
        return _SharedOutcome(self, action)

    def exchange_error(self, error: BaseException | None, action: str) -> None:
        """Send ``error`` to all processes; raise ``StateError`` if another process has failed and this one has not."""
        texts: list[Any] = [None] * self.group.size()
        with translate_group_errors():
            torch.distributed.all_gather_object(texts, "" if error is None else str(error), group=self.group)
        for rank, text in enumerate(texts):
            if text and error is None:
                raise StateError(f"rank {rank} could not {action}: {text}")

    @property
    def _transfer_device(self) -> torch.device:
        is_gpu = torch.distributed.get_backend(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")

    def _broadcast(self, tensor: torch.Tensor) -> None:
        sent = tensor.contiguous().to(self._transfer_device)
        torch.distributed.broadcast(sent, group=self.group, group_src=0)
        if sent.data_ptr() != tensor.data_ptr():
            tensor.copy_(sent)

    def _detach_contents(self) -> None:
        """Move each parameter's contents to ``Shard.original``, and leave the parameter on the device meta."""
        for shard in self.entries:
            parameter = shard.parameter
            empty = torch.empty_strided(shard.shape, shard.stride, dtype=shard.dtype, device="meta")
            original = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            swap(parameter, original)
            vars(parameter).update(vars(original))
            shard.original = original

    def _restore_contents(self) -> None:
        for shard in self.entries:
            if shard.original is not None:
                swap(shard.parameter, shard.original)
                shard.original = None

    def _describe(self) -> list[tuple[str, str]]:
        """Return (name, description) of all tensors; both must be equal in all processes."""
        facts = [
            (f"the dtype and shape of number {k}", f"{t.dtype} {tuple(t.shape)}") for k, t in enumerate(self._whole)
        ]
        for shard in self.entries:
            states = ", ".join(f"{name} {tuple(value.shape)}" for _, name, value in self.states(shard))
            gradient = shard.original is not None and shard.original.grad is not None
            text = f"{shard.dtype} {shard.shape} {shard.stride}, state ({states}), {'a' if gradient else 'no'} gradient"
            facts.append((shard.key, text))
        return facts

    def _keep_own_range(self, shard: Shard) -> None:
        """Broadcast a parameter and its optimizer state from process 0, and keep only this process's ranges."""
        original = shard.original
        if original is None:
            raise StateError(
                f"{shard.name} was spread over the processes before its contents were detached: this is a bug in "
                "outofcore; please report it"
            )
        whole = original.detach()
        row = whole.as_strided((whole.numel(),), (1,), whole.storage_offset())
        self._broadcast(row)
        shard.own_range = self.range_of(shard, whole.cpu())
        if original.grad is not None:
            shard.own_range.grad = self.range_of(shard, original.grad.detach().cpu())
            original.grad = None
        for entries, name, value in self.states(shard):
            if tuple(value.shape) != shard.shape:
                raise StateError(
                    f"an optimizer has state {name!r} of shape {tuple(value.shape)} for {shard.name} of shape "
                    f"{shard.shape}; sharded state must have the shape of its parameter; remove 'shard'"
                )
            shared = value.detach()
            self._broadcast(shared)
            entries[name] = self.range_of(shard, shared.cpu())
        set_data(original, torch.empty(0, dtype=shard.dtype))

    def _make_whole(self, shard: Shard, original: nn.Parameter) -> None:
        """Restore the user's parameter, with its gradient and optimizer state, from the ranges of all processes."""
        parameter = shard.parameter
        gradient = None if shard.own_range.grad is None else self.assemble(shard, shard.own_range.grad.detach())
        whole = self.assemble(shard, shard.own_range.detach())
        for entries, name, value in self.states(shard):
            entries[name] = self.assemble(shard, value.detach())
        set_data(original, whole)
        original.requires_grad_(parameter.requires_grad)
        parameter.grad = None
        vars(original).clear()
        vars(original).update(vars(parameter))
        swap(parameter, original)
        parameter.grad = gradient
        shard.original = shard.meta_gradient = None
        shard.own_range = torch.empty(shard.count, dtype=shard.dtype, device="meta")


class _SharedOutcome:
    """A context that all processes share: an error in one of them raises ``StateError`` in the others."""

    def __init__(self, shards: Shards, action: str) -> None:
        self._shards, self._what = shards, action

    def __enter__(self) -> None:
        """See ``Shards.finish_together``."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shards.exchange_error(error, self._what)


def _can_shard(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a large, dense, real or complex parameter that fills its storage."""
    count = tensor.numel() * tensor.element_size()
    return (
        type(tensor) is nn.Parameter
        and tensor.layout is torch.strided
        and (tensor.is_floating_point() or tensor.is_complex())
        and is_large(count)
        and tensor.untyped_storage().nbytes() == count
        and is_dense(tuple(tensor.shape), tensor.stride())
    )


def _difference(described: list[tuple[str, str]], reference: list[tuple[str, str]]) -> str:
    """Describe the first difference between the tensors of another process and the tensors of rank 0."""
    for (key, value), (name, expected) in zip(described, reference, strict=False):
        if key != name:
            return f"{key} there is {name} on rank 0"
        if value != expected:
            return f"{key} is {value} there, and {expected} on rank 0"
    return f"{len(described)} parameters and buffers there, and {len(reference)} on rank 0"


@contextlib.contextmanager
def translate_group_errors() -> Iterator[None]:
    """Translate errors of the process group into ``CommunicationError``."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, StateError | CommunicationError):
            raise
        raise CommunicationError(
            f"the processes that share a model could not go on together: {error}. Another process has ended, or "
            "exceeded the timeout of the process group; end this one too, and restart all of them with torchrun"
        ) from error
