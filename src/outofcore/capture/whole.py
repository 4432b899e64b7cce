"""The capture that everything else works with: traced, and made to need less memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from outofcore.capture.captured import Captured
from outofcore.capture.reorder import hoisting, reordered
from outofcore.capture.reuse import reuse
from outofcore.capture.splitting import split
from outofcore.capture.step import capture_step


def capture_in_order(
    step: Callable[..., Any],
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Captured:
    """Capture a step (see ``capture_step``), split what does two things in one, and reuse memory.

    The ops are in the order in which plain PyTorch runs them.

    Raises:
        CaptureError: the step cannot become one graph.
    """
    return reuse(split(capture_step(step, models, optimizers, args, kwargs)))


def capture_whole(
    step: Callable[..., Any],
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Captured:
    """Capture a step as ``capture_in_order`` does, and move updates up: the order that needs the least memory.

    Raises:
        CaptureError: the step cannot become one graph.
    """
    captured = capture_in_order(step, models, optimizers, args, kwargs)
    return reordered(captured, hoisting(captured))
