"""Capture models wrapped in ``DistributedDataParallel``, with the wrapper's collectives as ops.

This module replaces the wrapper's ``forward``; its reducer is not involved. Buffers are broadcast from rank 0 before a
forward pass. In the backward pass final gradients are divided by the number of processes and copied into buckets. Each
full bucket is summed over all processes.

The buckets match ``DistributedDataParallel``, since a ring sums parts of a bucket in different orders. There is one per
dtype in the first step; later ones follow the order in which gradients arrived (Li et al., "PyTorch Distributed", VLDB
2020, section 3.2). With two processes the order makes no difference, so the later buckets are used from the start.
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
    bucket_assignment,
    bucket_limits,
    call_after_backward,
    has_rebuilt_buckets,
    mark_buckets_rebuilt,
    parallel_buffers,
    parallel_parameters,
    require,
    without_version_bumps,
)
from outofcore.analysis.chunks import is_dense
from outofcore.capture.patching import patch_attribute
from outofcore.errors import CaptureError, InputError

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

_NO_ORDER: tuple[int, ...] = ()


def parallel_models(models: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    if not torch.distributed.is_available():
        return []
    kind = torch.nn.parallel.DistributedDataParallel
    wrappers = {id(m): m for model in models for m in model.modules() if isinstance(m, kind)}
    return list(wrappers.values())


def group_of(model: DistributedDataParallel) -> Any:
    return model.process_group


def phase(model: DistributedDataParallel) -> tuple[bool, bool, bool]:
    """Return whether a wrapper reduces gradients, broadcasts buffers, and still uses its first buckets."""
    # Sums of two numbers do not depend on the order.
    first = group_of(model).size() > 2 and not has_rebuilt_buckets(model)
    return bool(model.require_backward_grad_sync), bool(model.require_forward_param_sync), first


def check_supported(models: Sequence[nn.Module]) -> None:
    """Raise ``InputError`` for a ``DistributedDataParallel`` with settings that the capture does not support."""
    for model in parallel_models(models):
        require(Feature.PARALLEL)
        for setting, path, plain in PARALLEL_SETTINGS:
            value: Any = model
            for name in path.split("."):
                value = getattr(value, name, plain)
            if bool(value) != bool(plain):
                raise InputError(
                    f"the model is wrapped in DistributedDataParallel with {setting}: its reduction then depends on "
                    "more than the order of gradients, and cannot be captured; remove this setting, or reduce "
                    "gradients in the step yourself, with torch.distributed.all_reduce"
                )


@dataclass(frozen=True)
class ReplicaEnd:
    """The state in which a step leaves one ``DistributedDataParallel`` wrapper."""

    model: DistributedDataParallel
    sync_forward: bool  # the next forward pass broadcasts buffers
    is_reduced: bool  # gradients were reduced
    order: tuple[int, ...]  # parameters in the order in which gradients arrived; empty if not reduced

    def apply(self) -> None:
        """Set the wrapper's state as the step would in eager PyTorch."""
        self.model.require_forward_param_sync = self.sync_forward
        if self.is_reduced:
            mark_buckets_rebuilt(self.model)


class Replicas:
    """All ``DistributedDataParallel`` wrappers in one capture."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        fakes: Mapping[int, torch.Tensor],
        orders: Mapping[int, tuple[int, ...]],
    ) -> None:
        # ``orders`` gives the earlier order of gradients, by wrapper id. Without it gradients are grouped as they
        # arrive, and the capture is valid for that order only.
        wrappers = parallel_models(models)
        self._replicas = {id(model): _Replica(model, fakes, orders.get(id(model), _NO_ORDER)) for model in wrappers}

    @contextlib.contextmanager
    def replace_forward(self) -> Iterator[None]:
        """Replace the wrappers' ``forward``, and add hooks that record the reduction of gradients as ops."""
        if not self._replicas:
            yield
            return

        def forward(model: Any, *inputs: Any, **kwargs: Any) -> Any:
            return self._replicas[id(model)].forward(*inputs, **kwargs)

        for replica in self._replicas.values():
            replica.add_gradient_hooks()
        with patch_attribute(torch.nn.parallel.DistributedDataParallel, "forward", forward):
            yield

    def ends(self) -> tuple[ReplicaEnd, ...]:
        return tuple(replica.end() for replica in self._replicas.values())

    def lacks_order(self) -> bool:
        """Return whether a wrapper grouped gradients before the order of their arrival was known."""
        return any(replica.lacks_order for replica in self._replicas.values())


class _Replica:
    """One wrapper in a capture, with hooks that reduce gradients in the buckets that the wrapper would use."""

    def __init__(
        self, model: DistributedDataParallel, fakes: Mapping[int, torch.Tensor], order: tuple[int, ...]
    ) -> None:
        self._model = model
        self._fakes = fakes
        self._parameters, sparse = parallel_parameters(model)
        if any(sparse):
            raise CaptureError(
                "the model is wrapped in DistributedDataParallel and has an embedding with sparse=True: its gradient "
                "is not dense; create the embedding with sparse=False"
            )
        self._sync_forward = bool(model.require_forward_param_sync)
        self._order = order
        self._arrived: list[int] = []
        self._is_armed = False
        self._is_reduced = False
        self.lacks_order = False
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._launched = 0

    def add_gradient_hooks(self) -> None:
        for index, parameter in enumerate(self._parameters):
            fake = self._fakes[id(parameter)]
            fake.register_post_accumulate_grad_hook(partial(self._add_gradient, index))

    def end(self) -> ReplicaEnd:
        order = tuple(self._arrived) if self._is_reduced else _NO_ORDER
        return ReplicaEnd(self._model, self._sync_forward, self._is_reduced, order)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the wrapped module; prepare the reduction of its gradients if the wrapper would reduce them."""
        model = self._model
        if self._sync_forward and model.broadcast_buffers:
            self._broadcast_buffers()
        result = model.module(*inputs, **kwargs)
        self._is_armed = self._sync_forward = torch.is_grad_enabled() and bool(model.require_backward_grad_sync)
        if self._is_armed:
            self._prepare_buckets()
        return result

    def _broadcast_buffers(self) -> None:
        """Record ops that copy process 0's buffers into the buffers of all processes."""
        buffers = [self._fakes.get(id(buffer), buffer) for buffer in parallel_buffers(self._model)]
        group = self._model.process_group
        with torch.no_grad(), without_version_bumps(buffers):
            for _, alike in groupby(sorted(buffers, key=lambda b: str(b.dtype)), key=lambda b: b.dtype):
                tensors = list(alike)
                flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
                torch.distributed.broadcast(flat, group=group, group_src=0)
                for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                    tensor.copy_(part.view(tensor.shape))

    def _prepare_buckets(self) -> None:
        """Assign the parameters to the buckets in which their gradients will be reduced."""
        first, later = bucket_limits(self._model)
        parameters = self._parameters
        if phase(self._model)[2]:
            # Gradients of the last layers arrive first.
            assignment = bucket_assignment(parameters, first)[::-1]
        elif len(self._order) == len(parameters):
            assignment = bucket_assignment(parameters, later, list(self._order))
        else:
            self.lacks_order, assignment = True, bucket_assignment(parameters, later)[::-1]
        self._arrived, self._launched = [], 0
        self._buckets = [_Bucket(self._model, [parameters[i] for i in members], members) for members in assignment]
        self._bucket_of = {index: bucket for bucket in self._buckets for index in bucket.missing}

    def _add_gradient(self, index: int, fake: torch.Tensor) -> None:
        """Copy the gradient of parameter ``index`` into its bucket, and reduce the buckets that have become full."""
        if not self._is_armed:
            return
        if not self._arrived:
            call_after_backward(self._finish)
        self._arrived.append(index)
        gradient = fake.grad
        if gradient is None:
            raise CaptureError(
                "a gradient was removed from .grad before DistributedDataParallel reduced it: keep it there until "
                "backward() has ended"
            )
        bucket = self._bucket_of[index]
        with torch.no_grad():
            bucket.add(index, gradient)
            while self._launched < len(self._buckets) and not self._buckets[self._launched].missing:
                self._buckets[self._launched].reduce()
                self._launched += 1

    def _finish(self) -> None:
        """Copy the reduced gradients to the parameters; raise ``CaptureError`` if a gradient has not arrived."""
        missing = [index for bucket in self._buckets for index in bucket.missing]
        if missing:
            names = {id(parameter): name for name, parameter in self._model.module.named_parameters()}
            paths = [names.get(id(self._parameters[index]), str(index)) for index in missing]
            raise CaptureError(
                f"{', '.join(paths[:3])}{f' and {len(paths) - 3} more' if len(paths) > 3 else ''} got no gradient in "
                "the backward pass, and DistributedDataParallel waits for those of all parameters: use every parameter "
                "in the loss, or freeze unused ones with requires_grad_(False) before the model is wrapped"
            )
        with torch.no_grad():
            for bucket in self._buckets:
                for index, part in bucket.slices():
                    gradient = self._fakes[id(self._parameters[index])].grad
                    if gradient is not None:
                        gradient.copy_(part)
        self._is_armed, self._is_reduced, self._buckets, self._bucket_of = False, True, [], {}


class _Bucket:
    """Gradients that are reduced together, in one flat tensor."""

    def __init__(self, model: DistributedDataParallel, parameters: list[nn.Parameter], members: list[int]) -> None:
        self._group = group_of(model)
        self._members = dict(zip(members, parameters, strict=True))
        self.missing = list(members)
        self._flat: torch.Tensor | None = None

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Copy a gradient into the bucket, divided by the number of processes."""
        if self._flat is None:
            count = sum(parameter.numel() for parameter in self._members.values())
            self._flat = torch.empty(count, dtype=gradient.dtype, device=gradient.device)
        torch.mul(gradient, 1.0 / self._group.size(), out=self._slice(index))
        self.missing.remove(index)

    def reduce(self) -> None:
        torch.distributed.all_reduce(self._flat, group=self._group)

    def slices(self) -> Iterator[tuple[int, torch.Tensor]]:
        return ((index, self._slice(index)) for index in self._members)

    def _slice(self, index: int) -> torch.Tensor:
        """Return a view of the bucket for the gradient of parameter ``index``."""
        if self._flat is None:
            raise RuntimeError(
                "a bucket was read before a gradient arrived: this is a bug in outofcore; please report it"
            )
        before = 0
        for member, parameter in self._members.items():
            if member == index:
                break
            before += parameter.numel()
        parameter = self._members[index]
        if is_dense(tuple(parameter.shape), parameter.stride()):
            return self._flat.as_strided(parameter.shape, parameter.stride(), before)
        return self._flat[before : before + parameter.numel()].view(parameter.shape)
