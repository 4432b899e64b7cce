"""The forms of a trace that everything else works with.

They compute the same bits. Which is better depends on whether memory is short.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from outofcore.capture.captured import Captured
from outofcore.capture.reorder import hoisting, reordered
from outofcore.capture.reuse import reuse
from outofcore.capture.splitting import split
from outofcore.capture.step import capture_step
from outofcore.capture.together import together


def fastest(traced: Captured) -> Captured:
    """A trace for where memory is no matter: the ops as plain PyTorch runs them, but for what reuse saves.

    Updates in a row run faster than updates among other ops, whose code and data push theirs out of the caches.
    """
    return reuse(together(traced))


def leanest(traced: Captured) -> Captured:
    """A trace in the form that needs the least memory: what does two things in one is split, updates are moved up."""
    captured = reuse(split(traced))
    return reordered(captured, hoisting(captured))


def capture_whole(
    step: Callable[..., Any],
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device | None = None,
) -> Captured:
    """Capture a step (see ``capture_step``) in its leanest form.

    Raises:
        CaptureError: the step cannot become one graph.
    """
    return leanest(capture_step(step, models, optimizers, args, kwargs, device))
