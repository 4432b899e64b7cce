"""The machine and the process that a report is about."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from outofcore.units import KIB


@dataclass(frozen=True, slots=True)
class Machine:
    cpu: str  # the model's name, or else the architecture
    cores: int  # available to this process
    memory_bytes: int
    kernel: str
    python: str


def this_machine() -> Machine:
    return Machine(
        cpu=_field(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
    )


def available_memory_bytes() -> int | None:
    """Return the available memory, within the limits of the control group; None if unknown."""
    counts = [_parse_kib(_field(Path("/proc/meminfo"), "MemAvailable")), _free_in_group(_group_folder())]
    return min((count for count in counts if count is not None), default=None)


def resident_memory_bytes() -> int | None:
    return _parse_kib(_field(Path("/proc/self/status"), "VmRSS"))


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Physical memory of this process in bytes; 0 if the system does not report it."""

    resident: int
    of_files: int  # pages of files
    anonymous: int  # other private pages


def process_memory() -> ProcessMemory:
    lines = dict(line.split(":", 1) for line in _read_text(Path("/proc/self/status")).splitlines() if ":" in line)
    return ProcessMemory(*(_parse_kib(lines.get(name, "").strip()) or 0 for name in ("VmRSS", "RssFile", "RssAnon")))


def peak_memory_bytes() -> int | None:
    """Return the peak physical memory (RSS) of this process, exact to about a MiB; None if unknown."""
    # Not by getrusage, since a process inherits that value from its parent.
    return _parse_kib(_field(Path("/proc/self/status"), "VmHWM"))


def transparent_huge_pages() -> str:
    """Return the setting of transparent huge pages: "always", "madvise", "never", or "" if unknown."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]


def _group_folder() -> Path:
    line = next(
        (entry for entry in _read_text(Path("/proc/self/cgroup")).splitlines() if entry.startswith("0::")), "0::/"
    )
    return Path("/sys/fs/cgroup") / line.removeprefix("0::").lstrip("/")


def _free_in_group(folder: Path) -> int | None:
    """Return the free bytes within the memory limits of a control group and its parents; None without a limit."""
    free_bytes: list[int] = []
    for group in (folder, *folder.parents):
        limit, used = _read_text(group / "memory.max").strip(), _read_text(group / "memory.current").strip()
        if limit.isdigit() and used.isdigit():
            statistics = dict(line.split() for line in _read_text(group / "memory.stat").splitlines())
            file_bytes = int(statistics.get("active_file", 0)) + int(statistics.get("inactive_file", 0))
            # The kernel drops file pages first, so they count as free.
            free_bytes.append(max(int(limit) - int(used) + file_bytes, 0))
    return min(free_bytes, default=None)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _field(path: Path, name: str) -> str:
    """Return the value of the first line ``name: value`` of a file; empty without such a line."""
    for line in _read_text(path).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _parse_kib(text: str) -> int | None:
    number = text.partition(" ")[0]
    return int(number) * KIB if number.isdigit() else None
