"""Builds and loads the native allocator (``arena.cpp``) on first use.

The build takes about a second, needs only a C++ compiler, and is kept in the user's cache per torch
version. Without a compiler everything still works, but on malloc: see ``execution.arena``.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from outofcore.execution.folders import private_folder, user_cache_folder

COMPILERS = ("c++", "g++", "clang++")
# The newest first: recent c10 headers may need C++20, older compilers may only have C++17.
STANDARDS = ("c++20", "c++17")
_TIMEOUT_S = 180

_POINTER = ctypes.c_void_p
_COUNT = ctypes.c_int64
# Result and arguments. No arguments declared (None): ctypes then passes a plain int and a ready-made c_void_p with
# no conversion, in half the time, which counts only for what every op calls.
_PROTOTYPES: dict[str, tuple[type | None, tuple[type, ...] | None]] = {
    "outofcore_install": (ctypes.c_int, ()),
    "outofcore_uninstall": (None, ()),
    "outofcore_arena_open": (_POINTER, (_POINTER, _COUNT, _COUNT, _COUNT)),
    "outofcore_arena_drop": (None, (_POINTER,)),
    "outofcore_arena_reserve": (None, (_POINTER, _COUNT)),
    "outofcore_arena_counters": (None, (_POINTER, _POINTER)),
    "outofcore_table_new": (_POINTER, (_POINTER, _COUNT, _POINTER, _POINTER)),
    "outofcore_table_free": (None, (_POINTER,)),
    "outofcore_table_surprises": (_COUNT, (_POINTER,)),
    "outofcore_table_surprise": (_COUNT, (_POINTER, _COUNT)),
    "outofcore_table_surprise_log": (_POINTER, (_POINTER, _COUNT)),
    "outofcore_table_forget": (None, (_POINTER,)),
    "outofcore_begin": (None, None),
    "outofcore_end": (None, ()),
    "outofcore_record_begin": (_POINTER, ()),
    "outofcore_record_end": (None, ()),
    "outofcore_record_size": (_COUNT, (_POINTER,)),
    "outofcore_record_data": (_POINTER, (_POINTER,)),
    "outofcore_record_free": (None, (_POINTER,)),
}


@dataclass(frozen=True)
class Native:
    """The loaded library, or None and the reason in words.

    ``PyDLL``: its calls take well under a microsecond, and releasing the GIL would cost more than that.
    """

    library: ctypes.PyDLL | None
    reason: str = ""


class BuildError(Exception):
    """The library could not be built; the message says why. Never reaches the user as an error."""


@functools.cache
def load_native() -> Native:
    """The native allocator of this process: from the cache folder, else built now.

    Raises nothing: without a compiler, or if its build fails, ``reason`` says so.
    """
    if sys.platform != "linux":
        return Native(None, f"the native allocator is written for Linux, and this is {sys.platform}")
    reasons: list[str] = []
    folder = user_cache_folder() / build_key()
    try:
        return Native(load_library(_cached(private_folder(folder))))
    except (OSError, BuildError) as error:
        reasons.append(f"in {folder}: {error}")
    # The cache may be read-only, or on a volume from which nothing may be executed.
    try:
        with tempfile.TemporaryDirectory(prefix="outofcore-") as temporary:
            return Native(load_library(build(Path(temporary))))  # stays loaded when the file is gone
    except (OSError, BuildError) as error:
        if str(error) not in reasons[0]:
            reasons.append(f"in a temporary folder: {error}")
    return Native(None, "the native allocator could not be built: " + "; ".join(reasons))


def build_key() -> str:
    """Names the build: torch version, Python, machine and a hash of everything else that goes into it."""
    hashed = hashlib.sha256(_source().read_bytes())
    hashed.update("\0".join((str(_torch_folder()), *_flags())).encode())
    tag = sys.implementation.cache_tag or sys.implementation.name
    return f"torch-{torch.__version__}-{tag}-{platform.machine()}-{hashed.hexdigest()[:16]}"


def build(folder: Path, compilers: Sequence[str] = COMPILERS) -> Path:
    """Build the library into ``folder``, under a name of its own until it is complete.

    Several processes may do so at once: each puts the whole file in place in one step.

    Raises:
        BuildError: there is no compiler, or it refuses the source.
        OSError: the folder cannot be written to.
    """
    found = [path for path in map(shutil.which, compilers) if path]
    if not found:
        raise BuildError(f"no C++ compiler is on PATH (looked for {', '.join(compilers)}); install g++ or clang++")
    target = folder / "arena.so"
    descriptor, name = tempfile.mkstemp(dir=folder, suffix=".so.part")
    os.close(descriptor)
    output = Path(name)
    failures: list[str] = []
    try:
        for compiler in found:
            for standard in STANDARDS:
                failure = _compile(compiler, standard, output)
                if failure is None:
                    output.chmod(0o600)
                    output.replace(target)
                    return target
                failures.append(f"{compiler} -std={standard}: {failure}")
    finally:
        output.unlink(missing_ok=True)
    raise BuildError("; ".join(failures))


def load_library(path: Path) -> ctypes.PyDLL:
    """Load a build and declare its functions.

    Raises:
        OSError: it cannot be loaded, or lacks a function.
    """
    library = ctypes.PyDLL(str(path))
    for name, (result, arguments) in _PROTOTYPES.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise OSError(f"{path} lacks the function {name}") from error
        function.restype = result
        if arguments is not None:
            function.argtypes = arguments
    return library


def _cached(folder: Path) -> Path:
    path = folder / "arena.so"
    if path.exists():
        try:
            load_library(path)
        except OSError:
            return build(folder)  # damaged, perhaps by a full disk
        return path
    return build(folder)


def _compile(compiler: str, standard: str, output: Path) -> str | None:
    """Run one compiler; None if it succeeded, else the most telling lines of what it said."""
    command = [compiler, f"-std={standard}", *_flags(), str(_source()), "-o", str(output), *_link_flags()]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"gave no answer in {_TIMEOUT_S} s"
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
    return " | ".join(lines[:3]) or f"exit status {done.returncode}"


def _torch_folder() -> Path:
    return Path(torch.__file__).resolve().parent


def _source() -> Path:
    return Path(__file__).with_name("arena.cpp")


def _flags() -> list[str]:
    return [
        "-O2",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{_torch_folder() / 'include'}",
    ]


def _link_flags() -> list[str]:
    library = _torch_folder() / "lib"
    return [f"-L{library}", "-lc10", f"-Wl,-rpath,{library}"]
