"""What followed loops change of PyTorch: the first loop changes it, and the last one puts it back exactly."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.hooks import RemovableHandle

from outofcore._torch_internals import (
    OWN_OPTIMIZER_HOOKS,
    current_autograd_node,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from outofcore.capture.engine_calls import around_engine


class Overlapping:
    """A context that may be open several times at once, and that is closed in any order and in any thread.

    Args:
        make: makes what the first one enters, and the last one leaves.
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
    """While in this context, ``ended`` is called when a backward pass has ended, and is told whether it is complete.

    One that keeps its graph is followed by another one; one that has failed is none. One inside of another, such as of
    a checkpoint, is a part of it.
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

    PyTorch fails in a step of another thread if a hook is removed meanwhile, so the hooks stay while there are threads.

    Args:
        before, after: called with the optimizer, its step's arguments and its keyword arguments.
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
