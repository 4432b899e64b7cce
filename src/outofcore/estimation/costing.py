"""What a step costs, found out without training it: measured here, or worked out for a device that is not here.

For a device that is not here, operations and bytes are counted from shapes, and a roofline gives seconds. Operations
are counted for convolutions, products of matrices and fused attention; every other op is taken to be bound by memory.
Bytes are those of the tensors that an op is given and gives back, each once.

Limits: the graph is that of the CPU, so ops that a GPU would fuse or split otherwise count as they are
here; no workspace is assumed; caches do not help; tensor cores reach their share whatever the shapes.
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
# Where the two factors stand among the arguments.
_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
# Rows in groups, each by a matrix of its own.
_GROUPED = "_grouped_mm"
# Operators that allocate memory and run no kernel.
_ALLOCATES = frozenset(
    ("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided")
)


@dataclass(frozen=True)
class Sharing:
    """Processes that share a model, of which none has to be here.

    Attributes:
        ranks: how many there are.
        cost: of a collective among them.
    """

    ranks: int
    cost: GroupCost


@dataclass(frozen=True)
class LocalMachine:
    """This machine, where a step is measured.

    Attributes:
        backend: where the step is to run.
        stores: the homes whose links are measured, nearest first.
        cache: where measurements are kept.
    """

    backend: Backend
    stores: Sequence[HomeStore] = ()
    cache: Cache | None = None


@contextmanager
def opened_place(
    device: str | None,
    home: str | os.PathLike[str] | None,
    host_budget: int | str | None,
    cache: bool | str | os.PathLike[str],
) -> Generator[LocalMachine | Device]:
    """Yield where a step is costed: a device by the name of its preset, or this machine with its homes open."""
    preset = simulated(device)
    if preset is not None:
        yield preset
        return
    backend, kept = open_backend(device), open_cache(cache)
    with ExitStack() as stack:
        stores = homes_of(backend, home, host_budget)
        for store in stores:
            stack.callback(store.close)
        yield LocalMachine(backend, stores, kept)


class Costed(NamedTuple):
    """A step with what it costs.

    Attributes:
        graph: the step.
        costs: of its ops and homes.
        parts: the step with ops in parts and its costs, where that needs less memory.
    """

    graph: StepGraph
    costs: Costs
    parts: tuple[StepGraph, Costs] | None = None


def captured_variants(
    user: UserStep[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    where: LocalMachine | Device,
    kernels: Kernels | None,
    split: Split,
    tell: Tell = silent,
) -> StepVariants:
    """Capture a call of a step; arguments and errors are those of ``costed``."""
    if isinstance(where, Device):
        # How a device that is not here rounds a range of an update is not known.
        here, cache, layouts, home_bytes = None, None, None, 0
    else:
        here, cache, layouts = where.backend, where.cache, KernelLayouts()
        home_bytes = where.stores[0].capacity if where.stores else None
    plain = user.capturing(args, kwargs, CPU if here is None else here.device, layouts)
    capture = summing(fusing(plain, kernels, tell), is_on=split is Split.CLOSE)
    return StepVariants(capture(), capture, here, cache, split, home_bytes)


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
    """A step with what it costs: measured here, or worked out for a device that is not here. Nothing is trained.

    Where later calls are another step than the first (``step_variants``), it is the one that needs the larger budget.

    Args:
        user: the step, called with ``args`` and ``kwargs``.
        args: see there.
        kwargs: see there.
        where: this machine, or the device.
        tell: progress callback ``(stage, done, total)``.
        sharing: the processes over which the models are spread; the step is that of the first. None: they are not.
        kernels: with which ops that become one are compiled; None: none do.
        split: whether to look at ops in parts as well, and to take sums in parts; for a device that is not here, all
            parts are taken to be exact.

    Raises:
        CaptureError: the step cannot become one graph.
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
    one, variant, _ = max(smallest, key=lambda found: found[2])
    return Costed(*whole, None if variant.op_bytes is None else costs_of(one, variant, "measure split ops"))


def estimated_step(user: UserStep[..., Any], args: tuple[Any, ...], device: Device, tell: Tell = silent) -> Step:
    """Return a step with what it costs on a device that is not here, as ``costed`` does.

    Raises:
        CaptureError: the step cannot become one graph.
    """
    tell("capture the step", 0, 1)
    first = captured_variants(user, args, {}, device, None, Split.OFF, tell)
    captured = _neediest(_calls_of(first)).made(LOWEST_MEMORY)
    tell("capture the step", 1, 1)
    return Step(captured.graph.unwatched(), estimated_costs(captured, device), ops_that_may_raise(captured))


def _calls_of(first: StepVariants) -> list[StepVariants]:
    """Return the step as its first call runs it, and as later ones do if that is another."""
    return [first] if first.later is None else [first, first.later]


def _neediest(steps: list[StepVariants]) -> StepVariants:
    return steps[0] if len(steps) == 1 else max(steps, key=lambda step: step.need(LOWEST_MEMORY) or 0)


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
    """The costs on a device of a step that was captured anywhere; its only home is the host's memory."""
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
        products = 5 if "backward" in name else 2  # of matrices; backward computes the scores again
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
