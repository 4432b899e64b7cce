"""Ops that do two things in one, as two ops, so that neither needs the memory of both.

The backward pass of a convolution computes the gradient of its input and those of its weight and bias by
separate kernels, one after the other. As two calls they compute the same bits, and the peak is that of the larger. The
half for the input's gradient takes nothing of the input but its shape, so that it need not be resident: a tensor
of the same shape stands in for it, on the memory of the result.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from outofcore.capture.captured import Call, Captured, Ref
from outofcore.graph import Op, StepGraph

_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default
_INPUT = 1  # the place of the input among the arguments
_MASK = 10  # the place of ``output_mask`` among the arguments


def split(captured: Captured) -> Captured:
    """The same step, to the bit, with every convolution's backward pass in two ops where it had both halves."""
    ops: list[Op] = []
    calls: list[Call] = []
    for op, call in zip(captured.graph.ops, captured.calls, strict=True):
        for part, part_call in _parts(captured, op, call):
            ops.append(replace(part, id=len(ops)))
            calls.append(part_call)
    graph = captured.graph
    return replace(captured, graph=StepGraph(graph.storages, tuple(ops), graph.outputs), calls=tuple(calls))


def _parts(captured: Captured, op: Op, call: Call) -> list[tuple[Op, Call]]:
    if call.func is not _CONVOLUTION_BACKWARD or len(call.args) <= _MASK or call.kwargs:
        return [(op, call)]
    wanted = [bool(flag) for flag in call.args[_MASK]]
    if not wanted[0] or not any(wanted[1:]) or len(call.results) != len(wanted):
        return [(op, call)]
    halves = (
        ([False, *wanted[1:]], (None, *call.results[1:])),
        ([True, False, False], (call.results[0], None, None)),
    )
    parts: list[tuple[Op, Call]] = []
    for mask, results in halves:
        args = [*call.args[:_MASK], mask, *call.args[_MASK + 1 :]]
        given, result = args[_INPUT], results[0]
        if mask[0] and result is not None and isinstance(given, Ref) and _alike(captured, given.value, result):
            args[_INPUT] = Ref(result)
        creates = dict.fromkeys(captured.values[v].storage for v in results if v is not None)
        used = {captured.values[a.value].storage for a in args if isinstance(a, Ref)}
        reads = tuple(s for s in op.reads if s in used)
        part = replace(op, reads=reads, creates=tuple(creates), family=f"{op.family}{mask}")
        parts.append((part, replace(call, args=tuple(args), results=tuple(results))))
    return parts


def _alike(captured: Captured, one: int, other: int) -> bool:
    """Whether two values are the same but for where they lie."""
    a, b = captured.values[one], captured.values[other]
    return (a.dtype, a.shape, a.stride) == (b.dtype, b.shape, b.stride)
