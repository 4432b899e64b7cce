"""Reductions over axes, and losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outofcore.onnx.operators.registry import axis_of, operator


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, axis, keepdim=keep, dtype=x.dtype)
    return x


def _sum(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return torch.sum(x, axes, keepdim=keep, dtype=x.dtype)


def _mean(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if x.is_floating_point():
        return torch.mean(x, axes, keepdim=keep)
    return torch.div(_sum(x, axes, keep), math.prod(x.shape[axis] for axis in axes), rounding_mode="trunc")


def _max_or_min(x: Tensor, axes: list[int], keepdim: bool, *, largest: bool) -> Tensor:
    if any(x.shape[axis] == 0 for axis in axes):  # the result is the dtype's smallest or largest number
        if x.dtype is torch.bool:
            value: Any = not largest
        elif x.is_floating_point():
            value = -math.inf if largest else math.inf
        else:
            value = torch.iinfo(x.dtype).min if largest else torch.iinfo(x.dtype).max
        return x.new_full([1 if i in axes else n for i, n in enumerate(x.shape) if keepdim or i not in axes], value)
    return (torch.amax if largest else torch.amin)(x, axes, keepdim=keepdim)


_REDUCE: dict[str, Callable[[Tensor, list[int], bool], Tensor]] = {
    "ReduceL1": lambda x, axes, keep: _sum(x.abs(), axes, keep),
    "ReduceL2": lambda x, axes, keep: torch.sqrt(_sum((x * x).to(_floating_dtype(x)), axes, keep)).to(x.dtype),
    "ReduceLogSum": lambda x, axes, keep: torch.log(_sum(x, axes, keep)),
    "ReduceLogSumExp": lambda x, axes, keep: torch.logsumexp(x.to(_floating_dtype(x)), axes, keepdim=keep).to(x.dtype),
    "ReduceMax": lambda x, axes, keep: _max_or_min(x, axes, keep, largest=True),
    "ReduceMean": _mean,
    "ReduceMin": lambda x, axes, keep: _max_or_min(x, axes, keep, largest=False),
    "ReduceProd": _product,
    "ReduceSum": _sum,
    "ReduceSumSquare": lambda x, axes, keep: _sum(x * x, axes, keep),
}


def _floating_dtype(x: Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else torch.float64


@operator(*_REDUCE, read=(1,))
def reduce(
    x: Tensor,
    given_axes: list[int] | None = None,
    *,
    op: str,
    axes: tuple[int, ...] = (),
    keepdims: int = 1,
    noop_with_empty_axes: int = 0,
) -> Tensor:
    """Reduce a tensor over axes; the default is all axes, or none with ``noop_with_empty_axes``."""
    places = given_axes if given_axes is not None else axes
    if not places and noop_with_empty_axes:
        # No axis is reduced, and the elementwise part of the operator still runs.
        return _REDUCE[op](x.unsqueeze(-1), [x.dim()], False)
    if not x.dim():
        return _REDUCE[op](x.reshape(1), [0], False)
    return _REDUCE[op](x, sorted({axis_of(axis, x.dim()) for axis in places or range(x.dim())}), bool(keepdims))


@operator("NegativeLogLikelihoodLoss")
def likelihood_loss(
    x: Tensor, target: Tensor, weight: Tensor | None = None, *, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    return F.nll_loss(x, target.to(torch.int64), weight, ignore_index=ignore_index, reduction=reduction)


@operator("SoftmaxCrossEntropyLoss", many=True)
def cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None = None, *, ignore_index: int = -100, reduction: str = "mean"
) -> tuple[Tensor, ...]:
    logs = torch.log_softmax(x, 1)
    return likelihood_loss(logs, target, weight, ignore_index=ignore_index, reduction=reduction), logs
