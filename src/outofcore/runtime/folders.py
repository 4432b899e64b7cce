"""Find the file system of a folder, and the default spill folder."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path

from outofcore.capture.provenance import user_stacklevel
from outofcore.compiling import ensure_private_folder, user_cache_folder

# File systems in memory: spilling there frees no memory.
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})


def file_system_of(path: Path) -> str:
    """Return the type of the file system of an existing path, such as "ext4"; empty if unknown."""
    device = path.stat().st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in mounts:
        before, separator, after = line.partition(" - ")
        if separator and before.split()[2] == name:
            return after.split()[0]
    return ""


def in_memory(path: Path) -> bool:
    """Return whether files under an existing path occupy memory instead of a disk."""
    return file_system_of(path) in _IN_MEMORY


def default_spill_directory() -> Path:
    """Choose a folder for spill files, on a disk if possible; it may create the cache folder."""
    temporary = Path(tempfile.gettempdir())
    if not in_memory(temporary):
        return temporary
    try:
        cache = ensure_private_folder(user_cache_folder())
        if not in_memory(cache):
            return cache
    except OSError:
        pass  # no usable home folder, as in some containers: try the next candidate
    fallback = Path("/var/tmp")
    if fallback.is_dir() and os.access(fallback, os.W_OK | os.X_OK) and not in_memory(fallback):
        return fallback
    warnings.warn(
        f"the spill directory {temporary} is kept in memory by the system, so that spilling to it frees none; "
        "name a directory on a disk as the spill directory",
        stacklevel=user_stacklevel(),
    )
    return temporary
