"""Store plans of compiled steps and eager loops on disk for later processes.

A file is named by a digest of the plan's inputs without the costs: after a change of costs, a plan is still correct.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Generic, TypeVar

from msgspec import Struct

from outofcore.compiling import ensure_private_folder
from outofcore.errors import OutOfCoreError
from outofcore.jsonfile import decode_own_json, refuse, replace_json

_log = logging.getLogger("outofcore")

# Maximum number of files of one type; the least recently used are deleted.
_MAX_FILES = 200


class Document(Struct):
    """A plan in a file; ``format`` names its type and version."""

    format: str


_Document = TypeVar("_Document", bound=Document)
_Plan = TypeVar("_Plan")


@dataclass(frozen=True)
class PlanStore(Generic[_Document]):
    """Documents of one type, stored in a folder; if the folder is None, they are not stored."""

    folder: Path | None
    name: str
    format: str
    kind: type[_Document]

    def find(self, key: str, check: Callable[[_Document, Path], _Plan]) -> _Plan | None:
        """Return ``check(document, path)`` for the document stored under a key; None if no valid one is stored."""
        if self.folder is None:
            return None
        path = self._path(self.folder, key)
        if not path.exists():
            return None
        try:
            document = decode_own_json(path, self.kind)
            if document.format != self.format:
                refuse(path, "$.format", f"must be {self.format!r}, and is {document.format!r}")
            plan = check(document, path)
            os.utime(path)
        except (OutOfCoreError, OSError) as error:
            _log.warning("a stored plan cannot be used and is made again: %s", error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        return plan

    def save(self, key: str, document: _Document) -> None:
        """Store a document under a key; delete the least recently used documents if there are too many."""
        if self.folder is None:
            return
        try:
            folder = ensure_private_folder(self.folder)
            replace_json(self._path(folder, key), document)
            paths = sorted(folder.glob(f"{self.name}-*.json"), key=lambda path: path.stat().st_mtime)
            for path in paths[:-_MAX_FILES]:
                path.unlink(missing_ok=True)
        except (OutOfCoreError, OSError) as error:
            _log.info("a plan could not be stored for later processes: %s", error)

    def _path(self, folder: Path, key: str) -> Path:
        return folder / f"{self.name}-{key}.json"


def key_of(*content: object) -> str:
    """Return a key made from the ``repr`` of values and the version of this library."""
    return hashlib.sha256(repr((library_version(), content)).encode()).hexdigest()[:32]


def library_version() -> str:
    try:
        return metadata.version("outofcore")
    except metadata.PackageNotFoundError:  # run from its source, without being installed
        return ""
