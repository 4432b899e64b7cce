"""Build the stub of a GPU: libraries for PyTorch's CUDA build, and the replay of op results.

    python build.py [--out FOLDER]

Run it with the Python that has PyTorch's CUDA build and its packages of headers and libraries, which name the entry
points to export. Skips up-to-date parts. Needs g++ and nm; takes a minute and a half.
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
# Headers that the CUDA runtime packages lack, and that a plain compiler does not need.
SHIM = ROOT / "src" / "outofcore" / "runtime" / "csrc" / "shim"


class BuildError(Exception):
    pass


@dataclass(frozen=True)
class Library:
    """A library that the stub replaces.

    Attributes:
        like: library or header with the entry points to export.
        versioned: whether its symbols have its name as their version.
    """

    source: str
    name: str
    like: Path
    versioned: bool = True
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Packages:
    torch: Path
    cuda: Path  # with include/ and lib/

    @staticmethod
    def of_this_python() -> Packages:
        spec = importlib.util.find_spec("torch")
        torch = Path(next(iter(spec.submodule_search_locations or ()))) if spec is not None else None
        if torch is None or not (torch / "lib" / "libtorch_cuda.so").is_file():
            raise BuildError(
                f"{sys.executable} has no CUDA build of PyTorch; on Linux, `pip install torch` brings one (5 GB with "
                "its packages)"
            )
        headers = sorted(torch.parent.glob("nvidia/cu*/include/cuda_runtime_api.h"))
        if not headers:
            raise BuildError(f"CUDA's packages are not in the folder of {torch}; the stub needs PyTorch with CUDA 13")
        return Packages(torch, headers[-1].parents[1])

    def library(self, pattern: str) -> Path:
        candidates = sorted((*self.cuda.glob(f"lib/{pattern}"), *self.cuda.parent.glob(f"*/lib/{pattern}")))
        if not candidates:
            raise BuildError(f"there is no {pattern} in the folder of {self.torch}")
        return candidates[0]


def run(command: Sequence[object]) -> str:
    process = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if process.returncode:
        raise BuildError(f"{' '.join(map(str, command))}\n{process.stderr.strip()[-3000:]}")
    return process.stdout


def defined_names(path: Path, *flags: str) -> set[str]:
    parts = [line.split() for line in run(["nm", *flags, "--defined-only", path]).splitlines()]
    return {part[2].split("@")[0] for part in parts if len(part) == 3 and part[1] in "TWiBDV"}


def entry_points(like: Path) -> set[str]:
    if like.suffix == ".h":
        return set(re.findall(r"\b(cu[A-Z]\w+)\s*\(", like.read_text(encoding="utf-8", errors="replace")))
    return {name for name in defined_names(like, "-D") if re.match(r"_*cu", name)}


def build_library(library: Library, packages: Packages, out: Path, runtime: Path) -> None:
    object_file, source, defaults = (out / f"{library.name}.{end}" for end in ("o", "defaults.c", "defaults.o"))
    flags = ["-O2", "-g1", "-fPIC", "-fvisibility=hidden", f"-I{packages.cuda / 'include'}", "-idirafter", SHIM]
    run(
        [
            "g++",
            "-std=c++20",
            "-Wall",
            "-Wextra",
            *flags,
            *library.flags,
            "-c",
            HERE / library.source,
            "-o",
            object_file,
        ]
    )
    own_names, names = defined_names(object_file), entry_points(library.like)
    lines = ["int stub_default(const char*, char*);"]
    lines += [
        f'int {n}(void) {{ static char told; return stub_default("{n}", &told); }}' for n in sorted(names - own_names)
    ]
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    run(["gcc", "-O1", "-fPIC", "-w", "-fno-builtin", "-c", source, "-o", defaults])
    version: list[str] = []
    if library.versioned:
        public = sorted(names | {name for name in own_names if re.match(r"_*cu|stub_", name)})
        script = out / f"{library.name}.map"
        script.write_text(f"{library.name} {{ global: {'; '.join(public)}; local: *; }};\n", encoding="utf-8")
        version = [f"-Wl,--version-script={script}"]
    runtime_flags = [] if library.name == runtime.name else [runtime, "-Wl,-rpath,$ORIGIN"]
    target = out / library.name
    parts = [object_file, defaults, *version, *runtime_flags]
    run(["g++", "-shared", f"-Wl,-soname,{library.name}", *parts, "-o", target, "-ldl", "-lpthread"])


def build_replay(packages: Packages, out: Path, runtime: Path) -> None:
    torch = packages.torch
    folders = [packages.cuda / "include", torch / "include", torch / "include" / "torch" / "csrc" / "api" / "include"]
    # Warnings in PyTorch's own headers are not ours.
    include = [part for folder in folders for part in ("-isystem", folder)]
    flags = ["-O1", "-g1", "-Wall", "-fPIC", "-shared", "-fvisibility=hidden", *include, "-idirafter", SHIM]
    link = [f"-L{torch / 'lib'}", "-lc10", "-lc10_cuda", "-ltorch_cpu", "-Wl,--no-as-needed", "-ltorch_cuda", runtime]
    target = out / "libreplay.so"
    run(["g++", "-std=c++20", *flags, HERE / "replay.cpp", "-o", target, *link, "-Wl,-rpath,$ORIGIN"])


def key_of(packages: Packages) -> str:
    hashed = hashlib.sha256(str(packages).encode())
    for path in (*sorted(HERE.glob("*.cpp")), *sorted(HERE.glob("*.h")), Path(__file__), packages.torch / "version.py"):
        hashed.update(path.read_bytes())
    return hashed.hexdigest()


def build(out: Path = OUT) -> Path:
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
    """Return the environment of a process on the stub.

    Args:
        out: folder of the stub.
        settings: of the stub, by the names in README.md without ``STUB_``, in lower case.
    """
    folders = [HERE / "startup", ROOT / "src", HERE, ROOT / "tests" / "cuda", ROOT / "tests" / "shared", ROOT / "tools"]
    paths = [*map(str, folders), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "LD_PRELOAD": (out / "preload").read_text(encoding="utf-8"),
        "STUB_REPLAY": str(out / "libreplay.so"),
        "TRITON_LIBCUDA_PATH": str(out),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # replaced kernels are intended here
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        # The stub has no expandable segments.
        "PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:False"),
        **{f"STUB_{name.upper()}": str(value) for name, value in settings.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the stub")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="command to run on the stub, such as `python train.py`"
    )
    arguments = parser.parse_args()
    try:
        out = build(arguments.out)
    except BuildError as error:
        print(f"gpu-stub: {error}", file=sys.stderr)
        return 2
    if arguments.command:
        command = [part for part in arguments.command if part != "--"]
        command[:1] = [sys.executable] if command[0] == "python" else command[:1]
        os.execvpe(command[0], command, environment(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
