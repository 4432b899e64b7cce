"""What each op would cost on a device that is not here: operations and bytes from shapes, and a roofline.

Operations are counted for convolutions, products of matrices and fused attention; every other op is
taken to be bound by memory. Bytes are those of the tensors that an op is given and gives back, each once.

Limits: the graph is that of the CPU, so ops that a GPU would fuse or split otherwise count as they are
here; no workspace is assumed; caches do not help; tensor cores reach their share whatever the shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch

from outofcore.capture.captured import Call, Captured, Ref
from outofcore.costs import Costs, OpCost
from outofcore.graph import Op
from outofcore.presets import Device, Number, Work

_HALVES = frozenset({torch.float16, torch.bfloat16})
# Where the two factors stand among the arguments.
_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
# Products of matrices in fused attention; backward computes the scores again.
_ATTENTION_FORWARD, _ATTENTION_BACKWARD = 2, 5


def blank_batch(sample: tuple[torch.Tensor, ...], batch: int) -> tuple[torch.Tensor, ...]:
    """A batch like a sample of one, with as many samples as wanted, and nothing written into it.

    Memory that is never touched takes no room, so this costs nothing however large the batch.
    """
    return tuple(torch.empty((batch, *tensor.shape[1:]), dtype=tensor.dtype) for tensor in sample)


def estimated_costs(captured: Captured, device: Device) -> Costs:
    """The costs of a captured step on a device; its only home is the host's memory.

    Args:
        captured: the step, captured anywhere.
        device: such as one of ``outofcore.presets``.
    """
    ops = [
        OpCost(_seconds(captured, op, call, device))
        for op, call in zip(captured.graph.ops, captured.calls, strict=True)
    ]
    return Costs(tuple(ops), (device.home(),))


def _seconds(captured: Captured, op: Op, call: Call, device: Device) -> float:
    values = [captured.values[index] for index in _values_of(call)]
    if not op.touched or not values:
        return 0.0
    # What is expanded is read from the same bytes again.
    moved = sum(
        value.dtype.itemsize * prod(size for size, stride in zip(value.shape, value.stride, strict=True) if stride)
        for value in values
        if prod(value.shape)
    )
    work, operations = operations_of(captured, op, call)
    return device.seconds(work, _number([value.dtype for value in values], work), operations, moved)


def operations_of(captured: Captured, op: Op, call: Call) -> tuple[Work, float]:
    """What kind of work an op is, and how many additions and multiplications it takes (0 where memory rules)."""
    name = op.name.split(".")[1] if op.name.startswith("aten.") else ""
    shapes: list[tuple[int, ...]] = [
        captured.values[arg.value].shape if isinstance(arg, Ref) else () for arg in call.args
    ]
    if name.startswith("_scaled_dot_product"):
        # Backward is given the gradient of the result before query and key.
        query, key = shapes[1:3] if "backward" in name else shapes[:2]
        products = _ATTENTION_BACKWARD if "backward" in name else _ATTENTION_FORWARD
        return Work.ATTENTION, 2.0 * products * prod(query) * key[-2]
    if name in _PRODUCTS:
        left, right = (shapes[place] for place in _PRODUCTS[name])
        return Work.MATMUL, 2.0 * prod(left) * right[-1]
    if name in ("convolution", "_convolution"):
        transposed = call.args[6]
        result = captured.values[call.results[0]].shape if call.results[0] is not None else ()
        return Work.CONVOLUTION, _convolution(shapes[0] if transposed else result, shapes[1])
    if name == "convolution_backward":
        gradient, given, weight = shapes[:3]
        transposed, wanted = call.args[7], call.args[10]
        # One convolution for the gradient of the input, one for that of the weight.
        return Work.CONVOLUTION, sum(wanted[:2]) * _convolution(given if transposed else gradient, weight)
    return Work.STREAMING, 0.0


def _convolution(outer: tuple[int, ...], weight: tuple[int, ...]) -> float:
    """Operations of a convolution with this result (of a transposed one: with this input)."""
    return 2.0 * prod(outer) * prod(weight[1:])


def _number(dtypes: list[torch.dtype], work: Work) -> Number:
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    if floating and floating[0] in _HALVES:
        return Number.HALF
    # PyTorch lets cuDNN take tf32, and cuBLAS not, unless told otherwise.
    return Number.TF32 if work is Work.CONVOLUTION else Number.FP32


def _values_of(call: Call) -> list[int]:
    """The values that a call is given and gives back, each once."""
    given = _refs((call.args, tuple(call.kwargs.values())))
    return list(dict.fromkeys([*given, *(value for value in call.results if value is not None)]))


def _refs(argument: Any) -> Iterator[int]:
    if isinstance(argument, Ref):
        yield argument.value
    elif isinstance(argument, list | tuple):
        for item in argument:
            yield from _refs(item)
