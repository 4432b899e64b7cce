"""Operators that compute element by element, and activation functions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from outofcore.onnx.operators.registry import Call, axis_of, number, operator
from outofcore.onnx.storage import DTYPES

# PyTorch stores these and computes little with them.
_NARROW = (torch.uint16, torch.uint32, torch.uint64)
_Op = Callable[..., torch.Tensor]


def widened(function: _Op, *tensors: torch.Tensor) -> torch.Tensor:
    """A function on whole numbers that PyTorch has no kernels for."""
    if not any(tensor.dtype in _NARROW for tensor in tensors):
        return function(*tensors)
    kind = next(tensor.dtype for tensor in tensors if tensor.dtype in _NARROW)
    result = function(*(tensor.to(torch.int64) if tensor.dtype in _NARROW else tensor for tensor in tensors))
    return result.to(kind) if result.dtype is torch.int64 else result


def _register(name: str, function: _Op) -> None:
    @operator(name)
    def run(call: Call, *inputs: torch.Tensor) -> torch.Tensor:
        return widened(function, *_legacy_broadcast(call, inputs))


def _legacy_broadcast(call: Call, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Before opset 7 the second operand was put at an axis of the first one."""
    if call.version >= 7 or len(inputs) != 2 or not call.get("broadcast", 0):
        return inputs
    first, second = inputs
    axis = call.get("axis")
    if axis is None:
        return inputs
    behind = first.dim() - axis_of(axis, first.dim()) - second.dim()
    return first, second.reshape(*second.shape, *([1] * behind))


def _divided(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.is_floating_point() or a.is_complex():
        return a / b
    return torch.div(a, b, rounding_mode="trunc")


def _power(base: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    if not base.is_floating_point() and exponent.is_floating_point():
        return torch.pow(base.to(torch.float64), exponent.to(torch.float64)).to(base.dtype)
    if base.is_floating_point() and not exponent.is_floating_point():
        return torch.pow(base, exponent.to(base.dtype))
    return torch.pow(base, exponent).to(base.dtype)


_PLAIN: dict[str, _Op] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Add": torch.add,
    "And": torch.logical_and,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseNot": torch.bitwise_not,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Div": _divided,
    "Equal": torch.eq,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "IsNaN": torch.isnan,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Log": torch.log,
    "Mish": F.mish,
    "Mul": torch.mul,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Or": torch.logical_or,
    "Pow": _power,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Round": torch.round,  # halves to even, in both
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Softplus": lambda x: F.softplus(x, threshold=1e4 if x.dtype is torch.float64 else 80),
    "Softsign": F.softsign,
    "Sqrt": torch.sqrt,
    "Sub": torch.sub,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
    "Xor": torch.logical_xor,
}
for _name, _function in _PLAIN.items():
    _register(_name, _function)


@operator("Identity")
def identity(call: Call, x: Any) -> Any:
    return (x,)


@operator("HardSwish")
def hard_swish(call: Call, x: torch.Tensor) -> torch.Tensor:
    return F.hardswish(x)


@operator("Swish")
def swish(call: Call, x: torch.Tensor) -> torch.Tensor:
    alpha = call.get("alpha", 1.0)
    return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)


@operator("Gelu")
@operator("Gelu", domain="com.microsoft")
def gelu(call: Call, x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate=call.get("approximate", "none"))


@operator("FastGelu", domain="com.microsoft")
def fast_gelu(call: Call, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


@operator("BiasGelu", domain="com.microsoft")
def bias_gelu(call: Call, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(x + bias)


@operator("QuickGelu", domain="com.microsoft")
def quick_gelu(call: Call, x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(call.get("alpha", 1.702) * x)


@operator("Elu")
def elu(call: Call, x: torch.Tensor) -> torch.Tensor:
    return F.elu(x, call.get("alpha", 1.0))


@operator("Celu")
def celu(call: Call, x: torch.Tensor) -> torch.Tensor:
    return F.celu(x, call.get("alpha", 1.0))


@operator("Selu")
def selu(call: Call, x: torch.Tensor) -> torch.Tensor:
    alpha, gamma = call.get("alpha", 1.67326319217681884765625), call.get("gamma", 1.05070102214813232421875)
    if call.version < 6:
        alpha, gamma = call.get("alpha", 1.6732), call.get("gamma", 1.0507)
    return gamma * torch.where(x > 0, x, alpha * torch.expm1(x))


@operator("LeakyRelu")
def leaky_relu(call: Call, x: torch.Tensor) -> torch.Tensor:
    return F.leaky_relu(x, call.get("alpha", 0.01))


@operator("ThresholdedRelu")
def thresholded_relu(call: Call, x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > call.get("alpha", 1.0), x, torch.zeros_like(x))


@operator("HardSigmoid")
def hard_sigmoid(call: Call, x: torch.Tensor) -> torch.Tensor:
    return torch.clamp(call.get("alpha", 0.2) * x + call.get("beta", 0.5), 0, 1)


@operator("Shrink")
def shrink(call: Call, x: torch.Tensor) -> torch.Tensor:
    bias, edge = call.get("bias", 0.0), call.get("lambd", 0.5)
    return torch.where(x < -edge, x + bias, torch.where(x > edge, x - bias, torch.zeros_like(x))).to(x.dtype)


@operator("PRelu")
def prelu(call: Call, x: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    if call.version < 7 and slope.dim() == 1 and slope.numel() > 1:
        slope = slope.reshape(-1, *([1] * (x.dim() - 2)))
    return torch.where(x >= 0, x, x * slope)


@operator("Clip")
def clip(
    call: Call, x: torch.Tensor, low: torch.Tensor | None = None, high: torch.Tensor | None = None
) -> torch.Tensor:
    if call.version < 11:
        return torch.clamp(x, call.get("min"), call.get("max")) if call.node.attributes else x
    # The upper limit holds where the lower one is above it.
    if low is not None:
        x = widened(torch.maximum, x, low.reshape(()).to(x.dtype))
    if high is not None:
        x = widened(torch.minimum, x, high.reshape(()).to(x.dtype))
    return x


@operator("Mod")
def modulo(call: Call, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return widened(torch.fmod if call.get("fmod", 0) else torch.remainder, a, b)


@operator("BitShift")
def bit_shift(call: Call, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    if call.get("direction") == "LEFT":
        return widened(torch.bitwise_left_shift, x, by)
    return widened(torch.bitwise_right_shift, x, by)


def _folded(function: _Op, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return functools.reduce(functools.partial(widened, function), tensors)


@operator("Max")
def maximum(call: Call, *tensors: torch.Tensor) -> torch.Tensor:
    return _folded(torch.maximum, tensors)


@operator("Min")
def minimum(call: Call, *tensors: torch.Tensor) -> torch.Tensor:
    return _folded(torch.minimum, tensors)


@operator("Sum")
def total(call: Call, *tensors: torch.Tensor) -> torch.Tensor:
    return _folded(torch.add, tensors)


@operator("Mean")
def mean(call: Call, *tensors: torch.Tensor) -> torch.Tensor:
    return _folded(torch.add, tensors) / len(tensors)


@operator("Where")
def where(call: Call, condition: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(condition, a, b)


@operator("IsInf")
def is_infinite(call: Call, x: torch.Tensor) -> torch.Tensor:
    up, down = call.get("detect_positive", 1), call.get("detect_negative", 1)
    if x.dtype.itemsize == 1:
        x = x.to(torch.float32)
    found = torch.zeros_like(x, dtype=torch.bool)
    if up:
        found = found | (x == math.inf)
    if down:
        found = found | (x == -math.inf)
    return found


@operator("Cast")
def cast(call: Call, x: torch.Tensor) -> torch.Tensor:
    code = call.get("to")
    if not isinstance(code, int) or code not in DTYPES or code in (21, 22):
        raise call.refuse(f"it casts to the data type {code}, which PyTorch does not compute with here")
    return converted(call, x, DTYPES[code])


@operator("BitCast")
def bit_cast(call: Call, x: torch.Tensor) -> torch.Tensor:
    dtype = DTYPES.get(call.get("to"))
    if dtype is None:
        raise call.refuse(f"it takes bits for the data type {call.get('to')}, which PyTorch does not compute with here")
    return x.contiguous().view(dtype)


@operator("CastLike")
def cast_like(call: Call, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return converted(call, x, like.dtype)


def converted(call: Call, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Another data type: what is too large for eight bits becomes the largest there is, unless saturate=0."""
    small = dtype.itemsize == 1 and dtype.is_floating_point
    if small and x.is_floating_point():
        wide = x.to(torch.float32)
        limit = torch.finfo(dtype).max
        if call.get("saturate", 1):
            return torch.clamp(wide, -limit, limit).to(dtype)
        if dtype is torch.float8_e4m3fn:  # it has no infinity, and recent PyTorch saturates
            wide = torch.where(wide.abs() > limit * (1 + 1 / 28), torch.nan, wide)  # 464 is still rounded to 448
        return wide.to(dtype)
    if dtype is torch.bool:
        return x != 0
    return x.to(dtype)


@operator("Softmax", "LogSoftmax", "Hardmax")
def flat_softmax(call: Call, x: torch.Tensor) -> torch.Tensor:
    """Before opset 13 all axes from one on were taken together."""
    axis = axis_of(call.get("axis", 1), x.dim())
    flat = x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))
    return _softmax(call, flat, 1).reshape(x.shape)


@operator("Softmax", "LogSoftmax", "Hardmax", since=13)
def softmax(call: Call, x: torch.Tensor) -> torch.Tensor:
    return _softmax(call, x, call.get("axis", -1))


def _softmax(call: Call, x: torch.Tensor, axis: int) -> torch.Tensor:
    if call.node.op == "Softmax":
        return torch.softmax(x, axis)
    if call.node.op == "LogSoftmax":
        return torch.log_softmax(x, axis)
    best = x.argmax(axis, keepdim=True)
    return torch.zeros_like(x).scatter(axis, best, 1)


@operator("Dropout", read=(1, 2), pure=False)
def dropout(
    call: Call, x: torch.Tensor, ratio: torch.Tensor | None = None, training: torch.Tensor | None = None
) -> Any:
    share = call.get("ratio", 0.5) if ratio is None else float(number(ratio))
    if training is not None and bool(number(training)) and share > 0:
        kept = torch.rand_like(x) >= share
        return torch.where(kept, x / (1 - share), torch.zeros_like(x)), kept
    return (x, torch.ones_like(x, dtype=torch.bool)) if call.wants(1) else x
