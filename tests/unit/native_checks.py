"""Programs that check C++ code without PyTorch; each prints its result."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import outofcore
from outofcore.compiling import COMPILERS

FOLDER = Path(outofcore.__file__).parent / "runtime" / "csrc"


def build_check(name: str, folder: Path) -> Path:
    """Compile ``NAME_check.cpp``; skip the test without a compiler."""
    compiler = next((path for path in map(shutil.which, COMPILERS) if path), None)
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    program = folder / name
    source = Path(__file__).with_name(f"{name}_check.cpp")
    subprocess.run(
        [compiler, "-std=c++20", "-O1", f"-I{FOLDER}", f"-I{FOLDER / 'follow'}", str(source), "-o", str(program)],
        check=True,
    )
    return program


def run_check(program: Path, *arguments: str) -> str:
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout.strip()
