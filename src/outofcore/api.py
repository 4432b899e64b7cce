"""The library as its users see it: ``compile`` a training step under a byte budget, and call it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from outofcore import planning
from outofcore.capture.whole import capture_whole
from outofcore.costs import Costs
from outofcore.errors import InputError
from outofcore.execution.homes import DiskHome, HomeStore, HostHome
from outofcore.profiling.cache import open_cache
from outofcore.profiling.kept import OpProfile
from outofcore.profiling.ops import profile_ops
from outofcore.step import Step, StepStats
from outofcore.units import parse_bytes


def _as_list(given: Any, kind: type, what: str) -> list[Any]:
    if given is None:
        return []
    items = list(given) if isinstance(given, Iterable) and not isinstance(given, kind) else [given]
    for item in items:
        if not isinstance(item, kind):
            raise InputError(
                f"{what} must be a {kind.__module__}.{kind.__qualname__} or a list of them, not {type(item).__name__}"
            )
    return items


def _open_home(home: str | os.PathLike[str] | None) -> HomeStore:
    if home is None or home == "disk":
        return DiskHome()
    if home == "host":
        return HostHome()
    return DiskHome(Path(home))


def _check_devices(models: Sequence[nn.Module], device: str | torch.device | None) -> None:
    wanted = torch.device(device) if device is not None else torch.device("cpu")
    if wanted.type != "cpu":
        raise InputError(
            f"this version runs on the CPU only, and device={str(wanted)!r} was asked for; leave 'device' out"
        )
    for number, model in enumerate(models):
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.device.type != wanted.type:
                which = f"model {number}: " if len(models) > 1 else ""
                raise InputError(
                    f"{which}{name} is on {tensor.device} and the step is to run on {wanted}; "
                    f"move the model there first: model.to({str(wanted)!r})"
                )


def compile(
    step: Callable[..., Any],
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    budget: int | str,
    device: str | torch.device | None = None,
    home: str | os.PathLike[str] | None = None,
    policy: str = "auto",
    cache: bool | str | os.PathLike[str] = True,
) -> Step:
    """Make a training step run within a byte budget, bit for bit as it does in plain PyTorch.

    Args:
        step: the training step: any function of pytrees of tensors and constants, that may run forward,
            backward, clip, update and clear gradients, and returns what it likes. It is not changed.
        model: the module that the step trains or uses, or a list of all of them.
        optimizer: the optimizer that the step calls, a list of them, or None.
        budget: device bytes for all tensors of the step, as a number or as text such as "6GiB".
        device: "cpu"; by default that.
        home: where bytes live that are not on the device: "host", "disk", or a folder on a disk.
            By default "disk".
        policy: how to plan; one of ``outofcore.planning.POLICIES``.
        cache: where measurements of ops and links are kept for later processes: a folder, True for the user's
            own (``$XDG_CACHE_HOME/outofcore/measured``), or False for nowhere.

    Returns:
        The step, to be called as the one given. Nothing is captured before its first call.

    Raises:
        InputError: an argument cannot be used; ``UnitError`` and ``SpillError`` are kinds of it.
    """
    if not callable(step):
        raise InputError(f"step must be a function, not {type(step).__name__}")
    models = _as_list(model, nn.Module, "model")
    optimizers = _as_list(optimizer, Optimizer, "optimizer")
    count = parse_bytes(budget)
    if policy not in planning.POLICIES:
        raise InputError(f"there is no policy {policy!r}; choose one of {', '.join(planning.POLICIES)}")
    _check_devices(models, device)
    kept = open_cache(cache)
    return Step(step, models, optimizers, count, _open_home(home), policy, kept)


def minimum_budget(
    step: Callable[..., Any],
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    inputs: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    device: str | torch.device | None = None,
    cache: bool | str | os.PathLike[str] = True,
) -> int:
    """The smallest budget in bytes with which ``compile`` can run the step on these inputs.

    Each family of ops is run once on scratch tensors to learn its workspace; nothing of the user's is changed.

    Args:
        step: as for ``compile``.
        model: as for ``compile``.
        optimizer: as for ``compile``.
        inputs: the positional arguments of the step.
        kwargs: its keyword arguments.
        device: as for ``compile``.
        cache: as for ``compile``.

    Raises:
        InputError: an argument cannot be used.
        CaptureError: the step cannot become one graph.
    """
    models = _as_list(model, nn.Module, "model")
    optimizers = _as_list(optimizer, Optimizer, "optimizer")
    _check_devices(models, device)
    kept = open_cache(cache)
    captured = capture_whole(step, models, optimizers, inputs, kwargs or {})
    profiles = profile_ops(captured, measure_time=False, cache=kept)
    return planning.smallest_budget(captured.graph, _costs(profiles))


def _costs(profiles: Sequence[OpProfile]) -> Costs:
    return Costs(tuple(profile.cost for profile in profiles))


__all__ = ["Step", "StepStats", "compile", "minimum_budget"]
