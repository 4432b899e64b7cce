"""Operators that make tensors, or move elements without computing with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outofcore.onnx.operators.registry import Refused, axis_of, operator


@operator("Shape", by_shape=True)
def shape(x: Tensor, *, start: int = 0, end: int | None = None) -> Tensor:
    return torch.tensor(x.shape[start:end], dtype=torch.int64)


@operator("Size", by_shape=True)
def size(x: Tensor) -> Tensor:
    return torch.tensor(x.numel(), dtype=torch.int64)


@operator("ConstantOfShape", read=(0,), size=math.prod)
def constant_of_shape(sizes: list[int], *, device: torch.device, value: Any = (0.0, torch.float32)) -> Tensor:
    return torch.full(sizes, value[0], dtype=value[1], device=device)


def _range_length(start: Tensor, limit: Tensor, delta: Tensor) -> int:
    return max(math.ceil((limit.item() - start.item()) / delta.item()), 0)


@operator("Range", host=(0, 1, 2), size=_range_length)
def value_range(start: Tensor, limit: Tensor, delta: Tensor, *, device: torch.device) -> Tensor:
    steps = torch.arange(_range_length(start, limit, delta), device=device)
    steps = steps.to(start.dtype) if start.is_floating_point() else steps
    return (steps * delta.item() + start.item()).to(start.dtype)


@operator("EyeLike")
def eye_like(x: Tensor, *, dtype: torch.dtype | None = None, k: int = 0) -> Tensor:
    rows, columns = x.shape
    down = torch.arange(rows, device=x.device)[:, None]
    return (torch.arange(columns, device=x.device)[None, :] - down == k).to(dtype or x.dtype)


@operator("Reshape", read=(1,))
def reshape(x: Tensor, given: list[int] | None = None, *, shape: Sequence[int] = (), allowzero: int = 0) -> Tensor:
    sizes = list(shape if given is None else given)
    if not allowzero:
        sizes = [x.shape[place] if one == 0 and place < x.dim() else one for place, one in enumerate(sizes)]
    if -1 in sizes and x.numel() == 0:
        rest = math.prod(one for one in sizes if one != -1)
        sizes = [one if one != -1 else (0 if rest == 0 else x.numel() // rest) for one in sizes]
    return x.reshape(sizes)


@operator("Flatten")
def flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    axis = axis + x.dim() if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@operator("Squeeze", read=(1,))
def squeeze(x: Tensor, given: list[int] | None = None, *, axes: Sequence[int] | None = None) -> Tensor:
    axes = given if given is not None else axes
    if axes is None:
        return x.reshape([one for one in x.shape if one != 1])
    places = {axis_of(axis, x.dim()) for axis in axes}
    if any(x.shape[place] != 1 for place in places):
        raise Refused(f"it takes away axes of {tuple(x.shape)} that are not of size 1")
    return x.reshape([one for place, one in enumerate(x.shape) if place not in places])


@operator("Unsqueeze", read=(1,))
def unsqueeze(x: Tensor, given: list[int] | None = None, *, axes: Sequence[int] = ()) -> Tensor:
    axes = given if given is not None else axes
    for axis in sorted(axis_of(one, x.dim() + len(axes)) for one in axes):
        x = x.unsqueeze(axis)
    return x


@operator("Transpose")
def transpose(x: Tensor, *, perm: Sequence[int] | None = None) -> Tensor:
    return x.permute(tuple(perm if perm is not None else reversed(range(x.dim()))))


@operator("Concat")
def concat(*tensors: Tensor, axis: int = 1) -> Tensor:
    return torch.cat(tensors, axis)


@operator("Expand", read=(1,), size=lambda x, sizes: x.numel() * math.prod(sizes))
def expand(x: Tensor, sizes: list[int]) -> Tensor:
    # Each of the two may have ones where the other has more.
    own = [1] * (len(sizes) - x.dim()) + list(x.shape)
    other = [1] * (x.dim() - len(sizes)) + sizes
    return x.expand([b if a == 1 else a for a, b in zip(own, other, strict=True)])


@operator("Tile", read=(1,), size=lambda x, repeats: x.numel() * math.prod(repeats), since=6)
def tile(x: Tensor, repeats: list[int]) -> Tensor:
    return x.repeat(repeats)


@operator("Split", read=(1,), many=True)
def split(
    x: Tensor,
    sizes: list[int] | None = None,
    *,
    outputs: int,
    axis: int = 0,
    num_outputs: int | None = None,
    split: Sequence[int] | None = None,
) -> tuple[Tensor, ...]:
    given = sizes if sizes is not None else split
    if given is None:
        parts = num_outputs or outputs
        each = -(-x.shape[axis] // parts)
        given = [*[each] * (parts - 1), x.shape[axis] - each * (parts - 1)]
    return torch.split(x, list(given), axis)


@operator("Slice", read=(1, 2, 3, 4))
def slice_tensor(
    x: Tensor,
    begins: Sequence[int] | None = None,
    limits: Sequence[int] | None = None,
    along: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
    *,
    starts: Sequence[int] = (),
    ends: Sequence[int] = (),
    axes: Sequence[int] | None = None,
) -> Tensor:
    """Take a part along axes; before opset 10 starts, ends and axes were attributes."""
    starts, ends = starts if begins is None else begins, ends if limits is None else limits
    along = axes if along is None else along
    places = range(len(starts)) if along is None else along
    by = [1] * len(starts) if steps is None else steps
    if not len(starts) == len(ends) == len(places) == len(by):
        raise Refused("its starts, ends, axes and steps are not equally many")
    for start, end, axis, step in zip(starts, ends, places, by, strict=True):
        place = axis_of(axis, x.dim())
        if step == 0:
            raise Refused("a slice in steps of zero")
        taken = range(x.shape[place])[slice(start, end, step)]
        rising = taken if step > 0 else taken[::-1]
        part = slice(rising.start, max(rising.stop, rising.start), abs(step))
        x = x[(slice(None),) * place + (part,)]
        x = x if step > 0 else x.flip(place)
    return x


@operator("Pad", read=(1, 3))
def pad(
    x: Tensor,
    amounts: list[int] | None = None,
    filling: Tensor | None = None,
    axes: list[int] | None = None,
    *,
    mode: str = "constant",
    pads: Sequence[int] = (),
    paddings: Sequence[int] = (),
    value: float = 0.0,
) -> Tensor:
    given = amounts if amounts is not None else pads or paddings
    places = range(x.dim()) if axes is None else [axis_of(one, x.dim()) for one in axes]
    if len(given) != 2 * len(places):
        raise Refused(f"it has {len(given)} pads for {len(places)} axes")
    pairs = {place: (given[order], given[order + len(places)]) for order, place in enumerate(places)}
    if mode != "constant":
        for place, (before, after) in pairs.items():
            x = _mirrored(x, place, before, after, mode) if before or after else x
        return x
    flat = [amount for place in reversed(range(x.dim())) for amount in pairs.get(place, (0, 0))]
    if filling is None:
        return F.pad(x, flat, value=value if x.is_floating_point() else int(value))
    # What the tensor holds need not be known before the step runs.
    zeros = F.pad(x.to(torch.uint8) if x.dtype is torch.bool else x, flat)
    outside = F.pad(torch.zeros_like(x, dtype=torch.uint8), flat, value=1) != 0
    return torch.where(outside, filling.reshape(()).to(x.dtype), zeros.to(x.dtype))


def _mirrored(x: Tensor, axis: int, before: int, after: int, mode: str) -> Tensor:
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
        raise Refused(f"it pads in the mode {mode!r}, which is not known")
    return x.index_select(axis, at)


@operator("DepthToSpace")
def depth_to_space(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    count, channels, height, width = x.shape
    inner = channels // (blocksize * blocksize)
    if mode == "DCR":
        y = x.reshape(count, blocksize, blocksize, inner, height, width).permute(0, 3, 4, 1, 5, 2)
    else:
        y = x.reshape(count, inner, blocksize, blocksize, height, width).permute(0, 1, 4, 2, 5, 3)
    return y.reshape(count, inner, height * blocksize, width * blocksize)


@operator("SpaceToDepth")
def space_to_depth(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    count, channels, height, width = x.shape
    y = x.reshape(count, channels, height // blocksize, blocksize, width // blocksize, blocksize)
    y = y.permute(0, 3, 5, 1, 2, 4) if mode == "DCR" else y.permute(0, 1, 3, 5, 2, 4)
    return y.reshape(count, channels * blocksize * blocksize, height // blocksize, width // blocksize)


@operator("Trilu", read=(1,))
def triangle(x: Tensor, k: list[int] | None = None, *, upper: int = 1) -> Tensor:
    return (torch.triu if upper else torch.tril)(x, 0 if k is None else int(k[0]))


@operator("CenterCropPad", read=(1,))
def center_crop_pad(x: Tensor, sizes: list[int], *, axes: Sequence[int] | None = None) -> Tensor:
    for one, wanted in zip(range(x.dim()) if axes is None else axes, sizes, strict=True):
        axis = axis_of(one, x.dim())
        over = x.shape[axis] - wanted
        if over > 0:
            x = x.narrow(axis, over // 2, wanted)
        elif over < 0:
            x = F.pad(x, [*[0] * (2 * (x.dim() - axis - 1)), -over // 2, -over - (-over // 2)])
    return x


@operator("ReverseSequence")
def reverse_sequence(x: Tensor, lengths: Tensor, *, time_axis: int = 0, batch_axis: int = 1) -> Tensor:
    if {time_axis, batch_axis} != {0, 1}:
        raise Refused("the axes of time and batch must be the first two")
    y = x.transpose(0, time_axis)
    steps = torch.arange(y.shape[0], device=x.device)[:, None]
    turned = lengths[None, :] - 1 - steps
    at = torch.where(turned >= 0, turned, steps)
    at = at.reshape(*at.shape, *([1] * (y.dim() - 2))).expand(y.shape)
    return y.gather(0, at).transpose(0, time_axis)


@operator("Col2Im", read=(1, 2))
def columns_to_image(
    x: Tensor,
    sizes: list[int],
    kernel: list[int],
    *,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    rank = len(sizes)
    by, wide, around = strides or (1,) * rank, dilations or (1,) * rank, pads or (0,) * (2 * rank)
    channels = x.shape[1] // math.prod(kernel)
    padded = [one + around[i] + around[i + rank] for i, one in enumerate(sizes)]
    counts = [(padded[i] - wide[i] * (kernel[i] - 1) - 1) // by[i] + 1 for i in range(rank)]
    y = x.reshape(x.shape[0], channels, *kernel, *counts)
    # Where each element of a block lands, counted through the padded image.
    at = torch.zeros((), dtype=torch.int64, device=x.device)
    for i in range(rank):
        of_kernel = torch.arange(kernel[i], device=x.device) * wide[i]
        of_block = torch.arange(counts[i], device=x.device) * by[i]
        at = at * padded[i] + of_kernel.reshape([-1 if j == i else 1 for j in range(2 * rank)])
        at = at + of_block.reshape([-1 if j == rank + i else 1 for j in range(2 * rank)])
    flat = x.new_zeros(x.shape[0], channels, math.prod(padded))
    where = at.reshape(-1).expand(x.shape[0], channels, -1)
    found = flat.scatter_add(2, where, y.reshape(x.shape[0], channels, -1)).reshape(x.shape[0], channels, *padded)
    for i in range(rank):
        found = found.narrow(2 + i, around[i], sizes[i])
    return found
