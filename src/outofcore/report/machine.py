"""The machine and the process that a report is about, as the system tells it."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from outofcore.units import KIB


@dataclass(frozen=True, slots=True)
class Machine:
    """What a measurement was taken on."""

    cpu: str  # the model's name; the architecture where the system does not say
    cores: int  # that this process may use
    memory_bytes: int
    kernel: str
    python: str


def this_machine() -> Machine:
    """The machine as this process sees it."""
    return Machine(
        cpu=_field(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
    )


def available_memory_bytes() -> int | None:
    """Memory that can be taken without swapping, as the kernel estimates; None where it does not say."""
    return _kib(_field(Path("/proc/meminfo"), "MemAvailable"))


def resident_memory_bytes() -> int | None:
    """Physical memory of this process (RSS) now; None where the system does not say."""
    return _kib(_field(Path("/proc/self/status"), "VmRSS"))


def peak_memory_bytes() -> int | None:
    """The most physical memory that this process has had (the peak of its RSS); None where the system does not say.

    Exact to about a MiB, since the kernel counts pages in batches. Not from ``getrusage``: there a process inherits
    the peak of the one that started it.
    """
    return _kib(_field(Path("/proc/self/status"), "VmHWM"))


def transparent_huge_pages() -> str:
    """The system's setting: "always", "madvise", "never", or "" where it does not say."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]


def _field(path: Path, name: str) -> str:
    """The value of the first line ``name: value`` of a file; "" where there is none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _kib(text: str) -> int | None:
    """Bytes of a text such as ``"1234 kB"``, as the kernel writes KiB."""
    number = text.partition(" ")[0]
    return int(number) * KIB if number.isdigit() else None
