"""Reductions over axes, and losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from outofcore.onnx.operators.registry import Call, axis_of, numbers, operator

_Reduce = Callable[[torch.Tensor, list[int], bool], torch.Tensor]


def _product(x: torch.Tensor, axes: list[int], keep: bool) -> torch.Tensor:
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, axis, keepdim=keep, dtype=x.dtype)
    return x


def _sum(x: torch.Tensor, axes: list[int], keep: bool) -> torch.Tensor:
    return torch.sum(x, axes, keepdim=keep, dtype=x.dtype)


def _mean(x: torch.Tensor, axes: list[int], keep: bool) -> torch.Tensor:
    if x.is_floating_point():
        return torch.mean(x, axes, keepdim=keep)
    count = 1
    for axis in axes:
        count *= x.shape[axis]
    return torch.div(_sum(x, axes, keep), count, rounding_mode="trunc")


def _extreme(largest: bool) -> _Reduce:
    def reduce(x: torch.Tensor, axes: list[int], keep: bool) -> torch.Tensor:
        if any(x.shape[axis] == 0 for axis in axes):  # the least, or the greatest, that there is
            shape = [1 if i in axes else one for i, one in enumerate(x.shape)]
            if x.dtype is torch.bool:
                value: Any = not largest
            elif x.is_floating_point():
                value = float("-inf") if largest else float("inf")
            else:
                value = torch.iinfo(x.dtype).min if largest else torch.iinfo(x.dtype).max
            found = x.new_full(shape, value)
            return found if keep else found.reshape([one for i, one in enumerate(shape) if i not in axes])
        return (torch.amax if largest else torch.amin)(x, axes, keepdim=keep)

    return reduce


_REDUCE: dict[str, _Reduce] = {
    "ReduceL1": lambda x, axes, keep: _sum(x.abs(), axes, keep),
    "ReduceL2": lambda x, axes, keep: torch.sqrt(_sum((x * x).to(_float(x)), axes, keep)).to(x.dtype),
    "ReduceLogSum": lambda x, axes, keep: torch.log(_sum(x, axes, keep)),
    "ReduceLogSumExp": lambda x, axes, keep: torch.logsumexp(x.to(_float(x)), axes, keepdim=keep).to(x.dtype),
    "ReduceMax": _extreme(True),
    "ReduceMean": _mean,
    "ReduceMin": _extreme(False),
    "ReduceProd": _product,
    "ReduceSum": _sum,
    "ReduceSumSquare": lambda x, axes, keep: _sum(x * x, axes, keep),
}


def _float(x: torch.Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else torch.float64


@operator(*_REDUCE, read=(1,))
def reduce(call: Call, x: torch.Tensor, axes: torch.Tensor | None = None) -> torch.Tensor:
    given = numbers(axes) if axes is not None else list(call.get("axes", ()))
    if not given:
        if call.get("noop_with_empty_axes", 0):
            # Nothing is taken together, and what is done to each element is done.
            return _REDUCE[call.node.op](x.unsqueeze(-1), [x.dim()], False)
        given = list(range(x.dim()))
    if not x.dim():
        return _REDUCE[call.node.op](x.reshape(1), [0], False)
    places = sorted({axis_of(axis, x.dim()) for axis in given})
    return _REDUCE[call.node.op](x, places, bool(call.get("keepdims", 1)))


@operator("NegativeLogLikelihoodLoss")
def likelihood_loss(
    call: Call, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None
) -> torch.Tensor:
    return _loss(call, x, target, weight)


@operator("SoftmaxCrossEntropyLoss")
def cross_entropy(call: Call, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None) -> Any:
    logs = torch.log_softmax(x, 1)
    found = _loss(call, logs, target, weight)
    return (found, logs) if call.wants(1) else found


def _loss(call: Call, logs: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    ignored = call.get("ignore_index", -100)
    labels = target.to(torch.int64)
    return F.nll_loss(logs, labels, weight, ignore_index=ignored, reduction=call.get("reduction", "mean"))
