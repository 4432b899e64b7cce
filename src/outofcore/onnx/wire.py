"""Replace large tensors of a model file by their positions, so that protobuf does not copy them into memory.

The package ``onnx`` parses the rest. Encoding: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from enum import IntEnum

from outofcore.errors import InputError

# Raw bytes of a tensor of at least this size stay in the file.
LARGE_BYTES = 64 << 10
# Nesting of graphs and functions. Deeper messages are copied unchanged here and refused when read.
MAX_DEPTH = 32


class _WireType(IntEnum):
    VARINT = 0  # a number, seven bits per byte
    FIXED64 = 1  # eight bytes
    MESSAGE = 2  # a length, and the bytes
    FIXED32 = 5  # four bytes


class _TensorField(IntEnum):
    """Numbers of fields of TensorProto (onnx.proto)."""

    RAW_DATA = 9
    EXTERNAL_DATA = 13
    DATA_LOCATION = 14


_FIXED: dict[int, int] = {_WireType.FIXED64: 8, _WireType.FIXED32: 4}
# By message, the fields that may contain tensors (onnx.proto).
_TENSOR_PATHS: dict[str, dict[int, str]] = {
    "Model": {7: "Graph", 25: "Function"},
    "Graph": {1: "Node", 5: "Tensor", 15: "SparseTensor"},
    "Function": {7: "Node", 11: "Attribute"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "SparseTensor", 23: "SparseTensor"},
    "SparseTensor": {1: "Tensor", 2: "Tensor"},
    "Tensor": {},
}


@dataclass(frozen=True)
class SlimModel:
    """A model's message without the bytes of large tensors, and the positions of these bytes in the file."""

    message: bytes  # a ModelProto
    ranges: list[tuple[int, int]]  # offset and length in the file of removed bytes
    key: str  # of the entry in external_data that replaces raw bytes; its value is an index into `ranges`


@dataclass
class _SlimState:
    source: memoryview
    key: str
    ranges: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


def remove_large_tensors(source: memoryview) -> SlimModel:
    """Copy a model's message without the bytes of large tensors; raises ``InputError`` if it is incomplete."""
    # The key is random, so that no file can contain it.
    state = _SlimState(source, f"outofcore-{secrets.token_hex(16)}")
    message = _copy_message(state, "Model", 0, len(source), 0)
    return SlimModel(message, state.ranges, state.key)


def _copy_message(state: _SlimState, kind: str, begin: int, end: int, depth: int) -> bytes:
    """Copy a protobuf message without the bytes of large tensors; add their positions to ``state.ranges``."""
    source, inner = state.source, _TENSOR_PATHS[kind]
    parts: list[bytes | memoryview] = []
    copied = at = begin  # bytes before `copied` are in `parts`
    while at < end:
        start = at
        tag, at = _read_varint(source, at, end)
        body = length = 0
        number, form = tag >> 3, tag & 7
        if number == 0:
            raise InputError(f"the field at byte {start} has no number")
        if form == _WireType.VARINT:
            _, at = _read_varint(source, at, end)
            continue
        if form in _FIXED:
            at += _FIXED[form]
        elif form == _WireType.MESSAGE:
            length, at = _read_varint(source, at, end)
            body, at = at, at + length
        else:
            raise InputError(f"the field at byte {start} has the unknown form {form}")
        if at > end:
            raise InputError(
                f"the field at byte {start} ends after its message: the file is cut off or damaged; export it again"
            )
        if form != _WireType.MESSAGE or length < LARGE_BYTES:
            continue
        replaced = None
        if kind == "Tensor" and number == _TensorField.RAW_DATA:
            entry = _encode_field(1, state.key.encode()) + _encode_field(2, str(len(state.ranges)).encode())
            place = _encode_varint(_TensorField.DATA_LOCATION << 3 | _WireType.VARINT) + _encode_varint(1)  # EXTERNAL
            replaced = _encode_field(_TensorField.EXTERNAL_DATA, entry) + place
            state.ranges.append((body, length))
        elif number in inner and depth < MAX_DEPTH:
            replaced = _encode_field(number, _copy_message(state, inner[number], body, at, depth + 1))
        if replaced is not None:
            parts += [source[copied:start], replaced]
            copied = at
    parts.append(source[copied:end])
    return b"".join(parts)


def _read_varint(source: memoryview, at: int, end: int) -> tuple[int, int]:
    """Return a protobuf integer and the position after it; raises ``InputError`` if it is cut off."""
    value = shift = 0
    while at < end and shift < 70:
        byte = source[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise InputError(f"a number has no end up to byte {at}; the file was cut off")


def _encode_varint(value: int) -> bytes:
    parts: list[int] = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _encode_field(number: int, body: bytes) -> bytes:
    return _encode_varint(number << 3 | _WireType.MESSAGE) + _encode_varint(len(body)) + body
