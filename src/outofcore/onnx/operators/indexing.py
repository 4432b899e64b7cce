"""Gather, scatter, sort and search operators, and sequences."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from outofcore.onnx.operators.elementwise import UNSIGNED
from outofcore.onnx.operators.registry import Unsupported, axis_of, operator, to_list

_Tensors = tuple[Tensor, ...]


def _from_front(index: Tensor, length: int) -> Tensor:
    """Return indices as int64, with negative indices counted from the front."""
    index = index.to(torch.int64)
    return torch.where(index < 0, index + length, index)


@operator("Gather")
def gather(x: Tensor, index: Tensor, *, axis: int = 0) -> Tensor:
    axis = axis_of(axis, x.dim())
    rows = x.index_select(axis, _from_front(index, x.shape[axis]).reshape(-1))
    return rows.reshape([*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]])


@operator("GatherElements")
def gather_elements(x: Tensor, index: Tensor, *, axis: int = 0) -> Tensor:
    return x.gather(axis, _from_front(index, x.shape[axis]))


@operator("GatherND")
def gather_nd(x: Tensor, index: Tensor, *, batch_dims: int = 0) -> Tensor:
    end = batch_dims + index.shape[-1]
    lead = math.prod(x.shape[:batch_dims])
    flat = x.reshape(lead, math.prod(x.shape[batch_dims:end]), *x.shape[end:])
    at = _flat_index(index, x.shape[batch_dims:end]).reshape(lead, -1)
    rows = torch.arange(lead, device=x.device)[:, None]
    return flat[rows, at].reshape([*index.shape[:-1], *x.shape[end:]])


def _flat_index(index: Tensor, shape: torch.Size) -> Tensor:
    """Convert index vectors (the last dimension) to indices into a flattened tensor of ``shape``."""
    at = torch.zeros(index.shape[:-1], dtype=torch.int64, device=index.device)
    for place, length in enumerate(shape):
        at = at * length + _from_front(index[..., place], length)
    return at


_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _scatter(x: Tensor, axis: int, indices: Tensor, updates: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return x.scatter(axis, indices, updates)
    if reduction == "add":
        return x.scatter_add(axis, indices, updates)
    if reduction not in _REDUCTIONS:
        raise Unsupported(f"the reduction {reduction!r} is unknown")
    return x.scatter_reduce(axis, indices, updates, _REDUCTIONS[reduction], include_self=True)


@operator("ScatterElements", "Scatter")
def scatter_elements(x: Tensor, index: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none") -> Tensor:
    return _scatter(x, axis, _from_front(index, x.shape[axis]), updates, reduction)


@operator("ScatterND")
def scatter_nd(x: Tensor, index: Tensor, updates: Tensor, *, reduction: str = "none") -> Tensor:
    deep = index.shape[-1]
    row_size = math.prod(x.shape[deep:])
    flat = x.reshape(math.prod(x.shape[:deep]), row_size)
    at = _flat_index(index, x.shape[:deep]).reshape(-1, 1).expand(-1, row_size)
    return _scatter(flat, 0, at, updates.reshape(-1, row_size), reduction).reshape(x.shape)


@operator("TensorScatter")
def tensor_scatter(
    past: Tensor, update: Tensor, starts: Tensor | None = None, *, axis: int = -2, mode: str = "linear"
) -> Tensor:
    axis = axis_of(axis, past.dim())
    at = torch.arange(update.shape[axis], device=past.device).expand(past.shape[0], -1)
    if starts is not None:
        at = starts.reshape(-1, 1) + at
    if mode == "circular":
        at = at.remainder(past.shape[axis])
    at = at.reshape([past.shape[0], *(update.shape[axis] if i == axis else 1 for i in range(1, past.dim()))])
    return past.scatter(axis, at.expand(update.shape), update)


@operator("OneHot", read=(1,))
def one_hot(index: Tensor, depth: list[float], values: Tensor, *, axis: int = -1) -> Tensor:
    count = int(depth[0])
    place = axis_of(axis, index.dim() + 1)
    at = _from_front(index, count).unsqueeze(place)
    shape = [count if i == place else 1 for i in range(index.dim() + 1)]
    return torch.where(torch.arange(count, device=index.device).reshape(shape) == at, values[1], values[0])


@operator("TopK", read=(1,), many=True)
def top_k(x: Tensor, given_count: list[int] | None = None, *, k: int = 0, axis: int = -1, largest: int = 1) -> _Tensors:
    (count,) = [k] if given_count is None else given_count
    if not 0 <= count <= x.shape[axis]:
        raise Unsupported(f"it selects {count} of {x.shape[axis]} elements")
    # Among equal elements the first wins; PyTorch's topk picks any.
    wide = x.to(torch.int64) if x.dtype in UNSIGNED else x
    values, places = torch.sort(wide, dim=axis, descending=bool(largest), stable=True)
    return values.narrow(axis, 0, count).to(x.dtype), places.narrow(axis, 0, count)


@operator("NonZero")
def non_zero(x: Tensor) -> Tensor:
    return torch.nonzero(x).t() if x.dim() else torch.nonzero(x.reshape(1)).t()[:0]


@operator("Compress")
def compress(x: Tensor, condition: Tensor, *, axis: int | None = None) -> Tensor:
    places = torch.nonzero(condition.reshape(-1)).reshape(-1)
    return x.reshape(-1)[places] if axis is None else x.index_select(axis, places)


@operator("Unique", many=True)
def unique(x: Tensor, *, axis: int | None = None, sorted: int = 1) -> _Tensors:
    values, places, counts = torch.unique(x, sorted=True, return_inverse=True, return_counts=True, dim=axis)
    along = places.reshape(-1)
    steps = torch.arange(along.numel(), device=x.device)
    first = torch.full((counts.numel(),), along.numel(), dtype=torch.int64, device=x.device)
    first = first.scatter_reduce(0, along, steps, "amin")
    if axis is None:
        values = values.reshape(-1)
    if not sorted:
        order = torch.argsort(first)
        values = values.index_select(axis or 0, order)
        first, counts, along = first[order], counts[order], torch.argsort(order)[along]
    return values, first, along, counts


@operator("NonMaxSuppression", read=(2, 3, 4), pure=False)
def non_max_suppression(
    boxes: Tensor,
    scores: Tensor,
    max_count: list[int] | None = None,
    overlap: list[float] | None = None,
    min_score: list[float] | None = None,
    *,
    center_point_box: int = 0,
) -> Tensor:
    limit, too_much = (max_count or [0])[0], (overlap or [0.0])[0]
    selected: list[list[int]] = []
    first, second = boxes[..., :2], boxes[..., 2:]
    if center_point_box:
        first, second = first - second / 2, first + second / 2
    corners = torch.cat([torch.minimum(first, second), torch.maximum(first, second)], -1)
    for batch in range(scores.shape[0]):
        box = corners[batch]
        area = (box[:, 2:] - box[:, :2]).prod(-1)
        for kind in range(scores.shape[1]):
            score = scores[batch, kind]
            order = torch.sort(score, descending=True, stable=True).indices
            if min_score is not None:
                order = order[score[order] > min_score[0]]
            count = 0
            while order.numel() and count < limit:
                best, order = order[0], order[1:]
                selected.append([batch, kind, int(best)])
                count += 1
                inner = torch.minimum(box[order, 2:], box[best, 2:]) - torch.maximum(box[order, :2], box[best, :2])
                common = inner.clamp(min=0).prod(-1)
                order = order[~(common / (area[order] + area[best] - common) > too_much)]
    return torch.tensor(selected, dtype=torch.int64, device=boxes.device).reshape(-1, 3)


@operator("ArgMax", "ArgMin")
def arg_extreme(x: Tensor, *, op: str, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    find = torch.argmax if op == "ArgMax" else torch.argmin
    if select_last_index:
        return x.shape[axis] - 1 - find(x.flip(axis), dim=axis, keepdim=bool(keepdims))
    return find(x, dim=axis, keepdim=bool(keepdims))


@operator("CumSum", "CumProd", read=(1,))
def cumulate(x: Tensor, axes: list[int], *, op: str, exclusive: int = 0, reverse: int = 0) -> Tensor:
    (axis,) = axes
    if reverse:
        x = x.flip(axis)
    if exclusive:
        # The first result is the neutral element.
        first = torch.full_like(x.narrow(axis, 0, 1), 0 if op == "CumSum" else 1)
        x = torch.cat([first, x.narrow(axis, 0, x.shape[axis] - 1)], axis)
    y = (torch.cumsum if op == "CumSum" else torch.cumprod)(x, axis, dtype=x.dtype)
    return y.flip(axis) if reverse else y


# ---- sequences: lists of tensors -------------------------------------------------------------------------------------


@operator("SequenceConstruct", "SequenceEmpty", pure=False)
def sequence(*tensors: Tensor) -> list[Tensor]:
    return list(tensors)


@operator("SequenceAt", read=(1,))
def sequence_at(tensors: list[Any], place: list[int]) -> Any:
    return tensors[place[0]]


@operator("SequenceInsert", read=(2,), pure=False)
def sequence_insert(tensors: list[Any], tensor: Tensor, place: list[int] | None = None) -> list[Any]:
    result = list(tensors)
    result.insert(len(tensors) if place is None else place[0], tensor)
    return result


@operator("SequenceErase", read=(1,), pure=False)
def sequence_erase(tensors: list[Any], place: list[int] | None = None) -> list[Any]:
    result = list(tensors)
    del result[-1 if place is None else place[0]]
    return result


@operator("SequenceLength", by_shape=True)
def sequence_length(tensors: list[Any]) -> Tensor:
    return torch.tensor(len(tensors), dtype=torch.int64)


@operator("ConcatFromSequence")
def concat_from_sequence(tensors: list[Any], *, axis: int, new_axis: int = 0) -> Tensor:
    return (torch.stack if new_axis else torch.cat)(tensors, axis)


@operator("SplitToSequence", host=(1,), pure=False)
def split_to_sequence(x: Tensor, sizes: Tensor | None = None, *, axis: int = 0, keepdims: int = 1) -> list[Tensor]:
    if sizes is None:
        return list(x.split(1, axis) if keepdims else x.unbind(axis))
    return list(torch.split(x, to_list(sizes) if sizes.dim() else int(to_list(sizes)[0]), axis))
