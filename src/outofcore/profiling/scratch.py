"""The contents of scratch tensors on which an op is measured.

Floats are one half and integers zero, a valid index anywhere. Other contents are tried for ops that do not run on
these, such as matrix factorisations. Indices are spread evenly: equal ones would be read from a cache, and additions to
one element would serialize. On a GPU floats are random, because with constant bits the chip would draw less power and
clock higher than in training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from outofcore._torch_internals import OpOverload
from outofcore.capture import operators
from outofcore.capture.captured import CPU
from outofcore.capture.device_traits import have_same_type, traits_of
from outofcore.capture.tables import leaves_in
from outofcore.execution.binding import BoundRun

NamedArguments = dict[str, Any]


@dataclass(frozen=True)
class ScratchContents:
    """The values with which to fill the arguments of an op before it is measured."""

    whole: int = 0  # in integer tensors
    identity: bool = False  # square matrices are the identity, which can be factorised and inverted
    random: bool = False  # other floats are drawn between 0 and 1 instead of one half
    varied: bool = False  # floats are drawn between 1/4 and 3/4

    def fill_bytes(self, target: torch.Tensor, dtype: torch.dtype) -> None:
        """Fill memory with values of a data type: 0.5 or random numbers if floating, else zeros."""
        if not (dtype.is_floating_point or dtype.is_complex):
            target.zero_()
            return
        values = target[: target.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        if self.varied and dtype in _RANDOM_DTYPES:
            values.uniform_(0.25, 0.75)  # valid probabilities: others end the process on a GPU
        else:
            values.fill_(0.5)

    def fill(self, run: BoundRun, device: torch.device = CPU) -> None:
        """Fill an op's arguments on ``device``, and make integers such as indices valid where possible."""
        tensors = list(leaves_in([run.args, run.kwargs]))
        scratch = [tensor for tensor in tensors if have_same_type(tensor.device, device)]
        if replace(self, varied=False) != HALVES:
            for tensor in scratch:
                self._fill(tensor)
        func = getattr(run.func, "func", run.func)
        if len(scratch) == len(tensors) and isinstance(func, OpOverload):
            set_runnable_integers(func, operators.arguments_by_name(func, run.args, run.kwargs))

    def _fill(self, tensor: torch.Tensor) -> None:
        """Replace a tensor's default contents by these scratch contents; skip expanded tensors."""
        if _is_expanded(tensor):
            return  # not writable
        if not (tensor.is_floating_point() or tensor.is_complex()):
            tensor.fill_(self.whole)
        elif self.identity and tensor.ndim > 1 and tensor.shape[-1] == tensor.shape[-2]:
            tensor.copy_(torch.eye(tensor.shape[-1], dtype=tensor.dtype, device=tensor.device).expand_as(tensor))
        elif self.random:
            tensor.uniform_(0, 1) if tensor.is_floating_point() else tensor.fill_(0.5)


def set_runnable_integers(func: OpOverload, named: NamedArguments) -> None:
    """Set integer arguments of certain operators to values with which they can run, such as valid indices."""
    if func._schema.name in _INTEGER_SETTERS:
        _INTEGER_SETTERS[func._schema.name](named)


HALVES, _RANDOM = ScratchContents(), ScratchContents(random=True)
_RANDOM_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def contents_to_try(device: torch.device) -> tuple[ScratchContents, ...]:
    """Return the scratch contents to try on an op, in order, until it runs."""
    if traits_of(device).survives_bad_indices:
        return (
            HALVES,
            ScratchContents(identity=True),
            ScratchContents(whole=1, identity=True),
            ScratchContents(whole=1),
            _RANDOM,
        )
    return ScratchContents(varied=True), ScratchContents(identity=True), _RANDOM


def _balance_groups(named: NamedArguments) -> None:
    """Give the groups of a grouped matrix product nearly equal numbers of rows, as trained routers do."""
    first, second, offsets = named["self"], named["mat2"], named.get("offs")
    if offsets is None:
        return
    extent = second.shape[-1] if first.ndim == 3 else first.shape[0 if second.ndim == 3 else 1]
    groups = offsets.numel()
    offsets.copy_(torch.arange(1, groups + 1, dtype=torch.int64) * extent // groups)


def _fill_bags(named: NamedArguments) -> None:
    """Set the size of each bag of an embedding bag to 1, because empty bags take no memory."""
    named["bag_size"].fill_(1)


def _balance_repeats(named: NamedArguments) -> None:
    """Set repeat counts to nearly equal numbers that add up to the output size."""
    repeats, size = named["repeats"], named.get("output_size")
    if size is not None and repeats.numel():
        repeats.fill_(size // repeats.numel())
        repeats.view(-1)[: size % repeats.numel()].add_(1)


def _balance_segments(named: NamedArguments) -> None:
    """Set the lengths in a segment reduction to nearly equal numbers that add up to the size of the axis."""
    lengths = named.get("lengths")
    if lengths is not None and lengths.numel():
        data, axis = named["data"], named.get("axis", 0)
        segments = lengths.shape[-1]
        lengths.fill_(data.shape[axis] // segments)
        lengths[..., : data.shape[axis] % segments].add_(1)


def _use_longest_sequences(named: NamedArguments) -> None:
    """Set the lengths in a CTC loss to the largest possible, which need the most memory."""
    frames, targets, lengths = named["input_lengths"], named["targets"], named["target_lengths"]
    if not isinstance(lengths, torch.Tensor) or not lengths.numel():
        return
    frames.fill_(named["log_probs"].shape[0])
    if targets.ndim == 2:
        lengths.fill_(targets.shape[1])
    else:  # the lengths add up to the length of the concatenated targets
        lengths.fill_(0)
        lengths.view(-1)[0] = targets.numel()


# Distance of consecutive indices: a prime, so that all come up, in an order that no cache prefetches.
_STRIDE = 7919


def spread(indices: torch.Tensor, count: int) -> None:
    """Fill an integer tensor with values from 0 to ``count`` - 1, each about equally often."""
    if indices.dtype in (torch.bool, torch.uint8) or not indices.numel() or count < 2 or _is_expanded(indices):
        return
    numbers = torch.arange(indices.numel(), dtype=torch.int64, device=indices.device)
    indices.copy_(numbers.mul_(_STRIDE).remainder_(count).view(indices.shape))


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _row_spreader(name: str) -> Callable[[NamedArguments], None]:
    """Return a function that spreads an op's indices over the rows of the argument ``name``."""

    def fill(named: NamedArguments) -> None:
        rows = named[name]
        spread(named["indices"], int(rows) if isinstance(rows, int) else rows.shape[0])

    return fill


def _spread_along_dim(named: NamedArguments) -> None:
    source = named["self"]
    if source.ndim:
        spread(named["index"], source.shape[named["dim"]])


def _spread_each_index_tensor(named: NamedArguments) -> None:
    for indices, count in zip(named["indices"], named["self"].shape, strict=False):
        if isinstance(indices, torch.Tensor) and not indices.is_floating_point():
            spread(indices, count)


def _spread_classes(named: NamedArguments) -> None:
    source = named["self"]
    spread(named["target"], source.shape[1 if source.ndim > 1 else 0])


def _spread_pooling_indices(named: NamedArguments) -> None:
    spread(named["indices"], named["self"].shape[-1] * named["self"].shape[-2])


# Ops that run, or do representative work, only with certain integers.
_INTEGER_SETTERS: dict[str, Callable[[NamedArguments], None]] = {
    f"aten::{name}": fill
    for fill, names in (
        (_row_spreader("weight"), ("embedding",)),
        (_row_spreader("num_weights"), ("embedding_dense_backward",)),
        (_spread_along_dim, ("gather", "scatter", "scatter_", "scatter_add", "scatter_add_")),
        (_spread_along_dim, ("index_select", "index_add", "index_add_")),
        (_spread_each_index_tensor, ("index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put")),
        (_spread_classes, ("nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward")),
        (_spread_pooling_indices, ("max_pool2d_with_indices_backward",)),
        (_use_longest_sequences, ("_ctc_loss", "_ctc_loss_backward")),
        (_balance_groups, ("_grouped_mm",)),
        (_fill_bags, ("_embedding_bag_backward", "_embedding_bag_dense_backward")),
        (_balance_repeats, ("repeat_interleave",)),
        (_balance_segments, ("segment_reduce", "_segment_reduce_backward")),
    )
    for name in names
}
