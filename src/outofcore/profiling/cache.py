"""Measurements cached on disk, so that no other process repeats them.

There is one JSON file per kind of measurement and set of facts (machine, threads, PyTorch version). Writers hold a lock
and replace files atomically. Damaged or outdated files are logged and replaced. See docs/internals/caches.md.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from msgspec import Struct

from outofcore.compiling import user_cache_folder
from outofcore.errors import GraphError, InputError
from outofcore.jsonfile import decode_json, refuse, replace_json

_log = logging.getLogger("outofcore.profiling")

FORMAT = "outofcore-measured/1"

# Entries in a file; the oldest are dropped first.
_MAX_ENTRIES = 20_000
# How long a writer waits for the lock before it drops its measurements.
_LOCK_SECONDS = 5.0
_SUFFIXES = (".json", ".lock", ".part")


class _CacheFile(Struct):
    format: str
    facts: dict[str, object]
    entries: dict[str, object]


def default_cache_folder() -> Path:
    return user_cache_folder() / "measured"


def open_cache(location: bool | str | os.PathLike[str]) -> Cache | None:
    """Return the cache in a folder, or in the default folder for True; None for False."""
    if location is False:
        return None
    folder = default_cache_folder() if location is True else Path(location)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"the cache {folder} is not a folder; name a folder, or use no cache")
    return Cache(folder)


@dataclass(frozen=True)
class Cache:
    """A folder of cached measurements, created at the first write."""

    folder: Path

    def shelf(self, kind: str, facts: Mapping[str, object]) -> Shelf:
        """Return the file for one kind of measurements, such as "ops", that depend on the given facts."""
        facts_text = json.dumps(facts, sort_keys=True, default=str)
        digest = hashlib.sha256(f"{FORMAT}\0{facts_text}".encode()).hexdigest()
        return Shelf(self.folder / f"{kind}-{digest[:16]}.json", json.loads(facts_text))

    def files(self) -> list[Path]:
        try:
            return sorted(p for p in self.folder.iterdir() if p.suffix in _SUFFIXES and p.is_file())
        except OSError:
            return []

    def bytes(self) -> int:
        total = 0
        for path in self.files():
            with contextlib.suppress(FileNotFoundError):  # another process may clear the cache
                total += path.stat().st_size
        return total

    def clear(self) -> int:
        """Delete all files of the cache and return their number; raises ``InputError`` if a file cannot be deleted."""
        files = self.files()
        for path in files:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise InputError(f"cannot delete {path}: {error.strerror}; delete the folder by hand") from error
        return len(files)


@lru_cache(8)
def _read(path: Path, *_: int) -> _CacheFile:
    """Read a cache file; a cached function, because reading takes longer than planning a small step."""
    return decode_json(path, FORMAT, _CacheFile, whole=False)


@dataclass(frozen=True)
class Shelf:
    """A cache file with the measurements of one kind that depend on the same facts."""

    path: Path
    facts: Mapping[str, object]

    def read(self) -> dict[str, object]:
        """Return all entries by key, or an empty dict if the file is missing or damaged."""
        try:
            status = self.path.stat()
        except OSError:
            return {}
        try:
            file = _read(self.path, status.st_ino, status.st_mtime_ns, status.st_size)
            if file.facts != self.facts:
                refuse(self.path, "$.facts", "do not match the name of the file")
            return dict(file.entries)
        except (GraphError, InputError) as error:
            _log.warning("measuring again, because the cached measurements cannot be read: %s", error)
            return {}

    def write(self, entries: Mapping[str, object]) -> None:
        """Add or replace entries in the file; only log a warning if that fails."""
        if not entries:
            return
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._lock() as locked:
                if not locked:
                    _log.warning("measurements are not cached: another process is writing %s", self.path)
                    return
                old_entries = {key: value for key, value in self.read().items() if key not in entries}
                merged = [*old_entries.items(), *entries.items()][-_MAX_ENTRIES:]
                try:
                    self._replace(dict(merged))
                except (ValueError, OverflowError):
                    # Some old entry can be read but not written.
                    self._replace(entries)
        except (OSError, InputError) as error:
            _log.warning("measurements are not cached: %s", error)

    def _replace(self, entries: Mapping[str, object]) -> None:
        replace_json(self.path, {"format": FORMAT, "facts": self.facts, "entries": entries})

    @contextlib.contextmanager
    def take_turn(self) -> Iterator[None]:
        """Hold a lock so that only one process measures at a time; go on without it if locking fails."""
        with contextlib.ExitStack() as opened:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                lock = opened.enter_context(self.path.with_name(f"{self.path.stem}-turn.lock").open("wb"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:
                _log.debug("measuring without a lock, so other processes may measure at the same time: %s", error)
            yield

    @contextlib.contextmanager
    def _lock(self) -> Iterator[bool]:
        """Lock the file and yield True, or yield False if another process keeps it locked for too long."""
        # A separate file, because replacing a locked file leaves the lock on the old one.
        with self.path.with_suffix(".lock").open("wb") as lock:
            until = time.monotonic() + _LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() >= until:
                        yield False
                        return
                    time.sleep(0.01)
                else:
                    break
            yield True
