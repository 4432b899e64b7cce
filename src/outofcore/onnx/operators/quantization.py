"""Quantised tensors: whole numbers with a scale and a zero point."""

from __future__ import annotations

from typing import Any

import torch

from outofcore.onnx.operators.elementwise import converted
from outofcore.onnx.operators.networks import convolved
from outofcore.onnx.operators.registry import Call, axis_of, operator
from outofcore.onnx.storage import DTYPES

_RANGES = {21: (0, 15), 22: (-8, 7)}


def _spread(call: Call, one: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Scales or zero points, as many as there are elements of ``x`` that they are for."""
    if one.dim() == 0 or (one.dim() == 1 and one.numel() == 1 and x.dim() != 1):
        return one.reshape(())
    axis = axis_of(call.get("axis", 1), x.dim())
    block = call.get("block_size", 0)
    if block:
        return one.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis])
    return one.reshape([-1 if place == axis else 1 for place in range(x.dim())])


@operator("QuantizeLinear")
def quantize(call: Call, x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None) -> torch.Tensor:
    code = call.get("output_dtype", 0)
    dtype = zero.dtype if zero is not None and not code else DTYPES[code or 2]
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    precision = call.get("precision", 0)
    kind = DTYPES[precision] if precision else wide
    # Whole numbers are rounded by what they are divided to, halves to even.
    scaled = x.to(kind) / _spread(call, scale.to(kind), x)
    if dtype.is_floating_point:
        return converted(call, scaled.to(wide), dtype)
    low, high = _RANGES.get(code, (torch.iinfo(dtype).min, torch.iinfo(dtype).max))
    rounded = torch.round(scaled.to(wide))
    if zero is not None:
        rounded = rounded + _spread(call, zero.to(wide), x)
    return torch.clamp(rounded, low, high).to(dtype)


@operator("DequantizeLinear")
def dequantize(call: Call, x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None) -> torch.Tensor:
    code = call.get("output_dtype", 0)
    dtype = DTYPES[code] if code else scale.dtype
    if x.dtype.is_floating_point:
        found = x.to(dtype)
    else:
        found = x.to(torch.int32) if zero is None else x.to(torch.int32) - _spread(call, zero.to(torch.int32), x)
    return (found.to(scale.dtype) * _spread(call, scale, x)).to(dtype)


@operator("DynamicQuantizeLinear")
def quantize_dynamically(call: Call, x: torch.Tensor) -> Any:
    low, high = x.amin().clamp(max=0), x.amax().clamp(min=0)
    scale = (high - low) / 255
    zero = torch.clamp(torch.round(-low / scale), 0, 255)
    zero = torch.where(scale == 0, torch.zeros_like(zero), zero)
    y = torch.clamp(torch.round(x / scale) + zero, 0, 255)
    return torch.where(scale == 0, torch.zeros_like(y), y).to(torch.uint8), scale, zero.to(torch.uint8)


def _centred(x: torch.Tensor, zero: torch.Tensor | None, shape: list[int] | None = None) -> torch.Tensor:
    found = x.to(torch.int32)
    if zero is None:
        return found
    return found - (zero.to(torch.int32) if shape is None or zero.dim() == 0 else zero.to(torch.int32).reshape(shape))


@operator("MatMulInteger")
def matmul_integer(
    call: Call,
    a: torch.Tensor,
    b: torch.Tensor,
    a_zero: torch.Tensor | None = None,
    b_zero: torch.Tensor | None = None,
) -> torch.Tensor:
    rows = None if a_zero is None or a_zero.dim() != 1 or a_zero.numel() == 1 else [-1, 1]
    return torch.matmul(_centred(a, a_zero, rows), _centred(b, b_zero))


@operator("ConvInteger")
def conv_integer(
    call: Call,
    x: torch.Tensor,
    w: torch.Tensor,
    x_zero: torch.Tensor | None = None,
    w_zero: torch.Tensor | None = None,
) -> torch.Tensor:
    shape = [-1, *([1] * (w.dim() - 1))]
    # Sums of products of bytes are exact in double precision.
    y = convolved(call, _centred(x, x_zero).to(torch.float64), _centred(w, w_zero, shape).to(torch.float64), None)
    return y.to(torch.int32)


def _requantized(call: Call, y: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    limits = torch.iinfo(zero.dtype)
    return torch.clamp(torch.round(y / scale) + zero.to(y.dtype), limits.min, limits.max).to(zero.dtype)


@operator("QLinearMatMul")
def quantized_matmul(
    call: Call,
    a: torch.Tensor,
    a_scale: torch.Tensor,
    a_zero: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    b_zero: torch.Tensor,
    y_scale: torch.Tensor,
    y_zero: torch.Tensor,
) -> torch.Tensor:
    rows = [-1, 1] if a_zero.dim() == 1 and a_zero.numel() > 1 else None
    product = torch.matmul(_centred(a, a_zero, rows).to(torch.float64), _centred(b, b_zero).to(torch.float64))
    first = a_scale if rows is None else a_scale.reshape(rows)
    scaled = product * (first.to(torch.float64) * b_scale.to(torch.float64))
    return _requantized(call, scaled, y_scale.to(torch.float64), y_zero)


@operator("QLinearConv")
def quantized_conv(
    call: Call,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    x_zero: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    w_zero: torch.Tensor,
    y_scale: torch.Tensor,
    y_zero: torch.Tensor,
    b: torch.Tensor | None = None,
) -> torch.Tensor:
    shape = [-1, *([1] * (w.dim() - 1))]
    wide = torch.float64
    bias = None if b is None else b.to(wide)
    y = convolved(call, _centred(x, x_zero).to(wide), _centred(w, w_zero, shape).to(wide), bias)
    of_channel = w_scale.to(wide).reshape([1, -1, *([1] * (w.dim() - 2))]) if w_scale.dim() else w_scale
    return _requantized(call, y * (x_scale.to(wide) * of_channel), y_scale.to(wide), y_zero)
