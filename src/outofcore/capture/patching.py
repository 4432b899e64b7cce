"""Replace attributes temporarily, for the capturing thread alone."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

# Held while a step is captured or measured. Captures replace functions of PyTorch, and measurements that run
# concurrently would distort each other.
CAPTURE_LOCK = threading.RLock()


def capturing_thread() -> Callable[[], bool]:
    """Return a predicate that is true in the thread that calls this, and in threads of the autograd engine."""
    creator = threading.get_ident()
    # Threads that Python has not started are the engine's, which runs backward for the capturing thread.
    return lambda: threading.get_ident() == creator or threading.current_thread().name.startswith("Dummy-")


def class_method(owner: type, name: str) -> Callable[..., Any]:
    """Return the class method ``name`` as a function that takes the class as first argument."""
    method = inspect.getattr_static(owner, name)
    return lambda cls, *args, **kwargs: method.__get__(None, cls)(*args, **kwargs)


@contextlib.contextmanager
def patch_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace ``owner.name`` by ``value`` within the context; other threads still call the original."""
    attributes = vars(owner)
    existed, old = name in attributes, attributes.get(name)
    if isinstance(value, classmethod):
        replacement: Any = classmethod(_restrict_to_thread(value.__func__, class_method(owner, name)))
    else:
        replacement = _restrict_to_thread(value, old if existed else getattr(owner, name))
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if existed:
            setattr(owner, name, old)
        else:
            delattr(owner, name)


def _restrict_to_thread(value: Any, original: Any) -> Any:
    """Return a function that calls ``value`` in this thread and its backward pass, ``original`` elsewhere."""
    if not callable(value):
        return value
    is_capturing = capturing_thread()

    def call(*args: Any, **kwargs: Any) -> Any:
        return value(*args, **kwargs) if is_capturing() else original(*args, **kwargs)

    call.__dict__.update(vars(value))
    return call
