"""The function that is compiled: a worker's turn, and the common update."""

from __future__ import annotations

import contextlib
import functools
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import outofcore
from outofcore.errors import CaptureError

_LIBRARIES = tuple(str(Path(package.__file__ or "").parent) + os.sep for package in (torch, outofcore))


def combine_phases(
    step: Callable[..., Any],
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    update: Callable[[], object] | None,
) -> Callable[..., Any]:
    """Return a function that updates the models if its first argument is true; otherwise it runs ``step``."""

    @functools.wraps(step, assigned=("__name__", "__qualname__", "__doc__"), updated=())
    def phase(updates: bool, /, *args: Any, **kwargs: Any) -> Any:
        if not updates:
            with contextlib.ExitStack() as stack:
                for optimizer in optimizers:
                    stack.enter_context(_without_step(optimizer))
                return step(*args, **kwargs)
        if update is not None:
            update()
        else:
            for optimizer in optimizers:
                optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        for model in models:
            model.zero_grad(set_to_none=True)
        return None

    return phase


@contextlib.contextmanager
def _without_step(optimizer: Optimizer) -> Iterator[None]:
    """Make ``optimizer.step`` raise ``CaptureError`` in the block."""
    attributes = vars(optimizer)
    before = attributes.get("step")
    attributes["step"] = _refuse_optimizer_step
    try:
        yield
    finally:
        if before is None:
            del attributes["step"]
        else:
            attributes["step"] = before


def _refuse_optimizer_step(*_: Any, **__: Any) -> None:
    raise _capture_error(
        "the step updates the parameters before the gradients of the other workers are there: outofcore.elastic() "
        "calls the optimizer once they are summed. End the step after loss.backward(), and pass work between sum and "
        "update, such as clipping, as a function: outofcore.elastic(..., update=...)."
    )


def _capture_error(text: str) -> CaptureError:
    frames = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None))
    place = next((f"{file}:{line}" for file, line in frames if not file.startswith(_LIBRARIES)), "")
    return CaptureError(f"{place}: {text}", place)
