"""``outofcore doctor``: check the installation. ``torch_checks`` has the checks that need PyTorch."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path

import outofcore
from outofcore.compiling import COMPILERS
from outofcore.profiling.cache import Cache, default_cache_folder
from outofcore.report.machine import available_memory_bytes, this_machine, transparent_huge_pages
from outofcore.units import format_bytes

CPU_BUILD = "pip install torch --index-url https://download.pytorch.org/whl/cpu"


class CheckStatus(Enum):
    """The result of a check; the value is the first word of its line."""

    OK = "ok"
    NOTE = "note"  # works, and could be better
    PROBLEM = "FAIL"
    BEGINS = ""  # announces a check that takes a while


@dataclass(frozen=True)
class Finding:
    result: CheckStatus
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.result.value:<4} {self.name:<17} {self.text}"


def doctor(home: str, cache: Path | None) -> bool:
    """Check the installation: print a line for each check, and a summary. Return whether everything works."""
    problems: dict[str, None] = {}
    for finding in _run_checks(home, cache):
        print(finding, flush=True)
        if finding.result is CheckStatus.PROBLEM:
            problems[finding.name] = None
    count = f"{len(problems)} problem{'' if len(problems) == 1 else 's'}"
    print(f"{count}: {', '.join(problems)}" if problems else "everything works")
    return not problems


def _run_checks(home: str, cache: Path | None) -> Iterator[Finding]:
    machine = this_machine()
    versions = f"{outofcore.__version__}, Python {machine.python}, {machine.kernel}"
    yield Finding(CheckStatus.OK, "outofcore", versions)
    yield Finding(CheckStatus.OK, "CPU", f"{machine.cpu}, {machine.cores} cores")
    available = available_memory_bytes()
    free = "" if available is None else f", {format_bytes(available)} available"
    yield Finding(CheckStatus.OK, "memory", f"{format_bytes(machine.memory_bytes)}{free}")
    pages = transparent_huge_pages()
    result = CheckStatus.NOTE if pages == "never" else CheckStatus.OK
    yield Finding(result, "huge pages", f"transparent huge pages: {pages or 'unknown on this system'}")
    yield _compiler_finding()
    stored = Cache(default_cache_folder() if cache is None else cache)
    files = sum(path.suffix == ".json" for path in stored.files())
    yield Finding(CheckStatus.OK, "measurements", f"{stored.folder}, {files} files, {format_bytes(stored.bytes())}")
    torch_problem = _torch_problem()
    if torch_problem is None:
        yield from import_module("outofcore.cli.torch_checks").findings(home)
    else:
        yield torch_problem


def _compiler_finding() -> Finding:
    compiler = next((path for path in map(shutil.which, COMPILERS) if path), None)
    if compiler is not None:
        return Finding(CheckStatus.OK, "C++ compiler", compiler)
    # Only a note: a wheel may contain the compiled code, which the check of the native code detects.
    return Finding(
        CheckStatus.NOTE,
        "C++ compiler",
        f"none on PATH (looked for {', '.join(COMPILERS)}); install one, e.g. apt install g++ or dnf install gcc-c++",
    )


def _torch_problem() -> Finding | None:
    """Import PyTorch; return a finding with the reason if that fails, else None."""
    try:
        import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            return _broken_torch_finding(error)
        text = f"not installed; install it with: pip install torch, or the much smaller CPU build: {CPU_BUILD}"
        return Finding(CheckStatus.PROBLEM, "PyTorch", text)
    except (ImportError, OSError) as error:
        return _broken_torch_finding(error)
    return None


def _broken_torch_finding(error: Exception) -> Finding:
    reason = str(error).partition("\n")[0]
    return Finding(CheckStatus.PROBLEM, "PyTorch", f"installed, but cannot be imported ({reason}); install it again")
