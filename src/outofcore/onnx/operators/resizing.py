"""Resize and sampling operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outofcore.onnx.operators.registry import Unsupported, axis_of, operator


@dataclass(frozen=True)
class ResizeAttributes:
    mode: str = "nearest"
    coordinate_transformation_mode: str = "half_pixel"
    nearest_mode: str = "round_prefer_floor"
    cubic_coeff_a: float = -0.75
    antialias: int = 0
    exclude_outside: int = 0
    axes: Sequence[int] | None = None
    keep_aspect_ratio_policy: str = "stretch"
    extrapolation_value: float = 0.0


@operator("Upsample", read=(1,))
@operator("Resize", read=(1,), since=10)
def upsample(
    x: Tensor, given_scales: list[float] | None = None, *, scales: Sequence[float] = (), mode: str = "nearest"
) -> Tensor:
    attributes = ResizeAttributes({"bilinear": "linear", "trilinear": "linear"}.get(mode, mode), "asymmetric", "floor")
    for axis, scale in enumerate(scales if given_scales is None else given_scales):
        if scale != 1:
            x = _resize_axis(attributes, x, axis, math.floor(x.shape[axis] * scale), scale, (0.0, 1.0))
    return x


@operator("Resize", read=(1, 2, 3), since=11, attributes=ResizeAttributes)
def resize(
    x: Tensor,
    roi: list[float] | None = None,
    scales: list[float] | None = None,
    sizes: list[int] | None = None,
    *,
    asked: ResizeAttributes,
) -> Tensor:
    axes = [axis_of(value, x.dim()) for value in asked.axes or range(x.dim())]
    if scales:
        by, target_sizes = scales, [math.floor(x.shape[axis] * value) for value, axis in zip(scales, axes, strict=True)]
    elif sizes is None:
        raise Unsupported("it has no scales and no sizes")
    else:
        by, target_sizes = [value / x.shape[axis] for value, axis in zip(sizes, axes, strict=True)], sizes
        if asked.keep_aspect_ratio_policy != "stretch":
            by = [min(by) if asked.keep_aspect_ratio_policy == "not_larger" else max(by)] * len(by)
            target_sizes = [math.floor(by[0] * x.shape[axis] + 0.5) for axis in axes]
    scales_and_sizes = dict(zip(axes, zip(by, target_sizes, strict=True), strict=True))
    resized = _interpolate(
        asked, x, [scales_and_sizes.get(i, (1.0, n)) for i, n in enumerate(x.shape)], has_scales=bool(scales)
    )
    if resized is not None:
        return resized
    crops, window = asked.coordinate_transformation_mode == "tf_crop_and_resize", roi or []
    outside = torch.zeros((), dtype=torch.bool, device=x.device)
    for place, (axis, (scale, size)) in enumerate(scales_and_sizes.items()):
        of = (window[place], window[place + len(axes)]) if len(window) == 2 * len(axes) else (0.0, 1.0)
        if scale == 1 and size == x.shape[axis] and not crops:
            continue
        if crops:
            at = _coordinates(asked, x.shape[axis], size, scale, of, x.device)
            beyond = (at < 0) | (at > x.shape[axis] - 1)
            outside = outside | beyond.reshape([-1 if i == axis else 1 for i in range(x.dim())])
        x = _resize_axis(asked, x, axis, size, scale, of)
    return torch.where(outside, torch.full_like(x, asked.extrapolation_value), x) if crops else x


def _interpolate(
    attributes: ResizeAttributes, x: Tensor, scales_and_sizes: list[tuple[float, int]], *, has_scales: bool
) -> Tensor | None:
    """Resize with ``F.interpolate``; return None if that could differ from the result that ONNX defines."""
    spatial = x.dim() - 2
    if not 1 <= spatial <= 3 or any(scales_and_sizes[i] != (1.0, x.shape[i]) for i in (0, 1)):
        return None
    if attributes.antialias or attributes.exclude_outside or not x.is_floating_point():
        return None
    whole = [size for _, size in scales_and_sizes[2:]]
    exact = all(size == scale * length for (scale, size), length in zip(scales_and_sizes[2:], x.shape[2:], strict=True))
    if attributes.mode == "nearest":
        exact = exact and all(scale == int(scale) for scale, _ in scales_and_sizes[2:])
        return (
            F.interpolate(x, size=whole)
            if (attributes.coordinate_transformation_mode, attributes.nearest_mode) == ("asymmetric", "floor") and exact
            else None
        )
    kind = {("linear", 1): "linear", ("linear", 2): "bilinear", ("linear", 3): "trilinear", ("cubic", 2): "bicubic"}
    if (attributes.mode, spatial) not in kind or (attributes.mode == "cubic" and attributes.cubic_coeff_a != -0.75):
        return None
    named = attributes.coordinate_transformation_mode
    if named not in ("half_pixel", "align_corners") and not (named == "pytorch_half_pixel" and min(whole) > 1):
        return None
    # The node computes coordinates from its scales, and PyTorch from the sizes.
    if has_scales and not exact:
        return None
    return F.interpolate(x, size=whole, mode=kind[attributes.mode, spatial], align_corners=named == "align_corners")


def _coordinates(
    attributes: ResizeAttributes,
    length: int,
    size: int,
    scale: float,
    crop: tuple[float, float],
    device: torch.device,
) -> Tensor:
    """Return the position along an input axis of ``length`` elements for each of ``size`` output elements."""
    # A rounding error in a coordinate could change the nearest neighbour.
    at = torch.arange(size, dtype=torch.float64, device=device)
    named, exact = attributes.coordinate_transformation_mode, scale * length  # the length before it is rounded
    if named == "half_pixel" or (named == "pytorch_half_pixel" and size > 1):
        return (at + 0.5) / scale - 0.5
    if named in ("half_pixel_for_nn", "tf_half_pixel_for_nn"):
        return (at + 0.5) / scale
    if named == "half_pixel_symmetric":
        return length / 2 * (1 - size / exact) + (at + 0.5) / scale - 0.5
    if named == "align_corners" and exact > 1:
        return at * ((length - 1) / (exact - 1))
    if named in ("pytorch_half_pixel", "align_corners"):
        return torch.zeros_like(at)
    if named == "tf_crop_and_resize":
        begin, end = crop
        if size > 1:
            return begin * (length - 1) + at * ((end - begin) * (length - 1) / (size - 1))
        return torch.full_like(at, 0.5 * (begin + end) * (length - 1))
    if named == "asymmetric":
        return at / scale
    raise Unsupported(f"the coordinates {named!r} are unknown")


_NEAREST: dict[str, Callable[[Tensor], Tensor]] = {
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round_prefer_floor": lambda at: torch.ceil(at - 0.5),
    "round_prefer_ceil": lambda at: torch.floor(at + 0.5),
}


def _resize_axis(
    attributes: ResizeAttributes, x: Tensor, axis: int, size: int, scale: float, crop: tuple[float, float]
) -> Tensor:
    """Resize one axis by interpolation; ``crop`` is the begin and end of the crop, as fractions of the axis."""
    length = x.shape[axis]
    at = _coordinates(attributes, length, size, scale, crop, x.device)
    if attributes.mode == "nearest":
        return x.index_select(axis, _NEAREST[attributes.nearest_mode](at).clamp(0, length - 1).to(torch.int64))
    y = x if x.is_floating_point() else x.to(torch.float32)
    narrow = min(scale, 1.0) if attributes.antialias else 1.0
    reach = math.ceil({"linear": 1.0, "cubic": 2.0}[attributes.mode] / narrow)
    floor = torch.floor(at)
    weights: list[Tensor] = []
    places: list[Tensor] = []
    for step in range(1 - reach, reach + 1):
        position = floor + step
        weight = _sample_weight(attributes.mode, (position - at) * narrow, attributes.cubic_coeff_a)
        if attributes.exclude_outside:
            weight = torch.where((position < 0) | (position > length - 1), torch.zeros_like(weight), weight)
        weights.append(weight)
        places.append(position.clamp(0, length - 1).to(torch.int64))
    total = torch.stack(weights).sum(0)
    shape = [-1 if i == axis else 1 for i in range(x.dim())]
    result = y.index_select(axis, places[0]) * (weights[0] / total).to(y.dtype).reshape(shape)
    for weight, place in zip(weights[1:], places[1:], strict=True):
        result = result + y.index_select(axis, place) * (weight / total).to(y.dtype).reshape(shape)
    return result if x.dtype is y.dtype else result.round().to(x.dtype)


def _sample_weight(mode: str, distance: Tensor, a: float) -> Tensor:
    """Return the interpolation weight of a neighbour at a distance; ``a`` is the coefficient of the cubic mode."""
    d = distance.abs()
    if mode == "linear":
        return (1 - d).clamp(min=0)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return torch.where(d <= 1, near, torch.where(d < 2, far, torch.zeros_like(d)))


@operator("GridSample")
def grid_sample(
    x: Tensor, grid: Tensor, *, mode: str = "linear", padding_mode: str = "zeros", align_corners: int = 0
) -> Tensor:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    return F.grid_sample(x, grid, mode=mode, padding_mode=padding_mode, align_corners=bool(align_corners))


@dataclass(frozen=True)
class RoiAlignAttributes:
    version: int
    coordinate_transformation_mode: str | None = None
    mode: str = "avg"
    output_height: int = 1
    output_width: int = 1
    sampling_ratio: int = 0
    spatial_scale: float = 1.0


@operator("RoiAlign", attributes=RoiAlignAttributes)
def roi_align(x: Tensor, rois: Tensor, images: Tensor, *, asked: RoiAlignAttributes) -> Tensor:
    ratio = asked.sampling_ratio
    if not ratio:
        raise Unsupported("the number of samples depends on the regions (sampling_ratio=0), and must be fixed")
    halves = asked.coordinate_transformation_mode or ("half_pixel" if asked.version >= 16 else "output_half_pixel")
    corners = rois * asked.spatial_scale - (0.5 if halves == "half_pixel" else 0.0)
    extent = corners[:, 2:] - corners[:, :2]
    if halves != "half_pixel":
        extent = extent.clamp(min=1.0)

    def neighbours(column: int, bin_count: int) -> tuple[Tensor, ...]:
        """Return each sample's two neighbours on an axis, the second's weight, and whether the sample is inside."""
        count, size = bin_count * ratio, x.shape[3 - column]
        steps = (torch.arange(count, device=x.device, dtype=x.dtype) + 0.5) / count
        at = corners[:, column, None] + steps[None, :] * extent[:, column, None]
        inside = (at >= -1) & (at <= size)
        at = at.clamp(0, size - 1)
        low = at.floor().to(torch.int64)
        return low, (low + 1).clamp(max=size - 1), at - low, inside

    y0, y1, fy, in_y = neighbours(1, asked.output_height)
    x0, x1, fx, in_x = neighbours(0, asked.output_width)
    flat = x.reshape(x.shape[0], x.shape[1], -1)[images.to(torch.int64)]

    def weighted_samples(rows: Tensor, columns: Tensor, weight: Tensor) -> Tensor:
        at = (rows[:, :, None] * x.shape[3] + columns[:, None, :]).flatten(1)
        samples = flat.gather(2, at[:, None, :].expand(-1, x.shape[1], -1))
        return samples.reshape(len(rois), x.shape[1], rows.shape[1], columns.shape[1]) * weight[:, None]

    inside = (in_y[:, :, None] & in_x[:, None, :]).to(x.dtype)
    parts = [
        weighted_samples(rows, columns, wy[:, :, None] * wx[:, None, :] * inside)
        for rows, wy in ((y0, 1 - fy), (y1, fy))
        for columns, wx in ((x0, 1 - fx), (x1, fx))
    ]
    shape = (len(rois), x.shape[1], asked.output_height, ratio, asked.output_width, ratio)
    if asked.mode == "max":
        return torch.stack(parts).amax(0).reshape(shape).amax((3, 5))
    return (parts[0] + parts[1] + parts[2] + parts[3]).reshape(shape).mean((3, 5))
