"""Build and load the native code that follows a loop (``paging.cpp``) on first use, for the CPU or for CUDA.

It needs the headers of PyTorch's dispatcher, so the build takes some ten seconds; it is kept in the user's cache for
each version of PyTorch. The libraries of both devices use one dispatch key, which belongs to the one whose loop was
started last.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from outofcore._torch_internals import has_python_kernel, storage_address
from outofcore.compiling import BuildError, compile_library, load_kept, native_callback
from outofcore.errors import SpillError, StateError, TransferError
from outofcore.runtime.mapped_files import OWNERS
from outofcore.runtime.native import CSRC, Flavor, cuda_headers, device_flags

_FOLDER = CSRC / "follow"
_SOURCE = _FOLDER / "paging.cpp"
_FILES = {Flavor.CPU: "paging.so", Flavor.CUDA: "paging-cuda.so"}
# By the type of the device whose tensors it follows.
_FLAVORS = {"cpu": Flavor.CPU, "cuda": Flavor.CUDA}
_BENEATH = tuple(sorted(CSRC.glob("*.h")))  # headers that compiled steps use as well

# Prefix of messages from paging.cpp, and the text that marks a refusal by the budget.
OURS, REFUSED = "outofcore: ", "outofcore: the budget of "
# Error classes by the words in a message; all others are TransferErrors.
_ERRORS: dict[str, type[Exception]] = {
    "no home has room": SpillError,
    "the system gave no memory": MemoryError,
    "the system gives no thread": StateError,
    "addresses": StateError,
}

_POINTER = ctypes.c_void_p
_COUNT = ctypes.c_int64
# By which ops are seen: ``kKey`` in space.h.
DISPATCH_KEY = "Fake"
# Result and arguments. A result of -1 is a failure.
_PROTOTYPES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "follow_failure": (ctypes.c_char_p, ()),
    "follow_load": (_COUNT, (_POINTER,)),
    "follow_unload": (None, ()),
    "follow_new": (_POINTER, (_COUNT, ctypes.c_int, ctypes.c_int, ctypes.c_int)),
    "follow_reserve": (_COUNT, (_POINTER, _COUNT, _COUNT, _COUNT)),
    "follow_add_home": (_COUNT, (_POINTER, ctypes.c_int, ctypes.c_int, ctypes.c_int, _COUNT)),
    "follow_end_of_step": (_COUNT, (_POINTER,)),
    "follow_proposal": (_COUNT, (_POINTER, _POINTER, _COUNT)),
    "follow_names": (ctypes.c_char_p, (_POINTER,)),
    "follow_observed": (_COUNT, (_POINTER, _POINTER, _COUNT)),
    "follow_observed_names": (ctypes.c_char_p, (_POINTER,)),
    "follow_number": (_COUNT, (_POINTER, _POINTER)),
    "follow_schedule": (_COUNT, (_POINTER, _COUNT, _POINTER)),
    "follow_open": (_COUNT, (_POINTER, ctypes.c_int)),
    "follow_pause": (_COUNT, (_POINTER,)),
    "follow_vacate": (_COUNT, (_POINTER,)),
    "follow_current": (ctypes.c_int, ()),
    "follow_thread": (None, (ctypes.c_int,)),
    "follow_leave_thread": (None, ()),
    "follow_close": (_COUNT, (_POINTER,)),
    "follow_adopt": (_COUNT, (_POINTER, _COUNT, _COUNT)),
    "follow_memory": (_COUNT, (_POINTER,)),
    "follow_add_file": (_COUNT, (_POINTER, ctypes.c_int)),
    "follow_strangers": (_COUNT, (_POINTER, _POINTER, _COUNT)),
    "follow_plain": (ctypes.c_int, (_POINTER,)),
    "follow_release": (_COUNT, (_POINTER,)),
    "follow_release_all": (_COUNT, (_POINTER,)),
    "follow_forget": (None, (_POINTER,)),
    "follow_fix": (_COUNT, (_POINTER,)),
    "follow_is_opener": (ctypes.c_int, ()),
    "follow_tracked": (ctypes.c_int, ()),
    "follow_hold": (_COUNT, (_POINTER,)),
    "follow_unhold": (None, ()),
    "follow_told": (_POINTER, (ctypes.c_int, _POINTER, _POINTER)),
    "follow_pieces": (_COUNT, ()),
    "follow_where": (_COUNT, (_POINTER,)),
    "follow_evict": (_COUNT, (_POINTER,)),
    "follow_evict_all": (_COUNT, (_POINTER,)),
    "follow_stress": (None, (_POINTER, ctypes.c_int)),
    "follow_smallest": (None, (_COUNT,)),
    "follow_ahead": (None, (_POINTER, ctypes.c_int)),
    "follow_base": (_COUNT, (_POINTER,)),
    "follow_sizes": (None, (_POINTER, _POINTER)),
    "follow_offer_to": (None, (_POINTER,)),
    "follow_ask_source": (None, (_POINTER,)),
    "follow_recompute": (_COUNT, (_POINTER, ctypes.c_int)),
    "follow_recompute_set": (_COUNT, (_POINTER, _POINTER, _COUNT)),
    "follow_notes": (_COUNT, (_POINTER, _POINTER, _COUNT)),
    "follow_pack": (_POINTER, (_POINTER,)),
    "follow_unpack": (_POINTER, (_POINTER,)),
    "follow_drop": (None, (_POINTER,)),
    "follow_counters": (_COUNT, (_POINTER, _POINTER, _COUNT)),
}


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


def load_paging(flavor: Flavor = Flavor.CPU) -> ctypes.CDLL:
    """Load the library of this process from the cache folder, building it if needed; raises ``StateError``."""
    return _loaded(flavor)


def flavor_of(device: torch.device) -> Flavor | None:
    """Return the flavor that follows tensors of a device; None if there is none."""
    return _FLAVORS.get(device.type)


def loaded_paging(device: torch.device) -> ctypes.CDLL | None:
    """Return the library for the tensors of a device if this process has loaded it."""
    flavor = flavor_of(device)
    return None if flavor is None else _key.loaded.get(flavor)


def loaded_pagings() -> list[ctypes.CDLL]:
    return list(_key.loaded.values())


@functools.cache
def _loaded(flavor: Flavor) -> ctypes.CDLL:
    if sys.platform != "linux":
        raise StateError(f"loops are followed by native code that is written for Linux, and this is {sys.platform}")
    library, reason = load_kept(_build_key(flavor), _FILES[flavor], functools.partial(_build, flavor=flavor), _load)
    if library is None:
        raise StateError(f"loops are followed by native code, which could not be built: {reason}")
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


def error_of(text: str) -> Exception | None:
    """Return the error that a message of the native code stands for; None if it is none of these.

    A refusal by the budget is none of them: ``explained`` in failures.py makes an error of it.
    """
    at = text.find(OURS)
    if at < 0 or REFUSED in text:
        return None
    said = text[at + len(OURS) :].splitlines()[0]
    for words, kind in _ERRORS.items():
        if words in said:
            return kind(said)
    return TransferError(said)


def _flags(flavor: Flavor) -> list[str]:
    folder = Path(torch.__file__).resolve().parent
    return [
        "-O3",
        *device_flags(flavor),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{folder / 'include'}",
    ]


def _build_key(flavor: Flavor) -> str:
    hashed = hashlib.sha256("\0".join(_flags(flavor)).encode())
    for path in (_SOURCE, *sorted(_FOLDER.glob("*.h")), *_BENEATH):
        hashed.update(path.read_bytes())
    return f"torch-{torch.__version__}-{platform.machine()}-{hashed.hexdigest()[:16]}"


def _build(folder: Path, flavor: Flavor) -> Path:
    if flavor is Flavor.CUDA and cuda_headers() is None:
        raise BuildError("the headers of the CUDA runtime (cuda_runtime_api.h) are not here; install them")
    libraries = Path(torch.__file__).resolve().parent / "lib"
    cuda = ["-lc10_cuda"] if flavor is Flavor.CUDA else []
    link = [f"-L{libraries}", "-ltorch_cpu", "-lc10", *cuda, "-lpthread", f"-Wl,-rpath,{libraries}"]
    return compile_library(_SOURCE, folder / _FILES[flavor], _flags(flavor), link)


def _load(path: Path) -> ctypes.CDLL:
    # Calls release the GIL: some move much data.
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _PROTOTYPES.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise OSError(f"{path} lacks the function {name}") from error
        function.restype, function.argtypes = result, arguments
    return library
