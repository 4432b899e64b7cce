"""Model files without their large tensors: the bytes of those stay where they are in the file.

An ONNX file is one protobuf message, and protobuf copies every byte of it into memory. Here the message is walked
through as it lies in the file, and what a tensor larger than ``LARGE_BYTES`` holds as raw bytes is replaced by a note
of where it lies. What is left is small, and is parsed by the ``onnx`` package. The encoding:
https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from enum import IntEnum

from outofcore.errors import InputError

# Raw bytes of a tensor from here on stay in the file.
LARGE_BYTES = 64 << 10
# Graphs within graphs, functions within functions. What is deeper is left as it is here, and refused when it is read.
DEEPEST = 32


class _Form(IntEnum):
    """The wire types of protobuf that are in use."""

    VARINT = 0  # a number, seven bits a byte
    FIXED64 = 1  # eight bytes
    MESSAGE = 2  # a length, and as many bytes
    FIXED32 = 5  # four bytes


class _TensorField(IntEnum):
    """The numbers of some fields of TensorProto (onnx.proto)."""

    RAW_DATA = 9
    EXTERNAL_DATA = 13
    DATA_LOCATION = 14


_FIXED: dict[int, int] = {_Form.FIXED64: 8, _Form.FIXED32: 4}
# Where tensors may be: by message, the fields that lead to them (onnx.proto).
_INNER: dict[str, dict[int, str]] = {
    "Model": {7: "Graph", 25: "Function"},
    "Graph": {1: "Node", 5: "Tensor", 15: "SparseTensor"},
    "Function": {7: "Node", 11: "Attribute"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "SparseTensor", 23: "SparseTensor"},
    "SparseTensor": {1: "Tensor", 2: "Tensor"},
    "Tensor": {},
}


@dataclass(frozen=True)
class Slim:
    """A model file without its large raw bytes.

    Attributes:
        message: the rest, a ``ModelProto``.
        ranges: offset and length in the file of what was left out.
        key: of the entry of ``external_data`` that a tensor has in its place; its value is an index into ``ranges``.
    """

    message: bytes
    ranges: list[tuple[int, int]]
    key: str


@dataclass
class _Walk:
    source: memoryview
    key: str
    ranges: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


def slim(source: memoryview) -> Slim:
    """Leave the large raw bytes of a model file out.

    Args:
        source: the whole file.

    Raises:
        InputError: this is not a whole protobuf message.
    """
    # No file can have the key by chance or on purpose.
    walk = _Walk(source, f"outofcore-{secrets.token_hex(16)}")
    message = _walked(walk, "Model", 0, len(source), 0)
    return Slim(message, walk.ranges, walk.key)


def _walked(walk: _Walk, kind: str, begin: int, end: int, depth: int) -> bytes:
    source, inner = walk.source, _INNER[kind]
    parts: list[bytes | memoryview] = []
    copied = at = begin  # up to the first, all has been taken over
    while at < end:
        start = at
        tag, at = _varint(source, at, end)
        body = length = 0
        number, form = tag >> 3, tag & 7
        if number == 0:
            raise InputError(f"a field without a number at byte {start}")
        if form == _Form.VARINT:
            _, at = _varint(source, at, end)
            continue
        if form in _FIXED:
            at += _FIXED[form]
        elif form == _Form.MESSAGE:
            length, at = _varint(source, at, end)
            body, at = at, at + length
        else:
            raise InputError(f"a field of the unknown form {form} at byte {start}")
        if at > end:
            raise InputError(f"the field at byte {start} does not end within what holds it; the file was cut off")
        if form != _Form.MESSAGE or length < LARGE_BYTES:
            continue
        replaced = None
        if kind == "Tensor" and number == _TensorField.RAW_DATA:
            entry = _field(1, walk.key.encode()) + _field(2, str(len(walk.ranges)).encode())
            place = _number(_TensorField.DATA_LOCATION << 3 | _Form.VARINT) + _number(1)  # EXTERNAL
            replaced = _field(_TensorField.EXTERNAL_DATA, entry) + place
            walk.ranges.append((body, length))
        elif number in inner and depth < DEEPEST:
            replaced = _field(number, _walked(walk, inner[number], body, at, depth + 1))
        if replaced is not None:
            parts += [source[copied:start], replaced]
            copied = at
    parts.append(source[copied:end])
    return b"".join(parts)


def _varint(source: memoryview, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = source[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise InputError(f"a number that does not end at byte {at}; the file was cut off")


def _number(value: int) -> bytes:
    parts: list[int] = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _field(number: int, body: bytes) -> bytes:
    return _number(number << 3 | _Form.MESSAGE) + _number(len(body)) + body
