"""The contents of scratch tensors while an op is measured on them.

Floating-point tensors hold one half, integers zero, which any index may be: most ops run on these. Other contents are
tried for those that do not, such as factorisations of matrices. Integers that are indices are spread over all places:
if all were equal, reads would come from a cache, and additions to one place would wait for each other.

On a GPU floating-point values are drawn from around one half. A chip that switches fewer bits draws less power, and
keeps a higher clock than in training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from outofcore._torch_internals import OpOverload
from outofcore.capture import operators
from outofcore.capture.captured import CPU
from outofcore.capture.device_traits import are_alike, traits_of
from outofcore.capture.tables import leaves_in
from outofcore.execution.binding import BoundRun

Given = dict[str, Any]


@dataclass(frozen=True)
class Contents:
    """What the arguments of an op are filled with.

    Attributes:
        whole: the value in integer tensors.
        identity: whether square matrices are the identity, which has every factorisation and an inverse.
        random: whether the rest is drawn between 0 and 1, and not one half.
        varied: whether it is drawn between 1/4 and 3/4.
    """

    whole: int = 0
    identity: bool = False
    random: bool = False
    varied: bool = False

    def fill_bytes(self, target: torch.Tensor, dtype: torch.dtype) -> None:
        """Fill a storage (contiguous uint8) before ``fill``: with halves, or random values; with zeros for integers.

        ``dtype`` is of the first value in it.
        """
        if not (dtype.is_floating_point or dtype.is_complex):
            target.zero_()
            return
        whole = target[: target.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        if self.varied and dtype in _DRAWN:
            whole.uniform_(0.25, 0.75)  # within 0 and 1: what is no probability ends the process on a GPU
        else:
            whole.fill_(0.5)

    def fill(self, run: BoundRun, device: torch.device = CPU) -> None:
        """Fill the arguments of an op, which hold halves and zeros; skip constants, which are not on ``device``."""
        given = list(leaves_in([run.args, run.kwargs]))
        scratch = [tensor for tensor in given if are_alike(tensor.device, device)]
        if replace(self, varied=False) != PLAIN:
            for tensor in scratch:
                self._fill(tensor)
        func = getattr(run.func, "func", run.func)
        if len(scratch) == len(given) and isinstance(func, OpOverload):
            fit(func, operators.by_name(func, run.args, run.kwargs))

    def _fill(self, tensor: torch.Tensor) -> None:
        if _is_expanded(tensor):
            return  # it cannot be written to
        if not (tensor.is_floating_point() or tensor.is_complex()):
            tensor.fill_(self.whole)
        elif self.identity and tensor.ndim > 1 and tensor.shape[-1] == tensor.shape[-2]:
            tensor.copy_(torch.eye(tensor.shape[-1], dtype=tensor.dtype, device=tensor.device).expand_as(tensor))
        elif self.random:
            tensor.uniform_(0, 1) if tensor.is_floating_point() else tensor.fill_(0.5)


def fit(func: OpOverload, given: Given) -> None:
    """Set an operator's integer arguments, given by name, to values with which it can run."""
    if func._schema.name in _FITTING:
        _FITTING[func._schema.name](given)


PLAIN, _RANDOM = Contents(), Contents(random=True)
_DRAWN = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def contents_to_try(device: torch.device) -> tuple[Contents, ...]:
    """Return contents to try one after the other until an op runs."""
    if traits_of(device).survives_bad_indices:
        return PLAIN, Contents(identity=True), Contents(whole=1, identity=True), Contents(whole=1), _RANDOM
    return Contents(varied=True), Contents(identity=True), _RANDOM


def _even_groups(given: Given) -> None:
    """Divide the rows evenly among the ragged groups of a product of matrices.

    Zeros would leave all groups empty and the op without work. The groups of training are unknown, but routers of
    mixtures of experts are trained to keep them even.
    """
    one, other, offsets = given["self"], given["mat2"], given.get("offs")
    if offsets is None:
        return
    extent = other.shape[-1] if one.ndim == 3 else one.shape[0 if other.ndim == 3 else 1]
    groups = offsets.numel()
    offsets.copy_(torch.arange(1, groups + 1, dtype=torch.int64) * extent // groups)


def _full_bags(given: Given) -> None:
    """Leave no bag of an embedding bag empty: empty ones take no memory."""
    given["bag_size"].fill_(1)


def _even_repeats(given: Given) -> None:
    """Make repeats add up to the size of the result."""
    repeats, size = given["repeats"], given.get("output_size")
    if size is not None and repeats.numel():
        repeats.fill_(size // repeats.numel())
        repeats.view(-1)[: size % repeats.numel()].add_(1)


def _even_segments(given: Given) -> None:
    """Make segment lengths add up to the length that is divided."""
    lengths = given.get("lengths")
    if lengths is not None and lengths.numel():
        data, axis = given["data"], given.get("axis", 0)
        share = lengths.shape[-1]
        lengths.fill_(data.shape[axis] // share)
        lengths[..., : data.shape[axis] % share].add_(1)


def _longest_sequences(given: Given) -> None:
    """Use all frames, and make targets as long as there is room for: no other lengths need more memory."""
    frames, targets, lengths = given["input_lengths"], given["targets"], given["target_lengths"]
    if not isinstance(lengths, torch.Tensor) or not lengths.numel():
        return
    frames.fill_(given["log_probs"].shape[0])
    if targets.ndim == 2:
        lengths.fill_(targets.shape[1])
    else:  # they add up to the length of all targets in a row
        lengths.fill_(0)
        lengths.view(-1)[0] = targets.numel()


# Consecutive places are so far apart: a prime, so that all of them come up, and in no order that a cache foresees.
_STRIDE = 7919


def spread(places: torch.Tensor, count: int) -> None:
    """Fill an integer tensor with values from 0 to ``count`` - 1, as evenly as possible."""
    if places.dtype in (torch.bool, torch.uint8) or not places.numel() or count < 2 or _is_expanded(places):
        return
    numbers = torch.arange(places.numel(), dtype=torch.int64, device=places.device)
    places.copy_(numbers.mul_(_STRIDE).remainder_(count).view(places.shape))


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _rows_of(name: str) -> Callable[[Given], None]:
    """Spread indices of rows; the named argument has the rows, or is their number."""

    def fill(given: Given) -> None:
        rows = given[name]
        spread(given["indices"], int(rows) if isinstance(rows, int) else rows.shape[0])

    return fill


def _places_along(given: Given) -> None:
    """Spread indices along one dimension."""
    one = given["self"]
    if one.ndim:
        spread(given["index"], one.shape[given["dim"]])


def _places_of_each(given: Given) -> None:
    """Spread indices along each dimension that is indexed."""
    for places, count in zip(given["indices"], given["self"].shape, strict=False):
        if isinstance(places, torch.Tensor) and not places.is_floating_point():
            spread(places, count)


def _classes(given: Given) -> None:
    """Spread class numbers."""
    one = given["self"]
    spread(given["target"], one.shape[1 if one.ndim > 1 else 0])


def _windows(given: Given) -> None:
    """Spread the places at which a pooling has found its largest values."""
    spread(given["indices"], given["self"].shape[-1] * given["self"].shape[-2])


# Ops whose work, or whose right to run, depends on whole numbers that they are given.
_FITTING: dict[str, Callable[[Given], None]] = {
    f"aten::{name}": fill
    for fill, names in (
        (_rows_of("weight"), ("embedding",)),
        (_rows_of("num_weights"), ("embedding_dense_backward",)),
        (_places_along, ("gather", "scatter", "scatter_", "scatter_add", "scatter_add_")),
        (_places_along, ("index_select", "index_add", "index_add_")),
        (_places_of_each, ("index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put")),
        (_classes, ("nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward")),
        (_windows, ("max_pool2d_with_indices_backward",)),
        (_longest_sequences, ("_ctc_loss", "_ctc_loss_backward")),
        (_even_groups, ("_grouped_mm",)),
        (_full_bags, ("_embedding_bag_backward", "_embedding_bag_dense_backward")),
        (_even_repeats, ("repeat_interleave",)),
        (_even_segments, ("segment_reduce", "_segment_reduce_backward")),
    )
    for name in names
}
