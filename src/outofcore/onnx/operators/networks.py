"""Matrix products, convolutions, pooling, normalizations and random numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outofcore.onnx.operators.registry import Unsupported, axis_of, operator, register_function

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_MAX: dict[int, Any] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_MEAN = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_Ints = tuple[int, ...] | None

register_function("MatMul", torch.matmul)
register_function("Det", torch.linalg.det)


@operator("FusedMatMul", domain="com.microsoft")
def fused_matmul(
    a: Tensor,
    b: Tensor,
    *,
    transA: int = 0,  # noqa: N803 - the standard's name, here and below
    transB: int = 0,  # noqa: N803
    transBatchA: int = 0,  # noqa: N803
    transBatchB: int = 0,  # noqa: N803
    alpha: float = 1.0,
) -> Tensor:
    if transBatchA or transBatchB:
        raise Unsupported("it transposes batches, which is not supported")
    product = torch.matmul(a.transpose(-1, -2) if transA else a, b.transpose(-1, -2) if transB else b)
    return product if alpha == 1.0 else product * alpha


@operator("Gemm")
def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    transA: int = 0,  # noqa: N803
    transB: int = 0,  # noqa: N803
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Tensor:
    a = a.t() if transA else a
    if alpha == beta == 1.0 and transB and c is not None and c.dim() == 1 and c.numel() == b.shape[0]:
        return F.linear(a, b, c)
    b = b.t() if transB else b
    if not a.is_floating_point():
        product = torch.matmul(a, b) * int(alpha)
        return product if c is None else product + c * int(beta)
    if c is not None:
        return torch.addmm(c, a, b, beta=beta, alpha=alpha) if c.dim() <= 2 else alpha * (a @ b) + beta * c
    product = torch.matmul(a, b)
    return product if alpha == 1.0 else product * alpha


@operator("Einsum")
def einsum(*tensors: Tensor, equation: str) -> Tensor:
    return torch.einsum(equation.replace(" ", ""), *tensors)


# ---- sliding windows -------------------------------------------------------------------------------------------------


def _per_dimension(name: str, values: _Ints, count: int, default: int) -> list[int]:
    numbers = [default] * count if values is None else list(values)
    if len(numbers) != count:
        raise Unsupported(f"it has {len(numbers)} {name} for {count} dimensions")
    return numbers


WINDOW_ATTRIBUTES = ("auto_pad", "pads", "strides", "dilations")


class _SlidingWindow:
    """The windows of a convolution or pooling; ``pads`` are pairs before and after each dimension."""

    def __init__(
        self,
        sizes: Sequence[int],
        kernel: Sequence[int],
        auto_pad: str = "NOTSET",
        pads: _Ints = None,
        strides: _Ints = None,
        dilations: _Ints = None,
    ) -> None:
        rank = len(kernel)
        if rank not in _CONV or len(sizes) != rank:
            raise Unsupported(f"it has windows in {rank} dimensions, and 1 to 3 are supported")
        self.sizes, self.kernel = list(sizes), list(kernel)
        self.strides = _per_dimension("strides", strides, rank, 1)
        self.dilations = _per_dimension("dilations", dilations, rank, 1)
        if auto_pad in ("NOTSET", "", "VALID"):
            both_pads = _per_dimension("pads", None if auto_pad == "VALID" else pads, 2 * rank, 0)
            self.pads = [(both_pads[i], both_pads[i + rank]) for i in range(rank)]
            return
        self.pads: list[tuple[int, int]] = []
        for size, width, by, wide in zip(sizes, kernel, self.strides, self.dilations, strict=True):
            missing = max((-(-size // by) - 1) * by + (width - 1) * wide + 1 - size, 0)
            less = missing // 2
            self.pads.append((less, missing - less) if auto_pad == "SAME_UPPER" else (missing - less, less))

    @property
    def before(self) -> list[int]:
        return [pair[0] for pair in self.pads]

    def has_symmetric_pads(self) -> bool:
        """Return whether PyTorch supports these pads: equal before and after each dimension."""
        return all(before == after >= 0 for before, after in self.pads)

    def has_pooling_pads(self) -> bool:
        """Return whether PyTorch supports these pads in pooling: at most half the window."""
        return self.has_symmetric_pads() and all(
            2 * p[0] <= width for p, width in zip(self.pads, self.kernel, strict=True)
        )

    def ceil_pads(self) -> list[tuple[int, int]]:
        """Return the additional padding of each dimension that rounds the number of windows up (``ceil_mode``)."""
        missing_pads: list[tuple[int, int]] = []
        for i, (before, after) in enumerate(self.pads):
            free = self.sizes[i] + before + after - (self.dilations[i] * (self.kernel[i] - 1) + 1)
            windows = -(-free // self.strides[i]) + 1
            if (windows - 1) * self.strides[i] >= self.sizes[i] + before:  # it would start after the data
                windows -= 1
            missing_pads.append((0, max((windows - 1) * self.strides[i] - free, 0)))
        return missing_pads

    def window_sums(self, x: Tensor) -> Tensor:
        """Return the sum of each window of a padded tensor, per channel."""
        ones = x.new_ones(1, 1, *self.kernel)
        flat = x.reshape(-1, 1, *x.shape[2:])
        y = _CONV[len(self.kernel)](flat, ones, None, self.strides, 0, self.dilations)
        return y.reshape(*x.shape[:2], *y.shape[2:])


def _pad(x: Tensor, pads: list[tuple[int, int]], value: float = 0.0) -> Tensor:
    return F.pad(x, [amount for pair in reversed(pads) for amount in pair], value=value)


@operator("Conv", also=WINDOW_ATTRIBUTES)
def conv(x: Tensor, w: Tensor, b: Tensor | None = None, *, group: int = 1, **window: Any) -> Tensor:
    windows = _SlidingWindow(x.shape[2:], w.shape[2:], **window)
    before = windows.before
    if not windows.has_symmetric_pads():
        x, before = _pad(x, windows.pads), [0] * len(before)
    return _CONV[len(before)](x, w, b, windows.strides, before, windows.dilations, group)


@operator("ConvTranspose", also=WINDOW_ATTRIBUTES[1:])
def conv_transpose(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    output_padding: _Ints = None,
    output_shape: _Ints = None,
    group: int = 1,
    auto_pad: str = "NOTSET",
    **window: Any,
) -> Tensor:
    windows = _SlidingWindow(x.shape[2:], w.shape[2:], auto_pad, **window)
    rank, strides, dilations = len(windows.kernel), windows.strides, windows.dilations
    extra = _per_dimension("output_padding", output_padding, rank, 0)
    full_sizes = [
        (x.shape[2 + i] - 1) * strides[i] + (windows.kernel[i] - 1) * dilations[i] + 1 + extra[i] for i in range(rank)
    ]
    target = None if output_shape is None else list(output_shape)[-rank:]
    if target is None and auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        target = [size * step for size, step in zip(windows.sizes, strides, strict=True)]
    if target is not None:
        windows.pads = [((n - m) // 2, n - m - (n - m) // 2) for n, m in zip(full_sizes, target, strict=True)]
        if auto_pad in ("NOTSET", "", "SAME_LOWER"):
            windows.pads = [(behind, before) for before, behind in windows.pads]
    if windows.has_symmetric_pads() and all(
        amount < max(pair) for amount, pair in zip(extra, zip(strides, dilations, strict=True), strict=True)
    ):
        return _CONV_TRANSPOSE[rank](x, w, b, strides, windows.before, extra, group, dilations)
    y = _CONV_TRANSPOSE[rank](x, w, b, strides, 0, 0, group, dilations)
    if any(extra):
        y = _pad(y, [(0, amount) for amount in extra])
        if b is not None:  # the added elements are the bias alone
            inside = torch.zeros(full_sizes, dtype=torch.bool, device=y.device)
            inside[tuple(slice(0, full_sizes[i] - extra[i]) for i in range(rank))] = True
            y = torch.where(inside, y, b.reshape(-1, *([1] * rank)))
    return _pad(y, [(-before, -after) for before, after in windows.pads])


@operator("MaxPool", also=WINDOW_ATTRIBUTES, many=True)
def max_pool(
    x: Tensor, *, count: int, kernel_shape: tuple[int, ...], ceil_mode: int = 0, storage_order: int = 0, **window: Any
) -> tuple[Tensor, ...]:
    windows = _SlidingWindow(x.shape[2:], kernel_shape, **window)
    kernel, before, wants_places = windows.kernel, windows.before, count > 1
    padded = x if x.is_floating_point() else x.to(torch.float32)
    if not windows.has_pooling_pads():
        padded = _pad(padded, windows.pads, -math.inf)
        padded = _pad(padded, windows.ceil_pads(), -math.inf) if ceil_mode else padded
        before, ceil_mode = [0] * len(kernel), 0
    # Both ONNX and PyTorch drop a last window that would start after the data.
    arguments = (kernel, windows.strides, before, windows.dilations, bool(ceil_mode))
    pooled = _MAX[len(kernel)](padded, *arguments, return_indices=wants_places)
    if not wants_places:
        return (pooled.to(x.dtype),)
    offset = [0] * len(kernel) if windows.has_pooling_pads() else windows.before
    places = _onnx_pool_indices(pooled[1], x, list(padded.shape[2:]), offset, by_column=bool(storage_order))
    return pooled[0].to(x.dtype), places


def _onnx_pool_indices(
    indices: Tensor, x: Tensor, padded_sizes: list[int], offset: list[int], *, by_column: bool
) -> Tensor:
    """Convert PyTorch's pooling indices, within a padded channel, to ONNX's indices into the whole tensor."""
    sizes = list(x.shape[2:])
    parts: list[Tensor] = []
    for size, before in zip(reversed(padded_sizes), reversed(offset), strict=True):
        parts.insert(0, indices.remainder(size) - before)
        indices = indices.div(size, rounding_mode="floor")
    at = torch.zeros_like(indices)
    for i in reversed(range(len(sizes))) if by_column else range(len(sizes)):
        at = at * sizes[i] + parts[i]
    channels = torch.arange(x.shape[0] * x.shape[1], device=x.device)
    return at + (channels * math.prod(sizes)).reshape(x.shape[0], x.shape[1], *([1] * len(sizes)))


@operator("MaxUnpool", read=(2,))
def max_unpool(
    x: Tensor,
    indices: Tensor,
    sizes: list[int] | None = None,
    *,
    kernel_shape: tuple[int, ...],
    pads: _Ints = None,
    strides: _Ints = None,
) -> Tensor:
    rank = len(kernel_shape)
    by, around = _per_dimension("strides", strides, rank, 1), _per_dimension("pads", pads, 2 * rank, 0)
    inner = [(x.shape[2 + i] - 1) * by[i] - around[i] - around[i + rank] + kernel_shape[i] for i in range(rank)]
    shape = [*x.shape[:2], *inner]
    unpooled = x.new_zeros(math.prod(shape)).scatter(0, indices.reshape(-1), x.reshape(-1)).reshape(shape)
    return unpooled if sizes is None else _pad(unpooled, [(0, n - m) for n, m in zip(sizes[2:], inner, strict=True)])


@operator("AveragePool", also=WINDOW_ATTRIBUTES)
def average_pool(
    x: Tensor, *, kernel_shape: tuple[int, ...], ceil_mode: int = 0, count_include_pad: int = 0, **window: Any
) -> Tensor:
    windows = _SlidingWindow(x.shape[2:], kernel_shape, **window)
    if windows.has_pooling_pads() and set(windows.dilations) == {1}:
        arguments = (windows.kernel, windows.strides, windows.before, bool(ceil_mode), bool(count_include_pad))
        return _MEAN[len(kernel_shape)](x, *arguments)
    ones = torch.ones((1, 1, *x.shape[2:]), dtype=x.dtype, device=x.device)
    ones, x = _pad(ones, windows.pads, 1.0 if count_include_pad else 0.0), _pad(x, windows.pads)
    if ceil_mode:
        ones, x = _pad(ones, windows.ceil_pads()), _pad(x, windows.ceil_pads())
    return windows.window_sums(x) / windows.window_sums(ones)


@operator("LpPool", also=WINDOW_ATTRIBUTES)
def lp_pool(x: Tensor, *, kernel_shape: tuple[int, ...], ceil_mode: int = 0, p: int = 2, **window: Any) -> Tensor:
    windows = _SlidingWindow(x.shape[2:], kernel_shape, **window)
    x = _pad(x, windows.pads)
    x = _pad(x, windows.ceil_pads()) if ceil_mode else x
    return windows.window_sums(x.abs().pow(p)).pow(1 / p)


@operator("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def global_pool(x: Tensor, *, op: str, p: int = 2) -> Tensor:
    space = list(range(2, x.dim()))
    if op == "GlobalLpPool":
        return x.abs().pow(p).sum(space, keepdim=True).pow(1 / p)
    return x.mean(space, keepdim=True) if op == "GlobalAveragePool" else x.amax(space, keepdim=True)


# ---- normalizations -------------------------------------------------------------------------------------------------


@operator("BatchNormalization", many=True)
def old_batch_normalization(
    x: Tensor, scale: Tensor, b: Tensor, mean: Tensor, var: Tensor, *, epsilon: float = 1e-5, spatial: int = 1
) -> tuple[Tensor, ...]:
    """Normalize with the given mean and variance, as batch normalization before opset 14 does."""
    if not spatial:
        raise Unsupported("it normalizes each position separately (spatial=0), and only spatial=1 is supported")
    return batch_normalization(x, scale, b, mean, var, epsilon=epsilon)


@operator("BatchNormalization", many=True, since=14)
def batch_normalization(
    x: Tensor,
    scale: Tensor,
    b: Tensor,
    mean: Tensor,
    var: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
) -> tuple[Tensor, ...]:
    kind = x.dtype
    if not training_mode:
        return F.batch_norm(x, mean.to(kind), var.to(kind), scale.to(kind), b.to(kind), eps=epsilon), mean, var
    axes = [0, *range(2, x.dim())]
    wide = x.to(torch.float32) if kind in (torch.float16, torch.bfloat16) else x
    now, spread = wide.mean(axes), wide.var(axes, correction=0)
    y = F.batch_norm(x, None, None, scale.to(kind), b.to(kind), training=True, eps=epsilon)
    complement = 1 - momentum
    return y, mean * momentum + now.to(mean.dtype) * complement, var * momentum + spread.to(var.dtype) * complement


@operator("InstanceNormalization")
def instance_normalization(x: Tensor, scale: Tensor, b: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    return F.instance_norm(x, weight=scale, bias=b, eps=epsilon)


@operator("GroupNormalization")
def group_normalization(
    x: Tensor, scale: Tensor, b: Tensor, *, version: int, num_groups: int, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    if version < 21:  # one number per group, not per channel
        group_size = x.shape[1] // num_groups
        scale, b = scale.repeat_interleave(group_size), b.repeat_interleave(group_size)
    elif x.dtype in (torch.float16, torch.bfloat16) and stash_type == 1:
        y = F.group_norm(x.to(torch.float32), num_groups, None, None, epsilon).to(x.dtype)
        shape = (-1, *([1] * (x.dim() - 2)))
        return y * scale.reshape(shape) + b.reshape(shape)
    return F.group_norm(x, num_groups, scale, b, epsilon)


@operator("LayerNormalization", many=True)
def layer_normalization(
    x: Tensor,
    scale: Tensor,
    b: Tensor | None = None,
    *,
    count: int,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> tuple[Tensor, ...]:
    axis = axis_of(axis, x.dim())
    if scale.shape == x.shape[axis:] and (b is None or b.shape == scale.shape):
        y = F.layer_norm(x, x.shape[axis:], scale, b, epsilon)
    else:
        y = F.layer_norm(x, x.shape[axis:], None, None, epsilon) * scale
        y = y if b is None else y + b
    if count == 1:
        return (y,)
    over = list(range(axis, x.dim()))
    wide = x.to(torch.float32) if stash_type == 1 else x
    return y, wide.mean(over, keepdim=True), torch.rsqrt(wide.var(over, correction=0, keepdim=True) + epsilon)


@operator("RMSNormalization", "SimplifiedLayerNormalization")
@operator("SimplifiedLayerNormalization", domain="com.microsoft")
def rms_normalization(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    over = list(range(axis_of(axis, x.dim()), x.dim()))
    wide = x.to(torch.float32) if stash_type == 1 else x
    return (wide * torch.rsqrt(wide.square().mean(over, keepdim=True) + epsilon)).to(x.dtype) * scale


@operator("LpNormalization")
def lp_normalization(x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    length = torch.linalg.vector_norm(x, p, dim=axis, keepdim=True)
    return x / torch.where(length == 0, torch.ones_like(length), length)


@operator("LRN")
def local_response(x: Tensor, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Tensor:
    before, after = (size - 1) // 2, size - 1 - (size - 1) // 2
    flat = x.square().reshape(x.shape[0], 1, x.shape[1], -1)
    mean = F.avg_pool2d(F.pad(flat, (0, 0, before, after)), (size, 1), 1).reshape(x.shape)
    return x / (bias + alpha * mean).pow(beta)


# ---- random numbers --------------------------------------------------------------------------------------------------


def _random_shape(x: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype | None) -> tuple[Any, torch.dtype]:
    return (shape, dtype or torch.float32) if x is None else (x.shape, dtype or x.dtype)


@operator("RandomNormal", "RandomNormalLike", pure=False)
def random_normal(
    x: Tensor | None = None,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    shape: tuple[int, ...] = (),
    mean: float = 0.0,
    scale: float = 1.0,
) -> Tensor:
    shape, kind = _random_shape(x, shape, dtype)
    return torch.randn(shape, dtype=kind, device=device) * scale + mean


@operator("RandomUniform", "RandomUniformLike", pure=False)
def random_uniform(
    x: Tensor | None = None,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    shape: tuple[int, ...] = (),
    low: float = 0.0,
    high: float = 1.0,
) -> Tensor:
    shape, kind = _random_shape(x, shape, dtype)
    return torch.rand(shape, dtype=kind, device=device) * (high - low) + low


@operator("Bernoulli", pure=False)
def bernoulli(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return torch.bernoulli(x).to(dtype or x.dtype)


@operator("Multinomial", pure=False)
def multinomial(x: Tensor, *, dtype: torch.dtype = torch.int32, sample_size: int = 1) -> Tensor:
    picked: Any = torch.multinomial(torch.softmax(x, -1), sample_size, replacement=True)
    return picked.to(dtype)
