"""Safetensors files: their headers, and tensors streamed to and from them, a piece at a time.

The format: 8 bytes with the header's length, the header as JSON, then the bytes of all tensors, one after the other
without holes, in row-major order and little-endian; a header takes at most 100 MB
(https://github.com/huggingface/safetensors#format). Files are written past the page cache through one small buffer.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from msgspec import Struct

from outofcore._torch_internals import memory_of, storage_bytes
from outofcore.errors import InputError, TransferError
from outofcore.execution.aliases import Faces
from outofcore.execution.file_ranges import Stamp
from outofcore.execution.homes import HomeStore
from outofcore.execution.memory import Region, map_anonymous
from outofcore.jsonfile import decode_json, refuse
from outofcore.units import MIB, PAGE_BYTES, format_bytes, round_up

BUFFER_BYTES = 4 * MIB
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000
_METADATA = "__metadata__"
_MOST_TOLD = 200  # characters of what is wrong with a header

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
    stamp: Stamp


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
            stamp = Stamp.of(file.fileno())
            total = stamp.bytes
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if total < _LENGTH_BYTES or length > min(_MOST_HEADER_BYTES, total - _LENGTH_BYTES):
                raise InputError(f"{path} is not a safetensors file, or was cut off")
            text = file.read(length)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    try:
        described = json.loads(text, object_pairs_hook=_once_each)
        start = _LENGTH_BYTES + length
        found = [_entry(name, item, start) for name, item in described.items() if name != _METADATA]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:_MOST_TOLD]
        raise InputError(f"the header of {path} is not that of a safetensors file ({why})") from error
    end = start
    for entry in sorted(found, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != end or entry.end - entry.begin != math.prod(entry.shape) * entry.dtype.itemsize:
            raise InputError(f"{path}: the bytes of {entry.name} are not where its shape and its neighbours have them")
        end = entry.end
    if end != total:
        raise InputError(f"{path} has {total} bytes, and its header tells of {end}: it was cut off or changed")
    return TensorFile(path, {entry.name: entry for entry in found}, total, stamp)


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it has a name twice")
    return found


def _whole(number: object) -> int:
    """A number that counts bytes or elements: JSON has others, and Python would take them."""
    if type(number) is not int or not 0 <= number < 1 << 63:
        raise ValueError(f"{number!r} is no count")
    return number


def _entry(name: str, item: Mapping[str, Any], start: int) -> Entry:
    begin, end = map(_whole, item["data_offsets"])
    shape = tuple(map(_whole, item["shape"]))
    if item["dtype"] not in _DTYPES:
        raise ValueError(f"{name} has the dtype {item['dtype']!r}")
    return Entry(name, _DTYPES[item["dtype"]], shape, start + begin, start + end)


def new_buffer() -> memoryview:
    """``BUFFER_BYTES`` of memory that direct I/O can use."""
    return Region(map_anonymous(BUFFER_BYTES), BUFFER_BYTES).memory(0, BUFFER_BYTES)


class OutFile:
    """A new file that is written from its beginning to its end; a context manager.

    It is whole on disk once ``finish`` has returned.

    Attributes:
        bytes: written so far.
        crc32: of them.

    Raises:
        TransferError: the system refuses; the message says where and why.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = 0
        self.crc32 = 0
        self._buffer = new_buffer()
        self._filled = 0
        self._flushed = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            try:
                self._descriptor = os.open(path, flags | _O_DIRECT, 0o666)
            except OSError as error:
                # What file systems without direct I/O say.
                if error.errno != errno.EINVAL:
                    raise
                self._descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            raise self._error(error) from error
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._closed:
            self._closed = True
            os.close(self._descriptor)

    def write(self, source: memoryview | bytes) -> None:
        """Append bytes."""
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
        """Write what is left, and return when the disk has it all."""
        try:
            if self._filled:
                # Direct I/O moves whole pages; what is too much is cut off.
                self._flush(round_up(self._filled, PAGE_BYTES))
                os.ftruncate(self._descriptor, self.bytes)
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._error(error) from error

    def _flush(self, count: int) -> None:
        source = self._buffer[:count]
        done = 0
        try:
            while done < count:
                try:
                    moved = os.pwrite(self._descriptor, source[done:], self._flushed + done)
                except OSError as error:
                    flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
                    if error.errno != errno.EINVAL or not flags & _O_DIRECT:
                        raise
                    # Some file systems take the flag and refuse the I/O.
                    fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_O_DIRECT)
                    continue
                if not moved:
                    raise OSError(errno.EIO, "the system wrote nothing")
                # After a short write direct I/O can only go on from a page boundary.
                done += moved if done + moved == count else moved // PAGE_BYTES * PAGE_BYTES or moved
        except OSError as error:
            raise self._error(error) from error
        self._flushed += count
        self._filled = 0

    def _error(self, error: OSError) -> TransferError:
        if isinstance(error, TransferError):
            return error
        advice = {
            errno.ENOSPC: "make room there, or save to another disk",
            errno.EDQUOT: "raise the quota, or save elsewhere",
            errno.EFBIG: "lift the file size limit (ulimit -f)",
        }.get(error.errno or 0, "check that disk, or save elsewhere")
        found = TransferError(
            f"could not write {self.path} after {format_bytes(self.bytes)}: {error.strerror}; {advice}. "
            "The checkpoint that was there before is still whole"
        )
        found.errno = error.errno
        return found


class InFile:
    """A file that is read in pieces, without its pages staying in the page cache; a context manager.

    Raises:
        InputError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def read(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` from byte ``offset`` on.

        Raises:
            TransferError: the file ends there, or cannot be read.
        """
        done = 0
        while done < len(target):
            try:
                moved = os.preadv(self._descriptor, [target[done:]], offset + done)
            except OSError as error:
                raise self._error(offset + done, error.strerror or "the read failed") from error
            if not moved:
                raise self._error(offset + done, "the file ends there")
            done += moved
        os.posix_fadvise(self._descriptor, offset, len(target), os.POSIX_FADV_DONTNEED)

    def _error(self, offset: int, why: str) -> TransferError:
        return TransferError(f"could not read {self.path} at byte {offset}: {why}; take another copy of the file")


def pour(tensor: torch.Tensor, out: OutFile, faces: Faces | None, buffer: memoryview) -> None:
    """Append the elements of a tensor to a file, in row-major order.

    Args:
        tensor: any strided tensor on the CPU.
        out: the file.
        faces: of the home where the tensor may live.
        buffer: whole pages, through which the bytes go.
    """
    count = tensor.numel() * tensor.element_size()
    if not count:
        return
    slot = _whole_slot(tensor, faces, to_write=False)
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
            _forget(tensor, faces)


def fill(
    tensor: torch.Tensor, entry: Entry, source: InFile, faces: Faces | None, buffer: memoryview, crc32: int = 0
) -> int:
    """Fill a tensor with what a file has, converted where the dtypes differ.

    Args:
        tensor: any strided tensor on the CPU, of the entry's shape.
        entry: where its elements are in the file.
        source: the file.
        faces: of the home where the tensor may live.
        buffer: whole pages, through which the bytes go.
        crc32: of the bytes of the file before the entry's.

    Returns:
        the checksum gone on with.

    Raises:
        TransferError: the file cannot be read.
    """
    at, count = entry.begin, entry.end - entry.begin
    if not count:
        return crc32
    slot = _whole_slot(tensor, faces, to_write=True)
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
        # Pieces by the larger of the two sizes of an element, so that they fit the buffer.
        for target in _pieces(tensor.detach(), len(buffer), max(itemsize, tensor.element_size())):
            piece = buffer[: target.numel() * itemsize]
            source.read(at, piece)
            crc32 = zlib.crc32(piece, crc32)
            at += len(piece)
            target.copy_(torch.frombuffer(piece, dtype=entry.dtype).view(target.shape))
            _forget(tensor, faces)
    return crc32


def fill_range(
    tensor: torch.Tensor,
    start: int,
    entry: Entry,
    source: InFile,
    faces: Faces | None,
    buffer: memoryview,
    crc32: int = 0,
) -> int:
    """Fill a row with a range of what a file has; all of it is read, for the checksum.

    Args:
        tensor: a row of elements on the CPU.
        start: which element of the entry, in row-major order, is its first one.
        entry: where the elements are in the file.
        source, faces, buffer, crc32: as for ``fill``.

    Returns:
        the checksum gone on with.

    Raises:
        TransferError: the file cannot be read.
    """
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
                wanted = piece[(low - first) * itemsize : (high - first) * itemsize]
                tensor[low - start : high - start].copy_(torch.frombuffer(wanted, dtype=entry.dtype))
                _forget(tensor, faces)
    return crc32


def _whole_slot(tensor: torch.Tensor, faces: Faces | None, *, to_write: bool) -> tuple[HomeStore, int] | None:
    """The home and the slot of a tensor that takes all of it, in the order of a file."""
    whole = (
        tensor.is_contiguous()
        and tensor.storage_offset() == 0
        and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    )
    slot = None if faces is None else faces.slot_of(tensor, to_write=to_write)
    return slot if whole else None


def _pieces(tensor: torch.Tensor, most: int, itemsize: int) -> Iterator[torch.Tensor]:
    """Parts of a tensor in row-major order, each of at most ``most`` bytes, if an element takes ``itemsize``."""
    if tensor.numel() * itemsize <= most:
        yield tensor
        return
    rows = most // (tensor[0].numel() * itemsize)
    if rows:
        yield from tensor.split(rows)
        return
    for row in tensor:
        yield from _pieces(row, most, itemsize)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor."""
    start = tensor.storage_offset() * tensor.element_size()
    return memory_of(storage_bytes(tensor)[start : start + tensor.numel() * tensor.element_size()])


def _forget(tensor: torch.Tensor, faces: Faces | None) -> None:
    if faces is not None:
        faces.drop_cache(tensor)


class _WeightMap(Struct):
    weight_map: dict[str, str]  # by the name of a tensor: its file


class Weights:
    """Named tensors in safetensors files, of which the headers alone have been read.

    Args:
        path: a safetensors file; an index (``*.safetensors.index.json``) beside the files that it names; or a folder
            with ``model.safetensors`` or ``model.safetensors.index.json``.

    Raises:
        InputError: there are no such files, or they cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, tuple[TensorFile, Entry]] = {}
        if path.is_dir():
            path = next((path / name for name in (_INDEX, _ONE) if (path / name).is_file()), path)
            if path.is_dir():
                raise InputError(f"{path} has neither {_ONE} nor {_INDEX}; name the file itself")
        if path.name.endswith(".json"):
            self._read_index(path)
        else:
            file = read_header(path)
            self._entries = {name: (file, entry) for name, entry in file.entries.items()}

    def _read_index(self, path: Path) -> None:
        files: dict[str, TensorFile] = {}
        for name, where in decode_json(path, None, _WeightMap).weight_map.items():
            if where not in files:
                files[where] = read_header(path.parent / where)
            if name not in files[where].entries:
                refuse(path, f"$.weight_map.{name}", f"{where} has no such tensor")
            self._entries[name] = (files[where], files[where].entries[name])

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self._entries)

    def find(self, name: str) -> tuple[TensorFile, Entry]:
        """The file that has a tensor, and where in it.

        Raises:
            KeyError: none has it.
        """
        return self._entries[name]

    def load(self, targets: Mapping[str, torch.Tensor], faces: Faces | None) -> None:
        """Fill tensors on the CPU of the files' shapes, by name, converted where dtypes differ; others are left.

        Raises:
            TransferError: a file cannot be read.
        """
        wanted: defaultdict[Path, list[tuple[Entry, torch.Tensor]]] = defaultdict(list)
        for name, tensor in targets.items():
            file, entry = self._entries[name]
            wanted[file.path].append((entry, tensor))
        buffer = new_buffer()
        for path, items in wanted.items():
            with InFile(path) as source:
                for entry, tensor in sorted(items, key=lambda item: item[0].begin):
                    fill(tensor, entry, source, faces, buffer)
