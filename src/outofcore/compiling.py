"""Compile C++ that comes with the package on first use, and keep the libraries in the user's cache.

It needs only a C++ compiler, and is done once for each version of the source and each set of flags. Wheels have
libraries already (``setup.py``): those that need neither PyTorch nor CUDA, see ``load_functions``, and where PyTorch is
there while the wheel is built, the one for the CPU, see ``runtime.native``.
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
# The newest first: recent headers of PyTorch may need C++20, older compilers may only have C++17.
STANDARDS = ("c++20", "c++17")
# Without contraction of sums into other operations: plans are compared to the last bit.
_FLAGS = ("-O2", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off")
_TIMEOUT_S = 900  # half a minute of work, on a machine that may do much else

_Library = TypeVar("_Library", bound=ctypes.CDLL)


class BuildError(Exception):
    """The library could not be built; the message says why. The caller tells the user what follows from that."""


def user_cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/outofcore``, or ``~/.cache/outofcore``. It need not exist."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path is to be ignored, says the XDG base directory specification.
    return (Path(base) if Path(base).is_absolute() else Path("~/.cache").expanduser()) / "outofcore"


def private_folder(path: Path) -> Path:
    """Create a folder that only this user may enter, or check that an existing one is this user's own.

    Raises ``OSError`` if it cannot be created, or somebody else may write to it.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{path} belongs to, or can be written by, somebody else")
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(f"{path} cannot be written to")
    return path


def load_built(what: str, beside: Path, build: Callable[[Path], object], load: Callable[[Path], _Library]) -> _Library:
    """Load a library from where a wheel has it, or from the cache; build it there if it is in neither.

    ``what`` is its name for people. The name of the file ``beside`` the sources covers everything that goes into the
    build. ``build`` makes the file that it is given, and may raise ``BuildError`` or OSError; ``load`` may raise
    OSError. Where the cache cannot be used, it is built in a temporary folder. A terminal says that it is being
    compiled. Raises ``StateError`` if it cannot be built.
    """
    with contextlib.suppress(OSError):  # not installed from a wheel, or one for an older system or another PyTorch
        return load(beside)
    folder = user_cache_folder() / beside.stem
    try:
        path = private_folder(folder) / beside.name
        with contextlib.suppress(OSError):  # it is not there yet, or damaged, perhaps by a full disk
            return load(path)
        with _alone(folder):
            with contextlib.suppress(OSError):  # another process has built it meanwhile
                return load(path)
            if sys.stderr.isatty():
                sys.stderr.write(f"outofcore: compiling {what}, up to half a minute or so, only once ...\n")
            build(path)
            return load(path)
    except (OSError, BuildError) as error:
        reasons = [f"in {folder}: {error}"]
    # The cache may be read-only, or on a volume from which nothing may be executed.
    try:
        with tempfile.TemporaryDirectory(prefix="outofcore-") as temporary:
            path = Path(temporary, beside.name)
            build(path)
            return load(path)  # stays loaded when the file is gone
    except (OSError, BuildError) as error:
        if str(error) not in reasons[0]:
            reasons.append(f"in a temporary folder: {error}")
    raise StateError(
        f"native code is missing: {what} is not compiled here, and could not be ({'; '.join(reasons)}). Install a C++ "
        "compiler such as g++, or a wheel of outofcore that was built with one"
    )


def is_built(beside: Path) -> bool:
    """Return whether ``load_built`` need not build the library, unless a file is damaged."""
    return beside.is_file() or (user_cache_folder() / beside.stem / beside.name).is_file()


def wheel_library(source: Path) -> Path:
    """Return where a wheel has the library of a C++ file: beside it, with the machine and a digest in its name.

    The digest covers the file and all headers beside it, which it may include.
    """
    texts = [path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h")))]
    digest = hashlib.sha256(b"".join(texts) + "\0".join(_FLAGS).encode()).hexdigest()[:16]
    return source.with_name(f"{source.stem}-{platform.machine()}-{digest}.so")


def load_functions(
    source: Path, functions: Mapping[str, tuple[tuple[object, ...], object]], kind: type[_Library] = ctypes.CDLL
) -> _Library:
    """Load the functions of a C++ file that needs nothing else, as ``load_built`` does.

    ``functions`` gives argument and result types by name without ``outofcore_``. ``kind`` is ``ctypes.PyDLL`` if they
    are called with Python's lock held. Raises ``StateError`` if there is no library, and none can be built.
    """

    def load(path: Path) -> _Library:
        library = kind(str(path))
        for function, (arguments, result) in functions.items():
            found = getattr(library, f"outofcore_{function}", None)
            if found is None:
                raise OSError(f"{path} lacks the function outofcore_{function}")
            found.argtypes, found.restype = arguments, result
        return library

    return load_built(source.name, wheel_library(source), lambda path: compile_library({source: ()}, path), load)


def native_callback(function: Callable[..., int], *arguments: Any, failed: int) -> Any:
    """Wrap a Python function as a native callback ``void (arguments..., int64_t* answer)``.

    If a ctypes callback with a return value raises, the native caller gets an undefined value. This callback returns
    nothing and writes to ``answer`` instead. After Ctrl-C ``answer`` is unchanged, and the native caller must check.
    After any other exception, which ctypes prints, it is ``failed``.
    """

    def call(*given: Any) -> None:
        answer = given[-1]
        try:
            answer[0] = function(*given[:-1])
        except KeyboardInterrupt:
            pass
        except Exception:
            answer[0] = failed
            raise

    return ctypes.CFUNCTYPE(None, *arguments, ctypes.POINTER(ctypes.c_int64))(call)


@contextlib.contextmanager
def _alone(folder: Path) -> Generator[None]:
    """Let one process at a time build in a folder: all ranks of a job begin at once."""
    with (folder / "lock").open("w") as lock:
        with contextlib.suppress(OSError):  # some file systems have no locks: then each builds its own
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compile_library(
    sources: Mapping[Path, Sequence[str]],
    target: Path,
    flags: Sequence[str] = (),
    link_flags: Sequence[str] = (),
    compilers: Sequence[str] = COMPILERS,
) -> Path:
    """Compile sources, each with flags of its own, to a library, under a temporary name until it is complete.

    As many at a time as there are processors, in the order given. Several processes may build the same library at
    once, since the final rename is atomic. Raises ``BuildError`` if no compiler works or the system gives no thread,
    and ``OSError`` if the folder cannot be written to.
    """
    found = [path for path in map(shutil.which, compilers) if path]
    if not found:
        raise BuildError(f"no C++ compiler is on PATH (looked for {', '.join(compilers)}); install g++ or clang++")
    failures: list[str] = []
    with (
        tempfile.TemporaryDirectory(dir=target.parent, prefix="building-") as temporary,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        for compiler in found:
            for standard in STANDARDS:
                command = [compiler, f"-std={standard}", *_FLAGS, *flags]
                objects = {source: str(Path(temporary, f"{source.stem}.o")) for source in sources}
                try:
                    compiled = [
                        pool.submit(_run, [*command, *sources[source], "-c", str(source), "-o", name])
                        for source, name in objects.items()
                    ]
                except RuntimeError as error:
                    raise BuildError(f"the system gives no thread for the compiler ({error})") from error
                failure = next((text for one in compiled if (text := one.result()) is not None), None)
                output = Path(temporary, target.name)
                if failure is None:
                    failure = _run([compiler, "-shared", *flags, *objects.values(), "-o", str(output), *link_flags])
                if failure is None:
                    output.chmod(0o600)
                    output.replace(target)
                    return target
                failures.append(f"{compiler} -std={standard}: {failure}")
    raise BuildError("; ".join(failures))


def _run(command: Sequence[str]) -> str | None:
    """Run a compiler; return None if it succeeded, else the most important lines of its output."""
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
