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
from outofcore.capture.operators import arguments_by_name
from outofcore.capture.shards import AssumedGroup, Shards
from outofcore.capture.tables import leaves_in
from outofcore.capture.value_errors import ops_that_may_raise
from outofcore.costs import Costs, Home, OpCost
from outofcore.estimation.repeating import CostedStep
from outofcore.execution.backend import Backend
from outofcore.execution.opening import open_backend, open_homes_of_backend
from outofcore.graph import Op, StepGraph
from outofcore.options import UserStep
from outofcore.presets import Device, Number, Work, simulated
from outofcore.profiling.cache import Cache, open_cache
from outofcore.profiling.groups import GroupCost
from outofcore.profiling.links import measure_homes
from outofcore.progress import ProgressCallback, ignore_progress
from outofcore.runtime.homes import HomeStore
from outofcore.step_variants import Split, StepVariants
from outofcore.transforms.fusing import capture_and_fuse
from outofcore.transforms.kernels import Kernels
from outofcore.transforms.partial_sums import capture_and_split_sums
from outofcore.units import MIB
from outofcore.variant import LOWEST_MEMORY, Variant, smallest_variant

_HALVES = frozenset({torch.float16, torch.bfloat16})
# The positions of both factors among the arguments.
_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
# Multiplies each group of rows by a matrix of its own.
_GROUPED_PRODUCT = "_grouped_mm"
# Operators that allocate memory and run no kernel.
_ALLOCATION_OPS = frozenset(
    ("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided")
)


@dataclass(frozen=True)
class AssumedSharding:
    """An assumed number of processes that shard a model, and the cost of their communication."""

    ranks: int
    cost: GroupCost  # of its collectives


@dataclass(frozen=True)
class LocalMachine:
    backend: Backend
    stores: Sequence[HomeStore] = ()  # homes with links to measure, nearest first
    cache: Cache | None = None  # of measurements


@contextmanager
def open_target(
    device: str | None,
    home: str | os.PathLike[str] | None,
    host_budget: int | str | None,
    cache: bool | str | os.PathLike[str],
) -> Generator[LocalMachine | Device]:
    """Open the machine to estimate for: a simulated device if ``device`` names one, otherwise this machine."""
    preset = simulated(device)
    if preset is not None:
        yield preset
        return
    backend, measurements = open_backend(device), open_cache(cache)
    with ExitStack() as stack:
        stores = open_homes_of_backend(backend, home, host_budget)
        for store in stores:
            stack.callback(store.close)
        yield LocalMachine(backend, stores, measurements)


class StepCosts(NamedTuple):
    graph: StepGraph
    costs: Costs
    parts: tuple[StepGraph, Costs] | None = None  # with split ops, if these need less memory


def capture_variants(
    user: UserStep[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: LocalMachine | Device,
    kernels: Kernels | None,
    split: Split,
    tell: ProgressCallback = ignore_progress,
) -> StepVariants:
    """Capture a step, and return its variants, such as whole or split; raises ``CaptureError``."""
    if isinstance(target, Device):
        # Without the device, the rounding of an update of a range cannot be checked.
        local_backend, cache, layouts, home_bytes = None, None, None, 0
    else:
        local_backend, cache, layouts = target.backend, target.cache, KernelLayouts()
        home_bytes = target.stores[0].capacity if target.stores else None
    capturer = user.capturer(args, kwargs, CPU if local_backend is None else local_backend.device, layouts)
    capture = capture_and_split_sums(capture_and_fuse(capturer, kernels, tell), is_on=split is Split.CLOSE)
    return StepVariants(capture(), capture, local_backend, cache, split, home_bytes)


def cost_step(
    user: UserStep[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: LocalMachine | Device,
    *,
    tell: ProgressCallback,
    sharing: AssumedSharding | None = None,
    kernels: Kernels | None = None,
    split: Split = Split.OFF,
) -> StepCosts:
    """Capture a step, and measure its costs on this machine or estimate them for a simulated device."""
    tell("capture the step", 0, 1)
    if sharing is not None:
        user = replace(user, shards=Shards(user.models, user.optimizers, AssumedGroup(sharing.ranks)))
    first = capture_variants(user, args, kwargs, target, kernels, split, tell)
    tell("capture the step", 1, 1)
    links: tuple[Home, ...] = ()
    if isinstance(target, LocalMachine):
        target.backend.prepare()
        first.costs(LOWEST_MEMORY, timed=True, advance=partial(tell, "measure ops"))
        tell("measure copies", 0, 1)
        links = measure_homes(target.stores, target.cache, target.backend, 64 * MIB)
        tell("measure copies", 1, 1)

    def costs_of(step: StepVariants, variant: Variant, stage: str) -> tuple[StepGraph, Costs]:
        """Return the graph of a variant, and its measured or estimated costs."""
        captured = step.get_variant(variant)
        if isinstance(target, Device):
            graph, costs = captured.graph.unwatched(), estimate_costs(captured, target)
        else:
            costs = step.costs(variant, timed=True, advance=partial(tell, stage))
            graph, costs = captured.graph, replace(costs, homes=links)
        return graph, _replace_collective_costs(captured, costs, sharing)

    # A budget must hold all calls of the step, so the call that needs most memory counts.
    steps = _distinct_calls(first)
    whole = costs_of(_largest_step(steps), LOWEST_MEMORY, "measure ops")
    if split is Split.OFF:
        return StepCosts(*whole)
    smallest = [(step, *smallest_variant(step)) for step in steps]
    smallest_step, variant, _ = max(smallest, key=lambda candidate: candidate[2])
    return StepCosts(
        *whole, None if variant.op_bytes is None else costs_of(smallest_step, variant, "measure split ops")
    )


def estimate_step(
    user: UserStep[..., Any], args: tuple[Any, ...], device: Device, tell: ProgressCallback = ignore_progress
) -> CostedStep:
    """Capture a step, and estimate the costs of its lowest-memory variant on a device; raises ``CaptureError``."""
    tell("capture the step", 0, 1)
    first = capture_variants(user, args, {}, device, None, Split.OFF, tell)
    captured = _largest_step(_distinct_calls(first)).get_variant(LOWEST_MEMORY)
    tell("capture the step", 1, 1)
    return CostedStep(captured.graph.unwatched(), estimate_costs(captured, device), ops_that_may_raise(captured))


def _distinct_calls(first: StepVariants) -> list[StepVariants]:
    return [first] if first.later is None else [first, first.later]


def _largest_step(steps: list[StepVariants]) -> StepVariants:
    return steps[0] if len(steps) == 1 else max(steps, key=lambda step: step.smallest_arena(LOWEST_MEMORY) or 0)


def _replace_collective_costs(captured: Captured, costs: Costs, sharing: AssumedSharding | None) -> Costs:
    """Return costs in which collective ops take the time that ``sharing`` assumes; the same costs without it."""
    if sharing is None:
        return costs
    ops = [
        OpCost(sharing.cost.seconds(call.func)) if isinstance(call.func, Collective) else cost
        for call, cost in zip(captured.calls, costs.ops, strict=True)
    ]
    return replace(costs, ops=tuple(ops))


def estimate_costs(captured: Captured, device: Device) -> Costs:
    """Estimate the costs of a captured step on a device with host memory as its only home."""
    ops = [
        OpCost(_op_seconds(captured, op, call, device))
        for op, call in zip(captured.graph.ops, captured.calls, strict=True)
    ]
    return Costs(tuple(ops), (device.home(),))


def _op_seconds(captured: Captured, op: Op, call: Call, device: Device) -> float:
    """Estimate the seconds of an op from its arithmetic and its bytes read and written; 0 for views and allocations."""
    values = [captured.values[index] for index in _inputs_and_outputs(call)]
    if not op.touched or not values or _is_allocation(call):
        return 0.0
    # Expanded dimensions, of stride 0, repeat the same bytes.
    moved = sum(
        value.dtype.itemsize * prod(size for size, stride in zip(value.shape, value.stride, strict=True) if stride)
        for value in values
        if prod(value.shape)
    )
    work, operations = count_operations(captured, op, call)
    return device.seconds(work, _number_format([value.dtype for value in values], work), operations, moved)


def _is_allocation(call: Call) -> bool:
    return isinstance(call.func, OpOverload) and call.func._schema.name in _ALLOCATION_OPS


def count_operations(captured: Captured, op: Op, call: Call) -> tuple[Work, float]:
    """Return the kind of work of an op, and its number of additions and multiplications (0 if memory-bound)."""
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
        causal = isinstance(func, OpOverload) and arguments_by_name(func, call.args, call.kwargs).get("is_causal")
        share = 0.5 if causal else 1.0
        return Work.ATTENTION, 2.0 * products * share * prod(query) * key[-2]
    if name == _GROUPED_PRODUCT:
        # Forward, each row is multiplied by the weights of one expert; backward, all columns by all rows.
        left_shape, right_shape = shapes[:2]
        return Work.MATMUL, 2.0 * prod(left_shape) * right_shape[-1]
    if name in _PRODUCTS:
        left_shape, right_shape = (shapes[place] for place in _PRODUCTS[name])
        return Work.MATMUL, 2.0 * prod(left_shape) * right_shape[-1]
    if name in ("convolution", "_convolution"):
        transposed = call.args[6]
        result = captured.values[call.results[0]].shape if call.results[0] is not None else ()
        return Work.CONVOLUTION, _convolution_operations(shapes[0] if transposed else result, shapes[1])
    if name == "convolution_backward":
        gradient, input_shape, weight = shapes[:3]
        transposed, needs_gradient = call.args[7], call.args[10]
        # One convolution for the gradient of the input, one for that of the weight.
        return Work.CONVOLUTION, sum(needs_gradient[:2]) * _convolution_operations(
            input_shape if transposed else gradient, weight
        )
    return Work.STREAMING, 0.0


def _convolution_operations(outer: tuple[int, ...], weight: tuple[int, ...]) -> float:
    """Count the operations of a convolution with this output shape (if transposed: input shape)."""
    return 2.0 * prod(outer) * prod(weight[1:])


def _number_format(dtypes: list[torch.dtype], work: Work) -> Number:
    """Return HALF if the first floating-point dtype has 16 bits, else TF32 for convolutions or FP32."""
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    if floating and floating[0] in _HALVES:
        return Number.HALF
    # By default PyTorch allows TF32 for cuDNN and not for cuBLAS.
    return Number.TF32 if work is Work.CONVOLUTION else Number.FP32


def _inputs_and_outputs(call: Call) -> list[int]:
    """Return the distinct inputs and outputs of a call, as indices of captured values."""
    inputs = [ref.value for ref in leaves_in((call.args, call.kwargs), Ref)]
    return list(dict.fromkeys([*inputs, *(value for value in call.results if value is not None)]))
