"""Build and load the native code (``arena.cpp`` and its neighbours) on first use, for the CPU or for CUDA.

The build takes about a second, needs only a C++ compiler (and for CUDA the headers of its runtime, which PyTorch's own
packages bring along), and is kept in the user's cache per torch version. Without it everything still works, but on the
stock allocator: see ``execution.arena``.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeAlias

import torch

from outofcore.compiling import COMPILERS, BuildError, compile_library, load_kept

CSRC = Path(__file__).parent / "csrc"
_SOURCES = tuple(CSRC / f"{name}.cpp" for name in ("arena", "bytes", "lanes", "copying"))
_CUDA_SOURCE = CSRC / "issue.cpp"

_POINTER = ctypes.c_void_p
_COUNT = ctypes.c_int64
# Result and arguments by name. No arguments declared (None): ctypes then passes a plain int and a ready-made c_void_p
# with no conversion, in half the time, which counts only for what every op calls.
Prototypes: TypeAlias = Mapping[str, tuple[type | None, tuple[type, ...] | None]]
_PROTOTYPES: Prototypes = {
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
}
_CUDA_PROTOTYPES: Prototypes = {
    "outofcore_issue": (ctypes.c_int, None),
    "outofcore_lane_holds": (ctypes.c_int, (_POINTER, _POINTER)),
    "outofcore_cuda_error": (ctypes.c_char_p, (ctypes.c_int,)),
}


@dataclass(frozen=True)
class Native:
    """The loaded library, or None and the reason in words.

    ``PyDLL``: its calls take well under a microsecond, and releasing the GIL would cost more than that.
    """

    library: ctypes.PyDLL | None
    reason: str = ""


class Flavor(Enum):
    """Which of PyTorch's allocators is wrapped."""

    CPU = "arena"  # that of the CPU
    CUDA = "arena-cuda"  # the caching allocator of CUDA


@functools.cache
def load_native(flavor: Flavor = Flavor.CPU) -> Native:
    """Load the native allocator of this process from the cache folder, building it if needed.

    It raises nothing: ``reason`` says if there is no compiler, or the build failed.
    """
    if sys.platform != "linux":
        return Native(None, f"the native allocator is written for Linux, and this is {sys.platform}")
    library, reason = load_kept(
        build_key(flavor),
        f"{flavor.value}.so",
        lambda folder: build(folder, flavor=flavor),
        lambda path: load_library(path, flavor),
    )
    return Native(library, reason and f"the native allocator could not be built: {reason}")


def build_key(flavor: Flavor = Flavor.CPU) -> str:
    """Return the name of the build: torch version, Python, machine and a hash of everything else that goes into it."""
    hashed = hashlib.sha256()
    for path in (*_sources(flavor), *sorted(CSRC.glob("*.h"))):
        hashed.update(path.read_bytes())
    hashed.update("\0".join((str(torch_folder()), *_flags(flavor))).encode())
    tag = sys.implementation.cache_tag or sys.implementation.name
    return f"torch-{torch.__version__}-{tag}-{platform.machine()}-{hashed.hexdigest()[:16]}"


def build(folder: Path, compilers: Sequence[str] = COMPILERS, flavor: Flavor = Flavor.CPU) -> Path:
    """Build the library into ``folder``; raises ``BuildError`` if no compiler works, ``OSError`` for the folder."""
    if flavor is Flavor.CUDA and cuda_headers() is None:
        raise BuildError("the headers of the CUDA runtime (cuda_runtime_api.h) are not here; install them")
    first, *others = _sources(flavor)
    flags = [*_flags(flavor), *map(str, others)]
    return compile_library(first, folder / f"{flavor.value}.so", flags, _link_flags(flavor), compilers=compilers)


def load_library(path: Path, flavor: Flavor = Flavor.CPU) -> ctypes.PyDLL:
    """Load a build and declare its functions; raises ``OSError`` if that fails."""
    library = ctypes.PyDLL(str(path))
    declare(library, path, {**_PROTOTYPES, **(_CUDA_PROTOTYPES if flavor is Flavor.CUDA else {})})
    return library


def declare(library: ctypes.CDLL, path: Path, prototypes: Prototypes) -> None:
    """Declare the functions of a library; raises ``OSError`` if it lacks one."""
    for name, (result, arguments) in prototypes.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise OSError(f"{path} lacks the function {name}") from error
        function.restype = result
        if arguments is not None:
            function.argtypes = arguments


def cuda_headers() -> Path | None:
    """Return the folder with the CUDA runtime's headers: of PyTorch's packages, of conda, or of the system."""
    packages = sorted(torch_folder().parent.glob("nvidia/*/include"))
    named = [Path(home) / "include" for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")) if home]
    conda = [Path(sys.prefix) / "include", *sorted(Path(sys.prefix).glob("targets/*/include"))]
    system = [Path("/usr/local/cuda/include"), *sorted(Path("/usr/local").glob("cuda-*/include"), reverse=True)]
    for folder in (*packages, *named, *conda, *system):
        if (folder / "cuda_runtime_api.h").is_file():
            return folder
    return None


def without_lock(library: ctypes.PyDLL, name: str) -> Callable[..., int]:
    """Return a declared function of the library that releases the GIL while it runs."""
    function, declared = getattr(ctypes.CDLL(None, handle=library._handle), name), getattr(library, name)
    function.restype, function.argtypes = declared.restype, declared.argtypes
    found: Callable[..., int] = function
    return found


def _sources(flavor: Flavor) -> tuple[Path, ...]:
    return (*_SOURCES, _CUDA_SOURCE) if flavor is Flavor.CUDA else _SOURCES


def torch_folder() -> Path:
    return Path(torch.__file__).resolve().parent


def device_flags(flavor: Flavor) -> list[str]:
    """Return the compiler flags that select the device in C++ sources."""
    headers = cuda_headers() if flavor is Flavor.CUDA else None
    return [
        *(["-DOUTOFCORE_CUDA"] if flavor is Flavor.CUDA else []),
        # The packages of CUDA's runtime lack two headers that it includes, and that say nothing to a plain compiler.
        *([f"-I{headers}", f"-idirafter{CSRC / 'shim'}"] if headers else []),
    ]


def _flags(flavor: Flavor) -> list[str]:
    return [
        *device_flags(flavor),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{torch_folder() / 'include'}",
    ]


def _link_flags(flavor: Flavor) -> list[str]:
    library = torch_folder() / "lib"
    cuda = ["-lc10_cuda", "-ldl"] if flavor is Flavor.CUDA else []
    return [f"-L{library}", "-lc10", *cuda, "-pthread", f"-Wl,-rpath,{library}"]
