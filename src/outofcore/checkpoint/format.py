"""Headers of safetensors files: 8 bytes with the header's length, the header as JSON, then the bytes of all tensors.

The format: https://github.com/huggingface/safetensors#format. Tensors lie one after the other without
holes, in row-major order and little-endian; a header takes at most 100 MB.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outofcore.errors import InputError

_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000
_METADATA = "__metadata__"

_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file: its bytes are [begin, end) of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file whose header has been read and found right."""

    path: Path
    entries: dict[str, Entry]
    bytes: int


def header_for(tensors: Sequence[tuple[str, torch.Tensor]]) -> bytes:
    """The beginning of a file that holds these tensors in this order.

    Raises:
        InputError: a tensor has a dtype that the format has no name for.
    """
    described: dict[str, Any] = {_METADATA: {"format": "pt"}}
    offset = 0
    for name, tensor in tensors:
        if tensor.dtype not in _NAMES:
            raise InputError(
                f"{name} is of dtype {tensor.dtype}, for which safetensors files have no name; convert it before saving"
            )
        count = tensor.numel() * tensor.element_size()
        described[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + count],
        }
        offset += count
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    # The data shall start on a multiple of 8 bytes; spaces may follow the JSON.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_header(path: Path) -> TensorFile:
    """Read the header of a file, and nothing else of it.

    Raises:
        InputError: the file cannot be read or is not a whole safetensors file.
    """
    try:
        with path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if total < _LENGTH_BYTES or length > min(_MOST_HEADER_BYTES, total - _LENGTH_BYTES):
                raise InputError(f"{path} is not a safetensors file, or was cut off")
            text = file.read(length)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    try:
        described = json.loads(text)
        start = _LENGTH_BYTES + length
        found = [_entry(name, item, start) for name, item in described.items() if name != _METADATA]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"the header of {path} is not that of a safetensors file ({error})") from error
    end = start
    for entry in sorted(found, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != end or entry.end - entry.begin != math.prod(entry.shape) * entry.dtype.itemsize:
            raise InputError(f"{path}: the bytes of {entry.name} are not where its shape and its neighbours have them")
        end = entry.end
    if end != total:
        raise InputError(f"{path} has {total} bytes, and its header tells of {end}: it was cut off or changed")
    return TensorFile(path, {entry.name: entry for entry in found}, total)


def _entry(name: str, item: Mapping[str, Any], start: int) -> Entry:
    begin, end = (int(offset) for offset in item["data_offsets"])
    shape = tuple(int(size) for size in item["shape"])
    if item["dtype"] not in _DTYPES or min(shape, default=0) < 0:
        raise ValueError(f"{name} has the dtype {item['dtype']!r} and the shape {shape}")
    return Entry(name, _DTYPES[item["dtype"]], shape, start + begin, start + end)
