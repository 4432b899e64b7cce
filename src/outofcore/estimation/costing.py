"""Measure the costs of a step on this machine, or estimate them for another device.

The estimate is a roofline model of operations (of convolutions, matrix products and fused attention) and bytes (of all
inputs and outputs). The graph is captured on the CPU, which may fuse ops differently; workspace and caches are ignored.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch

from outofcore._torch_internals import OpOverload
from outofcore.capture.captured import CPU, Call, Captured, Ref
from outofcore.capture.collectives import Collective
from outofcore.capture.kernel_layouts import KernelLayouts
from outofcore.capture.operators import by_name
from outofcore.capture.shards import AssumedGroup, Shards
from outofcore.capture.tables import leaves_in
from outofcore.capture.value_errors import ops_that_may_raise
from outofcore.costs import Costs, Home, OpCost
from outofcore.estimation.repeating import Step
from outofcore.execution.backend import Backend
from outofcore.execution.opening import homes_of, open_backend
from outofcore.graph import Op, StepGraph
from outofcore.options import UserStep
from outofcore.presets import Device, Number, Work, simulated
from outofcore.profiling.cache import Cache, open_cache
from outofcore.profiling.groups import GroupCost
from outofcore.profiling.links import links_to
from outofcore.progress import Tell, silent
from outofcore.runtime.homes import HomeStore
from outofcore.step_variants import Split, StepVariants
from outofcore.transforms.fusing import fusing
from outofcore.transforms.kernels import Kernels
from outofcore.transforms.partial_sums import summing
from outofcore.units import MIB
from outofcore.variant import LOWEST_MEMORY, Variant, smallest_variant

_HALVES = frozenset({torch.float16, torch.bfloat16})
# The positions of both factors among the arguments.
_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
# Multiplies each group of rows by a matrix of its own.
_GROUPED = "_grouped_mm"
# Operators that allocate memory and run no kernel.
_ALLOCATES = frozenset(
    ("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided")
)


@dataclass(frozen=True)
class Sharing:
    """An assumed group of processes that share a model."""

    ranks: int
    cost: GroupCost  # of its collectives


@dataclass(frozen=True)
class LocalMachine:
    backend: Backend
    stores: Sequence[HomeStore] = ()  # homes with links to measure, nearest first
    cache: Cache | None = None  # of measurements


@contextmanager
def opened_place(
    device: str | None,
    home: str | os.PathLike[str] | None,
    host_budget: int | str | None,
    cache: bool | str | os.PathLike[str],
) -> Generator[LocalMachine | Device]:
    """Yield the preset that ``device`` names, or this machine with its homes open."""
    preset = simulated(device)
    if preset is not None:
        yield preset
        return
    backend, measurements = open_backend(device), open_cache(cache)
    with ExitStack() as stack:
        stores = homes_of(backend, home, host_budget)
        for store in stores:
            stack.callback(store.close)
        yield LocalMachine(backend, stores, measurements)


class Costed(NamedTuple):
    graph: StepGraph
    costs: Costs
    parts: tuple[StepGraph, Costs] | None = None  # with split ops, if these need less memory


def captured_variants(
    user: UserStep[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: LocalMachine | Device,
    kernels: Kernels | None,
    split: Split,
    tell: Tell = silent,
) -> StepVariants:
    """Capture a call of a step; takes the arguments and raises the errors of ``cost_step``."""
    if isinstance(target, Device):
        # Without the device, the rounding of an update of a range cannot be checked.
        local_backend, cache, layouts, home_bytes = None, None, None, 0
    else:
        local_backend, cache, layouts = target.backend, target.cache, KernelLayouts()
        home_bytes = target.stores[0].capacity if target.stores else None
    plain = user.capturing(args, kwargs, CPU if local_backend is None else local_backend.device, layouts)
    capture = summing(fusing(plain, kernels, tell), is_on=split is Split.CLOSE)
    return StepVariants(capture(), capture, local_backend, cache, split, home_bytes)


def costed(
    user: UserStep[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    where: LocalMachine | Device,
    *,
    tell: Tell,
    sharing: Sharing | None = None,
    kernels: Kernels | None = None,
    split: Split = Split.OFF,
) -> Costed:
    """Capture a step, and measure or estimate its costs without training; raises ``CaptureError``.

    If later calls differ from the first, return the step that needs the larger budget. ``sharing`` is the group that
    shards the models; the step is that of rank 0. ``kernels`` fuse ops. On another device all splits count as exact.
    """
    tell("capture the step", 0, 1)
    if sharing is not None:
        user = replace(user, shards=Shards(user.models, user.optimizers, AssumedGroup(sharing.ranks)))
    first = captured_variants(user, args, kwargs, where, kernels, split, tell)
    tell("capture the step", 1, 1)
    links: tuple[Home, ...] = ()
    if isinstance(where, LocalMachine):
        where.backend.prepare()
        first.costs(LOWEST_MEMORY, timed=True, advance=partial(tell, "measure ops"))
        tell("measure copies", 0, 1)
        links = links_to(where.stores, where.cache, where.backend, 64 * MIB)
        tell("measure copies", 1, 1)

    def costs_of(step: StepVariants, variant: Variant, stage: str) -> tuple[StepGraph, Costs]:
        captured = step.made(variant)
        if isinstance(where, Device):
            graph, costs = captured.graph.unwatched(), estimated_costs(captured, where)
        else:
            costs = step.costs(variant, timed=True, advance=partial(tell, stage))
            graph, costs = captured.graph, replace(costs, homes=links)
        return graph, _with_collectives(captured, costs, sharing)

    steps = _calls_of(first)
    whole = costs_of(_neediest(steps), LOWEST_MEMORY, "measure ops")
    if split is Split.OFF:
        return Costed(*whole)
    smallest = [(step, *smallest_variant(step)) for step in steps]
    smallest_step, variant, _ = max(smallest, key=lambda candidate: candidate[2])
    return Costed(*whole, None if variant.op_bytes is None else costs_of(smallest_step, variant, "measure split ops"))


def estimated_step(user: UserStep[..., Any], args: tuple[Any, ...], device: Device, tell: Tell = silent) -> Step:
    """Capture a step, and estimate its costs on another device; raises ``CaptureError``."""
    tell("capture the step", 0, 1)
    first = captured_variants(user, args, {}, device, None, Split.OFF, tell)
    captured = _neediest(_calls_of(first)).made(LOWEST_MEMORY)
    tell("capture the step", 1, 1)
    return Step(captured.graph.unwatched(), estimated_costs(captured, device), ops_that_may_raise(captured))


def _calls_of(first: StepVariants) -> list[StepVariants]:
    """Return the step of the first call, and that of later calls if it differs."""
    return [first] if first.later is None else [first, first.later]


def _neediest(steps: list[StepVariants]) -> StepVariants:
    return steps[0] if len(steps) == 1 else max(steps, key=lambda step: step.need(LOWEST_MEMORY) or 0)


def _with_collectives(captured: Captured, costs: Costs, sharing: Sharing | None) -> Costs:
    if sharing is None:
        return costs
    ops = [
        OpCost(sharing.cost.seconds(call.func)) if isinstance(call.func, Collective) else cost
        for call, cost in zip(captured.calls, costs.ops, strict=True)
    ]
    return replace(costs, ops=tuple(ops))


def estimated_costs(captured: Captured, device: Device) -> Costs:
    """Estimate the costs of a captured step on a device with host memory as its only home."""
    ops = [
        OpCost(_seconds(captured, op, call, device))
        for op, call in zip(captured.graph.ops, captured.calls, strict=True)
    ]
    return Costs(tuple(ops), (device.home(),))


def _seconds(captured: Captured, op: Op, call: Call, device: Device) -> float:
    values = [captured.values[index] for index in _values_of(call)]
    if not op.touched or not values or _only_allocates(call):
        return 0.0
    # Expanded dimensions, of stride 0, repeat the same bytes.
    moved = sum(
        value.dtype.itemsize * prod(size for size, stride in zip(value.shape, value.stride, strict=True) if stride)
        for value in values
        if prod(value.shape)
    )
    work, operations = operations_of(captured, op, call)
    return device.seconds(work, _number([value.dtype for value in values], work), operations, moved)


def _only_allocates(call: Call) -> bool:
    return isinstance(call.func, OpOverload) and call.func._schema.name in _ALLOCATES


def operations_of(captured: Captured, op: Op, call: Call) -> tuple[Work, float]:
    """Return an op's kind of work, and its number of additions and multiplications (0 if memory-bound)."""
    name = op.name.split(".")[1] if op.name.startswith("aten.") else ""
    shapes: list[tuple[int, ...]] = [
        captured.values[arg.value].shape if isinstance(arg, Ref) else () for arg in call.args
    ]
    if name.startswith("_scaled_dot_product"):
        # In the backward pass the gradient of the result comes before query and key.
        query, key = shapes[1:3] if "backward" in name else shapes[:2]
        products = 5 if "backward" in name else 2  # of matrices; the backward pass recomputes the scores
        # Fused kernels skip the masked half of causal attention.
        func = call.func
        causal = isinstance(func, OpOverload) and by_name(func, call.args, call.kwargs).get("is_causal")
        share = 0.5 if causal else 1.0
        return Work.ATTENTION, 2.0 * products * share * prod(query) * key[-2]
    if name == _GROUPED:
        # Forward, each row is multiplied by the weights of one expert; backward, all columns by all rows.
        left_shape, right_shape = shapes[:2]
        return Work.MATMUL, 2.0 * prod(left_shape) * right_shape[-1]
    if name in _PRODUCTS:
        left_shape, right_shape = (shapes[place] for place in _PRODUCTS[name])
        return Work.MATMUL, 2.0 * prod(left_shape) * right_shape[-1]
    if name in ("convolution", "_convolution"):
        transposed = call.args[6]
        result = captured.values[call.results[0]].shape if call.results[0] is not None else ()
        return Work.CONVOLUTION, _convolution(shapes[0] if transposed else result, shapes[1])
    if name == "convolution_backward":
        gradient, input_shape, weight = shapes[:3]
        transposed, needs_gradient = call.args[7], call.args[10]
        # One convolution for the gradient of the input, one for that of the weight.
        return Work.CONVOLUTION, sum(needs_gradient[:2]) * _convolution(input_shape if transposed else gradient, weight)
    return Work.STREAMING, 0.0


def _convolution(outer: tuple[int, ...], weight: tuple[int, ...]) -> float:
    """Count the operations of a convolution with this output shape (if transposed: input shape)."""
    return 2.0 * prod(outer) * prod(weight[1:])


def _number(dtypes: list[torch.dtype], work: Work) -> Number:
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    if floating and floating[0] in _HALVES:
        return Number.HALF
    # By default PyTorch allows TF32 for cuDNN and not for cuBLAS.
    return Number.TF32 if work is Work.CONVOLUTION else Number.FP32


def _values_of(call: Call) -> list[int]:
    """Return the distinct inputs and outputs of a call."""
    inputs = [ref.value for ref in leaves_in((call.args, call.kwargs), Ref)]
    return list(dict.fromkeys([*inputs, *(value for value in call.results if value is not None)]))
