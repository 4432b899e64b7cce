"""Builds the stub: the libraries that PyTorch's CUDA build loads, and what gives its ops their results.

    python build.py [--out FOLDER]

Run by the Python that has PyTorch's CUDA build with its packages of headers and libraries, of which the stub takes the
names of all that it has to export. What is up to date is left alone. Needs g++ and nm; a minute and a half.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
OUT = ROOT / "build" / "gpu-stub"
# Headers that the packages of CUDA's runtime lack, and that say nothing to a plain compiler.
SHIM = ROOT / "src" / "outofcore" / "runtime" / "csrc" / "shim"


class BuildError(Exception):
    """What the stub is built from is not here, or does not build."""


@dataclass(frozen=True)
class Library:
    """One that is stood in for.

    Attributes:
        source: C++ file of this folder.
        name: of the library, as PyTorch loads it.
        like: libraries and headers whose entry points it has to export.
        versioned: whether its symbols have its name for a version.
        flags: of the compiler.
    """

    source: str
    name: str
    like: Path
    versioned: bool = True
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Packages:
    """Where PyTorch is, and CUDA's packages beside it."""

    torch: Path
    cuda: Path  # with include/ and lib/

    @staticmethod
    def of_this_python() -> Packages:
        """Those of the Python that runs.

        Raises:
            BuildError: its PyTorch is none, or not the CUDA build.
        """
        spec = importlib.util.find_spec("torch")
        torch = Path(next(iter(spec.submodule_search_locations or ()))) if spec is not None else None
        if torch is None or not (torch / "lib" / "libtorch_cuda.so").is_file():
            raise BuildError(
                f"{sys.executable} has no CUDA build of PyTorch; on Linux, `pip install torch` brings one (5 GB with "
                "its packages)"
            )
        found = sorted(torch.parent.glob("nvidia/cu*/include/cuda_runtime_api.h"))
        if not found:
            raise BuildError(f"CUDA's packages are not beside {torch}; this is written for PyTorch with CUDA 13")
        return Packages(torch, found[-1].parents[1])

    def library(self, pattern: str) -> Path:
        """One of CUDA's libraries."""
        found = sorted((*self.cuda.glob(f"lib/{pattern}"), *self.cuda.parent.glob(f"*/lib/{pattern}")))
        if not found:
            raise BuildError(f"there is no {pattern} beside {self.torch}")
        return found[0]


def run(command: Sequence[object]) -> str:
    """What a command prints.

    Raises:
        BuildError: it failed.
    """
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(map(str, command))}\n{done.stderr.strip()[-3000:]}")
    return done.stdout


def defined(path: Path, *flags: str) -> set[str]:
    """The names that a library or an object file defines."""
    parts = [line.split() for line in run(["nm", *flags, "--defined-only", path]).splitlines()]
    return {part[2].split("@")[0] for part in parts if len(part) == 3 and part[1] in "TWiBDV"}


def wanted(like: Path) -> set[str]:
    """The entry points that a library has, or a header declares."""
    if like.suffix == ".h":
        return set(re.findall(r"\b(cu[A-Z]\w+)\s*\(", like.read_text(encoding="utf-8", errors="replace")))
    return {name for name in defined(like, "-D") if re.match(r"_*cu", name)}


def build_library(library: Library, packages: Packages, out: Path, runtime: Path) -> None:
    """Compile it, give every entry point that it does not have a default, and link it."""
    written, source, rest = (out / f"{library.name}.{end}" for end in ("o", "defaults.c", "defaults.o"))
    flags = ["-O2", "-g1", "-fPIC", "-fvisibility=hidden", f"-I{packages.cuda / 'include'}", "-idirafter", SHIM]
    run(["g++", "-std=c++20", "-Wall", "-Wextra", *flags, *library.flags, "-c", HERE / library.source, "-o", written])
    own, names = defined(written), wanted(library.like)
    lines = ["int stub_default(const char*, char*);"]
    lines += [f'int {n}(void) {{ static char told; return stub_default("{n}", &told); }}' for n in sorted(names - own)]
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    run(["gcc", "-O1", "-fPIC", "-w", "-fno-builtin", "-c", source, "-o", rest])
    version: list[str] = []
    if library.versioned:
        public = sorted(names | {name for name in own if re.match(r"_*cu|stub_", name)})
        script = out / f"{library.name}.map"
        script.write_text(f"{library.name} {{ global: {'; '.join(public)}; local: *; }};\n", encoding="utf-8")
        version = [f"-Wl,--version-script={script}"]
    beside = [] if library.name == runtime.name else [runtime, "-Wl,-rpath,$ORIGIN"]
    target = out / library.name
    parts = [written, rest, *version, *beside]
    run(["g++", "-shared", f"-Wl,-soname,{library.name}", *parts, "-o", target, "-ldl", "-lpthread"])


def build_replay(packages: Packages, out: Path, runtime: Path) -> None:
    """What gives ops their results."""
    torch = packages.torch
    folders = [packages.cuda / "include", torch / "include", torch / "include" / "torch" / "csrc" / "api" / "include"]
    # Warnings in PyTorch's own headers are not ours.
    include = [part for folder in folders for part in ("-isystem", folder)]
    flags = ["-O1", "-g1", "-Wall", "-fPIC", "-shared", "-fvisibility=hidden", *include, "-idirafter", SHIM]
    link = [f"-L{torch / 'lib'}", "-lc10", "-lc10_cuda", "-ltorch_cpu", "-Wl,--no-as-needed", "-ltorch_cuda", runtime]
    target = out / "libreplay.so"
    run(["g++", "-std=c++20", *flags, HERE / "replay.cpp", "-o", target, *link, "-Wl,-rpath,$ORIGIN"])


def key_of(packages: Packages) -> str:
    """Says all that goes into a build."""
    hashed = hashlib.sha256(str(packages).encode())
    for path in (*sorted(HERE.glob("*.cpp")), *sorted(HERE.glob("*.h")), Path(__file__), packages.torch / "version.py"):
        hashed.update(path.read_bytes())
    return hashed.hexdigest()


def build(out: Path = OUT) -> Path:
    """Build what is not up to date; returns the folder.

    Raises:
        BuildError: it cannot be built.
    """
    packages = Packages.of_this_python()
    out.mkdir(parents=True, exist_ok=True)
    stamp, key = out / "built", key_of(packages)
    if stamp.is_file() and stamp.read_text(encoding="ascii") == key:
        return out
    stamp.unlink(missing_ok=True)
    names = ("libcudart.so.*", "libcublas.so.*", "libcublasLt.so.*", "libcudnn.so.*", "libcupti.so.*")
    cudart, blas, lt, dnn, cupti = map(packages.library, names)
    runtime = out / cudart.name
    libraries = [
        Library("cuda.cpp", "libcuda.so.1", packages.cuda / "include" / "cuda.h", versioned=False),
        Library("blas.cpp", blas.name, blas),
        Library("blas.cpp", lt.name, lt, flags=("-DSTUB_LT",)),
        Library("dnn.cpp", dnn.name, dnn, flags=(f"-I{dnn.parents[1] / 'include'}",)),
        Library("cupti.cpp", cupti.name, cupti),
    ]
    build_library(Library("cudart.cpp", cudart.name, cudart), packages, out, runtime)
    with ThreadPoolExecutor(2) as pool:
        replay = pool.submit(build_replay, packages, out, runtime)
        for library in libraries:
            build_library(library, packages, out, runtime)
        replay.result()
    preloaded = [runtime, *(out / library.name for library in libraries)]
    (out / "preload").write_text(os.pathsep.join(map(str, preloaded)), encoding="utf-8")
    stamp.write_text(key, encoding="ascii")
    return out


def environment(out: Path = OUT, **settings: object) -> dict[str, str]:
    """In which a process runs on the stub.

    Args:
        out: where it is built.
        settings: of the stub, by the names in README.md without their ``STUB_``, in small letters.
    """
    folders = [HERE / "startup", ROOT / "src", HERE, ROOT / "tests" / "cuda", ROOT / "tests" / "shared", ROOT / "tools"]
    paths = [*map(str, folders), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "LD_PRELOAD": (out / "preload").read_text(encoding="utf-8"),
        "STUB_REPLAY": str(out / "libreplay.so"),
        "TRITON_LIBCUDA_PATH": str(out),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # that kernels are replaced is the purpose
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        # There are no segments that grow.
        "PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:False"),
        **{f"STUB_{name.upper()}": str(value) for name, value in settings.items()},
    }


def main() -> int:
    """Build it, and run a command on it if one is given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="where to")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="to be run on the stub, such as `python train.py`")
    given = parser.parse_args()
    try:
        out = build(given.out)
    except BuildError as error:
        print(f"gpu-stub: {error}", file=sys.stderr)
        return 2
    if given.command:
        command = [part for part in given.command if part != "--"]
        command[:1] = [sys.executable] if command[0] == "python" else command[:1]
        os.execvpe(command[0], command, environment(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
