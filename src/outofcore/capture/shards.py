"""A model whose parameters, gradients and optimizer state are spread over processes: each has a range of every tensor.

The idea is that of ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
SC 2020, section 5): what is the same in all processes is there once. Large parameters are dealt out element by element,
as they lie in memory, in ranges of one length (``analysis.chunks``); small ones stay whole in every process, and so do
buffers. What a process has of a parameter is a tensor of one dimension of its own, with its range of the gradient in
``.grad``; an optimizer's state for the parameter has that shape, too. The user's parameter is on the device ``meta``
meanwhile, under the same object: it has its shape and dtype and no contents, so that whoever reads it is told so by
PyTorch. ``gather`` makes all of them whole again.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class AssumedGroup:
    """Processes that need not be there, to plan for; this is the first of them."""

    count: int

    def size(self) -> int:
        """How many processes there are."""
        return self.count

    def rank(self) -> int:
        """Which of them this one is."""
        return 0


@dataclass(eq=False)
class Shard:
    """What one process has of one parameter.

    Attributes:
        key: of the parameter; see ``StateBinding.key``.
        name: for people.
        parameter: the user's own object.
        chunks: how its elements are dealt out, in the order in which they lie in memory.
        rank: of this process.
        shape, stride, dtype: of the whole parameter.
        own: this process's range, of shape (count,), on memory for a whole chunk; its gradient is in ``own.grad``.
        aside: what the user's parameter was; without contents, while its bytes are spread.
    """

    key: str
    name: str
    parameter: nn.Parameter
    chunks: Chunks
    rank: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    own: torch.Tensor
    aside: nn.Parameter | None = None
    # The gradient as the user finds it in ``parameter.grad``, and how often the two had been written.
    face: torch.Tensor | None = None
    versions: tuple[int, int] = (0, 0)

    @property
    def count(self) -> int:
        """Elements of the own range."""
        return self.chunks.count(self.rank)

    @property
    def start(self) -> int:
        """Where the own range begins."""
        return self.chunks.start(self.rank)

    @property
    def chunk_bytes(self) -> int:
        """Of the memory for a chunk."""
        return self.chunks.each * self.dtype.itemsize

    @property
    def in_order(self) -> bool:
        """Whether the elements lie in row-major order, as in a file."""
        return torch.empty(self.shape, device="meta").stride() == self.stride

    def whole_of(self, row: torch.Tensor) -> torch.Tensor:
        """The parameter's shape over all elements in a row, in the order of memory."""
        return row.as_strided(self.shape, self.stride, row.storage_offset())

    def show_gradient(self) -> None:
        """Have the user find a gradient where there is one, without contents like the parameter."""
        if self.own.grad is None:
            self.face = None
        elif self.face is None:
            self.face = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        self.parameter.grad = self.face
        self.settle()

    def settle(self) -> None:
        """Take it that whatever has been written so far may have been."""
        self.versions = self.parameter._version, 0 if self.face is None else self.face._version

    def check(self) -> None:
        """See what the user has done to the parameter, which has no contents to be changed.

        A gradient that the user has cleared is cleared.

        Raises:
            StateError: something else was done.
        """
        parameter, gradient = self.parameter, self.parameter.grad
        if gradient is None:
            self.own.grad = self.face = None
        elif gradient is not self.face or gradient._version != self.versions[1]:
            raise StateError(
                f"the gradient of {self.name} was changed between two steps, and its bytes are spread over the "
                "processes: what was written is nowhere; change it inside of the step, or clear it by zero_grad()"
            )
        if not parameter.is_meta or parameter._version != self.versions[0]:
            raise StateError(
                f"{self.name} was changed between two steps, and its bytes are spread over the processes: what was "
                "written is nowhere; change it inside of the step, load it with step.load(), or close the step first. "
                "(optimizer.step() belongs into the step as well.)"
            )


class Shards:
    """All parameters of some models that are spread over the processes of a group.

    Args:
        models: of the step.
        optimizers: of the step.
        group: the processes.

    Attributes:
        group: the processes.
        all: in the order of the models.
        is_spread: whether the user's parameters are without contents now.

    Raises:
        InputError: a model cannot be spread, or an optimizer not be run on ranges.
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], group: Any) -> None:
        self.group = group
        self.all: list[Shard] = []
        self.is_spread = False
        self._optimizers = list(optimizers)
        if parallel_models(models):
            raise InputError(
                "the model is wrapped in DistributedDataParallel, and shard= reduces gradients by itself: give the "
                "module that is inside, model.module, and call that in the step"
            )
        found = {id(entry[3]): entry for entry in reversed(list(states_of(models, optimizers)))}
        entries = list(reversed(found.values()))
        owners: dict[int, int] = {}
        for *_, tensor in entries:
            owners[storage_key(tensor)] = owners.get(storage_key(tensor), 0) + 1
        self._whole: list[torch.Tensor] = []  # what every process has
        for key, name, kind, tensor in entries:
            if kind is StorageKind.PARAMETER and owners[storage_key(tensor)] == 1 and _can_be_spread(tensor):
                self.all.append(self._shard(key, name, tensor))
            else:
                self._whole.append(tensor)
        self._by_id = {id(shard.parameter): shard for shard in self.all}
        for optimizer in optimizers:
            spread = [s.name for g in optimizer.param_groups for p in g["params"] if (s := self.of(p)) is not None]
            if spread and not updates_elementwise(optimizer):
                raise InputError(
                    f"the optimizer {type(optimizer).__name__} updates {spread[0]}, which is to be spread over the "
                    "processes, and it is not known to compute every element by itself: its update of a range would "
                    "be another one; use SGD, Adam, AdamW, RMSprop or the like, or leave 'shard' out. (A class of your "
                    "own that does so says it by a true attribute outofcore_elementwise.)"
                )

    def _shard(self, key: str, name: str, parameter: Any) -> Shard:
        chunks, rank = Chunks(parameter.numel(), self.group.size()), self.group.rank()
        shape, stride = tuple(parameter.shape), parameter.stride()
        own = torch.empty(chunks.count(rank), dtype=parameter.dtype, device="meta")
        return Shard(key, name, parameter, chunks, rank, shape, stride, parameter.dtype, own)

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.group.rank()

    def of(self, tensor: object) -> Shard | None:
        """What this process has of one of the user's parameters; None: it is not spread."""
        return self._by_id.get(id(tensor))

    def check(self) -> None:
        """See what the user has done since the last step.

        Raises:
            StateError: something was written to what has no contents.
        """
        for shard in self.all:
            shard.check()

    def show_gradients(self) -> None:
        """Have the user find gradients where there are some."""
        for shard in self.all:
            shard.show_gradient()

    # All processes at once

    def spread(self) -> None:
        """Leave each process its range of everything, as process 0 has it; to be called by all of them at once.

        Raises:
            InputError: the processes have different models.
            StateError: a parameter cannot give up its contents, here or in another process.
        """
        error = ""
        try:
            self._put_aside()
        except RuntimeError as raised:
            error = str(raised)
        everyone: list[Any] = [None] * self.group.size()
        with talking():
            torch.distributed.all_gather_object(everyone, (error, self._described()), group=self.group)
        for rank, (other, described) in enumerate(everyone):
            if not other and described == everyone[0][1]:
                continue
            self._take_back()
            if other:
                raise StateError(
                    f"the parameters of rank {rank} cannot be spread over the processes: {other}; drop what refers to "
                    "them, such as losses of earlier steps, or build the model anew"
                )
            raise InputError(f"rank {rank} and rank 0 have other models: {_difference(described, everyone[0][1])}")
        with talking(), torch.no_grad():
            for tensor in self._whole:
                if tensor.numel():
                    self._share(tensor.detach())
            for shard in self.all:
                self._take_range(shard)
        self.is_spread = True
        self.show_gradients()

    def gather(self) -> None:
        """Give each process everything again; to be called by all of them at once, with nothing in an arena.

        Raises:
            CommunicationError: another process has ended. What has not been gathered is without contents still.
        """
        with talking(), torch.no_grad():
            for shard in self.all:
                if shard.aside is not None:
                    self._make_whole(shard, shard.aside)
        self.is_spread = False

    def whole(self, shard: Shard, part: torch.Tensor) -> torch.Tensor:
        """A parameter, or what is like it, put together from the ranges of all processes, on the CPU."""
        wire = self._wire
        chunk = torch.zeros(shard.chunks.each, dtype=part.dtype, device=wire)
        chunk[: shard.count].copy_(part)
        row = torch.empty(shard.chunks.padded, dtype=part.dtype, device=wire)
        with talking():
            gather_into(row, chunk, self.group)
        made = torch.empty_strided(shard.shape, shard.stride, dtype=part.dtype)
        return made.copy_(shard.whole_of(row))

    def range_of(self, shard: Shard, whole: torch.Tensor) -> torch.Tensor:
        """The own range of something that is shaped like a parameter."""
        if whole.stride() != shard.stride:
            whole = torch.empty_strided(shard.shape, shard.stride, dtype=whole.dtype).copy_(whole)
        row = whole.as_strided((shard.chunks.elements,), (1,), whole.storage_offset())
        part = torch.zeros(shard.chunks.each, dtype=whole.dtype)[: shard.count]
        return part.copy_(row[shard.start : shard.start + shard.count])

    def states(self, shard: Shard) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
        """What optimizers have for a parameter that is spread like it: the dict that has it, its name and tensor."""
        for optimizer in self._optimizers:
            entries = optimizer.state.get(shard.parameter, {})
            for name, value in list(entries.items()):
                if isinstance(value, torch.Tensor) and value.ndim > 0:
                    yield entries, name, value

    def send(self, part: torch.Tensor, rank: int) -> None:
        """Send a row of elements to another process, which receives it."""
        with talking():
            torch.distributed.send(part.contiguous().to(self._wire), group=self.group, group_dst=rank)

    def receive(self, count: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
        """A row of elements that another process sends."""
        part = torch.empty(count, dtype=dtype, device=self._wire)
        with talking():
            torch.distributed.recv(part, group=self.group, group_src=rank)
        return part.cpu()

    def settle(self, error: BaseException | None, what: str) -> None:
        """Go on if all processes can.

        Raises:
            StateError: one of the others cannot.
            BaseException: the error of this one.
        """
        texts: list[Any] = [None] * self.group.size()
        with talking():
            torch.distributed.all_gather_object(texts, "" if error is None else str(error), group=self.group)
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text:
                raise StateError(f"rank {rank} could not {what}: {text}")

    @property
    def _wire(self) -> torch.device:
        """Where tensors have to be to be sent."""
        is_gpu = torch.distributed.get_backend(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")

    def _share(self, tensor: torch.Tensor) -> None:
        """Fill a tensor with what process 0 has in it."""
        sent = tensor.contiguous().to(self._wire)
        torch.distributed.broadcast(sent, group=self.group, group_src=0)
        if sent.data_ptr() != tensor.data_ptr():
            tensor.copy_(sent)

    def _put_aside(self) -> None:
        """Take the user's objects off their contents."""
        for shard in self.all:
            parameter = shard.parameter
            empty = torch.empty_strided(shard.shape, shard.stride, dtype=shard.dtype, device="meta")
            aside = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            _swap(parameter, aside)
            vars(parameter).update(vars(aside))
            shard.aside = aside

    def _take_back(self) -> None:
        for shard in self.all:
            if shard.aside is not None:
                _swap(shard.parameter, shard.aside)
                shard.aside = None

    def _described(self) -> list[tuple[str, str]]:
        """What has to be the same in all processes."""
        found = [
            (f"the dtype and shape of number {k}", f"{t.dtype} {tuple(t.shape)}") for k, t in enumerate(self._whole)
        ]
        for shard in self.all:
            states = ", ".join(f"{name} {tuple(value.shape)}" for _, name, value in self.states(shard))
            gradient = shard.aside is not None and shard.aside.grad is not None
            text = f"{shard.dtype} {shard.shape} {shard.stride}, state ({states}), {'a' if gradient else 'no'} gradient"
            found.append((shard.key, text))
        return found

    def _take_range(self, shard: Shard) -> None:
        aside = shard.aside
        if aside is None:
            raise StateError(f"{shard.name} was spread before its contents were put aside: please report it")
        whole = aside.detach()
        row = whole.as_strided((whole.numel(),), (1,), whole.storage_offset())
        self._share(row)
        shard.own = self.range_of(shard, whole.cpu())
        if aside.grad is not None:
            shard.own.grad = self.range_of(shard, aside.grad.detach().cpu())
            aside.grad = None
        for entries, name, value in self.states(shard):
            if tuple(value.shape) != shard.shape:
                raise StateError(
                    f"an optimizer has state {name!r} of shape {tuple(value.shape)} for {shard.name} of shape "
                    f"{shard.shape}, and what is spread has to have the shape of its parameter; leave 'shard' out"
                )
            shared = value.detach()
            self._share(shared)
            entries[name] = self.range_of(shard, shared.cpu())
        aside.data = torch.empty(0, dtype=shard.dtype)

    def _make_whole(self, shard: Shard, aside: nn.Parameter) -> None:
        parameter = shard.parameter
        gradient = None if shard.own.grad is None else self.whole(shard, shard.own.grad.detach())
        whole = self.whole(shard, shard.own.detach())
        for entries, name, value in self.states(shard):
            entries[name] = self.whole(shard, value.detach())
        aside.data = whole
        aside.requires_grad_(parameter.requires_grad)
        parameter.grad = None
        vars(aside).clear()
        vars(aside).update(vars(parameter))
        _swap(parameter, aside)
        parameter.grad = gradient
        shard.aside = shard.face = None
        shard.own = torch.empty(shard.count, dtype=shard.dtype, device="meta")


def _can_be_spread(tensor: torch.Tensor) -> bool:
    """Whether a parameter is large, and its elements fill memory of its own, each once."""
    count = tensor.numel() * tensor.element_size()
    return (
        type(tensor) is nn.Parameter
        and tensor.layout is torch.strided
        and (tensor.is_floating_point() or tensor.is_complex())
        and is_large(count)
        and tensor.untyped_storage().nbytes() == count
        and is_dense(tuple(tensor.shape), tensor.stride())
    )


def _swap(one: torch.Tensor, other: torch.Tensor) -> None:
    try:
        torch.utils.swap_tensors(one, other)
    except RuntimeError:
        gc.collect()  # an earlier capture may refer to it, weakly, in a cycle
        torch.utils.swap_tensors(one, other)


def _difference(one: list[tuple[str, str]], other: list[tuple[str, str]]) -> str:
    for (key, mine), (name, theirs) in zip(one, other, strict=False):
        if key != name:
            return f"{key} there is {name} on rank 0"
        if mine != theirs:
            return f"{key} is {mine} there, and {theirs} on rank 0"
    return f"{len(one)} parameters and buffers there, and {len(other)} on rank 0"


@contextlib.contextmanager
def talking() -> Iterator[None]:
    """Say of errors of the process group what they mean."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, StateError | CommunicationError):
            raise
        raise CommunicationError(
            f"the processes that share a model could not go on together: {error}. Another process has ended, or did "
            "not come here within the timeout of the process group; end this one as well, and let torchrun start all "
            "of them again"
        ) from error
