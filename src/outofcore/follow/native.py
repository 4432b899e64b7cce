"""The native code that follows loops (``paging.cpp``): who has the dispatch key, and what its errors mean.

The libraries of both devices use one dispatch key, which belongs to the one whose loop was started last.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable

import torch

from outofcore._torch_internals import has_python_kernel, storage_address
from outofcore.compiling import native_callback
from outofcore.errors import SpillError, StateError, TransferError
from outofcore.runtime.mapped_files import OWNERS
from outofcore.runtime.native import Flavor, load_unlocked

# By the type of the device whose tensors it follows.
_FLAVORS = {flavor.value: flavor for flavor in Flavor}

_OURS = "outofcore: "  # how messages from paging.cpp begin
# Error classes by the words in a message; all others are TransferErrors.
_ERRORS: dict[str, type[Exception]] = {
    "no home has room": SpillError,
    "the system gave no memory": MemoryError,
    "the system gives no thread": StateError,
    "addresses": StateError,
}

# By which ops are seen: ``kKey`` in space.h.
DISPATCH_KEY = "Fake"


def _has_python_kernel(name: bytes, overload: bytes) -> int:
    return has_python_kernel(name.decode(), overload.decode())


_is_python = native_callback(_has_python_kernel, ctypes.c_char_p, ctypes.c_char_p, failed=0)


class _Key:
    """Which of the libraries has the dispatch key; it stays there until another one needs it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holder: ctypes.CDLL | None = None
        self.loaded: dict[Flavor, ctypes.CDLL] = {}


_key = _Key()


def flavor_of(device: torch.device) -> Flavor | None:
    """Return the flavor that follows tensors of a device; None if there is none."""
    return _FLAVORS.get(device.type)


def loaded_paging(device: torch.device) -> ctypes.CDLL | None:
    """Return the library for the tensors of a device if this process has loaded it."""
    flavor = flavor_of(device)
    return None if flavor is None else _key.loaded.get(flavor)


def loaded_pagings() -> list[ctypes.CDLL]:
    return list(_key.loaded.values())


def load_paging(flavor: Flavor = Flavor.CPU) -> ctypes.CDLL:
    """Load the library of this process, to follow loops with it; raises ``StateError``."""
    return _loaded(flavor)


@functools.cache
def _loaded(flavor: Flavor) -> ctypes.CDLL:
    library = load_unlocked(flavor)
    with _key.lock:
        if _key.holder is None:
            _take_key(library)
        _key.loaded[flavor] = library
    OWNERS.append(lambda storage: library.follow_where(storage_address(storage)) != 0)
    return library


def open_paging(library: ctypes.CDLL, space: object, beside: bool) -> None:
    """Begin to follow with a library, which gets the dispatch key; raises ``StateError``."""
    with _key.lock:
        if _key.holder is not library:
            if is_followed():
                raise StateError("a loop is followed already, on another device; stop() it first")
            if _key.holder is not None:
                _key.holder.follow_unload()
                _key.holder = None
            _take_key(library)
        call(library, "follow_open", space, int(beside))


def _take_key(library: ctypes.CDLL) -> None:
    if call(library, "follow_load", _is_python) != 0:
        raise StateError(
            f"torch {torch.__version__} uses the dispatch key for itself by which loops are followed; "
            "use outofcore.compile, or another release of torch"
        )
    _key.holder = library


# What native code calls must stay there.
_trampolines: list[object] = []


def trampoline(number: int, tell: Callable[[tuple[object, ...]], int], function: int) -> int:
    """Return the address of a C function that reports each call's arguments to ``tell``, and then calls another one.

    ``number`` is 0 or 1: there is one of each at a time. ``function`` is the address of the other; it takes a tuple and
    a dictionary.
    """
    callback = native_callback(tell, ctypes.py_object, failed=0)
    _trampolines.append(callback)
    return loaded_pagings()[0].follow_told(number, function, callback)


def has_pieces() -> bool:
    """Return whether a tensor is in memory of a loop, even of one that has ended."""
    return any(library.follow_pieces() for library in loaded_pagings())


def is_followed() -> bool:
    """Return whether any thread is followed now."""
    return any(library.follow_current() for library in _key.loaded.values())


def call(library: ctypes.CDLL, function: str, *arguments: object) -> int:
    """Call a native function that may fail.

    Raises ``SpillError`` if no home has room, ``TransferError`` for a failed copy, ``MemoryError`` if the system gave
    no memory, and ``StateError`` for any other reason.
    """
    result = getattr(library, function)(*arguments)
    if result == -1 or result is None:
        text = library.follow_failure().decode(errors="replace")
        raise error_of(text) or StateError(text)
    return result


REFUSAL_FIELDS = ("budget", "asked", "used", "kept", "least", "small", "smallest", "beside", "sums", "parameter")


class Refusal(ctypes.Structure):
    """The numbers of what a budget has refused; as ``Numbers`` in refusals.h."""

    _fields_ = tuple((name, ctypes.c_int64) for name in REFUSAL_FIELDS)


def refusal_of(text: str) -> tuple[str, Refusal] | None:
    """Return the op that a budget could not hold, with the numbers, by the text of the error; None for any other."""
    numbers = Refusal()
    for library in loaded_pagings():
        op: bytes | None = library.follow_refusal(text.encode(errors="replace"), ctypes.byref(numbers))
        if op is not None:
            return op.decode(errors="replace"), numbers
    return None


def error_of(text: str) -> Exception | None:
    """Return the error that a message of the native code stands for; None if it is not one of its messages.

    What the budget refused, ``explained`` in failures.py explains.
    """
    at = text.find(_OURS)
    if at < 0 or refusal_of(text) is not None:
        return None
    said = text[at + len(_OURS) :].splitlines()[0]
    for words, kind in _ERRORS.items():
        if words in said:
            return kind(said)
    return TransferError(said)
