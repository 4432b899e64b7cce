"""The user's step and the options of ``compile``, grouped for the step, the session and the planner."""

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
    """A training step in plain PyTorch, with its models and optimizers.

    Attributes:
        models: all of them; on the device ``meta`` if the step is only planned.
        shards: how the models are sharded over processes; None: they are not.
    """

    function: Callable[P, R]
    models: Sequence[nn.Module]
    optimizers: Sequence[Optimizer]
    shards: Shards | None = None

    def capturer(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device,
        layouts: KernelLayouts | None,
        orders: Mapping[int, tuple[int, ...]] | None = None,
    ) -> Callable[..., Captured]:
        """Return a function that captures a call of the step; see ``capture_step``."""
        options = CaptureOptions(self.shards, {} if orders is None else orders, layouts)
        return partial(capture_step, self.function, self.models, self.optimizers, args, kwargs, device, options=options)


@dataclass(frozen=True)
class MemoryOptions:
    """The device bytes of a step, and the home for its offloaded tensors."""

    budget: int
    home: OpenHome


@dataclass(frozen=True)
class PlanOptions:
    """How a step is planned.

    Attributes:
        split: whether ops that exceed the available memory may be split.
        cache: store for measurements and plans, if any.
        repeats: whether the budget must also hold a call that starts with the gradients of the previous one.
    """

    policy: Policy
    split: Split = Split.EXACT
    cache: Cache | None = None
    repeats: bool = True


@dataclass(frozen=True)
class RunOptions:
    """How a step runs.

    Attributes:
        kernels: compiles fused ops; None: PyTorch's own kernels run.
        dynamic: whether calls run as an eager loop: always, never, or (None) from the second input size on.
        loop: makes that eager loop; None: calls cannot run as one.
    """

    backend: Backend
    kernels: Kernels | None = None
    dynamic: bool | None = False
    loop: Callable[[], Loop] | None = None
