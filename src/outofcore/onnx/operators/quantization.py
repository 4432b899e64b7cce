"""Operators on quantised tensors: integers with a scale and a zero point."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from outofcore.onnx.operators.elementwise import cast
from outofcore.onnx.operators.networks import WINDOW_ATTRIBUTES, conv
from outofcore.onnx.operators.registry import axis_of, operator
from outofcore.onnx.storage import DTYPES

_RANGES = {21: (0, 15), 22: (-8, 7)}


def _broadcast_parameter(parameter: Tensor, x: Tensor, axis: int, block: int) -> Tensor:
    """Reshape scales or zero points so that they broadcast to ``x``; repeat each ``block`` times along the axis."""
    if parameter.dim() == 0 or (parameter.dim() == 1 and parameter.numel() == 1 and x.dim() != 1):
        return parameter.reshape(())
    axis = axis_of(axis, x.dim())
    if block:
        return parameter.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis])
    return parameter.reshape([-1 if place == axis else 1 for place in range(x.dim())])


@operator("QuantizeLinear")
def quantize(
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: torch.dtype | None = None,
    saturate: int = 1,
) -> Tensor:
    dtype = zero.dtype if zero is not None and not output_dtype else DTYPES[output_dtype or 2]
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    compute_dtype = precision or wide
    # Results are rounded half to even after the division.
    scaled = (x.to(compute_dtype) / _broadcast_parameter(scale.to(compute_dtype), x, axis, block_size)).to(wide)
    if dtype.is_floating_point:
        return cast(scaled, to=dtype, saturate=saturate)
    low, high = _RANGES.get(output_dtype, (torch.iinfo(dtype).min, torch.iinfo(dtype).max))
    rounded = torch.round(scaled)
    if zero is not None:
        rounded = rounded + _broadcast_parameter(zero.to(wide), x, axis, block_size)
    return torch.clamp(rounded, low, high).to(dtype)


@operator("DequantizeLinear")
def dequantize(
    x: Tensor, scale: Tensor, zero: Tensor | None = None, *, axis: int = 1, block_size: int = 0, output_dtype: int = 0
) -> Tensor:
    dtype = DTYPES[output_dtype] if output_dtype else scale.dtype
    numbers = x.to(dtype if x.dtype.is_floating_point else torch.int32)
    if zero is not None and not x.dtype.is_floating_point:
        numbers = numbers - _broadcast_parameter(zero.to(torch.int32), x, axis, block_size)
    return (numbers.to(scale.dtype) * _broadcast_parameter(scale, x, axis, block_size)).to(dtype)


def _subtract_zero(x: Tensor, zero: Tensor | None, shape: list[int] | None = None, dtype: Any = torch.int32) -> Tensor:
    """Subtract the zero point as ``dtype``; reshape it to ``shape`` first, unless it is one number."""
    numbers = x.to(torch.int32)
    if zero is not None:
        zero = zero.to(torch.int32)
        numbers = numbers - (zero if shape is None or zero.dim() == 0 else zero.reshape(shape))
    return numbers.to(dtype)


def _row_shape(zero: Tensor | None) -> list[int] | None:
    return None if zero is None or zero.dim() != 1 or zero.numel() == 1 else [-1, 1]


@operator("MatMulInteger")
def matmul_integer(a: Tensor, b: Tensor, a_zero: Tensor | None = None, b_zero: Tensor | None = None) -> Tensor:
    return torch.matmul(_subtract_zero(a, a_zero, _row_shape(a_zero)), _subtract_zero(b, b_zero))


def _convolve_in_float64(
    x: Tensor, x_zero: Tensor | None, w: Tensor, w_zero: Tensor | None, b: Tensor | None, **window: Any
) -> Tensor:
    """Subtract the zero points of quantized integers, and convolve the differences exactly (in float64)."""
    # Double precision is exact for sums of products of bytes.
    dtype = torch.float64
    shape = [-1, *([1] * (w.dim() - 1))]
    bias = None if b is None else b.to(dtype)
    return conv(_subtract_zero(x, x_zero, dtype=dtype), _subtract_zero(w, w_zero, shape, dtype), bias, **window)


@operator("ConvInteger", also=("group", *WINDOW_ATTRIBUTES))
def conv_integer(
    x: Tensor, w: Tensor, x_zero: Tensor | None = None, w_zero: Tensor | None = None, **window: Any
) -> Tensor:
    return _convolve_in_float64(x, x_zero, w, w_zero, None, **window).to(torch.int32)


def _requantize(y: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Divide by a scale, round, add the zero point, and clamp to its dtype."""
    limits = torch.iinfo(zero.dtype)
    scaled = torch.round(y / scale.to(torch.float64)) + zero.to(y.dtype)
    return torch.clamp(scaled, limits.min, limits.max).to(zero.dtype)


class _QuantizedTensor(NamedTuple):
    numbers: Tensor
    scale: Tensor
    zero: Tensor


@operator("QLinearMatMul")
def quantized_matmul(*inputs: Tensor) -> Tensor:
    a, b, y_scale, y_zero = _QuantizedTensor(*inputs[:3]), _QuantizedTensor(*inputs[3:6]), *inputs[6:]
    rows, wide = _row_shape(a.zero), torch.float64
    product = torch.matmul(_subtract_zero(a.numbers, a.zero, rows, wide), _subtract_zero(b.numbers, b.zero, dtype=wide))
    first = a.scale if rows is None else a.scale.reshape(rows)
    return _requantize(product * (first.to(wide) * b.scale.to(wide)), y_scale, y_zero)


@operator("QLinearConv", also=("group", *WINDOW_ATTRIBUTES))
def quantized_conv(*inputs: Tensor, **window: Any) -> Tensor:
    x, w, (y_scale, y_zero, *bias) = _QuantizedTensor(*inputs[:3]), _QuantizedTensor(*inputs[3:6]), inputs[6:]
    y = _convolve_in_float64(x.numbers, x.zero, w.numbers, w.zero, bias[0] if bias else None, **window)
    scale = w.scale.to(y.dtype).reshape([1, -1, *([1] * (w.numbers.dim() - 2))]) if w.scale.dim() else w.scale
    return _requantize(y * (x.scale.to(y.dtype) * scale), y_scale, y_zero)
