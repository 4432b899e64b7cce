"""Changes to PyTorch while loops are followed: the first loop makes them, and the last one undoes them exactly."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from outofcore._torch_internals import (
    OWN_OPTIMIZER_HOOKS,
    current_autograd_node,
)
from outofcore.capture.engine_calls import around_engine


class Overlapping:
    """A context that may be open several times at once, and closed in any order and thread.

    ``make`` returns the context that the first one enters and the last one exits.
    """

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
        self._make = make
        self._open = 0
        self._undo = contextlib.ExitStack()
        self._lock = threading.RLock()  # garbage collection, which ends lost loops, may come while it is held

    def __enter__(self) -> None:
        with self._lock:
            if self._open == 0:
                self._undo.enter_context(self._make())
            self._open += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._open -= 1
            if self._open == 0:
                self._undo.close()


@contextlib.contextmanager
def backward_passes_seen(ended: Callable[[bool], object]) -> Iterator[None]:
    """Call ``ended`` at the end of each backward pass, with whether it is complete.

    A pass that keeps its graph is incomplete, since another one follows; a failed one does not count. A nested pass,
    such as of a checkpoint, is a part of the outer one.
    """

    def seen(engine: Any, outputs: Any, gradients: Any, keep_graph: Any, *more: Any, **named: Any) -> Any:
        outermost, complete = current_autograd_node() is None, False
        try:
            result = engine(outputs, gradients, keep_graph, *more, **named)
            complete = not keep_graph
            return result
        finally:
            if outermost:
                ended(complete)

    with around_engine(seen):
        yield


class OptimizerHooks:
    """A context in which functions are called before and after each step of an optimizer, in all threads.

    They receive the optimizer, the step's arguments and its keyword arguments. PyTorch fails in a step of another
    thread if a hook is removed meanwhile, so the hooks stay while there are threads.
    """

    def __init__(self, before: Callable[..., None], after: Callable[..., None]) -> None:
        self._before, self._after = before, after
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> None:
        if not self._handles:
            self._handles = [
                register_optimizer_step_pre_hook(self._before),
                register_optimizer_step_post_hook(self._after),
            ]
            OWN_OPTIMIZER_HOOKS.update(handle.id for handle in self._handles)

    def __exit__(self, *_: object) -> None:
        if len(sys._current_frames()) > 1:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
