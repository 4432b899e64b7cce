"""Builds and loads the native code that follows a loop (``paging.cpp``) on first use.

It needs the headers of PyTorch's dispatcher, so the build takes some ten seconds; it is kept in the user's cache for
each version of PyTorch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import sys
from pathlib import Path

import torch

from outofcore._torch_internals import has_python_kernel
from outofcore.compiling import compile_library, load_kept
from outofcore.errors import StateError

_FOLDER = Path(__file__).parent
_SOURCE = _FOLDER / "paging.cpp"

_POINTER = ctypes.c_void_p
_COUNT = ctypes.c_int64
_PREDICATE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p)
# Result and arguments. A result of -1 is a failure.
_PROTOTYPES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "follow_failure": (ctypes.c_char_p, ()),
    "follow_load": (_COUNT, (_PREDICATE,)),
    "follow_new": (_POINTER, (_COUNT, ctypes.c_int)),
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
    "follow_close": (_COUNT, (_POINTER,)),
    "follow_adopt": (_COUNT, (_POINTER,)),
    "follow_strangers": (_COUNT, (_POINTER, _POINTER, _COUNT)),
    "follow_plain": (ctypes.c_int, (_POINTER,)),
    "follow_release": (_COUNT, (_POINTER,)),
    "follow_release_all": (_COUNT, (_POINTER,)),
    "follow_forget": (None, (_POINTER,)),
    "follow_fix": (_COUNT, (_POINTER,)),
    "follow_where": (_COUNT, (_POINTER,)),
    "follow_evict": (_COUNT, (_POINTER,)),
    "follow_evict_all": (_COUNT, (_POINTER,)),
    "follow_stress": (None, (_POINTER, ctypes.c_int)),
    "follow_smallest": (None, (_COUNT,)),
    "follow_ahead": (None, (_POINTER, ctypes.c_int)),
    "follow_sizes": (None, (_POINTER, _POINTER)),
    "follow_offer_to": (None, (ctypes.CFUNCTYPE(ctypes.c_int, _POINTER),)),
    "follow_recompute": (_COUNT, (_POINTER, ctypes.c_int)),
    "follow_recompute_set": (_COUNT, (_POINTER, _POINTER, _COUNT)),
    "follow_notes": (_COUNT, (_POINTER, _POINTER, _COUNT)),
    "follow_pack": (_POINTER, (_POINTER,)),
    "follow_unpack": (_POINTER, (_POINTER,)),
    "follow_drop": (None, (_POINTER,)),
    "follow_counters": (_COUNT, (_POINTER, _POINTER, _COUNT)),
}


@_PREDICATE
def _is_python(name: bytes, overload: bytes) -> int:
    return has_python_kernel(name.decode(), overload.decode())


@functools.cache
def load_paging() -> ctypes.CDLL:
    """The library of this process: from the cache folder, else built now.

    Raises:
        StateError: it cannot be built, or PyTorch has no place for it.
    """
    if sys.platform != "linux":
        raise StateError(f"loops are followed by native code that is written for Linux, and this is {sys.platform}")
    library, reason = load_kept(_build_key(), "paging.so", _build, _load)
    if library is None:
        raise StateError(f"loops are followed by native code, which could not be built: {reason}")
    if call(library, "follow_load", _is_python) != 0:
        raise StateError(
            f"torch {torch.__version__} uses the dispatch key for itself by which loops are followed; "
            "use outofcore.compile, or another release of torch"
        )
    return library


def is_followed() -> bool:
    """Whether a loop is followed now, in whichever thread."""
    return bool(load_paging.cache_info().currsize) and bool(load_paging().follow_current())


def call(library: ctypes.CDLL, function: str, *arguments: object) -> int:
    """Call a function that may fail.

    Raises:
        StateError: it failed.
    """
    result = getattr(library, function)(*arguments)
    if result == -1 or result is None:
        raise StateError(library.follow_failure().decode(errors="replace"))
    return result


def _flags() -> list[str]:
    folder = Path(torch.__file__).resolve().parent
    return [
        "-O3",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{folder / 'include'}",
    ]


def _build_key() -> str:
    hashed = hashlib.sha256("\0".join(_flags()).encode())
    for path in (_SOURCE, *sorted(_FOLDER.glob("*.h"))):
        hashed.update(path.read_bytes())
    return f"torch-{torch.__version__}-{platform.machine()}-{hashed.hexdigest()[:16]}"


def _build(folder: Path) -> Path:
    libraries = Path(torch.__file__).resolve().parent / "lib"
    link = [f"-L{libraries}", "-ltorch_cpu", "-lc10", "-lpthread", f"-Wl,-rpath,{libraries}"]
    return compile_library(_SOURCE, folder / "paging.so", _flags(), link)


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
