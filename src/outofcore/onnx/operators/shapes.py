"""Operators that make tensors, or move elements without computing with them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from outofcore.onnx.operators.registry import Call, Known, axis_of, number, numbers, operator
from outofcore.onnx.storage import DTYPES


@operator("Shape", by_shape=True)
def shape(call: Call, x: torch.Tensor) -> torch.Tensor:
    begin, end = call.get("start", 0), call.get("end")
    return torch.tensor(list(x.shape)[slice(begin, end)], dtype=torch.int64)


@operator("Size", by_shape=True)
def size(call: Call, x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(x.numel(), dtype=torch.int64)


def _product(call: Call, *tensors: torch.Tensor) -> int:
    return math.prod(numbers(tensors[-1]))


@operator("ConstantOfShape", read=(0,), size=_product)
def constant_of_shape(call: Call, sizes: torch.Tensor) -> torch.Tensor:
    stored = call.get("value")
    value = Known(torch.zeros(1)) if stored is None else call.tensor(stored)
    return torch.full(numbers(sizes), number(value), dtype=value.dtype, device=call.device)


def _range_length(call: Call, start: torch.Tensor, limit: torch.Tensor, delta: torch.Tensor) -> int:
    by = number(delta)
    if by == 0:
        raise call.refuse("a range in steps of zero")
    return max(math.ceil((number(limit) - number(start)) / by), 0)


@operator("Range", read=(0, 1, 2), size=_range_length)
def value_range(call: Call, start: torch.Tensor, limit: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    count = _range_length(call, start, limit, delta)
    steps = torch.arange(count, device=call.device)
    if not start.is_floating_point():
        return (steps * number(delta) + number(start)).to(start.dtype)
    return steps.to(start.dtype) * number(delta) + number(start)


@operator("EyeLike")
def eye_like(call: Call, x: torch.Tensor) -> torch.Tensor:
    dtype = DTYPES[call.get("dtype")] if "dtype" in call.node.attributes else x.dtype
    rows, columns = x.shape
    down = torch.arange(rows, device=x.device)[:, None]
    return (torch.arange(columns, device=x.device)[None, :] - down == call.get("k", 0)).to(dtype)


@operator("Reshape", read=(1,), since=5)
def reshape(call: Call, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return _reshaped(call, x, numbers(sizes))


@operator("Reshape")
def reshape_by_attribute(call: Call, x: torch.Tensor) -> torch.Tensor:
    return _reshaped(call, x, list(call.get("shape", ())))


def _reshaped(call: Call, x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    if not call.get("allowzero", 0):
        sizes = [x.shape[place] if one == 0 and place < x.dim() else one for place, one in enumerate(sizes)]
    if -1 in sizes and x.numel() == 0:
        rest = math.prod(one for one in sizes if one != -1)
        sizes = [one if one != -1 else (0 if rest == 0 else x.numel() // rest) for one in sizes]
    return x.reshape(sizes)


@operator("Flatten")
def flatten(call: Call, x: torch.Tensor) -> torch.Tensor:
    axis = call.get("axis", 1)
    axis = axis + x.dim() if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@operator("Squeeze", read=(1,))
def squeeze(call: Call, x: torch.Tensor, axes: torch.Tensor | None = None) -> torch.Tensor:
    given = numbers(axes) if axes is not None else call.get("axes")
    if given is None:
        return x.reshape([one for one in x.shape if one != 1])
    places = {axis_of(axis, x.dim()) for axis in given}
    if any(x.shape[place] != 1 for place in places):
        raise call.refuse(f"it takes away axes of {tuple(x.shape)} that are not of size 1")
    return x.reshape([one for place, one in enumerate(x.shape) if place not in places])


@operator("Unsqueeze", read=(1,))
def unsqueeze(call: Call, x: torch.Tensor, axes: torch.Tensor | None = None) -> torch.Tensor:
    given = numbers(axes) if axes is not None else list(call.get("axes", ()))
    rank = x.dim() + len(given)
    for axis in sorted(axis_of(one, rank) for one in given):
        x = x.unsqueeze(axis)
    return x


@operator("Transpose")
def transpose(call: Call, x: torch.Tensor) -> torch.Tensor:
    return x.permute(call.get("perm", tuple(reversed(range(x.dim())))))


@operator("Concat")
def concat(call: Call, *tensors: torch.Tensor) -> torch.Tensor:
    return torch.cat(tensors, call.get("axis", 1))


@operator("Expand", read=(1,), size=_product)
def expand(call: Call, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    wanted = numbers(sizes)
    rank = max(x.dim(), len(wanted))
    # Each of the two may have ones where the other has more.
    own, other = [1] * (rank - x.dim()) + list(x.shape), [1] * (rank - len(wanted)) + wanted
    return x.expand([b if a == 1 else a for a, b in zip(own, other, strict=True)])


def _tiled_size(call: Call, x: torch.Tensor, *repeats: torch.Tensor) -> int:
    return x.numel() * math.prod(numbers(repeats[0]))


@operator("Tile", read=(1,), size=_tiled_size, since=6)
def tile(call: Call, x: torch.Tensor, repeats: torch.Tensor) -> torch.Tensor:
    return x.repeat(numbers(repeats))


@operator("Split", read=(1,))
def split(call: Call, x: torch.Tensor, sizes: torch.Tensor | None = None) -> Any:
    axis = axis_of(call.get("axis", 0), x.dim())
    given = numbers(sizes) if sizes is not None else call.get("split")
    if given is None:
        parts = call.get("num_outputs", len(call.node.outputs))
        each = -(-x.shape[axis] // parts)
        given = [each] * parts
        given[-1] = x.shape[axis] - each * (parts - 1)
    return tuple(torch.split(x, list(given), axis))


@operator("Slice")
def slice_by_attributes(call: Call, x: torch.Tensor) -> torch.Tensor:
    starts, ends = call.get("starts", ()), call.get("ends", ())
    return _sliced(call, x, list(starts), list(ends), call.get("axes"), None)


@operator("Slice", read=(1, 2, 3, 4), since=10)
def slice_tensor(
    call: Call,
    x: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    axes: torch.Tensor | None = None,
    steps: torch.Tensor | None = None,
) -> torch.Tensor:
    places = None if axes is None else numbers(axes)
    return _sliced(call, x, numbers(starts), numbers(ends), places, None if steps is None else numbers(steps))


def _sliced(
    call: Call, x: torch.Tensor, starts: list[int], ends: list[int], axes: Any, steps: list[int] | None
) -> torch.Tensor:
    places = list(range(len(starts))) if axes is None else list(axes)
    by = [1] * len(starts) if steps is None else steps
    if not len(starts) == len(ends) == len(places) == len(by):
        raise call.refuse("its starts, ends, axes and steps are not equally many")
    for start, end, axis, step in zip(starts, ends, places, by, strict=True):
        place = axis_of(axis, x.dim())
        if step == 0:
            raise call.refuse("a slice in steps of zero")
        taken = range(x.shape[place])[slice(start, end, step)]
        if step > 0:
            found = slice(taken.start, max(taken.stop, taken.start), step)
            x = x[(slice(None),) * place + (found,)]
        else:
            rising = taken[::-1]
            x = x[(slice(None),) * place + (slice(rising.start, max(rising.stop, rising.start), -step),)].flip(place)
    return x


@operator("Pad", read=(1, 3))
def pad(
    call: Call,
    x: torch.Tensor,
    pads: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    axes: torch.Tensor | None = None,
) -> torch.Tensor:
    given = numbers(pads) if pads is not None else list(call.get("pads", call.get("paddings", ())))
    places = list(range(x.dim())) if axes is None else [axis_of(one, x.dim()) for one in numbers(axes)]
    if len(given) != 2 * len(places):
        raise call.refuse(f"it has {len(given)} pads for {len(places)} axes")
    amounts = {place: (given[order], given[order + len(places)]) for order, place in enumerate(places)}
    mode = call.get("mode", "constant")
    if mode == "constant":
        flat = [amount for place in reversed(range(x.dim())) for amount in amounts.get(place, (0, 0))]
        if value is None:
            return F.pad(x, flat, value=call.get("value", 0) if x.is_floating_point() else int(call.get("value", 0)))
        return _filled(x, flat, value)
    for place, (before, after) in amounts.items():
        if before or after:
            x = _mirrored(call, x, place, before, after, mode)
    return x


def _filled(x: torch.Tensor, flat: list[int], value: torch.Tensor) -> torch.Tensor:
    """Padded with what a tensor holds, which need not be known before the step runs."""
    zeros = F.pad(x.to(torch.uint8) if x.dtype is torch.bool else x, flat)
    outside = F.pad(torch.zeros_like(x, dtype=torch.uint8), flat, value=1) != 0
    return torch.where(outside, value.reshape(()).to(x.dtype), zeros.to(x.dtype))


def _mirrored(call: Call, x: torch.Tensor, axis: int, before: int, after: int, mode: str) -> torch.Tensor:
    length = x.shape[axis]
    at = torch.arange(-before, length + after, device=x.device)
    if mode == "edge":
        at = at.clamp(0, length - 1)
    elif mode == "wrap":
        at = at.remainder(length)
    elif mode == "reflect":
        period = max(2 * (length - 1), 1)
        at = at.remainder(period)
        at = torch.where(at < length, at, period - at)
    else:
        raise call.refuse(f"it pads in the mode {mode!r}, which is not known")
    return x.index_select(axis, at)


@operator("DepthToSpace")
def depth_to_space(call: Call, x: torch.Tensor) -> torch.Tensor:
    block = call.get("blocksize")
    count, channels, height, width = x.shape
    inner = channels // (block * block)
    if call.get("mode", "DCR") == "DCR":
        y = x.reshape(count, block, block, inner, height, width).permute(0, 3, 4, 1, 5, 2)
    else:
        y = x.reshape(count, inner, block, block, height, width).permute(0, 1, 4, 2, 5, 3)
    return y.reshape(count, inner, height * block, width * block)


@operator("SpaceToDepth")
def space_to_depth(call: Call, x: torch.Tensor) -> torch.Tensor:
    block = call.get("blocksize")
    count, channels, height, width = x.shape
    y = x.reshape(count, channels, height // block, block, width // block, block)
    y = y.permute(0, 3, 5, 1, 2, 4) if call.get("mode", "DCR") == "DCR" else y.permute(0, 1, 3, 5, 2, 4)
    return y.reshape(count, channels * block * block, height // block, width // block)


@operator("Trilu", read=(1,))
def triangle(call: Call, x: torch.Tensor, k: torch.Tensor | None = None) -> torch.Tensor:
    by = 0 if k is None else int(number(k))
    return torch.triu(x, by) if call.get("upper", 1) else torch.tril(x, by)


@operator("CenterCropPad", read=(1,))
def center_crop_pad(call: Call, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    axes = [axis_of(one, x.dim()) for one in call.get("axes", tuple(range(x.dim())))]
    for axis, wanted in zip(axes, numbers(sizes), strict=True):
        over = x.shape[axis] - wanted
        if over > 0:
            x = x.narrow(axis, over // 2, wanted)
        elif over < 0:
            flat = [0] * (2 * (x.dim() - axis))
            flat[-2], flat[-1] = -over // 2, -over - (-over // 2)
            x = F.pad(x, flat)
    return x


@operator("ReverseSequence")
def reverse_sequence(call: Call, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    time, batch = call.get("time_axis", 0), call.get("batch_axis", 1)
    y = x.transpose(0, time) if time == 0 else x.transpose(0, 1)
    if {time, batch} != {0, 1}:
        raise call.refuse("the axes of time and batch must be the first two")
    steps = torch.arange(y.shape[0], device=x.device)[:, None]
    turned = lengths[None, :] - 1 - steps
    at = torch.where(turned >= 0, turned, steps)
    at = at.reshape(*at.shape, *([1] * (y.dim() - 2))).expand(y.shape)
    found = y.gather(0, at)
    return found if time == 0 else found.transpose(0, 1)


@operator("Col2Im", read=(1, 2))
def columns_to_image(call: Call, x: torch.Tensor, image: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    sizes, kernel = numbers(image), numbers(block)
    rank = len(sizes)
    strides = call.get("strides", (1,) * rank)
    dilations = call.get("dilations", (1,) * rank)
    pads = call.get("pads", (0,) * (2 * rank))
    channels = x.shape[1] // math.prod(kernel)
    padded = [one + pads[i] + pads[i + rank] for i, one in enumerate(sizes)]
    counts = [(padded[i] - dilations[i] * (kernel[i] - 1) - 1) // strides[i] + 1 for i in range(rank)]
    y = x.reshape(x.shape[0], channels, *kernel, *counts)
    # Where each element of a block lands, counted through the padded image.
    at = torch.zeros((), dtype=torch.int64, device=x.device)
    for i in range(rank):
        of_kernel = (torch.arange(kernel[i], device=x.device) * dilations[i]).reshape(
            [-1 if j == i else 1 for j in range(2 * rank)]
        )
        of_block = (torch.arange(counts[i], device=x.device) * strides[i]).reshape(
            [-1 if j == rank + i else 1 for j in range(2 * rank)]
        )
        at = at * padded[i] + of_kernel + of_block
    flat = x.new_zeros(x.shape[0], channels, math.prod(padded))
    where = at.reshape(-1).expand(x.shape[0], channels, -1)
    found = flat.scatter_add(2, where, y.reshape(x.shape[0], channels, -1)).reshape(x.shape[0], channels, *padded)
    for i in range(rank):
        found = found.narrow(2 + i, pads[i], sizes[i])
    return found
