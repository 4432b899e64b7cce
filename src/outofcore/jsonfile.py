"""JSON files, plain or gzip, read with care: every refusal says where in which file."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, cast

from outofcore.errors import GraphError, InputError

_GZIP_MAGIC = b"\x1f\x8b"
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Node:
    """A value in a JSON file, and where it stands."""

    value: object
    file: str
    path: str = ""  # such as "ops[3].reads[0]"; empty: the whole file

    def refuse(self, what: str) -> NoReturn:
        """Raise the error that something is wrong with this value.

        Raises:
            GraphError: always.
        """
        raise GraphError(f"{self.file}: {self.path or 'the file'} {what}")

    def at(self, key: str) -> Node:
        """The value under a key that must be there."""
        found = self.find(key)
        if found is None:
            self.refuse(f"has no {key!r}, which it needs")
        return found

    def find(self, key: str) -> Node | None:
        """The value under a key; None where the key is absent."""
        found = self.mapping().get(key, _ABSENT)
        return None if found is _ABSENT else Node(found, self.file, f"{self.path}.{key}" if self.path else key)

    def mapping(self) -> Mapping[str, object]:
        """The value as an object."""
        value = self.value
        if not isinstance(value, dict):
            self.refuse(f"must be an object, and is {_shown(value)}")
        return cast("Mapping[str, object]", value)

    def items(self) -> Iterator[Node]:
        """The values of an array."""
        value = self.value
        if not isinstance(value, list):
            self.refuse(f"must be an array, and is {_shown(value)}")
        values = cast("list[object]", value)
        return (Node(value, self.file, f"{self.path}[{index}]") for index, value in enumerate(values))

    def text(self) -> str:
        """The value as text."""
        if not isinstance(self.value, str):
            self.refuse(f"must be text, and is {_shown(self.value)}")
        return self.value

    def flag(self) -> bool:
        """The value as true or false."""
        if not isinstance(self.value, bool):
            self.refuse(f"must be true or false, and is {_shown(self.value)}")
        return self.value

    def whole(self) -> int:
        """The value as a whole number; one written as 4096.0 counts as whole."""
        value = self.value
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            self.refuse(f"must be a whole number, and is {_shown(value)}")
        return value

    def count(self) -> int:
        """The value as a whole number that is not negative."""
        found = self.whole()
        if found < 0:
            self.refuse(f"must not be negative, and is {found}")
        return found

    def number(self) -> float:
        """The value as a finite number."""
        value = self.value
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            self.refuse(f"must be a finite number, and is {_shown(value)}")
        return float(value)

    def key(self) -> int | str:
        """The value as an id: text or a whole number."""
        return self.value if isinstance(self.value, str) else self.whole()


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "…"


def load_json(path: Path) -> Node:
    """Read a JSON file of any kind. Gzip is recognised by its first bytes.

    Raises:
        InputError: the file cannot be read.
        GraphError: it is not JSON.
    """
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP_MAGIC):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    try:
        return Node(json.loads(content), str(path))
    except (ValueError, RecursionError) as error:
        raise GraphError(f"{path} is not JSON: {error}") from error


def read_json(path: Path, form: str) -> Node:
    """Read a JSON file whose key ``format`` says ``form``. Gzip is recognised by its first bytes.

    Raises:
        InputError: the file cannot be read.
        GraphError: it is not JSON, or not of this format.
    """
    root = load_json(path)
    found = root.at("format")
    if found.value != form:
        found.refuse(
            f"must be {form!r}, and is {_shown(found.value)}: this is another kind of file, or a newer version"
        )
    return root


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON file, through gzip if its name ends in ``.gz``; the same content gives the same bytes.

    Raises:
        InputError: the file cannot be written.
    """
    data = (json.dumps(content, separators=(",", ":"), ensure_ascii=False) + "\n").encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error}") from error
