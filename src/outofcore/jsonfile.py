"""Read and write JSON files, plain or gzip; errors name the file and the place in it."""

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
# A float64 represents every whole number up to this one.
_MAX_EXACT_INT = 2.0**53

T = TypeVar("T")


def refuse(file: str | Path, place: str, problem: str) -> NoReturn:
    """Raise ``GraphError`` about the value at a place in a file, such as "$.ops[3].seconds"."""
    raise GraphError(f"{file}: {place}: {problem}")


def decode_json(path: Path, file_format: str | None, kind: type[T], *, whole: bool = True) -> T:
    """Read a JSON file, plain or gzip, and convert its object to ``kind``.

    ``file_format``: the required "format" entry; None: any. If ``whole``, numbers such as 4096.0 become ints. Raises
    ``InputError`` if the file cannot be read, ``GraphError`` that names an invalid value, such as ``$.ops[3].seconds``.
    """
    value = _parse(path, _whole_or_float if whole else float)
    if not isinstance(value, dict):
        refuse(path, "$", "must be an object")
    content = cast("dict[str, object]", value)
    actual_format = content.get("format")
    if file_format is not None and actual_format != file_format:
        shown = repr(actual_format) if isinstance(actual_format, str | int | float) else "not text"
        refuse(
            path,
            "$.format",
            f"must be {file_format!r}, and is {shown}: this is another type of file, or a newer version",
        )
    return convert_json(content, kind, path)


def decode_own_json(path: Path, kind: type[T]) -> T:
    """Read a JSON file that this library has written; faster than ``decode_json``, with less precise errors."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise GraphError(f"{path}: {error}") from error


def convert_json(value: object, kind: type[T], file: str | Path, place: str = "$") -> T:
    """Convert plain objects to a type; raise ``GraphError`` with the place in the file if a value is invalid."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem, _, inner = str(error).replace("`", "").partition(" - at ")
        refuse(file, place + inner.removeprefix("$"), problem[0].lower() + problem[1:])


class _InvalidValue:
    """A placeholder for an invalid value in parsed JSON, until its place in the file is known."""

    def __init__(self, problem: str) -> None:
        self.problem = problem


def _parse(path: Path, read_float: Callable[[str], float]) -> object:
    """Parse a JSON file, plain or gzip; raise ``GraphError`` for infinite numbers and duplicate keys."""
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP_MAGIC):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    wrong: list[_InvalidValue] = []

    def mark_invalid(problem: str) -> _InvalidValue:
        wrong.append(_InvalidValue(problem))
        return wrong[-1]

    def number(text: str) -> float | _InvalidValue:
        value = read_float(text)
        return value if math.isfinite(value) else mark_invalid(f"{text} is not a finite number")

    def object_of(pairs: list[tuple[str, object]]) -> dict[str, object] | _InvalidValue:
        unique = dict(pairs)
        if len(unique) == len(pairs):
            return unique
        names = [name for name, _ in pairs]
        return mark_invalid(f"has the key {next(name for name in names if names.count(name) > 1)!r} twice")

    try:
        value = json.loads(content, object_pairs_hook=object_of, parse_float=number, parse_constant=number)
        if b"\\u" in content:
            json.dumps(value, ensure_ascii=False, default=str).encode()  # lone surrogates cannot be encoded
    except (ValueError, RecursionError) as error:
        raise GraphError(f"{path} is not JSON: {error}") from error
    if wrong:
        # An invalid value inside another one is not found, but the outer one is.
        place, problem = next(_invalid_values(value, "$"))
        refuse(path, place, problem)
    return value


def _invalid_values(value: object, json_path: str) -> Iterator[tuple[str, str]]:
    """Yield the JSON path and the problem of each ``_InvalidValue`` in a parsed JSON value."""
    if isinstance(value, _InvalidValue):
        yield json_path, value.problem
    elif isinstance(value, dict):
        for key, item in cast("dict[str, object]", value).items():
            yield from _invalid_values(item, f"{json_path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(cast("list[object]", value)):
            yield from _invalid_values(item, f"{json_path}[{index}]")


def _whole_or_float(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() and abs(value) <= _MAX_EXACT_INT else value


def write_json(path: Path, content: object) -> None:
    """Write an object to a JSON file, compressed if its name ends in ``.gz``; create missing folders."""
    data = msgspec.json.encode(content) + b"\n"
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error}") from error


def replace_json(path: Path, content: object) -> None:
    """Replace a JSON file atomically; raise ``InputError`` or ``OSError`` if it cannot be written."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}-", suffix=".part")
    os.close(descriptor)
    part = Path(name)
    try:
        write_json(part, content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
