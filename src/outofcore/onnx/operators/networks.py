"""Products, convolutions, pooling and normalizations."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F

from outofcore.onnx.operators.registry import Call, axis_of, numbers, operator

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_MEAN = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@operator("MatMul")
def matmul(call: Call, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.matmul(a, b)


@operator("FusedMatMul", domain="com.microsoft")
def fused_matmul(call: Call, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if call.get("transBatchA", 0) or call.get("transBatchB", 0):
        raise call.refuse("it turns batches, which is not supported")
    a = a.transpose(-1, -2) if call.get("transA", 0) else a
    b = b.transpose(-1, -2) if call.get("transB", 0) else b
    found = torch.matmul(a, b)
    return found if call.get("alpha", 1.0) == 1.0 else found * call.get("alpha")


@operator("Gemm")
def gemm(call: Call, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None) -> torch.Tensor:
    a = a.t() if call.get("transA", 0) else a
    alpha, beta = call.get("alpha", 1.0), call.get("beta", 1.0)
    if alpha == beta == 1.0 and call.get("transB", 0) and c is not None and c.dim() == 1 and c.numel() == b.shape[0]:
        return F.linear(a, b, c)
    b = b.t() if call.get("transB", 0) else b
    if not a.is_floating_point():
        found = torch.matmul(a, b) * int(alpha)
        return found if c is None else found + c * int(beta)
    if c is not None:
        return torch.addmm(c, a, b, beta=beta, alpha=alpha) if c.dim() <= 2 else alpha * (a @ b) + beta * c
    found = torch.matmul(a, b)
    return found if alpha == 1.0 else found * alpha


@operator("Einsum")
def einsum(call: Call, *tensors: torch.Tensor) -> torch.Tensor:
    return torch.einsum(call.get("equation").replace(" ", ""), *tensors)


@operator("Det")
def determinant(call: Call, x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.det(x)


# ---- windows that move over space -----------------------------------------------------------------------------------


def _spatial(call: Call, name: str, rank: int, default: int) -> list[int]:
    given = list(call.get(name, (default,) * rank))
    if len(given) != rank:
        raise call.refuse(f"it has {len(given)} {name} for {rank} dimensions")
    return given


def _pads(call: Call, sizes: list[int], kernel: list[int], strides: list[int], dilations: list[int]) -> list[list[int]]:
    """How much is put before and behind each dimension."""
    rank, mode = len(sizes), call.get("auto_pad", "NOTSET")
    if mode in ("NOTSET", ""):
        given = _spatial(call, "pads", 2 * rank, 0)
        return [[given[i], given[i + rank]] for i in range(rank)]
    if mode == "VALID":
        return [[0, 0] for _ in sizes]
    found: list[list[int]] = []
    for size, width, by, wide in zip(sizes, kernel, strides, dilations, strict=True):
        missing = max((-(-size // by) - 1) * by + (width - 1) * wide + 1 - size, 0)
        less = missing // 2
        found.append([less, missing - less] if mode == "SAME_UPPER" else [missing - less, less])
    return found


def _flat(pads: list[list[int]]) -> list[int]:
    return [amount for pair in reversed(pads) for amount in pair]


def _even(pads: list[list[int]]) -> bool:
    return all(before == after >= 0 for before, after in pads)


@operator("Conv")
def conv(call: Call, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    return convolved(call, x, w, b)


def convolved(call: Call, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    rank = x.dim() - 2
    if rank not in _CONV:
        raise call.refuse(f"a convolution in {rank} dimensions")
    strides, dilations = _spatial(call, "strides", rank, 1), _spatial(call, "dilations", rank, 1)
    pads = _pads(call, list(x.shape[2:]), list(w.shape[2:]), strides, dilations)
    if not _even(pads):
        x, pads = F.pad(x, _flat(pads)), [[0, 0]] * rank
    return _CONV[rank](x, w, b, strides, [pair[0] for pair in pads], dilations, call.get("group", 1))


@operator("ConvTranspose")
def conv_transpose(call: Call, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    rank = x.dim() - 2
    if rank not in _TRANSPOSED:
        raise call.refuse(f"a convolution in {rank} dimensions")
    strides, dilations = _spatial(call, "strides", rank, 1), _spatial(call, "dilations", rank, 1)
    more = _spatial(call, "output_padding", rank, 0)
    kernel, mode = list(w.shape[2:]), call.get("auto_pad", "NOTSET")
    whole = [(x.shape[2 + i] - 1) * strides[i] + (kernel[i] - 1) * dilations[i] + 1 + more[i] for i in range(rank)]
    wanted = call.get("output_shape")
    if wanted is None and mode in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [x.shape[2 + i] * strides[i] for i in range(rank)]
    if wanted is not None:
        wanted = list(wanted)[-rank:]
        cut = [whole[i] - wanted[i] for i in range(rank)]
        pads = [[one // 2, one - one // 2] if mode != "SAME_LOWER" else [one - one // 2, one // 2] for one in cut]
        if mode in ("NOTSET", ""):
            pads = [[one - one // 2, one // 2] for one in cut]
    else:
        pads = _pads(call, list(x.shape[2:]), kernel, strides, dilations)
    if _even(pads) and all(one < max(by, wide) for one, by, wide in zip(more, strides, dilations, strict=True)):
        before = [pair[0] for pair in pads]
        return _TRANSPOSED[rank](x, w, b, strides, before, more, call.get("group", 1), dilations)
    y = _TRANSPOSED[rank](x, w, b, strides, 0, 0, call.get("group", 1), dilations)
    if any(more):
        y = F.pad(y, _flat([[0, one] for one in more]))
        if b is not None:  # what is added holds the bias and nothing else
            inside = torch.zeros(whole, dtype=torch.bool, device=y.device)
            inside[tuple(slice(0, whole[i] - more[i]) for i in range(rank))] = True
            y = torch.where(inside, y, b.reshape(-1, *([1] * rank)))
    return F.pad(y, _flat([[-before, -after] for before, after in pads]))


@operator("MaxPool")
def max_pool(call: Call, x: torch.Tensor) -> Any:
    kernel = list(call.get("kernel_shape"))
    rank = len(kernel)
    if rank not in _MAX:
        raise call.refuse(f"pooling in {rank} dimensions")
    strides, dilations = _spatial(call, "strides", rank, 1), _spatial(call, "dilations", rank, 1)
    sizes = list(x.shape[2:])
    pads = _pads(call, sizes, kernel, strides, dilations)
    up = bool(call.get("ceil_mode", 0))
    narrow = not x.is_floating_point()
    kind, plain = x.dtype, x
    if narrow:
        x = x.to(torch.float32)
    if _even(pads) and all(2 * pair[0] <= width for pair, width in zip(pads, kernel, strict=True)):
        # Where a last window would begin behind the data, neither has one.
        found = _MAX[rank](x, kernel, strides, [p[0] for p in pads], dilations, up, return_indices=call.wants(1))
        offset = [0] * rank
    else:
        offset = [pair[0] for pair in pads]
        if up:
            _round_up(pads, sizes, kernel, strides, dilations)
        x = F.pad(x, _flat(pads), value=-math.inf)
        found = _MAX[rank](x, kernel, strides, 0, dilations, False, return_indices=call.wants(1))
    values, places = found if isinstance(found, tuple) else (found, None)
    values = values.to(kind) if narrow else values
    if places is None:
        return values
    return values, _places(call, places, plain, list(x.shape[2:]), offset)


def _round_up(
    pads: list[list[int]], sizes: list[int], kernel: list[int], strides: list[int], dilations: list[int]
) -> None:
    """Put more behind, so that as many windows fit as when rounded up."""
    for i, (before, after) in enumerate(pads):
        free = sizes[i] + before + after - (dilations[i] * (kernel[i] - 1) + 1)
        windows = -(-free // strides[i]) + 1
        if (windows - 1) * strides[i] >= sizes[i] + before:  # it would begin behind the data
            windows -= 1
        pads[i] = [before, after + max((windows - 1) * strides[i] - free, 0)]


def _places(call: Call, places: torch.Tensor, x: torch.Tensor, padded: list[int], offset: list[int]) -> torch.Tensor:
    """Indices into the whole tensor, where PyTorch counts within a channel, padding included."""
    sizes = list(x.shape[2:])
    parts: list[torch.Tensor] = []
    for i in reversed(range(len(sizes))):
        parts.insert(0, places.remainder(padded[i]) - offset[i])
        places = places.div(padded[i], rounding_mode="floor")
    at = torch.zeros_like(places)
    order = range(len(sizes)) if not call.get("storage_order", 0) else reversed(range(len(sizes)))
    for i in order:
        at = at * sizes[i] + parts[i]
    channels = torch.arange(x.shape[0] * x.shape[1], device=x.device)
    return at + (channels * math.prod(sizes)).reshape(x.shape[0], x.shape[1], *([1] * len(sizes)))


@operator("MaxUnpool", read=(2,))
def max_unpool(call: Call, x: torch.Tensor, places: torch.Tensor, sizes: torch.Tensor | None = None) -> torch.Tensor:
    kernel = list(call.get("kernel_shape"))
    rank = len(kernel)
    strides, pads = _spatial(call, "strides", rank, 1), _spatial(call, "pads", 2 * rank, 0)
    inner = [(x.shape[2 + i] - 1) * strides[i] - pads[i] - pads[i + rank] + kernel[i] for i in range(rank)]
    shape = [*x.shape[:2], *inner]
    found = x.new_zeros(math.prod(shape)).scatter(0, places.reshape(-1), x.reshape(-1)).reshape(shape)
    if sizes is None:
        return found
    wanted = numbers(sizes)
    return F.pad(found, _flat([[0, wanted[2 + i] - inner[i]] for i in range(rank)]))


@operator("AveragePool")
def average_pool(call: Call, x: torch.Tensor) -> torch.Tensor:
    kernel = list(call.get("kernel_shape"))
    rank = len(kernel)
    if rank not in _MEAN:
        raise call.refuse(f"pooling in {rank} dimensions")
    strides, dilations = _spatial(call, "strides", rank, 1), _spatial(call, "dilations", rank, 1)
    pads = _pads(call, list(x.shape[2:]), kernel, strides, dilations)
    counted = bool(call.get("count_include_pad", 0))
    up = bool(call.get("ceil_mode", 0))
    small = all(2 * pair[0] <= width for pair, width in zip(pads, kernel, strict=True))
    if _even(pads) and small and set(dilations) == {1}:
        return _MEAN[rank](x, kernel, strides, [pair[0] for pair in pads], up, counted)
    ones = torch.ones((1, 1, *x.shape[2:]), dtype=x.dtype, device=x.device)
    ones = F.pad(ones, _flat(pads), value=1.0 if counted else 0.0)
    x = F.pad(x, _flat(pads))
    if up:
        wider = [list(pair) for pair in pads]
        _round_up(
            wider, [one - a - b for one, (a, b) in zip(x.shape[2:], pads, strict=True)], kernel, strides, dilations
        )
        extra = _flat([[0, new[1] - old[1]] for new, old in zip(wider, pads, strict=True)])
        ones, x = F.pad(ones, extra), F.pad(x, extra)
    return _window_sum(x, kernel, strides, dilations) / _window_sum(ones, kernel, strides, dilations)


def _window_sum(x: torch.Tensor, kernel: list[int], strides: list[int], dilations: list[int]) -> torch.Tensor:
    counts = [(x.shape[2 + i] - dilations[i] * (kernel[i] - 1) - 1) // strides[i] + 1 for i in range(len(kernel))]
    found: torch.Tensor | None = None
    for place in itertools.product(*map(range, kernel)):
        part = x
        for i, one in enumerate(place):
            begin = one * dilations[i]
            part = part[
                (slice(None),) * (2 + i) + (slice(begin, begin + (counts[i] - 1) * strides[i] + 1, strides[i]),)
            ]
        found = part if found is None else found + part
    if found is None:
        raise ValueError("a window without elements")
    return found


@operator("LpPool")
def lp_pool(call: Call, x: torch.Tensor) -> torch.Tensor:
    kernel, p = list(call.get("kernel_shape")), call.get("p", 2)
    rank = len(kernel)
    strides, dilations = _spatial(call, "strides", rank, 1), _spatial(call, "dilations", rank, 1)
    pads = _pads(call, list(x.shape[2:]), kernel, strides, dilations)
    if call.get("ceil_mode", 0):
        _round_up(pads, list(x.shape[2:]), kernel, strides, dilations)
    x = F.pad(x, _flat(pads))
    return _window_sum(x.abs().pow(p), kernel, strides, dilations).pow(1 / p)


def _space(x: torch.Tensor) -> list[int]:
    return list(range(2, x.dim()))


@operator("GlobalAveragePool")
def global_average(call: Call, x: torch.Tensor) -> torch.Tensor:
    return x.mean(_space(x), keepdim=True)


@operator("GlobalMaxPool")
def global_max(call: Call, x: torch.Tensor) -> torch.Tensor:
    return x.amax(_space(x), keepdim=True)


@operator("GlobalLpPool")
def global_lp(call: Call, x: torch.Tensor) -> torch.Tensor:
    p = call.get("p", 2)
    return x.abs().pow(p).sum(_space(x), keepdim=True).pow(1 / p)


# ---- normalizations -------------------------------------------------------------------------------------------------


@operator("BatchNormalization")
def batch_normalization(
    call: Call, x: torch.Tensor, scale: torch.Tensor, b: torch.Tensor, mean: torch.Tensor, var: torch.Tensor
) -> Any:
    epsilon = call.get("epsilon", 1e-5)
    if call.version < 9 and not call.get("spatial", 1):
        raise call.refuse("it normalizes each place by itself (spatial=0), which is not supported")
    trains = call.get("training_mode", 0) if call.version >= 14 else 0
    if not trains:
        y = F.batch_norm(x, mean.to(x.dtype), var.to(x.dtype), scale.to(x.dtype), b.to(x.dtype), eps=epsilon)
        return y if not call.wants(1) else (y, mean, var)
    share = call.get("momentum", 0.9)
    axes = [0, *_space(x)]
    wide = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
    now, spread = wide.mean(axes), wide.var(axes, correction=0)
    y = F.batch_norm(x, None, None, scale.to(x.dtype), b.to(x.dtype), training=True, eps=epsilon)
    return y, mean * share + now.to(mean.dtype) * (1 - share), var * share + spread.to(var.dtype) * (1 - share)


@operator("InstanceNormalization")
def instance_normalization(call: Call, x: torch.Tensor, scale: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.instance_norm(x, weight=scale, bias=b, eps=call.get("epsilon", 1e-5))


@operator("GroupNormalization")
def group_normalization(call: Call, x: torch.Tensor, scale: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    groups, each = call.get("num_groups"), x.shape[1] // call.get("num_groups")
    if call.version < 21:  # one number a group, and not a channel
        scale, b = scale.repeat_interleave(each), b.repeat_interleave(each)
    kind = x.dtype
    if call.version >= 21 and kind in (torch.float16, torch.bfloat16) and call.get("stash_type", 1) == 1:
        y = F.group_norm(x.to(torch.float32), groups, None, None, call.get("epsilon", 1e-5)).to(kind)
        shape = (-1, *([1] * (x.dim() - 2)))
        return y * scale.reshape(shape) + b.reshape(shape)
    return F.group_norm(x, groups, scale, b, call.get("epsilon", 1e-5))


@operator("LayerNormalization")
def layer_normalization(call: Call, x: torch.Tensor, scale: torch.Tensor, b: torch.Tensor | None = None) -> Any:
    axis, epsilon = axis_of(call.get("axis", -1), x.dim()), call.get("epsilon", 1e-5)
    over = list(range(axis, x.dim()))
    if list(scale.shape) == list(x.shape[axis:]) and (b is None or b.shape == scale.shape):
        y = F.layer_norm(x, x.shape[axis:], scale, b, epsilon)
    else:
        y = F.layer_norm(x, x.shape[axis:], None, None, epsilon) * scale
        y = y if b is None else y + b
    if not (call.wants(1) or call.wants(2)):
        return y
    wide = x.to(torch.float32) if call.get("stash_type", 1) == 1 else x
    return y, wide.mean(over, keepdim=True), torch.rsqrt(wide.var(over, correction=0, keepdim=True) + epsilon)


@operator("RMSNormalization")
def rms_normalization(call: Call, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    axis = axis_of(call.get("axis", -1), x.dim())
    over = list(range(axis, x.dim()))
    wide = x.to(torch.float32) if call.get("stash_type", 1) == 1 else x
    y = wide * torch.rsqrt(wide.square().mean(over, keepdim=True) + call.get("epsilon", 1e-5))
    return y.to(x.dtype) * scale


@operator("SimplifiedLayerNormalization")
@operator("SimplifiedLayerNormalization", domain="com.microsoft")
def simplified_layer_normalization(call: Call, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return rms_normalization(call, x, scale)


@operator("MeanVarianceNormalization")
def mean_variance(call: Call, x: torch.Tensor) -> torch.Tensor:
    axes = list(call.get("axes", (0, 2, 3)))
    mean = x.mean(axes, keepdim=True)
    spread = (x.square().mean(axes, keepdim=True) - mean.square()).sqrt()
    return (x - mean) / (spread + 1e-9)


@operator("LpNormalization")
def lp_normalization(call: Call, x: torch.Tensor) -> torch.Tensor:
    length = torch.linalg.vector_norm(x, call.get("p", 2), dim=call.get("axis", -1), keepdim=True)
    return x / torch.where(length == 0, torch.ones_like(length), length)


@operator("LRN")
def local_response(call: Call, x: torch.Tensor) -> torch.Tensor:
    size = call.get("size")
    before, after = (size - 1) // 2, size - 1 - (size - 1) // 2
    flat = x.square().reshape(x.shape[0], 1, x.shape[1], -1)
    mean = F.avg_pool2d(F.pad(flat, (0, 0, before, after)), (size, 1), 1).reshape(x.shape)
    return x / (call.get("bias", 1.0) + call.get("alpha", 1e-4) * mean).pow(call.get("beta", 0.75))


# ---- random numbers --------------------------------------------------------------------------------------------------


def _kind(call: Call, default: torch.dtype) -> torch.dtype:
    from outofcore.onnx.storage import DTYPES  # noqa: PLC0415

    return DTYPES[call.get("dtype")] if call.get("dtype") else default


@operator("RandomNormal", pure=False)
def random_normal(call: Call) -> torch.Tensor:
    made = torch.randn(call.get("shape"), dtype=_kind(call, torch.float32), device=call.device)
    return made * call.get("scale", 1.0) + call.get("mean", 0.0)


@operator("RandomNormalLike", pure=False)
def random_normal_like(call: Call, x: torch.Tensor) -> torch.Tensor:
    made = torch.randn(x.shape, dtype=_kind(call, x.dtype), device=x.device)
    return made * call.get("scale", 1.0) + call.get("mean", 0.0)


@operator("RandomUniform", pure=False)
def random_uniform(call: Call) -> torch.Tensor:
    low, high = call.get("low", 0.0), call.get("high", 1.0)
    return torch.rand(call.get("shape"), dtype=_kind(call, torch.float32), device=call.device) * (high - low) + low


@operator("RandomUniformLike", pure=False)
def random_uniform_like(call: Call, x: torch.Tensor) -> torch.Tensor:
    low, high = call.get("low", 0.0), call.get("high", 1.0)
    return torch.rand(x.shape, dtype=_kind(call, x.dtype), device=x.device) * (high - low) + low


@operator("Bernoulli", pure=False)
def bernoulli(call: Call, x: torch.Tensor) -> torch.Tensor:
    return torch.bernoulli(x).to(_kind(call, x.dtype))


@operator("Multinomial", pure=False)
def multinomial(call: Call, x: torch.Tensor) -> torch.Tensor:
    picked = torch.multinomial(torch.softmax(x, -1), call.get("sample_size", 1), replacement=True)
    return picked.to(_kind(call, torch.int32))
