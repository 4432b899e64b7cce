"""Operators that create tensors, or move elements without computing with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outofcore.onnx.operators.registry import Unsupported, axis_of, operator


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
def reshape(
    x: Tensor, given_sizes: list[int] | None = None, *, shape: Sequence[int] = (), allowzero: int = 0
) -> Tensor:
    sizes = list(shape if given_sizes is None else given_sizes)
    if not allowzero:
        sizes = [x.shape[place] if size == 0 and place < x.dim() else size for place, size in enumerate(sizes)]
    if -1 in sizes and x.numel() == 0:
        known_count = math.prod(size for size in sizes if size != -1)
        sizes = [size if size != -1 else (0 if known_count == 0 else x.numel() // known_count) for size in sizes]
    return x.reshape(sizes)


@operator("Flatten")
def flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    axis = axis + x.dim() if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@operator("Squeeze", read=(1,))
def squeeze(x: Tensor, given_axes: list[int] | None = None, *, axes: Sequence[int] | None = None) -> Tensor:
    axes = given_axes if given_axes is not None else axes
    if axes is None:
        return x.reshape([size for size in x.shape if size != 1])
    places = {axis_of(axis, x.dim()) for axis in axes}
    if any(x.shape[place] != 1 for place in places):
        raise Unsupported(f"it removes axes of {tuple(x.shape)} that are not of size 1")
    return x.reshape([size for place, size in enumerate(x.shape) if place not in places])


@operator("Unsqueeze", read=(1,))
def unsqueeze(x: Tensor, given_axes: list[int] | None = None, *, axes: Sequence[int] = ()) -> Tensor:
    axes = given_axes if given_axes is not None else axes
    for axis in sorted(axis_of(axis_index, x.dim() + len(axes)) for axis_index in axes):
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
    # Sizes of 1 are broadcast in either shape.
    first_shape = [1] * (len(sizes) - x.dim()) + list(x.shape)
    second_shape = [1] * (x.dim() - len(sizes)) + sizes
    return x.expand([b if a == 1 else a for a, b in zip(first_shape, second_shape, strict=True)])


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
    lengths = sizes if sizes is not None else split
    if lengths is None:
        parts = num_outputs or outputs
        length = -(-x.shape[axis] // parts)
        lengths = [*[length] * (parts - 1), x.shape[axis] - length * (parts - 1)]
    return torch.split(x, list(lengths), axis)


@operator("Slice", read=(1, 2, 3, 4))
def slice_tensor(
    x: Tensor,
    given_starts: Sequence[int] | None = None,
    given_ends: Sequence[int] | None = None,
    given_axes: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
    *,
    starts: Sequence[int] = (),
    ends: Sequence[int] = (),
    axes: Sequence[int] | None = None,
) -> Tensor:
    """Slice a tensor; starts, ends and axes are inputs, or attributes before opset 10."""
    starts, ends = starts if given_starts is None else given_starts, ends if given_ends is None else given_ends
    given_axes = axes if given_axes is None else given_axes
    places = range(len(starts)) if given_axes is None else given_axes
    by = [1] * len(starts) if steps is None else steps
    if not len(starts) == len(ends) == len(places) == len(by):
        raise Unsupported("its starts, ends, axes and steps differ in number")
    for start, end, axis, step in zip(starts, ends, places, by, strict=True):
        place = axis_of(axis, x.dim())
        if step == 0:
            raise Unsupported("a slice has a step of 0")
        indices = range(x.shape[place])[slice(start, end, step)]
        rising = indices if step > 0 else indices[::-1]
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
    given_pads = amounts if amounts is not None else pads or paddings
    places = range(x.dim()) if axes is None else [axis_of(axis_index, x.dim()) for axis_index in axes]
    if len(given_pads) != 2 * len(places):
        raise Unsupported(f"it has {len(given_pads)} pads for {len(places)} axes")
    pairs = {place: (given_pads[order], given_pads[order + len(places)]) for order, place in enumerate(places)}
    if mode != "constant":
        for place, (before, after) in pairs.items():
            x = _pad_with_own_elements(x, place, before, after, mode) if before or after else x
        return x
    flat = [amount for place in reversed(range(x.dim())) for amount in pairs.get(place, (0, 0))]
    if filling is None:
        return F.pad(x, flat, value=value if x.is_floating_point() else int(value))
    # The fill value may be unknown until the step runs.
    zeros = F.pad(x.to(torch.uint8) if x.dtype is torch.bool else x, flat)
    outside = F.pad(torch.zeros_like(x, dtype=torch.uint8), flat, value=1) != 0
    return torch.where(outside, filling.reshape(()).to(x.dtype), zeros.to(x.dtype))


def _pad_with_own_elements(x: Tensor, axis: int, before: int, after: int, mode: str) -> Tensor:
    """Pad one axis by repeating the tensor's own elements; raises ``Unsupported`` for an unknown mode."""
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
        raise Unsupported(f"it pads in the unknown mode {mode!r}")
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
    for axis_index, target in zip(range(x.dim()) if axes is None else axes, sizes, strict=True):
        axis = axis_of(axis_index, x.dim())
        over = x.shape[axis] - target
        if over > 0:
            x = x.narrow(axis, over // 2, target)
        elif over < 0:
            x = F.pad(x, [*[0] * (2 * (x.dim() - axis - 1)), -over // 2, -over - (-over // 2)])
    return x


@operator("ReverseSequence")
def reverse_sequence(x: Tensor, lengths: Tensor, *, time_axis: int = 0, batch_axis: int = 1) -> Tensor:
    if {time_axis, batch_axis} != {0, 1}:
        raise Unsupported("the axes of time and batch must be the first two")
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
    padded = [size + around[i] + around[i + rank] for i, size in enumerate(sizes)]
    counts = [(padded[i] - wide[i] * (kernel[i] - 1) - 1) // by[i] + 1 for i in range(rank)]
    y = x.reshape(x.shape[0], channels, *kernel, *counts)
    # The index of each element of a block in the flattened padded image.
    at = torch.zeros((), dtype=torch.int64, device=x.device)
    for i in range(rank):
        of_kernel = torch.arange(kernel[i], device=x.device) * wide[i]
        of_block = torch.arange(counts[i], device=x.device) * by[i]
        at = at * padded[i] + of_kernel.reshape([-1 if j == i else 1 for j in range(2 * rank)])
        at = at + of_block.reshape([-1 if j == rank + i else 1 for j in range(2 * rank)])
    flat = x.new_zeros(x.shape[0], channels, math.prod(padded))
    positions = at.reshape(-1).expand(x.shape[0], channels, -1)
    image = flat.scatter_add(2, positions, y.reshape(x.shape[0], channels, -1)).reshape(x.shape[0], channels, *padded)
    for i in range(rank):
        image = image.narrow(2 + i, around[i], sizes[i])
    return image
