"""Tensors to files and back, a piece at a time, wherever their bytes are: at home, in an arena, in ordinary memory."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch

from outofcore._torch_internals import memory_of, storage_bytes
from outofcore.checkpoint.format import Entry
from outofcore.checkpoint.stream import InFile, OutFile
from outofcore.execution.aliases import Faces
from outofcore.execution.store import HomeStore


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
    slot = _whole_slot(tensor, faces)
    if slot is not None:
        home, offset = slot
        for start in range(0, count, len(buffer)):
            piece = buffer[: min(len(buffer), count - start)]
            home.read(offset + start, piece)
            out.write(piece)
        return
    with torch.no_grad():
        for piece in _pieces(tensor.detach(), len(buffer), tensor.element_size()):
            out.write(_bytes_of(piece.contiguous()))
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
    slot = _whole_slot(tensor, faces) if tensor.dtype == entry.dtype else None
    if slot is not None:
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


def _whole_slot(tensor: torch.Tensor, faces: Faces | None) -> tuple[HomeStore, int] | None:
    """The home and the slot of a tensor that takes all of it, in the order of a file."""
    whole = (
        tensor.is_contiguous()
        and tensor.storage_offset() == 0
        and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    )
    face = faces.find(tensor) if whole and faces is not None else None
    return None if faces is None or face is None else (faces.store_of(face), face.offset)


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


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor."""
    start = tensor.storage_offset() * tensor.element_size()
    return memory_of(storage_bytes(tensor)[start : start + tensor.numel() * tensor.element_size()])


def _forget(tensor: torch.Tensor, faces: Faces | None) -> None:
    if faces is not None:
        faces.drop_cache(tensor)
