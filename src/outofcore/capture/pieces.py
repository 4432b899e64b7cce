"""Long parameters are updated piece by piece: what one operation of an optimizer leaves is in the cache for the next.

An optimizer goes over a parameter once for each of its operations, ten times and more. Over pieces that the caches
hold, it reads and writes memory but once; and its scratch memory is that of a piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

# Elements of a piece: 1 MiB of each tensor in float32.
PIECE_ELEMENTS = 1 << 18

# What these compute for an element depends on nothing but that element of each tensor, and on counts.
_ELEMENTWISE = frozenset({SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop})
# In narrower ones PyTorch rounds otherwise where a range ends than within it, so where ranges end has to stay.
_DTYPES = frozenset({torch.float32, torch.float64})
# Settings with which all parameters are gone over at once, or in native code that needs no help.
_AT_ONCE = ("foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True)
class Piece:
    """A parameter of an update, or a range of one.

    Attributes:
        member: the index of the parameter in its update.
        parameter: the range of it.
        gradient: likewise, if there is one.
        states: the state tensors; counts are copies, but for the last piece.
        own: state that is not the update's to place.
    """

    member: int
    parameter: torch.Tensor
    gradient: torch.Tensor | None
    states: tuple[torch.Tensor, ...]
    own: dict[str, Any]


def pieces_of(optimizer: Optimizer, group: int, whole: Piece) -> list[Piece]:
    """The pieces that a parameter is updated in, in order: one, unless it is long and any range gives the same bits.

    Args:
        optimizer: the user's.
        group: the index of the group that the parameter is in.
        whole: all of the parameter, and of its state: which may be yet to be made, each range by itself.
    """
    if not _can_be_cut(optimizer, optimizer.param_groups[group], whole):
        return [whole]
    count = whole.parameter.numel()
    starts = range(0, count, PIECE_ELEMENTS)
    found: list[Piece] = []
    for start in starts:
        length, last = min(PIECE_ELEMENTS, count - start), start == starts[-1]

        def part(tensor: torch.Tensor, start: int = start, length: int = length, last: bool = last) -> torch.Tensor:
            if tensor.ndim == 0:
                return tensor if last else tensor.clone()
            return tensor.view(-1).narrow(0, start, length)

        gradient = None if whole.gradient is None else part(whole.gradient)
        states = tuple(part(tensor) for tensor in whole.states)
        found.append(Piece(whole.member, part(whole.parameter), gradient, states, dict(whole.own)))
    return found


def _can_be_cut(optimizer: Optimizer, settings: dict[str, Any], whole: Piece) -> bool:
    parameter, gradient = whole.parameter, whole.gradient
    if (
        parameter.numel() < 2 * PIECE_ELEMENTS
        or type(optimizer) not in _ELEMENTWISE
        or any(settings.get(name) for name in _AT_ONCE)
        or parameter.device.type != "cpu"
        or parameter.dtype not in _DTYPES
        or parameter.ndim == 0
        or gradient is None
        or any(isinstance(value, torch.Tensor) for value in whole.own.values())
    ):
        return False
    return all(_lies_alike(tensor, parameter) for tensor in (parameter, gradient, *_not_counts(whole.states)))


def _not_counts(states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in states if tensor.ndim]


def _lies_alike(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.shape == parameter.shape
        and tensor.dtype == parameter.dtype
        and tensor.device == parameter.device
        and tensor.is_contiguous()
    )
