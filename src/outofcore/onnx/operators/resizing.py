"""Operators that sample images at other places."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from outofcore.onnx.operators.registry import Call, axis_of, numbers, operator, values


@operator("Upsample")
def upsample_by_attribute(call: Call, x: torch.Tensor) -> torch.Tensor:
    return _upsampled(call, x, [float(one) for one in call.get("scales", ())])


@operator("Upsample", read=(1,), since=9)
def upsample(call: Call, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return _upsampled(call, x, values(scales))


@operator("Resize", read=(1,), since=10)
def resize_of_opset_10(call: Call, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return _upsampled(call, x, values(scales))


def _upsampled(call: Call, x: torch.Tensor, scales: list[float]) -> torch.Tensor:
    asked: str = call.get("mode", "nearest")
    mode = {"bilinear": "linear", "trilinear": "linear"}.get(asked, asked)
    for axis, scale in enumerate(scales):
        if scale != 1:
            size = math.floor(x.shape[axis] * scale)
            x = _along(call, x, axis, size, scale, mode, "asymmetric", "floor", (0.0, 1.0))
    return x


@operator("Resize", read=(1, 2, 3), since=11)
def resize(
    call: Call,
    x: torch.Tensor,
    roi: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    sizes: torch.Tensor | None = None,
) -> torch.Tensor:
    axes = [axis_of(one, x.dim()) for one in call.get("axes", tuple(range(x.dim())))]
    by: list[float] | None = None if scales is None or not scales.numel() else [float(one) for one in values(scales)]
    if by is None:
        if sizes is None:
            raise call.refuse("neither scales nor sizes")
        wanted = numbers(sizes)
        by = [one / x.shape[axis] for one, axis in zip(wanted, axes, strict=True)]
        policy = call.get("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            common = min(by) if policy == "not_larger" else max(by)
            by = [common] * len(by)
            wanted = [math.floor(common * x.shape[axis] + 0.5) for axis in axes]
    else:
        wanted = [math.floor(x.shape[axis] * one) for one, axis in zip(by, axes, strict=True)]
    mode = call.get("mode", "nearest")
    how = call.get("coordinate_transformation_mode", "half_pixel")
    if how == "tf_half_pixel_for_nn":
        how = "half_pixel_for_nn"
    nearest = call.get("nearest_mode", "round_prefer_floor")
    window = [] if roi is None else values(roi)
    quick = _by_pytorch(call, x, axes, by, wanted, mode, how, nearest, given=scales is not None and scales.numel() > 0)
    if quick is not None:
        return quick
    outside = torch.zeros((), dtype=torch.bool, device=x.device)
    for place, axis in enumerate(axes):
        of = (window[place], window[place + len(axes)]) if len(window) == 2 * len(axes) else (0.0, 1.0)
        if by[place] == 1 and wanted[place] == x.shape[axis] and how != "tf_crop_and_resize":
            continue
        if how == "tf_crop_and_resize":
            at = _coordinates(x.shape[axis], wanted[place], by[place], how, of, x.device)
            beyond = (at < 0) | (at > x.shape[axis] - 1)
            outside = outside | beyond.reshape([-1 if i == axis else 1 for i in range(x.dim())])
        x = _along(call, x, axis, wanted[place], by[place], mode, how, nearest, of)
    if how == "tf_crop_and_resize":
        x = torch.where(outside, torch.full_like(x, call.get("extrapolation_value", 0.0)), x)
    return x


def _by_pytorch(
    call: Call,
    x: torch.Tensor,
    axes: list[int],
    scales: list[float],
    sizes: list[int],
    mode: str,
    how: str,
    nearest: str,
    *,
    given: bool,
) -> torch.Tensor | None:
    """What one function of PyTorch does the same as; None: there is none."""
    spatial = x.dim() - 2
    every = dict(zip(axes, zip(scales, sizes, strict=True), strict=True))
    if spatial < 1 or spatial > 3 or any(every.get(i, (1.0, x.shape[i])) != (1.0, x.shape[i]) for i in (0, 1)):
        return None
    if call.get("antialias", 0) or call.get("exclude_outside", 0) or not x.is_floating_point():
        return None
    inner = [every.get(2 + i, (1.0, x.shape[2 + i])) for i in range(spatial)]
    whole = [one[1] for one in inner]
    if mode == "nearest":
        exact = all(
            scale == int(scale) and size == int(scale) * x.shape[2 + i] for i, (scale, size) in enumerate(inner)
        )
        return F.interpolate(x, size=whole) if how == "asymmetric" and nearest == "floor" and exact else None
    kind = {("linear", 1): "linear", ("linear", 2): "bilinear", ("linear", 3): "trilinear", ("cubic", 2): "bicubic"}
    if (mode, spatial) not in kind or (mode == "cubic" and call.get("cubic_coeff_a", -0.75) != -0.75):
        return None
    if how not in ("half_pixel", "align_corners") and not (how == "pytorch_half_pixel" and min(whole) > 1):
        return None
    # Coordinates follow from the scales where these are given, and from the sizes where not.
    if given and any(size != scale * x.shape[2 + i] for i, (scale, size) in enumerate(inner)):
        return None
    return F.interpolate(x, size=whole, mode=kind[mode, spatial], align_corners=how == "align_corners")


def _coordinates(
    length: int, size: int, scale: float, how: str, window: tuple[float, float], device: torch.device
) -> torch.Tensor:
    """Where in the input each element of the output lies."""
    # Half a bit in a coordinate makes another neighbour the nearest.
    at = torch.arange(size, dtype=torch.float64, device=device)
    if how == "half_pixel":
        return (at + 0.5) / scale - 0.5
    if how == "half_pixel_for_nn":
        return (at + 0.5) / scale
    if how == "pytorch_half_pixel":
        return (at + 0.5) / scale - 0.5 if size > 1 else torch.zeros_like(at)
    if how == "half_pixel_symmetric":
        # As if the output had the length that the scale gives it before it is rounded.
        exact = scale * length
        middle = length / 2
        return middle * (1 - size / exact) + (at + 0.5) / scale - 0.5
    if how == "align_corners":
        exact = scale * length
        return at * ((length - 1) / (exact - 1)) if exact > 1 else torch.zeros_like(at)
    if how == "tf_crop_and_resize":
        begin, end = window
        if size > 1:
            return begin * (length - 1) + at * ((end - begin) * (length - 1) / (size - 1))
        return torch.full_like(at, 0.5 * (begin + end) * (length - 1))
    if how == "asymmetric":
        return at / scale
    raise ValueError(f"the coordinates {how!r} are not known")


def _along(
    call: Call,
    x: torch.Tensor,
    axis: int,
    size: int,
    scale: float,
    mode: str,
    how: str,
    nearest: str,
    window: tuple[float, float],
) -> torch.Tensor:
    length = x.shape[axis]
    at = _coordinates(length, size, scale, how, window, x.device)
    if mode == "nearest":
        places = {
            "floor": torch.floor,
            "ceil": torch.ceil,
            "round_prefer_floor": lambda one: torch.ceil(one - 0.5),
            "round_prefer_ceil": lambda one: torch.floor(one + 0.5),
        }[nearest](at)
        return x.index_select(axis, places.clamp(0, length - 1).to(torch.int64))
    kind = x.dtype
    y = x if x.is_floating_point() else x.to(torch.float32)
    narrow = min(scale, 1.0) if call.get("antialias", 0) else 1.0
    support = {"linear": 1.0, "cubic": 2.0}[mode] / narrow
    found: torch.Tensor | None = None
    left = torch.floor(at)
    reach = math.ceil(support)
    steps = range(1 - reach, reach + 1)
    weights: list[torch.Tensor] = []
    places: Any = []
    for step in steps:
        where = left + step
        weight = _weight(mode, (where - at) * narrow, call.get("cubic_coeff_a", -0.75))
        if call.get("exclude_outside", 0):
            weight = torch.where((where < 0) | (where > length - 1), torch.zeros_like(weight), weight)
        weights.append(weight)
        places.append(where.clamp(0, length - 1).to(torch.int64))
    total = torch.stack(weights).sum(0)
    shape = [-1 if i == axis else 1 for i in range(x.dim())]
    for weight, place in zip(weights, places, strict=True):
        part = y.index_select(axis, place) * (weight / total).to(y.dtype).reshape(shape)
        found = part if found is None else found + part
    if found is None:
        raise ValueError("a filter of no width")
    return found if kind is y.dtype else found.round().to(kind)


def _weight(mode: str, distance: torch.Tensor, a: float) -> torch.Tensor:
    d = distance.abs()
    if mode == "linear":
        return (1 - d).clamp(min=0)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return torch.where(d <= 1, near, torch.where(d < 2, far, torch.zeros_like(d)))


@operator("GridSample")
def grid_sample(call: Call, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    asked: str = call.get("mode", "linear")
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(asked, asked)
    return F.grid_sample(
        x,
        grid,
        mode=mode,
        padding_mode=call.get("padding_mode", "zeros"),
        align_corners=bool(call.get("align_corners", 0)),
    )


@operator("RoiAlign")
def roi_align(call: Call, x: torch.Tensor, rois: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """Means, or maxima, of samples between pixels, in each cell of each region."""
    high, wide = call.get("output_height", 1), call.get("output_width", 1)
    scale, ratio = call.get("spatial_scale", 1.0), call.get("sampling_ratio", 0)
    halves = call.get("coordinate_transformation_mode", "half_pixel" if call.version >= 16 else "output_half_pixel")
    if not ratio:
        raise call.refuse("the number of samples follows from the regions (sampling_ratio=0), which is not supported")
    corners = rois * scale - (0.5 if halves == "half_pixel" else 0.0)
    extent = corners[:, 2:] - corners[:, :2]
    if halves != "half_pixel":
        extent = extent.clamp(min=1.0)

    def samples(begin: torch.Tensor, length: torch.Tensor, cells: int) -> torch.Tensor:
        steps = (torch.arange(cells * ratio, device=x.device, dtype=x.dtype) + 0.5) / (cells * ratio)
        return begin[:, None] + steps[None, :] * length[:, None]

    def neighbours(at: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
        inside = (at >= -1) & (at <= size)
        at = at.clamp(0, size - 1)
        low = at.floor().to(torch.int64)
        share = at - low
        return low, (low + 1).clamp(max=size - 1), share, inside

    y0, y1, fy, in_y = neighbours(samples(corners[:, 1], extent[:, 1], high), x.shape[2])
    x0, x1, fx, in_x = neighbours(samples(corners[:, 0], extent[:, 0], wide), x.shape[3])
    flat = x.reshape(x.shape[0], x.shape[1], -1)[images.to(torch.int64)]

    def taken(rows: torch.Tensor, columns: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        at = (rows[:, :, None] * x.shape[3] + columns[:, None, :]).flatten(1)
        found = flat.gather(2, at[:, None, :].expand(-1, x.shape[1], -1))
        return found.reshape(len(rois), x.shape[1], rows.shape[1], columns.shape[1]) * weight[:, None]

    inside = (in_y[:, :, None] & in_x[:, None, :]).to(x.dtype)
    parts = [
        taken(rows, columns, wy[:, :, None] * wx[:, None, :] * inside)
        for rows, wy in ((y0, 1 - fy), (y1, fy))
        for columns, wx in ((x0, 1 - fx), (x1, fx))
    ]
    shape = (len(rois), x.shape[1], high, ratio, wide, ratio)
    if call.get("mode", "avg") == "max":
        best = torch.stack(parts).amax(0)
        return best.reshape(shape).amax((3, 5))
    return (parts[0] + parts[1] + parts[2] + parts[3]).reshape(shape).mean((3, 5))
