"""Replace attributes temporarily, for the capturing thread alone, and restore them exactly."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

# Held while a step is captured or measured: captures replace functions of PyTorch, and ops measured side by side
# would slow each other down.
TURN = threading.RLock()


def capturing_thread() -> Callable[[], bool]:
    """Return a predicate: whether it is called in the current thread or in one of the autograd engine's."""
    here = threading.get_ident()
    # A thread that Python has not started is the engine's; it runs backward for the one that captures.
    return lambda: threading.get_ident() == here or threading.current_thread().name.startswith("Dummy-")


def class_method(owner: type, name: str) -> Callable[..., Any]:
    """Return a class method, written in Python or in C, as a function whose first argument is the class."""
    method = inspect.getattr_static(owner, name)
    return lambda cls, *args, **kwargs: method.__get__(None, cls)(*args, **kwargs)


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set ``owner.name`` to ``value`` and restore it afterwards; other threads go on calling the original.

    It works on ``owner.__dict__``: a method is restored as its descriptor, and an inherited attribute is deleted again.
    """
    own = vars(owner)
    existed, old = name in own, own.get(name)
    if isinstance(value, classmethod):
        replacement: Any = classmethod(_for_this_thread(value.__func__, class_method(owner, name)))
    else:
        replacement = _for_this_thread(value, old if existed else getattr(owner, name))
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if existed:
            setattr(owner, name, old)
        else:
            delattr(owner, name)


def _for_this_thread(value: Any, original: Any) -> Any:
    if not callable(value):
        return value
    ours = capturing_thread()

    def call(*args: Any, **kwargs: Any) -> Any:
        return value(*args, **kwargs) if ours() else original(*args, **kwargs)

    call.__dict__.update(vars(value))
    return call
