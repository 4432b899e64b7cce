"""What a step costs, found out without training it: measured here, or worked out for a device that is not here.

For a device that is not here, operations and bytes are counted from shapes, and a roofline gives seconds. Operations
are counted for convolutions, products of matrices and fused attention; every other op is taken to be bound by memory.
Bytes are those of the tensors that an op is given and gives back, each once.

Limits: the graph is that of the CPU, so ops that a GPU would fuse or split otherwise count as they are
here; no workspace is assumed; caches do not help; tensor cores reach their share whatever the shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from outofcore._torch_internals import OpOverload
from outofcore.capture.captured import Call, Captured, Ref
from outofcore.capture.collectives import Collective
from outofcore.capture.kernel_layouts import KernelLayouts
from outofcore.capture.operators import by_name
from outofcore.capture.shards import AssumedGroup, Shards
from outofcore.capture.step import CaptureOptions, capture_step
from outofcore.capture.tables import leaves_in
from outofcore.costs import Costs, Home, OpCost
from outofcore.execution.backend import Backend, CpuBackend
from outofcore.execution.homes import HomeStore
from outofcore.graph import Op, StepGraph
from outofcore.presets import Device, Number, Work
from outofcore.profiling.cache import Cache
from outofcore.profiling.groups import GroupCost
from outofcore.profiling.links import links_to
from outofcore.progress import Tell
from outofcore.step_variants import Split, StepVariants
from outofcore.transforms.fusing import fusing
from outofcore.transforms.kernels import Kernels
from outofcore.transforms.partial_sums import summing
from outofcore.units import MIB
from outofcore.variant import LOWEST_MEMORY, Variant, smallest_variant

_HALVES = frozenset({torch.float16, torch.bfloat16})
# Where the two factors stand among the arguments.
_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
# Rows in groups, each by a matrix of its own.
_GROUPED = "_grouped_mm"
# Operators that allocate memory and run no kernel.
_ALLOCATES = frozenset(
    ("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided")
)
# Products of matrices in fused attention; backward computes the scores again.
_ATTENTION_FORWARD, _ATTENTION_BACKWARD = 2, 5


@dataclass(frozen=True)
class Sharing:
    """Processes that share a model, of which none has to be here.

    Attributes:
        ranks: how many there are.
        cost: of a collective among them.
    """

    ranks: int
    cost: GroupCost


class Costed(NamedTuple):
    """A step with what it costs.

    Attributes:
        graph: the step.
        costs: of its ops and homes.
        parts: the step with ops in parts, where that needs less memory.
        parts_costs: of the parts.
    """

    graph: StepGraph
    costs: Costs
    parts: StepGraph | None = None
    parts_costs: Costs | None = None


def costed(
    step: Callable[..., Any],
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    where: Sequence[HomeStore] | Device,
    cache: Cache | None,
    tell: Tell,
    backend: Backend | None = None,
    sharing: Sharing | None = None,
    kernels: Kernels | None = None,
    split: Split = Split.OFF,
) -> Costed:
    """A step with what it costs: measured here, or worked out for a device that is not here. Nothing is trained.

    Where later calls are another step than the first (``step_variants``), it is the one that needs the larger budget.

    Args:
        step: the user's own.
        models: all that it uses; they may be on the device "meta".
        optimizers: all that it uses.
        args: of the step.
        kwargs: of the step.
        where: the homes whose links are measured, nearest first, or the device.
        cache: where measurements are kept.
        tell: progress callback ``(stage, done, total)``.
        backend: where the step is to run, and ops are measured; None: on the CPU.
        sharing: the processes over which the models are spread; the step is that of the first. None: they are not.
        kernels: with which ops that become one are compiled; None: none do.
        split: whether to look at ops in parts as well, and to take sums in parts; for a device that is not here, all
            parts are taken to be exact.

    Raises:
        CaptureError: the step cannot become one graph.
    """
    tell("capture", 0, 1)
    backend = backend or CpuBackend()
    shards = None if sharing is None else Shards(models, optimizers, AssumedGroup(sharing.ranks))
    layouts = None if isinstance(where, Device) else KernelLayouts()
    given = (step, models, optimizers, args, kwargs)
    plain = partial(capture_step, *given, backend.device, options=CaptureOptions(shards, layouts=layouts))
    capture = summing(fusing(plain, kernels, tell), is_on=split is Split.CLOSE)
    here = None if isinstance(where, Device) else backend
    # How a device that is not here rounds a range of an update is not known.
    home_bytes = 0 if isinstance(where, Device) else where[0].capacity if where else None
    first = StepVariants(capture(), capture, here, cache, split, home_bytes)
    tell("capture", 1, 1)
    links: tuple[Home, ...] = ()
    if not isinstance(where, Device):
        backend.prepare()
        first.costs(LOWEST_MEMORY, timed=True, advance=partial(tell, "profile"))
        tell("measure the home", 0, 1)
        links = links_to(where, cache, backend, 64 * MIB)
        tell("measure the home", 1, 1)

    def costs_of(step: StepVariants, variant: Variant, stage: str) -> tuple[StepGraph, Costs]:
        captured = step.made(variant)
        if isinstance(where, Device):
            graph, costs = captured.graph.unwatched(), estimated_costs(captured, where)
        else:
            costs = step.costs(variant, timed=True, advance=partial(tell, stage))
            graph, costs = captured.graph, replace(costs, homes=links)
        return graph, _with_collectives(captured, costs, sharing)

    steps = [first] if first.later is None else [first, first.later]
    needs = {step.is_later: step.need(LOWEST_MEMORY) or 0 for step in steps}
    one = max(steps, key=lambda step: needs[step.is_later])
    whole = costs_of(one, LOWEST_MEMORY, "profile")
    if split is Split.OFF:
        return Costed(*whole)
    smallest = [(step, *smallest_variant(step)) for step in steps]
    one, variant, _ = max(smallest, key=lambda found: found[2])
    return Costed(*whole) if variant.op_bytes is None else Costed(*whole, *costs_of(one, variant, "profile parts"))


def _with_collectives(captured: Captured, costs: Costs, sharing: Sharing | None) -> Costs:
    """The costs with what collectives take among processes that share a model."""
    if sharing is None:
        return costs
    ops = [
        OpCost(sharing.cost.seconds(call.func)) if isinstance(call.func, Collective) else cost
        for call, cost in zip(captured.calls, costs.ops, strict=True)
    ]
    return replace(costs, ops=tuple(ops))


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
    if not op.touched or not values or _only_allocates(call):
        return 0.0
    # What is expanded is read from the same bytes again.
    moved = sum(
        value.dtype.itemsize * prod(size for size, stride in zip(value.shape, value.stride, strict=True) if stride)
        for value in values
        if prod(value.shape)
    )
    work, operations = operations_of(captured, op, call)
    return device.seconds(work, _number([value.dtype for value in values], work), operations, moved)


def _only_allocates(call: Call) -> bool:
    """Whether an operator allocates its result and writes nothing to it."""
    return isinstance(call.func, OpOverload) and call.func._schema.name in _ALLOCATES


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
        # Fused kernels leave out what causal attention does not look at.
        func = call.func
        causal = isinstance(func, OpOverload) and by_name(func, call.args, call.kwargs).get("is_causal")
        share = 0.5 if causal else 1.0
        return Work.ATTENTION, 2.0 * products * share * prod(query) * key[-2]
    if name == _GROUPED:
        # Rows by experts' weights, of which each row meets one; or, backward, columns by rows, all of which meet.
        left, right = shapes[:2]
        return Work.MATMUL, 2.0 * prod(left) * right[-1]
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
    given = [ref.value for ref in leaves_in((call.args, call.kwargs), Ref)]
    return list(dict.fromkeys([*given, *(value for value in call.results if value is not None)]))
