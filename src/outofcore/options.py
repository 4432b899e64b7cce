"""The user's step and the options of ``compile``, grouped as they are handed on to step, session and planner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from outofcore.capture import Captured, CaptureOptions, capture_step
from outofcore.capture.kernel_layouts import KernelLayouts
from outofcore.capture.shards import Shards
from outofcore.execution.backend import Backend
from outofcore.execution.opening import OpenHome
from outofcore.follow.loop import Loop
from outofcore.planning import Policy
from outofcore.profiling.cache import Cache
from outofcore.step_variants import Split
from outofcore.transforms.kernels import Kernels

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class UserStep(Generic[P, R]):
    """A training step in plain PyTorch, and all that it uses.

    Attributes:
        function: the step itself.
        models: all of them; where a step is only planned for, they may be on the device "meta".
        optimizers: all of them.
        shards: how the models are spread over processes; None: they are not.
    """

    function: Callable[P, R]
    models: Sequence[nn.Module]
    optimizers: Sequence[Optimizer]
    shards: Shards | None = None

    def capturing(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device,
        layouts: KernelLayouts | None,
        orders: Mapping[int, tuple[int, ...]] | None = None,
    ) -> Callable[..., Captured]:
        """Return what captures a call of the step, given ``gradients`` or nothing; all as for ``capture_step``."""
        options = CaptureOptions(self.shards, {} if orders is None else orders, layouts)
        return partial(capture_step, self.function, self.models, self.optimizers, args, kwargs, device, options=options)


@dataclass(frozen=True)
class MemoryOptions:
    """Where a step keeps its bytes: ``budget`` of them on the device, the others in ``home``."""

    budget: int
    home: OpenHome


@dataclass(frozen=True)
class PlanOptions:
    """How a step is planned.

    Attributes:
        policy: decides what leaves the device.
        split: whether ops that need more memory than there is may be split.
        cache: keeps measurements and plans; None: nothing is kept.
        repeats: whether a call may find the gradients that another of its kind has left.
    """

    policy: Policy
    split: Split = Split.EXACT
    cache: Cache | None = None
    repeats: bool = True


@dataclass(frozen=True)
class RunOptions:
    """How a step runs.

    Attributes:
        backend: the device.
        kernels: compiles fused ops; None: PyTorch's own kernels run.
        dynamic: whether calls are followed and not captured: always, never, or (None) from the second shape on.
        loop: makes the loop that follows calls; None: they cannot be followed.
    """

    backend: Backend
    kernels: Kernels | None = None
    dynamic: bool | None = False
    loop: Callable[[], Loop] | None = None
