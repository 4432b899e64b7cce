"""Plans on disk, for compiled steps and eager loops, so that the next process need not make them.

There is one file for each plan, named by a digest of the content that the plan was made for. Costs are no part of it: a
plan whose costs have changed stays correct, but may be slower. What the documents hold, and what is checked before one
is used, is up to ``step_plans`` and ``follow.loop_plans``. An unusable folder costs time and nothing else.
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

from outofcore.compiling import private_folder
from outofcore.errors import OutOfCoreError
from outofcore.jsonfile import decode_own_json, refuse, replace_json

_log = logging.getLogger("outofcore")

# Files of one type of document; the least recently used go first.
_MAX_FILES = 200


class Document(Struct):
    """A plan in a file; ``format`` names its type and version."""

    format: str


_Document = TypeVar("_Document", bound=Document)
_Plan = TypeVar("_Plan")


@dataclass(frozen=True)
class PlanStore(Generic[_Document]):
    """Documents of one type in a folder; with None it keeps none.

    ``name`` begins the names of their files, ``format`` is theirs.
    """

    folder: Path | None
    name: str
    format: str
    kind: type[_Document]

    def find(self, key: str, check: Callable[[_Document, Path], _Plan]) -> _Plan | None:
        """Return what ``check`` makes of a stored document; None if there is none.

        One that is damaged, or that ``check`` refuses by an error of this library, is logged and deleted.
        """
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
            _log.warning("a plan that was kept is made anew: %s", error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        return plan

    def keep(self, key: str, document: _Document) -> None:
        """Store a document, in place of one that has the same key; a failure is logged, not raised."""
        if self.folder is None:
            return
        try:
            folder = private_folder(self.folder)
            replace_json(self._path(folder, key), document)
            kept = sorted(folder.glob(f"{self.name}-*.json"), key=lambda path: path.stat().st_mtime)
            for path in kept[:-_MAX_FILES]:
                path.unlink(missing_ok=True)
        except (OutOfCoreError, OSError) as error:
            _log.info("a plan is not kept for later processes: %s", error)

    def _path(self, folder: Path, key: str) -> Path:
        return folder / f"{self.name}-{key}.json"


def key_of(*content: object) -> str:
    """Return the key of a plan that was made for some content, which ``repr`` tells apart, by this version."""
    return hashlib.sha256(repr((library_version(), content)).encode()).hexdigest()[:32]


def library_version() -> str:
    """Return the version of this library; empty if it is not installed."""
    try:
        return metadata.version("outofcore")
    except metadata.PackageNotFoundError:  # run from its source, without being installed
        return ""
