"""``outofcore doctor --clear-cache``: the measurements that are kept. Without PyTorch."""

from __future__ import annotations

from pathlib import Path

from outofcore.profiling.cache import Cache, default_cache_folder
from outofcore.units import format_bytes


def cache_at(folder: Path | None) -> Cache:
    """The cache in a folder, or the user's own."""
    return Cache(default_cache_folder() if folder is None else folder)


def describe(cache: Cache) -> str:
    """Where a cache is and what it takes."""
    files = [path for path in cache.files() if path.suffix == ".json"]
    return f"{cache.folder}, {len(files)} files, {format_bytes(cache.bytes())}"


def clear(folder: Path | None) -> None:
    """Delete what is kept, and say so.

    Raises:
        InputError: a file cannot be deleted.
    """
    cache = cache_at(folder)
    taken = cache.bytes()
    print(f"{cache.folder}: {cache.clear()} files deleted, {format_bytes(taken)}")
