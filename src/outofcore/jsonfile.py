"""JSON files, plain or gzip, read as types by msgspec: every refusal says where in which file."""

from __future__ import annotations

import gzip
import json
import math
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, TypeVar, cast

import msgspec

from outofcore.errors import GraphError, InputError

_GZIP_MAGIC = b"\x1f\x8b"
# Up to here a float64 holds every whole number.
_EXACT = 2.0**53

T = TypeVar("T")


def refuse(file: str | Path, where: str, what: str) -> NoReturn:
    """Raise ``GraphError`` about the value at ``where``, such as "$.ops[3].seconds", in a file."""
    raise GraphError(f"{file}: {where}: {what}")


def decode_json(path: Path, form: str | None, kind: type[T], *, whole: bool = True) -> T:
    """Read a JSON file, plain or gzip, as a type, after checking that its key ``format`` is ``form``.

    ``kind``'s annotations give types and ranges. ``whole`` allows whole numbers to be written as 4096.0 or 1e9;
    otherwise such numbers are read as floats. Raises ``InputError`` if the file cannot be read, and ``GraphError`` that
    names the wrong value, such as ``$.ops[3].seconds``.
    """
    value = _parsed(path, _whole_or_float if whole else float)
    if not isinstance(value, dict):
        refuse(path, "$", "must be an object")
    content = cast("dict[str, object]", value)
    found = content.get("format")
    if form is not None and found != form:
        shown = repr(found) if isinstance(found, str | int | float) else "not text"
        refuse(path, "$.format", f"must be {form!r}, and is {shown}: this is another kind of file, or a newer version")
    return convert_json(content, kind, path)


def decode_own_json(path: Path, kind: type[T]) -> T:
    """Read a JSON file that this library has written for itself as a type: in a fraction of the time, with less said.

    Raises ``InputError`` if the file cannot be read, and ``GraphError`` if it is damaged.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise GraphError(f"{path}: {error}") from error


def convert_json(value: object, kind: type[T], file: str | Path, where: str = "$") -> T:
    """Convert plain objects at a place in a file to a type; raises ``GraphError`` that names the wrong value."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).replace("`", "").partition(" - at ")
        refuse(file, where + place.removeprefix("$"), what[0].lower() + what[1:])


class _Wrong:
    """Stands in a parsed file for a value that JSON does not have."""

    def __init__(self, what: str) -> None:
        self.what = what


def _parsed(path: Path, read_float: Callable[[str], float]) -> object:
    """Return the content of a file as plain objects."""
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
    """Yield the place and description of each wrong value."""
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

    ``content`` is plain objects, dataclasses or ``msgspec.Struct``. The folder is created. Raises ``InputError``.
    """
    data = msgspec.json.encode(content) + b"\n"
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error}") from error


def replace_json(path: Path, content: object) -> None:
    """Replace a JSON file as a whole: a reader finds the old or the new one. Raises ``InputError`` or OSError."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}-", suffix=".part")
    os.close(descriptor)
    part = Path(name)
    try:
        write_json(part, content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
