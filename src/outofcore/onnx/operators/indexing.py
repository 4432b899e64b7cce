"""Operators that look elements up, put them somewhere, or put them in order."""

from __future__ import annotations

import math
from typing import Any

import torch

from outofcore.onnx.operators.registry import Call, axis_of, number, numbers, operator


def _counted(index: torch.Tensor, length: int) -> torch.Tensor:
    """Indices counted from the front."""
    index = index.to(torch.int64)
    return torch.where(index < 0, index + length, index)


@operator("Gather")
def gather(call: Call, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    axis = axis_of(call.get("axis", 0), x.dim())
    at = _counted(index, x.shape[axis])
    found = x.index_select(axis, at.reshape(-1))
    return found.reshape([*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]])


@operator("GatherElements")
def gather_elements(call: Call, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    axis = axis_of(call.get("axis", 0), x.dim())
    return x.gather(axis, _counted(index, x.shape[axis]))


@operator("GatherND")
def gather_nd(call: Call, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    batch, deep = call.get("batch_dims", 0), index.shape[-1]
    lead = math.prod(x.shape[:batch])
    flat = x.reshape(lead, math.prod(x.shape[batch : batch + deep]), *x.shape[batch + deep :])
    at = _flat_index(index, x.shape[batch : batch + deep]).reshape(lead, -1)
    rows = torch.arange(lead, device=x.device)[:, None]
    return flat[rows, at].reshape([*index.shape[:-1], *x.shape[batch + deep :]])


def _flat_index(index: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    at = torch.zeros(index.shape[:-1], dtype=torch.int64, device=index.device)
    for place, length in enumerate(shape):
        at = at * length + _counted(index[..., place], length)
    return at


_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _scattered(
    call: Call, x: torch.Tensor, axis: int, at: torch.Tensor, updates: torch.Tensor, reduction: str
) -> torch.Tensor:
    if reduction == "none":
        return x.scatter(axis, at, updates)
    if reduction == "add":
        return x.scatter_add(axis, at, updates)
    if reduction not in _REDUCTIONS:
        raise call.refuse(f"the reduction {reduction!r} is not known")
    return x.scatter_reduce(axis, at, updates, _REDUCTIONS[reduction], include_self=True)


@operator("ScatterElements", "Scatter")
def scatter_elements(call: Call, x: torch.Tensor, index: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    axis = axis_of(call.get("axis", 0), x.dim())
    at = _counted(index, x.shape[axis])
    return _scattered(call, x, axis, at, updates, call.get("reduction", "none"))


@operator("ScatterND")
def scatter_nd(call: Call, x: torch.Tensor, index: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    deep = index.shape[-1]
    rest = math.prod(x.shape[deep:])
    flat = x.reshape(math.prod(x.shape[:deep]), rest)
    at = _flat_index(index, x.shape[:deep]).reshape(-1, 1).expand(-1, rest)
    found = _scattered(call, flat, 0, at, updates.reshape(-1, rest), call.get("reduction", "none"))
    return found.reshape(x.shape)


@operator("TensorScatter")
def tensor_scatter(
    call: Call, past: torch.Tensor, update: torch.Tensor, begins: torch.Tensor | None = None
) -> torch.Tensor:
    axis = axis_of(call.get("axis", -2), past.dim())
    steps = torch.arange(update.shape[axis], device=past.device)
    first = torch.zeros(past.shape[0], dtype=torch.int64, device=past.device) if begins is None else begins
    at = first.reshape(-1, 1) + steps
    if call.get("mode", "linear") == "circular":
        at = at.remainder(past.shape[axis])
    at = at.reshape([past.shape[0], *(update.shape[axis] if i == axis else 1 for i in range(1, past.dim()))])
    return past.scatter(axis, at.expand(update.shape), update)


@operator("OneHot", read=(1,))
def one_hot(call: Call, index: torch.Tensor, depth: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    count = int(number(depth))
    axis = call.get("axis", -1)
    place = axis_of(axis, index.dim() + 1)
    at = index.to(torch.int64)
    at = torch.where(at < 0, at + count, at).unsqueeze(place)
    shape = [1] * (index.dim() + 1)
    shape[place] = count
    hot = torch.arange(count, device=index.device).reshape(shape) == at
    return torch.where(hot, values[1], values[0])


@operator("TopK")
def top_k_by_attribute(call: Call, x: torch.Tensor) -> Any:
    return _best(call, x, call.get("k"))


@operator("TopK", read=(1,), since=10)
def top_k(call: Call, x: torch.Tensor, k: torch.Tensor) -> Any:
    return _best(call, x, int(number(k)))


def _best(call: Call, x: torch.Tensor, count: int) -> Any:
    axis = axis_of(call.get("axis", -1), x.dim())
    if not 0 <= count <= x.shape[axis]:
        raise call.refuse(f"the best {count} of {x.shape[axis]}")
    # Of equals, the first one; PyTorch's topk takes any.
    wide = x.to(torch.int64) if x.dtype in (torch.uint16, torch.uint32, torch.uint64) else x
    values, places = torch.sort(wide, dim=axis, descending=bool(call.get("largest", 1)), stable=True)
    return values.narrow(axis, 0, count).to(x.dtype), places.narrow(axis, 0, count)


@operator("NonZero")
def non_zero(call: Call, x: torch.Tensor) -> torch.Tensor:
    return torch.nonzero(x).t() if x.dim() else torch.nonzero(x.reshape(1)).t()[:0]


@operator("Compress")
def compress(call: Call, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
    axis = call.get("axis")
    if axis is None:
        x, axis = x.reshape(-1), 0
    places = torch.nonzero(condition.reshape(-1)).reshape(-1)
    return x.index_select(axis_of(axis, x.dim()), places)


@operator("Unique")
def unique(call: Call, x: torch.Tensor) -> Any:
    axis = call.get("axis")
    values, places, counts = torch.unique(x, sorted=True, return_inverse=True, return_counts=True, dim=axis)
    along = places.reshape(-1)
    steps = torch.arange(along.numel(), device=x.device)
    first = torch.full((counts.numel(),), along.numel(), dtype=torch.int64, device=x.device)
    first = first.scatter_reduce(0, along, steps, "amin")
    if axis is None:
        values = values.reshape(-1)
    if not call.get("sorted", 1):
        order = torch.argsort(first)
        turned = torch.argsort(order)
        values = values.index_select(0 if axis is None else axis, order)
        first, counts, along = first[order], counts[order], turned[along]
    return values, first, along, counts


@operator("NonMaxSuppression", read=(2, 3, 4), pure=False)
def non_max_suppression(
    call: Call,
    boxes: torch.Tensor,
    scores: torch.Tensor,
    most: torch.Tensor | None = None,
    overlap: torch.Tensor | None = None,
    least: torch.Tensor | None = None,
) -> torch.Tensor:
    limit = 0 if most is None else int(number(most))
    too_much = 0.0 if overlap is None else float(number(overlap))
    found: list[list[int]] = []
    if call.get("center_point_box", 0):
        middle, half = boxes[..., :2], boxes[..., 2:] / 2
        corners = torch.cat([middle - half, middle + half], -1)
    else:
        corners = torch.cat(
            [torch.minimum(boxes[..., :2], boxes[..., 2:]), torch.maximum(boxes[..., :2], boxes[..., 2:])], -1
        )
    for batch in range(scores.shape[0]):
        box = corners[batch]
        area = (box[:, 2:] - box[:, :2]).prod(-1)
        for kind in range(scores.shape[1]):
            score = scores[batch, kind]
            order = torch.sort(score, descending=True, stable=True).indices
            if least is not None:
                order = order[score[order] > float(number(least))]
            taken = 0
            while order.numel() and taken < limit:
                best, order = order[0], order[1:]
                found.append([batch, kind, int(best)])
                taken += 1
                common = (
                    (torch.minimum(box[order, 2:], box[best, 2:]) - torch.maximum(box[order, :2], box[best, :2]))
                    .clamp(min=0)
                    .prod(-1)
                )
                order = order[~(common / (area[order] + area[best] - common) > too_much)]
    return torch.tensor(found, dtype=torch.int64, device=call.device).reshape(-1, 3)


@operator("ArgMax", "ArgMin")
def arg_extreme(call: Call, x: torch.Tensor) -> torch.Tensor:
    axis, keep = axis_of(call.get("axis", 0), x.dim()), bool(call.get("keepdims", 1))
    find = torch.argmax if call.node.op == "ArgMax" else torch.argmin
    if call.get("select_last_index", 0):
        return x.shape[axis] - 1 - find(x.flip(axis), dim=axis, keepdim=keep)
    return find(x, dim=axis, keepdim=keep)


@operator("CumSum", read=(1,))
def cumulative_sum(call: Call, x: torch.Tensor, axis: torch.Tensor) -> torch.Tensor:
    return _cumulative(call, x, axis, torch.cumsum)


@operator("CumProd", read=(1,))
def cumulative_product(call: Call, x: torch.Tensor, axis: torch.Tensor) -> torch.Tensor:
    return _cumulative(call, x, axis, torch.cumprod)


def _cumulative(call: Call, x: torch.Tensor, axis: torch.Tensor, function: Any) -> torch.Tensor:
    place = axis_of(int(number(axis)), x.dim())
    if call.get("reverse", 0):
        x = x.flip(place)
    if call.get("exclusive", 0):
        # What comes first is what nothing adds up, or multiplies, to.
        first = torch.full_like(x.narrow(place, 0, 1), 0 if function is torch.cumsum else 1)
        x = torch.cat([first, x.narrow(place, 0, x.shape[place] - 1)], place)
    y = function(x, place, dtype=x.dtype)
    return y.flip(place) if call.get("reverse", 0) else y


@operator("SequenceConstruct")
def sequence(call: Call, *tensors: torch.Tensor) -> Any:
    return (list(tensors),)


@operator("SequenceEmpty")
def empty_sequence(call: Call) -> Any:
    return ([],)


@operator("SequenceAt", read=(1,))
def sequence_at(call: Call, items: list[Any], place: torch.Tensor) -> Any:
    return items[int(number(place))]


@operator("SequenceInsert", read=(2,))
def sequence_insert(call: Call, items: list[Any], tensor: torch.Tensor, place: torch.Tensor | None = None) -> Any:
    at = len(items) if place is None else int(number(place))
    at = at + len(items) if at < 0 else at
    return ([*items[:at], tensor, *items[at:]],)


@operator("SequenceErase", read=(1,))
def sequence_erase(call: Call, items: list[Any], place: torch.Tensor | None = None) -> Any:
    at = range(len(items))[-1 if place is None else int(number(place))]
    return ([*items[:at], *items[at + 1 :]],)


@operator("SequenceLength", by_shape=True)
def sequence_length(call: Call, items: list[Any]) -> torch.Tensor:
    return torch.tensor(len(items), dtype=torch.int64)


@operator("ConcatFromSequence")
def concat_from_sequence(call: Call, items: list[Any]) -> torch.Tensor:
    join = torch.stack if call.get("new_axis", 0) else torch.cat
    return join(items, call.get("axis"))


@operator("SplitToSequence", read=(1,))
def split_to_sequence(call: Call, x: torch.Tensor, sizes: torch.Tensor | None = None) -> Any:
    axis = axis_of(call.get("axis", 0), x.dim())
    if sizes is None:
        parts = list(torch.split(x, 1, axis))
        return ([part if call.get("keepdims", 1) else part.squeeze(axis) for part in parts],)
    given: Any = numbers(sizes) if sizes.dim() else int(number(sizes))
    return (list(torch.split(x, given, axis)),)
