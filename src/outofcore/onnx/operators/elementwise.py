"""Elementwise operators and activation functions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from outofcore.onnx.operators.registry import axis_of, operator, register_function

# Dtypes for which PyTorch has few kernels.
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def _compute_wide(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Compute in int64 if a dtype is unsigned, because PyTorch lacks kernels for unsigned dtypes."""
    kind = next((tensor.dtype for tensor in tensors if tensor.dtype in UNSIGNED), None)
    if kind is None:
        return function(*tensors)
    result = function(*(tensor.to(torch.int64) if tensor.dtype in UNSIGNED else tensor for tensor in tensors))
    return result.to(kind) if result.dtype is torch.int64 else result


def divide(a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() or a.is_complex() else torch.div(a, b, rounding_mode="trunc")


def power(base: Tensor, exponent: Tensor) -> Tensor:
    if not base.is_floating_point() and exponent.is_floating_point():
        return torch.pow(base.to(torch.float64), exponent.to(torch.float64)).to(base.dtype)
    return torch.pow(base, exponent.to(base.dtype) if base.is_floating_point() else exponent).to(base.dtype)


def softplus(x: Tensor) -> Tensor:
    return F.softplus(x, threshold=1e4 if x.dtype is torch.float64 else 80)


_UNARY: dict[str, Callable[..., Tensor]] = {
    **{name: getattr(torch, name.lower()) for name in ("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh")},
    **{name: getattr(torch, name.lower()) for name in ("Ceil", "Cos", "Cosh", "Erf", "Exp", "Floor", "IsNaN", "Log")},
    **{name: getattr(torch, name.lower()) for name in ("Neg", "Reciprocal", "Relu", "Sigmoid", "Sign", "Sin", "Sinh")},
    **{name: getattr(torch, name.lower()) for name in ("Sqrt", "Tan", "Tanh")},
    "BitwiseNot": torch.bitwise_not,
    "HardSwish": F.hardswish,
    "Mish": F.mish,
    "Not": torch.logical_not,
    "Round": torch.round,  # halves to even, in both
    "Softplus": softplus,
    "Softsign": F.softsign,
}
_BINARY: dict[str, Callable[..., Tensor]] = {
    "Add": torch.add,
    "And": torch.logical_and,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
    "Div": divide,
    "Equal": torch.eq,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Mul": torch.mul,
    "Or": torch.logical_or,
    "Pow": power,
    "Sub": torch.sub,
    "Xor": torch.logical_xor,
}


@operator(*_BINARY)
def broadcast_at_axis(a: Tensor, b: Tensor, *, op: str, axis: int | None = None, broadcast: int = 0) -> Tensor:
    """Broadcast the second operand along an axis of the first, as before opset 7."""
    if broadcast and axis is not None:
        b = b.reshape(*b.shape, *([1] * (a.dim() - axis_of(axis, a.dim()) - b.dim())))
    return _compute_wide(_BINARY[op], a, b)


for _name, _function in _UNARY.items():
    register_function(_name, _function, plain=True)
for _name, _function in _BINARY.items():
    register_function(_name, _function, since=7, plain=True)
register_function("Where", torch.where)
register_function("Elu", F.elu, alpha=("alpha", 1.0))
register_function("Celu", F.celu, alpha=("alpha", 1.0))
register_function("LeakyRelu", F.leaky_relu, negative_slope=("alpha", 0.01))


def compute_plain(name: str, *tensors: Tensor) -> Tensor:
    """Compute a unary or binary operator, on unsigned dtypes by way of int64."""
    return _compute_wide(_UNARY.get(name) or _BINARY[name], *tensors)


@operator("Identity")
def identity(x: Tensor) -> Tensor:
    return x


@operator("Swish")
def swish(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)


@operator("Gelu")
@operator("Gelu", domain="com.microsoft")
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return F.gelu(x, approximate=approximate)


@operator("FastGelu", domain="com.microsoft")
def fast_gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


@operator("BiasGelu", domain="com.microsoft")
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


@operator("QuickGelu", domain="com.microsoft")
def quick_gelu(x: Tensor, *, alpha: float = 1.702) -> Tensor:
    return x * torch.sigmoid(alpha * x)


@operator("Selu")
def old_selu(x: Tensor, *, alpha: float = 1.6732, gamma: float = 1.0507) -> Tensor:
    return gamma * torch.where(x > 0, x, alpha * torch.expm1(x))


@operator("Selu", since=6)
def selu(x: Tensor, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875) -> Tensor:
    return old_selu(x, alpha=alpha, gamma=gamma)


@operator("ThresholdedRelu")
def thresholded_relu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return torch.where(x > alpha, x, torch.zeros_like(x))


@operator("HardSigmoid")
def hard_sigmoid(x: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    return torch.clamp(alpha * x + beta, 0, 1)


@operator("PRelu")
def prelu(x: Tensor, slope: Tensor, *, version: int) -> Tensor:
    if version < 7 and slope.dim() == 1 and slope.numel() > 1:
        slope = slope.reshape(-1, *([1] * (x.dim() - 2)))
    return torch.where(x >= 0, x, x * slope)


@operator("Clip")
def clip_by_attributes(x: Tensor, *, min: float | None = None, max: float | None = None) -> Tensor:
    return x if min is max is None else torch.clamp(x, min, max)


@operator("Clip", since=11)
def clip(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    # The upper limit wins if it is below the lower one.
    if low is not None:
        x = _compute_wide(torch.maximum, x, low.reshape(()).to(x.dtype))
    if high is not None:
        x = _compute_wide(torch.minimum, x, high.reshape(()).to(x.dtype))
    return x


@operator("Mod")
def modulo(a: Tensor, b: Tensor, *, fmod: int = 0) -> Tensor:
    return _compute_wide(torch.fmod if fmod else torch.remainder, a, b)


@operator("BitShift")
def bit_shift(x: Tensor, by: Tensor, *, direction: str) -> Tensor:
    return _compute_wide(torch.bitwise_left_shift if direction == "LEFT" else torch.bitwise_right_shift, x, by)


_FOLD_FUNCTIONS: dict[str, Callable[..., Tensor]] = {"Max": torch.maximum, "Min": torch.minimum}


@operator("Max", "Min", "Sum", "Mean")
def fold(*tensors: Tensor, op: str) -> Tensor:
    total = functools.reduce(functools.partial(_compute_wide, _FOLD_FUNCTIONS.get(op, torch.add)), tensors)
    return total / len(tensors) if op == "Mean" else total


@operator("IsInf")
def is_infinite(x: Tensor, *, detect_positive: int = 1, detect_negative: int = 1) -> Tensor:
    if x.dtype.itemsize == 1:
        x = x.to(torch.float32)
    result = torch.zeros_like(x, dtype=torch.bool)
    if detect_positive:
        result = result | (x == math.inf)
    return result | (x == -math.inf) if detect_negative else result


@operator("Cast")
def cast(x: Tensor, *, to: torch.dtype, saturate: int = 1) -> Tensor:
    """Convert to a dtype; values beyond the range of float8 are clamped unless ``saturate`` is 0."""
    if to.itemsize == 1 and to.is_floating_point and x.is_floating_point():
        wide = x.to(torch.float32)
        limit = torch.finfo(to).max
        if saturate:
            return torch.clamp(wide, -limit, limit).to(to)
        if to is torch.float8_e4m3fn:  # it has no infinity, and recent PyTorch saturates
            wide = torch.where(wide.abs() > limit * (1 + 1 / 28), torch.nan, wide)  # 464 is still rounded to 448
        return wide.to(to)
    return x != 0 if to is torch.bool else x.to(to)


@operator("CastLike")
def cast_like(x: Tensor, like: Tensor, *, saturate: int = 1) -> Tensor:
    return cast(x, to=like.dtype, saturate=saturate)


@operator("BitCast")
def bit_cast(x: Tensor, *, to: torch.dtype) -> Tensor:
    return x.contiguous().view(to)


register_function("Softmax", torch.softmax, since=13, dim=("axis", -1))
register_function("LogSoftmax", torch.log_softmax, since=13, dim=("axis", -1))


@operator("Hardmax", since=13)
def hardmax(x: Tensor, *, axis: int = -1) -> Tensor:
    return torch.zeros_like(x).scatter(axis, x.argmax(axis, keepdim=True), 1)


@operator("Softmax", "LogSoftmax", "Hardmax")
def flat_softmax(x: Tensor, *, op: str, axis: int = 1) -> Tensor:
    """Compute softmax over all axes from ``axis`` on together, as before opset 13."""
    axis = axis_of(axis, x.dim())
    flat = x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))
    if op == "Hardmax":
        return hardmax(flat).reshape(x.shape)
    return (torch.softmax if op == "Softmax" else torch.log_softmax)(flat, 1).reshape(x.shape)


@operator("Dropout", read=(1, 2), pure=False, many=True)
def dropout(
    x: Tensor, ratios: list[float] | None = None, training: list[bool] | None = None, *, count: int, ratio: float = 0.5
) -> tuple[Tensor, ...]:
    if ratios is not None:
        (ratio,) = ratios
    if training is not None and training[0] and ratio > 0:
        mask = torch.rand_like(x) >= ratio
        return torch.where(mask, x / (1 - ratio), torch.zeros_like(x)), mask
    return (x, torch.ones_like(x, dtype=torch.bool)) if count > 1 else (x,)
