"""The native code of eager loops (``paging.cpp``): its libraries, which share one dispatch key, and its errors."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable

import torch

from outofcore._torch_internals import has_python_kernel, storage_address
from outofcore.compiling import native_callback
from outofcore.errors import SpillError, StateError, TransferError
from outofcore.runtime.mapped_files import OWNERSHIP_TESTS
from outofcore.runtime.native import Flavor, load_unlocked

# Keyed by device type.
_FLAVORS = {flavor.value: flavor for flavor in Flavor}

_MESSAGE_PREFIX = "outofcore: "  # prefix of messages from paging.cpp
# Exception classes, by a fragment of the message; any other message becomes a TransferError.
_ERRORS: dict[str, type[Exception]] = {
    "no home has room": SpillError,
    "the system gave no memory": MemoryError,
    "the system gives no thread": StateError,
    "addresses": StateError,
}

# The dispatch key that intercepts ops: ``kKey`` in space.h.
DISPATCH_KEY = "Fake"


def _has_python_kernel(name: bytes, overload: bytes) -> int:
    return has_python_kernel(name.decode(), overload.decode())


_is_python = native_callback(_has_python_kernel, ctypes.c_char_p, ctypes.c_char_p, failed=0)


class _DispatchKey:
    """The dispatch key that intercepts ops; its owner is the library with the kernels registered under it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner: ctypes.CDLL | None = None
        self.loaded: dict[Flavor, ctypes.CDLL] = {}


_key = _DispatchKey()


def flavor_of(device: torch.device) -> Flavor | None:
    """Return the flavor of the library for tensors of a device; None if no library supports it."""
    return _FLAVORS.get(device.type)


def loaded_library(device: torch.device) -> ctypes.CDLL | None:
    flavor = flavor_of(device)
    return None if flavor is None else _key.loaded.get(flavor)


def loaded_libraries() -> list[ctypes.CDLL]:
    return list(_key.loaded.values())


def load_paging(flavor: Flavor = Flavor.CPU) -> ctypes.CDLL:
    """Return the native code for the CPU or for CUDA, loaded once per process."""
    return _load_once(flavor)


@functools.cache
def _load_once(flavor: Flavor) -> ctypes.CDLL:
    """Load the native code for the CPU or for CUDA, and register its kernels if it is loaded first."""
    library = load_unlocked(flavor)
    with _key.lock:
        if _key.owner is None:
            _register_kernels(library)
        _key.loaded[flavor] = library
    OWNERSHIP_TESTS.append(lambda storage: library.follow_where(storage_address(storage)) != 0)
    return library


def open_space(library: ctypes.CDLL, space: object, for_compiled_step: bool) -> None:
    """Start or resume the native code of a loop; raises ``StateError`` if another loop is open."""
    with _key.lock:
        if _key.owner is not library:
            if is_any_loop_running():
                raise StateError("a loop is running already, on another device; stop() it first")
            if _key.owner is not None:
                _key.owner.follow_unload()
                _key.owner = None
            _register_kernels(library)
        call(library, "follow_open", space, int(for_compiled_step))


def _register_kernels(library: ctypes.CDLL) -> None:
    """Register a library's kernels with PyTorch; raises ``StateError`` if PyTorch uses their dispatch key."""
    if call(library, "follow_load", _is_python) != 0:
        raise StateError(
            f"torch {torch.__version__} itself uses the dispatch key that outofcore.budget() needs; "
            "use outofcore.compile, or another release of torch"
        )
    _key.owner = library


# Keeps the callbacks alive: native code has their addresses.
_trampolines: list[object] = []


def make_trampoline(number: int, report: Callable[[tuple[object, ...]], int], function: int) -> int:
    """Return the address of a C function that passes its arguments to ``report`` and then calls ``function``."""
    # ``number`` is 0 or 1, and there is one trampoline for each; ``function`` takes a tuple and a dictionary.
    callback = native_callback(report, ctypes.py_object, failed=0)
    _trampolines.append(callback)
    return loaded_libraries()[0].follow_told(number, function, callback)


def has_loop_tensors() -> bool:
    """Return whether any tensor is in memory of a loop, even of one that has ended."""
    return any(library.follow_pieces() for library in loaded_libraries())


def is_any_loop_running() -> bool:
    return any(library.follow_current() for library in _key.loaded.values())


def call(library: ctypes.CDLL, function: str, *arguments: object) -> int:
    """Call a native function; raises ``SpillError``, ``TransferError``, ``MemoryError`` or ``StateError``."""
    result = getattr(library, function)(*arguments)
    if result == -1 or result is None:
        text = library.follow_failure().decode(errors="replace")
        raise error_of(text) or StateError(text)
    return result


REFUSAL_FIELDS = ("budget", "asked", "used", "kept", "least", "small", "smallest", "reserved", "sums", "parameter")


class Refusal(ctypes.Structure):
    """The numbers of a refused op; mirrors ``Numbers`` in refusals.h."""

    _fields_ = tuple((name, ctypes.c_int64) for name in REFUSAL_FIELDS)


def refusal_of(text: str) -> tuple[str, Refusal] | None:
    """Return the op and the byte counts in an out-of-budget error's text; None for any other text."""
    numbers = Refusal()
    for library in loaded_libraries():
        op: bytes | None = library.follow_refusal(text.encode(errors="replace"), ctypes.byref(numbers))
        if op is not None:
            return op.decode(errors="replace"), numbers
    return None


def error_of(text: str) -> Exception | None:
    """Return the library exception for a native error's text; None for out-of-budget and other texts."""
    start = text.find(_MESSAGE_PREFIX)
    if start < 0 or refusal_of(text) is not None:
        return None
    message = text[start + len(_MESSAGE_PREFIX) :].splitlines()[0]
    for words, kind in _ERRORS.items():
        if words in message:
            return kind(message)
    return TransferError(message)
