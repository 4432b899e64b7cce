"""Measurements kept on disk, so that no process has to take them again.

A cache is a folder with a JSON file for each kind of measurement and each set of facts on which it depends (the
machine, its threads, the version of PyTorch): other facts, another file.

Safe under concurrent use: a file is replaced as a whole, so a reader finds the old or the new one; a writer adds to it
under a lock, so that two writers lose nothing. Damaged files, or those of another format, are ignored, logged, and
rewritten. A folder that cannot be written to costs time and nothing else. docs/internals/caches.md lists all caches.
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

# A file holds no more than this; what was written longest ago goes first.
_MOST_ENTRIES = 20_000
# How long a writer waits for another one before it gives up: what it has measured is then lost, not wrong.
_LOCK_SECONDS = 5.0
_ENDINGS = (".json", ".lock", ".part")


class _File(Struct):
    format: str
    facts: dict[str, object]
    entries: dict[str, object]


def default_cache_folder() -> Path:
    """Return the default folder for measurements. It need not exist."""
    return user_cache_folder() / "measured"


def open_cache(given: bool | str | os.PathLike[str]) -> Cache | None:
    """Open the user's cache: True for the default folder, False for none, or a folder.

    Raises ``InputError`` if the path is not a folder.
    """
    if given is False:
        return None
    folder = default_cache_folder() if given is True else Path(given)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"the cache {folder} is not a folder; name a folder, or go without a cache")
    return Cache(folder)


@dataclass(frozen=True)
class Cache:
    """Measurements in a folder, which is made when something is first written."""

    folder: Path

    def shelf(self, kind: str, facts: Mapping[str, object]) -> Shelf:
        """Return the measurements of one kind, such as "ops", that depend on these facts (JSON values)."""
        settled = json.dumps(facts, sort_keys=True, default=str)
        digest = hashlib.sha256(f"{FORMAT}\0{settled}".encode()).hexdigest()
        return Shelf(self.folder / f"{kind}-{digest[:16]}.json", json.loads(settled))

    def files(self) -> list[Path]:
        """Return the files of the cache, in order."""
        try:
            return sorted(p for p in self.folder.iterdir() if p.suffix in _ENDINGS and p.is_file())
        except OSError:
            return []

    def bytes(self) -> int:
        total = 0
        for path in self.files():
            with contextlib.suppress(FileNotFoundError):  # another process may clear it meanwhile
                total += path.stat().st_size
        return total

    def clear(self) -> int:
        """Delete the files of the cache, and nothing else in its folder; return how many there were."""
        found = self.files()
        for path in found:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise InputError(f"cannot delete {path}: {error.strerror}; delete the folder by hand") from error
        return len(found)


@lru_cache(8)
def _read(path: Path, *_: int) -> _File:
    """Read a file of a cache, once for each inode, time and size: reading takes longer than planning a small step."""
    return decode_json(path, FORMAT, _File, whole=False)


@dataclass(frozen=True)
class Shelf:
    """One file of a cache."""

    path: Path
    facts: Mapping[str, object]

    def read(self) -> dict[str, object]:
        """Return all entries by key; none where the file is missing or damaged."""
        try:
            seen = self.path.stat()
        except OSError:
            return {}
        try:
            file = _read(self.path, seen.st_ino, seen.st_mtime_ns, seen.st_size)
            if file.facts != self.facts:
                refuse(self.path, "$.facts", "are not those by which the file is named")
            return dict(file.entries)
        except (GraphError, InputError) as error:
            _log.warning("measurements are taken anew, for those kept cannot be read: %s", error)
            return {}

    def write(self, entries: Mapping[str, object]) -> None:
        """Add or replace entries; a failure is logged, not raised."""
        if not entries:
            return
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked() as locked:
                if not locked:
                    _log.warning("measurements are not kept: %s is being written by another process", self.path)
                    return
                kept = {key: value for key, value in self.read().items() if key not in entries}
                together = [*kept.items(), *entries.items()][-_MOST_ENTRIES:]
                try:
                    self._replace(dict(together))
                except (ValueError, OverflowError):
                    # What was kept is damaged in a way that can be read and not written.
                    self._replace(entries)
        except (OSError, InputError) as error:
            _log.warning("measurements are not kept: %s", error)

    def _replace(self, entries: Mapping[str, object]) -> None:
        replace_json(self.path, {"format": FORMAT, "facts": self.facts, "entries": entries})

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Take turns with other processes in a measurement that takes much memory, then read again.

        It waits as long as another process is measuring. Where no lock can be had, all go at once.
        """
        with contextlib.ExitStack() as opened:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                lock = opened.enter_context(self.path.with_name(f"{self.path.stem}-turn.lock").open("wb"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:
                _log.debug("others may measure at the same time: %s", error)
            yield

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Hold the lock of the file; False if another process keeps it for too long."""
        # A file of its own: the lock of one that is replaced would be that of the former one.
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
