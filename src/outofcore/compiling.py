"""Compile the package's C++ code on first use, and keep the libraries in the user's cache.

Wheels contain the libraries that need neither PyTorch nor CUDA, and the CPU library if they were built with PyTorch.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from outofcore.errors import StateError

COMPILERS = ("c++", "g++", "clang++")
# Newest first: recent PyTorch headers may need C++20, and older compilers may support only C++17.
STANDARDS = ("c++20", "c++17")
# No floating-point contraction: plans are compared bit for bit.
_FLAGS = ("-O2", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off")
_TIMEOUT_S = 900  # half a minute of work on an idle machine

_Library = TypeVar("_Library", bound=ctypes.CDLL)


class BuildError(Exception):
    """A library could not be built; the message gives the reason."""


def user_cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification requires that relative paths are ignored.
    return (Path(base) if Path(base).is_absolute() else Path("~/.cache").expanduser()) / "outofcore"


def ensure_private_folder(path: Path) -> Path:
    """Return a folder, created if needed; raise ``OSError`` unless only this user can write to it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(
            f"{path}: {'another user owns it' if status.st_uid != os.getuid() else 'others can write to it'}; "
            "use a folder of your own that only you can write to"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(f"{path} cannot be written to; use another folder or change its permissions")
    return path


def load_or_build(
    description: str, wheel_path: Path, build: Callable[[Path], object], load: Callable[[Path], _Library]
) -> _Library:
    """Load a library from the wheel or the cache, or build it.

    The file name of ``wheel_path`` must change with each input of the build. ``build`` writes a file and may raise
    ``BuildError`` or ``OSError``; ``load`` may raise ``OSError``. Raises ``StateError`` if the library cannot be built.
    """
    with contextlib.suppress(OSError):  # no wheel, or one for an older system or another PyTorch
        return load(wheel_path)
    folder = user_cache_folder() / wheel_path.stem
    try:
        path = ensure_private_folder(folder) / wheel_path.name
        with contextlib.suppress(OSError):  # not built yet, or damaged, perhaps by a full disk
            return load(path)
        with _build_lock(folder):
            with contextlib.suppress(OSError):  # another process may have built it meanwhile
                return load(path)
            if sys.stderr.isatty():
                sys.stderr.write(f"outofcore: compiling {description} once, which takes up to half a minute ...\n")
            build(path)
            return load(path)
    except (OSError, BuildError) as error:
        reasons = [f"in {folder}: {error}"]
    # The cache may be read-only, or on a volume mounted with noexec.
    try:
        with tempfile.TemporaryDirectory(prefix="outofcore-") as temporary:
            path = Path(temporary, wheel_path.name)
            build(path)
            return load(path)  # it stays loaded after the file is deleted
    except (OSError, BuildError) as error:
        if str(error) not in reasons[0]:
            reasons.append(f"in a temporary folder: {error}")
    raise StateError(
        f"native code is missing: {description} is not compiled here, and could not be ({'; '.join(reasons)}). "
        "Install a C++ compiler such as g++, or a wheel of outofcore that was built with one"
    )


def is_built(wheel_path: Path) -> bool:
    """Return whether a library is in the wheel or in the cache."""
    return wheel_path.is_file() or (user_cache_folder() / wheel_path.stem / wheel_path.name).is_file()


def wheel_library(source: Path) -> Path:
    """Return the path of a C++ file's library in a wheel; the name contains a digest of the sources."""
    texts = [path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h")))]
    digest = hashlib.sha256(b"".join(texts) + "\0".join(_FLAGS).encode()).hexdigest()[:16]
    return source.with_name(f"{source.stem}-{platform.machine()}-{digest}.so")


def load_functions(
    source: Path, functions: Mapping[str, tuple[tuple[object, ...], object]], kind: type[_Library] = ctypes.CDLL
) -> _Library:
    """Load the functions of a C++ file without dependencies; raise ``StateError`` if it cannot be built.

    ``functions`` maps names without ``outofcore_`` to argument and result types. Calls to a ``PyDLL`` keep the GIL.
    """

    def load_library(path: Path) -> _Library:
        library = kind(str(path))
        for function, (arguments, result) in functions.items():
            symbol = getattr(library, f"outofcore_{function}", None)
            if symbol is None:
                raise OSError(f"{path} lacks the function outofcore_{function}")
            symbol.argtypes, symbol.restype = arguments, result
        return library

    return load_or_build(
        source.name, wheel_library(source), lambda path: compile_library({source: ()}, path), load_library
    )


def native_callback(function: Callable[..., int], *arguments: Any, failed: int) -> Any:
    """Wrap a Python function as a native callback ``void (arguments..., int64_t* answer)``.

    The callback stores the result in ``answer``, or ``failed`` after an exception, which ctypes prints. After Ctrl-C,
    ``answer`` is unchanged; the native caller must check for this.
    """

    # The return value of a ctypes callback that raises is undefined, so it returns nothing.
    def call_and_store_answer(*call_arguments: Any) -> None:
        answer = call_arguments[-1]
        try:
            answer[0] = function(*call_arguments[:-1])
        except KeyboardInterrupt:
            pass
        except Exception:
            answer[0] = failed
            raise

    return ctypes.CFUNCTYPE(None, *arguments, ctypes.POINTER(ctypes.c_int64))(call_and_store_answer)


@contextlib.contextmanager
def _build_lock(folder: Path) -> Generator[None]:
    """Hold a lock on a folder, so that of several processes only one at a time builds in it."""
    with (folder / "lock").open("w") as lock:
        with contextlib.suppress(OSError):  # without file locks, each process builds its own
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compile_library(
    sources: Mapping[Path, Sequence[str]],
    target: Path,
    flags: Sequence[str] = (),
    link_flags: Sequence[str] = (),
    compilers: Sequence[str] = COMPILERS,
) -> Path:
    """Compile sources in parallel, each with its own flags, and link them to a library.

    Raises ``BuildError`` if no compiler works, and ``OSError`` if the folder is not writable.
    """
    available = [path for path in map(shutil.which, compilers) if path]
    if not available:
        raise BuildError(f"no C++ compiler is on PATH (looked for {', '.join(compilers)}); install g++ or clang++")
    failures: list[str] = []
    with (
        tempfile.TemporaryDirectory(dir=target.parent, prefix="building-") as temporary,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        for compiler in available:
            for standard in STANDARDS:
                command = [compiler, f"-std={standard}", *_FLAGS, *flags]
                objects = {source: str(Path(temporary, f"{source.stem}.o")) for source in sources}
                try:
                    compiled = [
                        pool.submit(_run_compiler, [*command, *sources[source], "-c", str(source), "-o", name])
                        for source, name in objects.items()
                    ]
                except RuntimeError as error:
                    raise BuildError(
                        f"the system gives no thread for the compiler ({error}); raise the limit on "
                        "processes (ulimit -u), or end other programs"
                    ) from error
                failure = next((text for future in compiled if (text := future.result()) is not None), None)
                output = Path(temporary, target.name)
                if failure is None:
                    failure = _run_compiler(
                        [compiler, "-shared", *flags, *objects.values(), "-o", str(output), *link_flags]
                    )
                if failure is None:
                    output.chmod(0o600)
                    output.replace(target)
                    return target
                failures.append(f"{compiler} -std={standard}: {failure}")
    raise BuildError("; ".join(failures))


def _run_compiler(command: Sequence[str]) -> str | None:
    """Run a compiler; return its error lines if it failed, None if it succeeded."""
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"did not finish in {_TIMEOUT_S} s"
    if process.returncode == 0:
        return None
    lines = [line for line in process.stderr.splitlines() if "error" in line] or process.stderr.splitlines()
    return " | ".join(lines[:3]) or f"exit status {process.returncode}"
