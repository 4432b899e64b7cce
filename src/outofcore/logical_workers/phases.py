"""The function that is compiled: a worker's turn, and the update of all."""

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


def phases(
    step: Callable[..., Any],
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    update: Callable[[], object] | None,
) -> Callable[..., Any]:
    """Combine the two compiled functions: a worker's turn, and, if the argument is true, the update.

    As one step they share an arena, so that little moves between them. A turn that adds to the gradients of the one
    before is a capture of its own.
    """

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
    """Refuse calls of an optimizer's ``step``."""
    own = vars(optimizer)
    before = own.get("step")
    own["step"] = _refuse
    try:
        yield
    finally:
        if before is None:
            del own["step"]
        else:
            own["step"] = before


def _refuse(*_: Any, **__: Any) -> None:
    raise _refusal(
        "the step updates the parameters: the gradients of the other workers are not there yet: outofcore.elastic() "
        "calls the optimizer once they are summed; end the step after loss.backward(); what is to happen before the "
        "update, such as clipping, is a function for outofcore.elastic(..., update=...)."
    )


def _refusal(text: str) -> CaptureError:
    """Build an error at the user's line on the stack."""
    frames = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None))
    where = next((f"{file}:{line}" for file, line in frames if not file.startswith(_LIBRARIES)), "")
    return CaptureError(f"{where}: {text}", where)
