"""What scratch tensors hold while an op is measured on them.

Half throughout, and zero where numbers are whole, which any index may be: most ops run on these. Those that do
not, such as factorisations of matrices, are tried on others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from outofcore._torch_internals import OpOverload
from outofcore.capture import operators
from outofcore.capture.tables import leaves_in
from outofcore.execution.binding import BoundRun

Given = dict[str, Any]


@dataclass(frozen=True)
class Contents:
    """What the arguments of an op are filled with.

    Attributes:
        whole: in tensors of whole numbers.
        identity: whether square matrices are the identity, which every factorisation and inverse exists for.
        random: whether the rest is drawn between 0 and 1, and not one half.
    """

    whole: int = 0
    identity: bool = False
    random: bool = False

    def fill(self, run: BoundRun) -> None:
        """Fill the arguments of an op, which hold halves and zeros."""
        if self != PLAIN:
            for tensor in leaves_in([run.args, run.kwargs]):
                self._fill(tensor)
        if isinstance(run.func, OpOverload) and run.func._schema.name in _FITTING:
            _FITTING[run.func._schema.name](operators.by_name(run.func, run.args, run.kwargs))

    def _fill(self, tensor: torch.Tensor) -> None:
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            return  # an expanded tensor cannot be written to
        if not (tensor.is_floating_point() or tensor.is_complex()):
            tensor.fill_(self.whole)
        elif self.identity and tensor.ndim > 1 and tensor.shape[-1] == tensor.shape[-2]:
            tensor.copy_(torch.eye(tensor.shape[-1], dtype=tensor.dtype, device=tensor.device).expand_as(tensor))
        elif self.random:
            tensor.uniform_(0, 1) if tensor.is_floating_point() else tensor.fill_(0.5)


PLAIN = Contents()


def contents_to_try(device: torch.device) -> Iterator[Contents]:
    """What to try one after the other, until an op runs."""
    yield PLAIN
    yield Contents(identity=True)
    # On a device an index out of range ends the process, and cannot be tried.
    if device.type == "cpu":
        yield Contents(whole=1, identity=True)
        yield Contents(whole=1)
    yield Contents(random=True)


def _even_groups(given: Given) -> None:
    """Divide what there is evenly among the ragged groups of a product of matrices.

    Zeros would leave all groups empty and the op without work. How uneven groups are in training is not known
    before: routers of mixtures of experts are trained to keep them even.
    """
    one, other, offsets = given["self"], given["mat2"], given.get("offs")
    if offsets is None:
        return
    extent = other.shape[-1] if one.ndim == 3 else one.shape[0 if other.ndim == 3 else 1]
    groups = offsets.numel()
    offsets.copy_(torch.arange(1, groups + 1, dtype=torch.int64) * extent // groups)


def _full_bags(given: Given) -> None:
    """No bag of an embedding bag is empty: those that are take no memory."""
    given["bag_size"].fill_(1)


def _even_repeats(given: Given) -> None:
    """Repeats that add up to the size of the result."""
    repeats, size = given["repeats"], given.get("output_size")
    if size is not None and repeats.numel():
        repeats.fill_(size // repeats.numel())
        repeats.view(-1)[: size % repeats.numel()].add_(1)


def _even_segments(given: Given) -> None:
    """Lengths that add up to the length of what is divided into segments."""
    lengths = given.get("lengths")
    if lengths is not None and lengths.numel():
        data, axis = given["data"], given.get("axis", 0)
        share = lengths.shape[-1]
        lengths.fill_(data.shape[axis] // share)
        lengths[..., : data.shape[axis] % share].add_(1)


# Ops whose work, or whose right to run, depends on whole numbers that they are given.
_FITTING: dict[str, Callable[[Given], None]] = {
    "aten::_grouped_mm": _even_groups,
    "aten::_embedding_bag_backward": _full_bags,
    "aten::_embedding_bag_dense_backward": _full_bags,
    "aten::repeat_interleave": _even_repeats,
    "aten::segment_reduce": _even_segments,
    "aten::_segment_reduce_backward": _even_segments,
}
