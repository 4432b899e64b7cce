"""Build and load the native code that uses PyTorch (``csrc``) on first use: one library for CPU, one for CUDA.

The build takes half a minute on one core, and is cached for each version of PyTorch. It needs a C++ compiler, and for
CUDA the headers in PyTorch's own packages. A wheel contains the CPU library for the PyTorch that it was built with.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TypeVar

import torch

from outofcore.compiling import COMPILERS, BuildError, compile_library, load_or_build
from outofcore.errors import StateError

_Library = TypeVar("_Library", bound=ctypes.CDLL)

CSRC = Path(__file__).parent / "csrc"
_TORCH = Path(torch.__file__).resolve().parent
# Extra flags by source file; these files are compiled first, because they take the longest.
_EXTRA_FLAGS = {"paging.cpp": ("-O3",)}
_ONLY_CUDA = "issue.cpp"

_POINTER = ctypes.c_void_p
_COUNT = ctypes.c_int64
# Result and argument types by name. Without argument types (None), ctypes passes an int or a c_void_p unconverted, in
# half the time. That matters only for functions that every op calls.
_PROTOTYPES: Mapping[str, tuple[type | None, tuple[type, ...] | None]] = {
    "outofcore_borders": (ctypes.c_char_p, ()),
    "outofcore_install": (ctypes.c_int, ()),
    "outofcore_uninstall": (None, ()),
    "outofcore_arena_open": (_POINTER, (_POINTER, _COUNT, _COUNT, _COUNT)),
    "outofcore_arena_drop": (None, (_POINTER,)),
    "outofcore_arena_reserve": (None, (_POINTER, _COUNT)),
    "outofcore_arena_lender": (None, (_POINTER, _POINTER)),
    "outofcore_arena_lent": (_COUNT, (_POINTER, _POINTER, _COUNT)),
    "outofcore_arena_counters": (_COUNT, (_POINTER, _POINTER, _COUNT)),
    "outofcore_table_new": (_POINTER, (_POINTER, _COUNT, _POINTER, _POINTER)),
    "outofcore_table_workspaces": (_COUNT, (_POINTER, _POINTER)),
    "outofcore_passes": (ctypes.c_int, (_POINTER,)),
    "outofcore_unbounded": (None, (ctypes.c_int,)),
    "outofcore_table_free": (None, (_POINTER,)),
    "outofcore_table_surprises": (_COUNT, (_POINTER, _POINTER, _COUNT)),
    "outofcore_table_surprise_log": (_POINTER, (_POINTER, _COUNT)),
    "outofcore_table_forget": (None, (_POINTER,)),
    "outofcore_begin": (None, None),
    "outofcore_end": (None, ()),
    "outofcore_record_begin": (_POINTER, ()),
    "outofcore_record_end": (None, ()),
    "outofcore_record_size": (_COUNT, (_POINTER,)),
    "outofcore_record_data": (_POINTER, (_POINTER,)),
    "outofcore_record_free": (None, (_POINTER,)),
    "outofcore_sum": (ctypes.c_uint64, (_POINTER, _COUNT, _COUNT)),
    "outofcore_sampled": (ctypes.c_uint64, (_POINTER, _COUNT, _COUNT)),
    "outofcore_any_written": (ctypes.c_int, (_POINTER, _COUNT)),
    "outofcore_transfer": (None, (_POINTER,)),
    "outofcore_post": (None, (_POINTER,)),
    "outofcore_lane_new": (_POINTER, (_POINTER,)),
    "outofcore_lane_free": (None, (_POINTER,)),
    "outofcore_copying_new": (_POINTER, (_COUNT,)),
    "outofcore_copying_free": (None, (_POINTER,)),
    "outofcore_copying_begin": (ctypes.c_int, (_POINTER, _POINTER, _POINTER, _POINTER)),
    "outofcore_copying_reached": (ctypes.c_int, None),
    "outofcore_copying_wait": (ctypes.c_int, (_POINTER, _COUNT, _COUNT, ctypes.c_double)),
    "outofcore_copying_publish": (None, (_POINTER, _COUNT, _COUNT)),
    "outofcore_copying_stop": (ctypes.c_int, (_POINTER,)),
    "outofcore_copying_pause": (ctypes.c_int, (_POINTER, ctypes.c_int)),
    "outofcore_copying_idle": (ctypes.c_int, (_POINTER, ctypes.c_double)),
    "outofcore_copying_failure": (None, (_POINTER, _POINTER)),
    "replay_new": (_POINTER, (_COUNT,)),
    "replay_free": (None, (_POINTER,)),
    "replay_watch": (_COUNT, ()),
    "replay_unwatch": (None, ()),
    "replay_expect": (None, ()),
    "replay_take": (
        _COUNT,
        (_POINTER, _COUNT, *[ctypes.c_char_p] * 2, ctypes.c_int, _COUNT, _COUNT, _POINTER, _COUNT, _POINTER),
    ),
    "replay_run": (_COUNT, (_POINTER, _COUNT, _COUNT, ctypes.c_double, *[_POINTER] * 9)),
    "replay_order": (_COUNT, (_POINTER, _COUNT, _COUNT, _POINTER, _COUNT)),
    "replay_issue": (None, (_POINTER, _COUNT, _POINTER, _POINTER, _COUNT, _POINTER)),
    "replay_let_go": (None, (_POINTER,)),
    "replay_at": (_COUNT, (_POINTER,)),
    "replay_failure": (_COUNT, (_POINTER,)),
    "replay_status": (_COUNT, (_POINTER,)),
    "replay_message": (ctypes.c_char_p, (_POINTER,)),
    "follow_failure": (ctypes.c_char_p, ()),
    "follow_refusal": (ctypes.c_char_p, (ctypes.c_char_p, _POINTER)),
    "follow_load": (_COUNT, (_POINTER,)),
    "follow_unload": (None, ()),
    "follow_need": (ctypes.c_char_p, (_POINTER, _POINTER)),
    "follow_new": (_POINTER, (_COUNT, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int)),
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
_CUDA_PROTOTYPES: Mapping[str, tuple[type | None, tuple[type, ...] | None]] = {
    "outofcore_issue": (ctypes.c_int, None),
    "outofcore_lane_holds": (ctypes.c_int, (_POINTER, _POINTER)),
    "outofcore_cuda_error": (ctypes.c_char_p, (ctypes.c_int,)),
}


class Flavor(Enum):
    """The build of the native library, named after the PyTorch allocator that it wraps."""

    CPU = "cpu"
    CUDA = "cuda"  # the caching allocator


def load_native(flavor: Flavor = Flavor.CPU) -> ctypes.PyDLL:
    """Return the native library, loaded or built once per process. Its calls keep the GIL. Raises ``StateError``."""
    return _load_once(flavor)


@functools.cache
def _load_once(flavor: Flavor) -> ctypes.PyDLL:
    """Load the native library, and build it first if necessary; raises ``StateError`` on failure."""
    if sys.platform != "linux":
        raise StateError(f"the native code runs only on Linux, and this is {sys.platform}; use Linux")
    library, name = library_file(flavor), f"outofcore-{flavor.value}"
    try:
        return load_or_build(
            name, library, lambda path: build(path, flavor=flavor), lambda path: load_library(path, flavor)
        )
    except StateError as error:
        versions = [_versions_of(path) for path in sorted(library.parent.glob(f"{name}-*.so")) if path != library]
        if not versions:
            raise
        raise StateError(
            f"{error}. The installed wheel was built for {', '.join(versions)}, and this is {_versions_of(library)}: "
            "install versions that the wheel was built for, or a C++ compiler"
        ) from None


def _versions_of(library: Path) -> str:
    """Return the versions in a library's name, such as ``torch-2.13.0-cpython-311-x86_64``."""
    return library.name.split("-", 2)[2].rpartition("-")[0]


@functools.cache
def load_unlocked(flavor: Flavor) -> ctypes.CDLL:
    """Return the native library with calls that release the GIL, for functions that copy much data or wait."""
    return _declare_functions(ctypes.CDLL(None, handle=load_native(flavor)._handle), flavor)


def library_file(flavor: Flavor = Flavor.CPU) -> Path:
    """Return the path at which a wheel installs the native library, present or not."""
    hashed = hashlib.sha256()
    for path in sorted((*CSRC.rglob("*.cpp"), *CSRC.rglob("*.h"))):
        hashed.update(path.read_bytes())
    hashed.update("\0".join((*_defines(flavor), *map(str, _EXTRA_FLAGS.items()))).encode())
    tag = sys.implementation.cache_tag or sys.implementation.name
    built_for = f"torch-{torch.__version__}-{tag}-{platform.machine()}"
    return CSRC / f"outofcore-{flavor.value}-{built_for}-{hashed.hexdigest()[:16]}.so"


def build(target: Path, compilers: Sequence[str] = COMPILERS, flavor: Flavor = Flavor.CPU) -> Path:
    """Compile the native library to ``target``; raises ``BuildError``, or ``OSError`` if the folder is read-only."""
    if flavor is Flavor.CUDA and cuda_headers() is None:
        raise BuildError(
            "the headers of the CUDA runtime (cuda_runtime_api.h) are missing; install a CUDA toolkit, and set "
            "CUDA_HOME to its folder"
        )
    sources = [path for path in sorted(CSRC.rglob("*.cpp")) if flavor is Flavor.CUDA or path.name != _ONLY_CUDA]
    sources.sort(key=lambda path: path.name not in _EXTRA_FLAGS)
    units = {path: _EXTRA_FLAGS.get(path.name, ()) for path in sources}
    flags = [*_defines(flavor), *_includes(flavor)]
    cuda = ["-lc10_cuda", "-ldl"] if flavor is Flavor.CUDA else []
    # No run path is needed: PyTorch's libraries are loaded before this one.
    link = [f"-L{_TORCH / 'lib'}", "-ltorch_cpu", "-lc10", *cuda, "-pthread"]
    return compile_library(units, target, flags, link, compilers=compilers)


def load_library(path: Path, flavor: Flavor = Flavor.CPU) -> ctypes.PyDLL:
    """Load the library at ``path`` and declare its functions; raises ``OSError`` if that fails."""
    # PyDLL keeps the GIL: most calls take well under a microsecond, less than releasing it.
    return _declare_functions(ctypes.PyDLL(str(path)), flavor)


def _declare_functions(library: _Library, flavor: Flavor) -> _Library:
    """Set the C types of a library's functions; raises ``OSError`` if a function is missing."""
    for name, (result, arguments) in {**_PROTOTYPES, **(_CUDA_PROTOTYPES if flavor is Flavor.CUDA else {})}.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise OSError(f"{library._name} lacks the function {name}") from error
        function.restype = result
        if arguments is not None:
            function.argtypes = arguments
    return library


def cuda_headers() -> Path | None:
    """Return the folder with the CUDA runtime's headers; None if they are not found."""
    packages = sorted(_TORCH.parent.glob("nvidia/*/include"))
    configured = [Path(home) / "include" for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")) if home]
    conda = [Path(sys.prefix) / "include", *sorted(Path(sys.prefix).glob("targets/*/include"))]
    system = [Path("/usr/local/cuda/include"), *sorted(Path("/usr/local").glob("cuda-*/include"), reverse=True)]
    for folder in (*packages, *configured, *conda, *system):
        if (folder / "cuda_runtime_api.h").is_file():
            return folder
    return None


def _defines(flavor: Flavor) -> list[str]:
    return [
        "-DNDEBUG",  # as in PyTorch's own build: without it, some of its classes have other members
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(["-DOUTOFCORE_CUDA"] if flavor is Flavor.CUDA else []),
    ]


def _includes(flavor: Flavor) -> list[str]:
    headers = cuda_headers() if flavor is Flavor.CUDA else None
    # The packages of CUDA's runtime lack two headers that it includes; the replacements suffice for a C++ compiler.
    return [
        f"-I{_TORCH / 'include'}",
        *([f"-I{headers}", f"-idirafter{CSRC / 'shim'}"] if headers else []),
    ]
