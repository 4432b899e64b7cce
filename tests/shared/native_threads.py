"""The threads of this process as the kernel lists them, Python's and native ones."""

from __future__ import annotations

from pathlib import Path

_EXITING = 0x4  # PF_EXITING of the kernel's include/linux/sched.h


def thread_names() -> dict[int, str]:
    """Return the names of threads by id, without exiting threads: the kernel lists joined threads a moment longer."""
    names = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            start, _, end = (task / "stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if not int(end.split()[6]) & _EXITING:
            names[int(task.name)] = start.partition(" (")[2]
    return names


def copy_threads() -> set[int]:
    return {thread for thread, name in thread_names().items() if name == "outofcore-copy"}
