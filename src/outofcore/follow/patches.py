"""What followed loops change of PyTorch: the first loop changes it, and the last one puts it back exactly."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from outofcore._torch_internals import BACKWARD_ENTRY_POINTS, current_autograd_node, not_compiled


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

    def wrapped(plain: Callable[..., Any]) -> Callable[..., Any]:
        @not_compiled
        @functools.wraps(plain)
        def run(outputs: Any, gradients: Any, keep_graph: Any, *args: Any, **kwargs: Any) -> Any:
            outermost, complete = current_autograd_node() is None, False
            try:
                result = plain(outputs, gradients, keep_graph, *args, **kwargs)
                complete = not keep_graph
                return result
            finally:
                if outermost:
                    ended(complete)

        return run

    ours = wrapped(getattr(*BACKWARD_ENTRY_POINTS[0]))
    plain = [(owner, name, getattr(owner, name)) for owner, name in BACKWARD_ENTRY_POINTS]
    for owner, name, _ in plain:
        setattr(owner, name, ours)
    try:
        yield
    finally:
        for owner, name, before in plain:
            if getattr(owner, name) is ours:  # else a step is being captured, which puts ours back
                setattr(owner, name, before)
