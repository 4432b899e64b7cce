"""Copy small tensors of a file into memory, and map large ones privately: writes never reach the file."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outofcore.errors import InputError
from outofcore.onnx.contents import BITS, STRING, FileRange, StoredTensor
from outofcore.onnx.wire import LARGE_BYTES

# By the number of the data type in TensorProto.
DTYPES: dict[int, torch.dtype] = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    4: torch.uint16,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    12: torch.uint32,
    13: torch.uint64,
    14: torch.complex64,
    15: torch.complex128,
    16: torch.bfloat16,
    17: torch.float8_e4m3fn,
    18: torch.float8_e4m3fnuz,
    19: torch.float8_e5m2,
    20: torch.float8_e5m2fnuz,
    # An element of four bits takes a byte in memory.
    21: torch.uint8,
    22: torch.int8,
}


class Files:
    """The files of an ONNX model, each mapped into memory once."""

    def __init__(self) -> None:
        self._open: dict[Path, mmap.mmap] = {}

    def read_tensor(self, stored: StoredTensor) -> torch.Tensor:
        """Return a stored tensor, memory-mapped if it is large; raises ``InputError`` for text or a missing file."""
        if stored.code == STRING:
            raise InputError(
                f"the tensor {stored.name!r} contains text, which PyTorch tensors do not support; "
                "remove it before the export"
            )
        dtype, data = DTYPES[stored.code], stored.data
        if isinstance(data, FileRange):
            source = self.mapping(data)
            if data.length < LARGE_BYTES or BITS[stored.code] < 8:
                array = np.frombuffer(source, np.uint8, data.length, data.offset).copy()
            else:
                array = np.frombuffer(source, np.uint8, data.length, data.offset)
        else:
            array = data.copy()
        if BITS[stored.code] == 4:
            array = _unpack_nibbles(array, int(np.prod(stored.shape, dtype=np.int64)), signed=dtype is torch.int8)
        if dtype is torch.bool and array.size and array.max() > 1:
            array = (array != 0).view(np.uint8)  # PyTorch only supports the bytes 0 and 1
        if not array.size:
            return torch.empty(stored.shape, dtype=dtype)
        return _view_bytes(array, dtype).reshape(stored.shape)

    def mapping(self, file_range: FileRange) -> mmap.mmap:
        """Return the memory map of a file, made on first use; raises ``InputError`` if unreadable or too short."""
        if file_range.path not in self._open:
            try:
                with file_range.path.open("rb") as file:
                    # Private: writes by an optimizer stay in this process.
                    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise InputError(f"cannot read {file_range.path}: {error}") from error
            self._open[file_range.path] = mapping
        mapping = self._open[file_range.path]
        if file_range.offset + file_range.length > len(mapping):
            raise InputError(f"{file_range.path} became shorter while it was read; use another copy of it")
        return mapping


def _view_bytes(array: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """View the bytes of an array as a flat tensor; the array may begin at any address."""
    width = dtype.itemsize
    whole = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}[width]
    return torch.from_numpy(np.frombuffer(array.data, dtype=whole)).view(dtype)


def _unpack_nibbles(packed: np.ndarray[Any, Any], count: int, *, signed: bool) -> np.ndarray[Any, Any]:
    """Unpack two four-bit elements from each byte, the lower half first."""
    wide = np.empty(packed.size * 2, dtype=np.uint8)
    wide[0::2], wide[1::2] = packed & 15, packed >> 4
    wide = wide[:count]
    return ((wide ^ 8).astype(np.int8) - 8).view(np.uint8) if signed else wide


def is_mapped(stored: StoredTensor) -> bool:
    data = stored.data
    return isinstance(data, FileRange) and data.length >= LARGE_BYTES and BITS[stored.code] >= 8
