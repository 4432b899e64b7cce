"""Wrap calls of the autograd engine from Python in layers of captures and eager loops."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from outofcore._torch_internals import BACKWARD_ENTRY_POINTS, not_compiled

# Called with the wrapped call and its arguments.
Layer = Callable[..., Any]


class _Layers:
    """Wrappers around the autograd engine's entry points, outermost last. Any of them can be removed."""

    def __init__(self) -> None:
        self._plain = [(owner, name, getattr(owner, name)) for owner, name in BACKWARD_ENTRY_POINTS]
        self._layers: tuple[Layer, ...] = ()
        plain = self._plain[0][2]

        @not_compiled
        @functools.wraps(plain)
        def run(*args: Any, **kwargs: Any) -> Any:
            call = plain
            for layer in self._layers:
                call = functools.partial(layer, call)
            return call(*args, **kwargs)

        self._run = run
        for owner, name, _ in self._plain:
            setattr(owner, name, run)

    def add(self, layer: Layer) -> None:
        self._layers = (*self._layers, layer)

    def remove(self, layer: Layer) -> bool:
        """Remove a layer; if no layer is left, restore the engine's entry points and return True."""
        self._layers = tuple(added for added in self._layers if added is not layer)
        if not self._layers:
            for owner, name, plain in self._plain:
                if getattr(owner, name) is self._run:  # else another library has wrapped it in the meantime
                    setattr(owner, name, plain)
        return not self._layers


_installed: list[_Layers] = []
_lock = threading.RLock()  # reentrant: garbage collection may end an abandoned loop while this thread holds it


@contextlib.contextmanager
def wrap_engine_calls(layer: Layer) -> Iterator[None]:
    """Route calls of the autograd engine through ``layer`` within this context."""
    # Contexts may end in any order and in any thread.
    with _lock:
        if not _installed:
            _installed.append(_Layers())
        layers = _installed[0]
        layers.add(layer)
    try:
        yield
    finally:
        with _lock:
            if layers.remove(layer):
                _installed.remove(layers)
