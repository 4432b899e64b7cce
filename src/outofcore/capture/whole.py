"""The capture that everything else works with: traced, and brought into the order that needs the least memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from outofcore.capture.captured import Captured
from outofcore.capture.reorder import reorder
from outofcore.capture.splitting import split
from outofcore.capture.step import capture_step


def capture_whole(
    step: Callable[..., Any],
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Captured:
    """Capture a step (see ``capture_step``), split what does two things in one, and move updates up.

    Raises:
        CaptureError: the step cannot become one graph.
    """
    return reorder(split(capture_step(step, models, optimizers, args, kwargs)))
