"""The options of a compiled step, grouped as ``compile`` hands them on to its step, session and planner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outofcore.execution.backend import Backend
from outofcore.execution.opening import OpenHome
from outofcore.follow.loop import Loop
from outofcore.planning import Policy
from outofcore.profiling.cache import Cache
from outofcore.step_variants import Split
from outofcore.transforms.kernels import Kernels


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
        is_alternating: whether calls of one kind never find the gradients that another of that kind has left.
    """

    policy: Policy
    split: Split = Split.EXACT
    cache: Cache | None = None
    is_alternating: bool = False


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
