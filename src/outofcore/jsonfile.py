"""JSON files, plain or gzip: every refusal says where in which file.

``decode_json`` reads what a type describes, by msgspec; a ``Node`` is a value of which nothing is known beforehand.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar, cast

import msgspec

from outofcore.errors import GraphError, InputError

_GZIP_MAGIC = b"\x1f\x8b"
_ABSENT = object()
# Up to here a float64 holds every whole number.
_EXACT = 2.0**53

T = TypeVar("T")


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


def refuse(file: str | Path, where: str, what: str) -> NoReturn:
    """Raise the error that something is wrong with a value in a file.

    Args:
        file: its path.
        where: the value, such as "$.ops[3].seconds".
        what: such as "must not be negative".

    Raises:
        GraphError: always.
    """
    raise GraphError(f"{file}: {where}: {what}")


def decode_json(path: Path, form: str, kind: type[T]) -> T:
    """Read a JSON file whose key ``format`` says ``form`` as a type. Gzip is recognised by its first bytes.

    Args:
        path: the file.
        form: such as "outofcore-graph/1".
        kind: a ``msgspec.Struct``, whose annotations give types and ranges. Whole numbers may be written as 4096.0
            or 1e9.

    Raises:
        InputError: the file cannot be read.
        GraphError: it is not JSON, not of this format, or a value has not the type or the range that it should; says
            which, such as ``$.ops[3].seconds``.
    """
    value = _parsed(path, _whole_or_float)
    _check_format(Node(value, str(path)), form)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).replace("`", "").partition(" - at ")
        refuse(path, where or "$", what[0].lower() + what[1:])


def load_json(path: Path) -> Node:
    """Read a JSON file of any kind. Gzip is recognised by its first bytes.

    Raises:
        InputError: the file cannot be read.
        GraphError: it is not JSON, an object has a key twice, or a number is not finite.
    """
    return Node(_parsed(path, float), str(path))


def read_json(path: Path, form: str) -> Node:
    """Read a JSON file whose key ``format`` says ``form``. Gzip is recognised by its first bytes.

    Raises:
        InputError: the file cannot be read.
        GraphError: it is not JSON, or not of this format.
    """
    root = load_json(path)
    _check_format(root, form)
    return root


def _check_format(root: Node, form: str) -> None:
    found = root.at("format")
    if found.value != form:
        found.refuse(
            f"must be {form!r}, and is {_shown(found.value)}: this is another kind of file, or a newer version"
        )


class _Wrong:
    """Stands in a parsed file for a value that JSON does not have."""

    def __init__(self, what: str) -> None:
        self.what = what


def _parsed(path: Path, read_float: Callable[[str], float]) -> object:
    """The content of a file as plain objects."""
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP_MAGIC):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    wrong: list[_Wrong] = []

    def instead(what: str) -> _Wrong:
        wrong.append(_Wrong(what))
        return wrong[-1]

    def number(text: str) -> float | _Wrong:
        value = read_float(text)
        return value if math.isfinite(value) else instead(f"{text} is not a finite number")

    def mapping(pairs: list[tuple[str, object]]) -> dict[str, object] | _Wrong:
        found = dict(pairs)
        if len(found) == len(pairs):
            return found
        names = [name for name, _ in pairs]
        return instead(f"has the key {next(name for name in names if names.count(name) > 1)!r} twice")

    try:
        value = json.loads(content, object_pairs_hook=mapping, parse_float=number, parse_constant=number)
        if b"\\u" in content:
            json.dumps(value, ensure_ascii=False, default=str).encode()  # half of a pair of surrogates is no text
    except (ValueError, RecursionError) as error:
        raise GraphError(f"{path} is not JSON: {error}") from error
    if wrong:
        # A value inside of one that is wrong as well is not found, but then the outer one is.
        where, what = next(_wrong(value, "$"))
        refuse(path, where, what)
    return value


def _wrong(value: object, where: str) -> Iterator[tuple[str, str]]:
    """Where something is wrong, and what."""
    if isinstance(value, _Wrong):
        yield where, value.what
    elif isinstance(value, dict):
        for key, item in cast("dict[str, object]", value).items():
            yield from _wrong(item, f"{where}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(cast("list[object]", value)):
            yield from _wrong(item, f"{where}[{index}]")


def _whole_or_float(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() and abs(value) <= _EXACT else value


def write_json(path: Path, content: object) -> None:
    """Write a JSON file, through gzip if its name ends in ``.gz``; the same content gives the same bytes.

    Args:
        path: the file; its folder is created.
        content: plain objects, dataclasses or ``msgspec.Struct``.

    Raises:
        InputError: the file cannot be written.
    """
    data = msgspec.json.encode(content) + b"\n"
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error}") from error
