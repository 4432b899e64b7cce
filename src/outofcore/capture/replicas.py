"""Models wrapped in ``DistributedDataParallel``: their module, with the wrapper's collectives as ops.

In a capture this module replaces the wrapper's ``forward``, and its reducer is not involved. Buffers are broadcast from
rank 0 before a forward pass. In the backward pass final gradients are divided by the number of processes and copied
into buckets; each full bucket is summed over all processes; at the end the sums are copied back. The buckets, and the
parameters' order in them, are those of ``DistributedDataParallel``, since a ring sums different parts of a bucket in
different orders: one bucket for each dtype in the first step, then those that it makes from the order in which
gradients came (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2). With two processes the order of additions
makes no difference, and the later buckets serve from the start.

Limits: see ``check_supported``. A loop that goes on in plain PyTorch begins with the first buckets again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outofcore._torch_internals import (
    PARALLEL_SETTINGS,
    Feature,
    at_the_end_of_backward,
    bucket_assignment,
    has_rebuilt_buckets,
    mark_buckets_rebuilt,
    parallel_buffers,
    parallel_limits,
    parallel_parameters,
    require,
    without_new_versions,
)
from outofcore.analysis.chunks import is_dense
from outofcore.capture.patching import patched
from outofcore.errors import CaptureError, InputError

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

_NO_ORDER: tuple[int, ...] = ()


def parallel_models(models: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    """Return the wrappers among models and their submodules, each once."""
    if not torch.distributed.is_available():
        return []
    kind = torch.nn.parallel.DistributedDataParallel
    found = {id(m): m for model in models for m in model.modules() if isinstance(m, kind)}
    return list(found.values())


def group_of(model: DistributedDataParallel) -> Any:
    return model.process_group


def phase(model: DistributedDataParallel) -> tuple[bool, bool, bool]:
    """Return what affects a capture and changes between steps: see ``ReplicaEnd``, and the flag of ``no_sync()``."""
    # The sum of two numbers is the same in either order.
    first = group_of(model).size() > 2 and not has_rebuilt_buckets(model)
    return bool(model.require_backward_grad_sync), bool(model.require_forward_param_sync), first


def check_supported(models: Sequence[nn.Module]) -> None:
    """Refuse wrappers whose reduction is not that of a plain ``DistributedDataParallel``."""
    for model in parallel_models(models):
        require(Feature.PARALLEL)
        for what, path, plain in PARALLEL_SETTINGS:
            value: Any = model
            for name in path.split("."):
                value = getattr(value, name, plain)
            if bool(value) != bool(plain):
                raise InputError(
                    f"the model is wrapped in DistributedDataParallel with {what}: what it reduces then depends on "
                    "more than the order of gradients, and cannot be written down beforehand; wrap it without, or "
                    "reduce gradients in the step yourself, with torch.distributed.all_reduce"
                )


@dataclass(frozen=True)
class ReplicaEnd:
    """What a step has done with one wrapper.

    Attributes:
        sync_forward: whether its next forward pass broadcasts buffers.
        reduced: whether its gradients were reduced.
        order: numbers of its parameters in the order in which their gradients came; empty if not reduced.
    """

    model: DistributedDataParallel
    sync_forward: bool
    reduced: bool
    order: tuple[int, ...]

    def apply(self) -> None:
        """Leave the wrapper as the step would have in plain PyTorch."""
        self.model.require_forward_param_sync = self.sync_forward
        if self.reduced:
            mark_buckets_rebuilt(self.model)


class Replicas:
    """All wrappers in one capture.

    ``orders`` gives by wrapper id the order in which gradients came before. Without one they are put together as they
    come, and the capture is valid for that order alone.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        fakes: Mapping[int, torch.Tensor],
        orders: Mapping[int, tuple[int, ...]],
    ) -> None:
        found = parallel_models(models)
        self._replicas = {id(model): _Replica(model, fakes, orders.get(id(model), _NO_ORDER)) for model in found}

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Replace the wrappers' forward passes, and reduce gradients by ops of the step."""
        if not self._replicas:
            yield
            return

        def forward(model: Any, *inputs: Any, **kwargs: Any) -> Any:
            return self._replicas[id(model)].forward(*inputs, **kwargs)

        for replica in self._replicas.values():
            replica.listen()
        with patched(torch.nn.parallel.DistributedDataParallel, "forward", forward):
            yield

    def ends(self) -> tuple[ReplicaEnd, ...]:
        return tuple(replica.end() for replica in self._replicas.values())

    def unknown(self) -> bool:
        """Return whether gradients were reduced whose order was not known beforehand."""
        return any(replica.unknown for replica in self._replicas.values())


class _Replica:
    def __init__(
        self, model: DistributedDataParallel, fakes: Mapping[int, torch.Tensor], order: tuple[int, ...]
    ) -> None:
        self._model = model
        self._fakes = fakes
        self._parameters, sparse = parallel_parameters(model)
        if any(sparse):
            raise CaptureError(
                "the model is wrapped in DistributedDataParallel and has an embedding with sparse=True: its gradient "
                "is no dense tensor; leave sparse out"
            )
        self._sync_forward = bool(model.require_forward_param_sync)
        self._order = order
        self._arrived: list[int] = []
        self._armed = False
        self._reduced = False
        self.unknown = False
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._launched = 0

    def listen(self) -> None:
        """Hook the gradients of the backward pass."""
        for index, parameter in enumerate(self._parameters):
            fake = self._fakes[id(parameter)]
            fake.register_post_accumulate_grad_hook(partial(self._final, index))

    def end(self) -> ReplicaEnd:
        order = tuple(self._arrived) if self._reduced else _NO_ORDER
        return ReplicaEnd(self._model, self._sync_forward, self._reduced, order)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Do what ``DistributedDataParallel.forward`` does, in a capture."""
        model = self._model
        if self._sync_forward and model.broadcast_buffers:
            self._receive_buffers()
        result = model.module(*inputs, **kwargs)
        self._armed = self._sync_forward = torch.is_grad_enabled() and bool(model.require_backward_grad_sync)
        if self._armed:
            self._prepare()
        return result

    def _receive_buffers(self) -> None:
        buffers = [self._fakes.get(id(buffer), buffer) for buffer in parallel_buffers(self._model)]
        group = self._model.process_group
        with torch.no_grad(), without_new_versions(buffers):
            for _, alike in groupby(sorted(buffers, key=lambda b: str(b.dtype)), key=lambda b: b.dtype):
                tensors = list(alike)
                flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
                torch.distributed.broadcast(flat, group=group, group_src=0)
                for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                    tensor.copy_(part.view(tensor.shape))

    def _prepare(self) -> None:
        """Empty the buckets for the next backward pass."""
        first, later = parallel_limits(self._model)
        parameters = self._parameters
        if phase(self._model)[2]:
            # Gradients of the last layers come first.
            wanted = bucket_assignment(parameters, first)[::-1]
        elif len(self._order) == len(parameters):
            wanted = bucket_assignment(parameters, later, list(self._order))
        else:
            self.unknown, wanted = True, bucket_assignment(parameters, later)[::-1]
        self._arrived, self._launched = [], 0
        self._buckets = [_Bucket(self._model, [parameters[i] for i in members], members) for members in wanted]
        self._bucket_of = {index: bucket for bucket in self._buckets for index in bucket.missing}

    def _final(self, index: int, fake: torch.Tensor) -> None:
        """Handle a parameter's final gradient."""
        if not self._armed:
            return
        if not self._arrived:
            at_the_end_of_backward(self._finish)
        self._arrived.append(index)
        gradient = fake.grad
        if gradient is None:
            raise CaptureError("a gradient is gone where DistributedDataParallel reduces it: leave it in .grad")
        bucket = self._bucket_of[index]
        with torch.no_grad():
            bucket.put(index, gradient)
            while self._launched < len(self._buckets) and not self._buckets[self._launched].missing:
                self._buckets[self._launched].reduce()
                self._launched += 1

    def _finish(self) -> None:
        """Set the gradients to the sums at the end of the backward pass."""
        missing = [index for bucket in self._buckets for index in bucket.missing]
        if missing:
            names = {id(parameter): name for name, parameter in self._model.module.named_parameters()}
            told = [names.get(id(self._parameters[index]), str(index)) for index in missing]
            raise CaptureError(
                f"{', '.join(told[:3])}{f' and {len(told) - 3} more' if len(told) > 3 else ''} got no gradient in the "
                "backward pass, and DistributedDataParallel waits for those of all parameters: use every parameter in "
                "the loss, or freeze those that are not used, with requires_grad_(False), before the model is wrapped"
            )
        with torch.no_grad():
            for bucket in self._buckets:
                for index, part in bucket.parts():
                    gradient = self._fakes[id(self._parameters[index])].grad
                    if gradient is not None:
                        gradient.copy_(part)
        self._armed, self._reduced, self._buckets, self._bucket_of = False, True, [], {}


class _Bucket:
    """Gradients that are reduced together."""

    def __init__(self, model: DistributedDataParallel, parameters: list[nn.Parameter], members: list[int]) -> None:
        self._group = group_of(model)
        self._members = dict(zip(members, parameters, strict=True))
        self.missing = list(members)
        self._flat: torch.Tensor | None = None

    def put(self, index: int, gradient: torch.Tensor) -> None:
        """Copy a gradient to its place, divided by the number of processes."""
        if self._flat is None:
            count = sum(parameter.numel() for parameter in self._members.values())
            self._flat = torch.empty(count, dtype=gradient.dtype, device=gradient.device)
        torch.mul(gradient, 1.0 / self._group.size(), out=self._part(index))
        self.missing.remove(index)

    def reduce(self) -> None:
        torch.distributed.all_reduce(self._flat, group=self._group)

    def parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the number of each parameter, and the place of its gradient."""
        return ((index, self._part(index)) for index in self._members)

    def _part(self, index: int) -> torch.Tensor:
        """Return a gradient's place in the bucket, laid out like the parameter if that is dense."""
        if self._flat is None:
            raise RuntimeError("a bucket was looked at before a gradient came; please report it")
        before = 0
        for member, parameter in self._members.items():
            if member == index:
                break
            before += parameter.numel()
        parameter = self._members[index]
        if is_dense(tuple(parameter.shape), parameter.stride()):
            return self._flat.as_strided(parameter.shape, parameter.stride(), before)
        return self._flat[before : before + parameter.numel()].view(parameter.shape)
