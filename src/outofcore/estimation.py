"""A step with what it costs, found out without training it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from outofcore._torch_internals import tree_flatten, tree_unflatten
from outofcore.capture.passes import capture_whole
from outofcore.costs import Costs
from outofcore.errors import InputError
from outofcore.execution.backend import Backend, CpuBackend
from outofcore.execution.homes import HomeStore
from outofcore.graph import StepGraph
from outofcore.presets import Device
from outofcore.profiling.cache import Cache
from outofcore.profiling.estimate import estimated_costs
from outofcore.profiling.links import links_to
from outofcore.profiling.ops import profile_ops
from outofcore.progress import Tell
from outofcore.units import MIB


@contextmanager
def given_memory(models: Sequence[nn.Module], inputs: Any) -> Generator[Any]:
    """Models without contents (on the device "meta") as models on the CPU, while the context lasts.

    Their memory is never written, so it takes no room. Yields the inputs likewise.
    """
    swapped: list[tuple[torch.Tensor, torch.Tensor]] = []
    states = {id(t): t for model in models for t in (*model.parameters(), *model.buffers())}
    try:
        for tensor in states.values():
            if tensor.is_meta:
                # The object stays the same: optimizers and the user's own variables know it.
                other = _filled(tensor)
                _swap(tensor, other)
                swapped.append((tensor, other))
        leaves, spec = tree_flatten(inputs)
        leaves = [_filled(leaf) if isinstance(leaf, torch.Tensor) and leaf.is_meta else leaf for leaf in leaves]
        yield tree_unflatten(leaves, spec)
    finally:
        if swapped:
            gc.collect()  # what the capture leaves behind still refers to the tensors, weakly
        for tensor, other in swapped:
            _swap(tensor, other)


def _swap(tensor: torch.Tensor, other: torch.Tensor) -> None:
    try:
        torch.utils.swap_tensors(tensor, other)
    except RuntimeError as error:
        raise InputError(
            f"a parameter of shape {tuple(tensor.shape)} on the device meta cannot be given memory for a while: "
            f"{error}; build the model anew, and estimate it before anything else uses it"
        ) from error


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


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
) -> tuple[StepGraph, Costs]:
    """A step with what it costs: measured here, or worked out for a device that is not here. Nothing is trained.

    Args:
        step: the user's own.
        models: all that it uses; they may be on the device "meta".
        optimizers: all that it uses.
        args: of the step.
        kwargs: of the step.
        where: the homes whose links are measured, nearest first, or the device.
        cache: where measurements are kept.
        tell: told how far things are.
        backend: where the step is to run, and ops are measured; None: on the CPU.

    Raises:
        CaptureError: the step cannot become one graph.
    """
    tell("capture", 0, 1)
    with given_memory(models, (args, kwargs)) as (given, named):
        return _costed(step, models, optimizers, given, named, where, cache, tell, backend or CpuBackend())


def _costed(
    step: Callable[..., Any],
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    where: Sequence[HomeStore] | Device,
    cache: Cache | None,
    tell: Tell,
    backend: Backend,
) -> tuple[StepGraph, Costs]:
    captured = capture_whole(step, models, optimizers, args, kwargs, backend.device)
    if backend.driver is not None:
        captured = captured.aligned(backend.alignment)
    tell("capture", 1, 1)
    if isinstance(where, Device):
        return captured.graph, estimated_costs(captured, where)
    backend.prepare()
    advance = partial(tell, "profile")
    profiles = profile_ops(captured, advance=advance, cache=cache, backend=backend)
    tell("measure the home", 0, 1)
    links = links_to(where, cache, backend, 64 * MIB)
    tell("measure the home", 1, 1)
    return captured.graph, Costs(tuple(profile.cost for profile in profiles), links)
