"""Read and write safetensors files in pieces, past the page cache (https://github.com/huggingface/safetensors)."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from msgspec import Struct

from outofcore._torch_internals import memory_of, view_storage_bytes
from outofcore.errors import InputError, TransferError
from outofcore.execution.aliases import HomeTensors
from outofcore.jsonfile import decode_json, refuse
from outofcore.runtime.file_io import ByteStore, Cache, Location, transfer
from outofcore.runtime.file_ranges import Stamp
from outofcore.runtime.homes import HomeStore
from outofcore.runtime.memory import Region, map_anonymous
from outofcore.units import MIB, PAGE_BYTES, format_bytes, round_up

BUFFER_BYTES = 4 * MIB
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_SINGLE_FILE, _INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_HEADER_LENGTH = struct.Struct("<Q")  # the header's length
_MAX_HEADER_BYTES = 100_000_000
_METADATA = "__metadata__"
_MAX_REASON_CHARACTERS = 200  # characters of a decoder's error in a message

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
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """The description of a tensor in a file; its bytes are [begin, end) of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class TensorFile:
    path: Path
    entries: dict[str, Entry]
    bytes: int
    stamp: Stamp


def header_for(tensors: Sequence[tuple[str, torch.Tensor]]) -> bytes:
    """Build the header of a safetensors file with these tensors; raises ``InputError`` for an unsupported dtype."""
    described: dict[str, Any] = {_METADATA: {"format": "pt"}}
    offset = 0
    for name, tensor in tensors:
        if tensor.dtype not in _DTYPE_NAMES:
            raise InputError(
                f"{name} is of dtype {tensor.dtype}, for which safetensors files have no name; convert it before saving"
            )
        count = tensor.numel() * tensor.element_size()
        described[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + count],
        }
        offset += count
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    # Spaces after the JSON align the data to 8 bytes.
    text += b" " * (-len(text) % 8)
    return _HEADER_LENGTH.pack(len(text)) + text


def read_header(path: Path) -> TensorFile:
    """Read only the header of a safetensors file; raises ``InputError`` for an unreadable or damaged file."""
    try:
        with path.open("rb") as file:
            stamp = Stamp.of(file.fileno())
            total = stamp.bytes
            length = int.from_bytes(file.read(_HEADER_LENGTH.size), "little")
            if total < _HEADER_LENGTH.size or length > min(_MAX_HEADER_BYTES, total - _HEADER_LENGTH.size):
                raise InputError(f"{path} is not a safetensors file, or was cut off; use another copy of the file")
            text = file.read(length)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    try:
        described = json.loads(text, object_pairs_hook=_unique_names)
        start = _HEADER_LENGTH.size + length
        entries = [_parse_entry(name, item, start) for name, item in described.items() if name != _METADATA]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_REASON_CHARACTERS]
        raise InputError(
            f"the header of {path} is not that of a safetensors file ({reason}); use another copy of the file"
        ) from error
    end = start
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != end or entry.end - entry.begin != math.prod(entry.shape) * entry.dtype.itemsize:
            raise InputError(
                f"{path} is damaged: {entry.name} has bytes {entry.begin} to {entry.end}, which do not follow the "
                f"previous tensor or do not match the shape {list(entry.shape)}; use another copy of the file"
            )
        end = entry.end
    if end != total:
        raise InputError(
            f"{path} has {total} bytes, and its header describes {end}: it was cut off or changed; use another copy "
            "of the file"
        )
    return TensorFile(path, {entry.name: entry for entry in entries}, total, stamp)


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a name occurs twice")
    return unique


def _parse_count(number: object) -> int:
    # JSON allows other numbers, and Python would accept them.
    if type(number) is not int or not 0 <= number < 1 << 63:
        raise ValueError(f"{number!r} is not a count")
    return number


def _parse_entry(name: str, item: Mapping[str, Any], start: int) -> Entry:
    begin, end = map(_parse_count, item["data_offsets"])
    shape = tuple(map(_parse_count, item["shape"]))
    if item["dtype"] not in _DTYPES:
        raise ValueError(f"{name} has the dtype {item['dtype']!r}")
    return Entry(name, _DTYPES[item["dtype"]], shape, start + begin, start + end)


def allocate_buffer() -> memoryview:
    """Allocate ``BUFFER_BYTES`` of memory aligned for direct I/O."""
    return Region(map_anonymous(BUFFER_BYTES), BUFFER_BYTES).memory(0, BUFFER_BYTES)


class OutFile:
    """A new file to write sequentially, as a context manager; its methods raise ``TransferError``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = 0  # written so far
        self.crc32 = 0  # of these bytes
        self._buffer = allocate_buffer()
        self._filled = 0
        self._flushed = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            try:
                self._descriptor = os.open(path, flags | _O_DIRECT, 0o666)
            except OSError as error:
                # File systems without direct I/O return EINVAL.
                if error.errno != errno.EINVAL:
                    raise
                self._descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            raise self._error(error) from error
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if not self._closed:
            self._closed = True
            os.close(self._descriptor)

    def write(self, source: memoryview | bytes) -> None:
        source = memoryview(source)
        self.crc32 = zlib.crc32(source, self.crc32)
        self.bytes += len(source)
        while source:
            count = min(len(source), BUFFER_BYTES - self._filled)
            self._buffer[self._filled : self._filled + count] = source[:count]
            self._filled += count
            source = source[count:]
            if self._filled == BUFFER_BYTES:
                self._flush(BUFFER_BYTES)

    def finish(self) -> None:
        """Write the buffered bytes, and sync the file to the disk."""
        try:
            if self._filled:
                # Direct I/O writes whole pages; the excess is cut off.
                self._flush(round_up(self._filled, PAGE_BYTES))
                os.ftruncate(self._descriptor, self.bytes)
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._error(error) from error

    def _flush(self, count: int) -> None:
        """Write the first ``count`` bytes of the buffer; turn off direct I/O if the file system refuses it."""
        place = Location(self._descriptor, self._flushed, count, self, Cache.PAST)
        _, failure = transfer(place, self._buffer[:count], writes=True)
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        if failure == errno.EINVAL and flags & _O_DIRECT:
            # Some file systems accept the flag and then refuse the I/O.
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_O_DIRECT)
            _, failure = transfer(place, self._buffer[:count], writes=True)
        if failure:
            reason = os.strerror(failure) if failure > 0 else "the system wrote 0 bytes"
            raise self._error(OSError(failure if failure > 0 else errno.EIO, reason))
        self._flushed += count
        self._filled = 0

    def _error(self, error: OSError) -> TransferError:
        """Convert an ``OSError`` to a ``TransferError`` with advice; return a ``TransferError`` unchanged."""
        if isinstance(error, TransferError):
            return error
        advice = {
            errno.ENOSPC: "make room there, or save to another disk",
            errno.EDQUOT: "raise the quota, or save elsewhere",
            errno.EFBIG: "lift the file size limit (ulimit -f)",
        }.get(error.errno or 0, "check that disk, or save elsewhere")
        failure = TransferError(
            f"could not write {self.path} after {format_bytes(self.bytes)}: {error.strerror}; {advice}. "
            "The previous checkpoint is still whole"
        )
        failure.errno = error.errno
        return failure


class InFile(ByteStore):
    """A file to read in pieces, as a context manager; pieces do not stay in the page cache."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        os.close(self._descriptor)

    def locate(self, offset: int, count: int) -> Location:
        return Location(self._descriptor, offset, count, self, Cache.DROPPED)

    def transfer_error(self, offset: int, count: int, failure: int, *, writes: bool) -> TransferError:
        reason = os.strerror(failure) if failure > 0 else "the file ends there"
        return TransferError(f"could not read {self.path} at byte {offset}: {reason}; use another copy of the file")


def append_tensor(tensor: torch.Tensor, out: OutFile, home_tensors: HomeTensors | None, buffer: memoryview) -> None:
    """Append a CPU tensor to a file, in row-major order and in pieces of at most the size of ``buffer``."""
    count = tensor.numel() * tensor.element_size()
    if not count:
        return
    slot = _row_major_slot(tensor, home_tensors, to_write=False)
    if slot is not None:
        home, offset = slot
        for start in range(0, count, len(buffer)):
            piece = buffer[: min(len(buffer), count - start)]
            home.read(offset + start, piece)
            out.write(piece)
        return
    with torch.no_grad():
        for piece in _pieces(tensor.detach(), len(buffer), tensor.element_size()):
            out.write(bytes_of(piece.contiguous()))
            _drop_cache(tensor, home_tensors)


def load_entry(
    tensor: torch.Tensor,
    entry: Entry,
    source: InFile,
    home_tensors: HomeTensors | None,
    buffer: memoryview,
    crc32: int = 0,
) -> int:
    """Load a file's entry into a CPU tensor of the same shape, and return the updated checksum.

    ``buffer`` has whole pages. ``crc32`` is the checksum of all bytes before the entry. Raises ``TransferError``.
    """
    at, count = entry.begin, entry.end - entry.begin
    if not count:
        return crc32
    slot = _row_major_slot(tensor, home_tensors, to_write=True)
    if slot is not None and tensor.dtype == entry.dtype:
        home, offset = slot
        for start in range(0, count, len(buffer)):
            piece = buffer[: min(len(buffer), count - start)]
            source.read(at + start, piece)
            crc32 = zlib.crc32(piece, crc32)
            home.write(offset + start, piece)
        return crc32
    itemsize = entry.dtype.itemsize
    with torch.no_grad():
        # The larger of the two element sizes, so that pieces fit the buffer.
        for target in _pieces(tensor.detach(), len(buffer), max(itemsize, tensor.element_size())):
            piece = buffer[: target.numel() * itemsize]
            source.read(at, piece)
            crc32 = zlib.crc32(piece, crc32)
            at += len(piece)
            target.copy_(torch.frombuffer(piece, dtype=entry.dtype).view(target.shape))
            _drop_cache(tensor, home_tensors)
    return crc32


def load_entry_range(
    tensor: torch.Tensor,
    start: int,
    entry: Entry,
    source: InFile,
    home_tensors: HomeTensors | None,
    buffer: memoryview,
    crc32: int = 0,
) -> int:
    """Load the range of an entry that begins at element ``start`` into a flat tensor; return the new checksum."""
    itemsize = entry.dtype.itemsize
    step = len(buffer) // itemsize
    count = (entry.end - entry.begin) // itemsize
    with torch.no_grad():
        for first in range(0, count, step):
            piece = buffer[: min(step, count - first) * itemsize]
            source.read(entry.begin + first * itemsize, piece)
            crc32 = zlib.crc32(piece, crc32)
            low, high = max(first, start), min(first + step, start + tensor.numel())
            if low < high:
                overlap = piece[(low - first) * itemsize : (high - first) * itemsize]
                tensor[low - start : high - start].copy_(torch.frombuffer(overlap, dtype=entry.dtype))
                _drop_cache(tensor, home_tensors)
    return crc32


def _row_major_slot(
    tensor: torch.Tensor, home_tensors: HomeTensors | None, *, to_write: bool
) -> tuple[HomeStore, int] | None:
    """Return a tensor's home and its offset there; None unless the tensor is one range of bytes in a home."""
    whole = (
        tensor.is_contiguous()
        and tensor.storage_offset() == 0
        and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    )
    slot = None if home_tensors is None else home_tensors.find_accessible_slot(tensor, to_write=to_write)
    return slot if whole else None


def _pieces(tensor: torch.Tensor, max_bytes: int, itemsize: int) -> Iterator[torch.Tensor]:
    """Split a tensor in row-major order into pieces of at most ``max_bytes``, at ``itemsize`` bytes per element."""
    if tensor.numel() * itemsize <= max_bytes:
        yield tensor
        return
    rows = max_bytes // (tensor[0].numel() * itemsize)
    if rows:
        yield from tensor.split(rows)
        return
    for row in tensor:
        yield from _pieces(row, max_bytes, itemsize)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    start = tensor.storage_offset() * tensor.element_size()
    return memory_of(view_storage_bytes(tensor)[start : start + tensor.numel() * tensor.element_size()])


def _drop_cache(tensor: torch.Tensor, home_tensors: HomeTensors | None) -> None:
    if home_tensors is not None:
        home_tensors.drop_cache(tensor)


class _WeightMap(Struct):
    weight_map: dict[str, str]  # the file of each tensor


class Weights:
    """The named tensors of one or several safetensors files; the constructor reads only the headers.

    ``path`` is a safetensors file, an index (``*.safetensors.index.json``) next to its files, or a folder with
    ``model.safetensors`` or ``model.safetensors.index.json``. Raises ``InputError`` for missing or unreadable files.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, tuple[TensorFile, Entry]] = {}
        if path.is_dir():
            path = next((path / name for name in (_INDEX_FILE, _SINGLE_FILE) if (path / name).is_file()), path)
            if path.is_dir():
                raise InputError(
                    f"{path} has neither {_SINGLE_FILE} nor {_INDEX_FILE}; pass the path of a weights file"
                )
        if path.name.endswith(".json"):
            self._read_index(path)
        else:
            file = read_header(path)
            self._entries = {name: (file, entry) for name, entry in file.entries.items()}

    def _read_index(self, path: Path) -> None:
        files: dict[str, TensorFile] = {}
        for name, file_name in decode_json(path, None, _WeightMap).weight_map.items():
            if file_name not in files:
                files[file_name] = read_header(path.parent / file_name)
            if name not in files[file_name].entries:
                refuse(path, f"$.weight_map.{name}", f"{file_name} has no such tensor")
            self._entries[name] = (files[file_name], files[file_name].entries[name])

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def find(self, name: str) -> tuple[TensorFile, Entry]:
        return self._entries[name]

    def load(self, targets: Mapping[str, torch.Tensor], home_tensors: HomeTensors | None) -> None:
        """Load weights into CPU tensors by name; each tensor must have the shape of its weight."""
        by_path: defaultdict[Path, list[tuple[Entry, torch.Tensor]]] = defaultdict(list)
        for name, tensor in targets.items():
            file, entry = self._entries[name]
            by_path[file.path].append((entry, tensor))
        buffer = allocate_buffer()
        for path, items in by_path.items():
            with InFile(path) as source:
                for entry, tensor in sorted(items, key=lambda item: item[0].begin):
                    load_entry(tensor, entry, source, home_tensors, buffer)
