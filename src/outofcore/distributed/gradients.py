"""The gradients of one process: those that a step has left, and those kept at home for earlier workers.

They are read and written a piece at a time, past the page cache if they are on a disk, so that they need only a few
pieces of memory beyond the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import torch

from outofcore._torch_internals import memory_of
from outofcore.analysis import is_large
from outofcore.distributed.chain import Extent, Span, pieces
from outofcore.execution.aliases import Faces
from outofcore.execution.homes import HomeStore
from outofcore.execution.memory import Region, map_anonymous, tensor_over
from outofcore.units import MIB

PIECE_BYTES = 1 * MIB


class Tensors:
    """Dense tensors as rows of elements, in memory or at a home."""

    def __init__(self, tensors: Sequence[torch.Tensor], faces: Faces) -> None:
        self._rows = [_row(tensor) for tensor in tensors]
        self._faces = faces
        self._buffer: torch.Tensor | None = None

    def get(self, span: Span) -> torch.Tensor:
        """Return elements on the CPU, read-only and valid until the next call."""
        row = self._rows[span.tensor]
        slot = self._slot(row, span)
        if slot is None:
            return row[span.start : span.start + span.count].cpu()
        home, offset = slot
        if self._buffer is None:
            self._buffer = new_row(PIECE_BYTES)
        found = self._buffer[: span.count * row.element_size()]
        home.read(offset, memory_of(found))
        return found.view(row.dtype)

    def put(self, span: Span, elements: torch.Tensor) -> None:
        """Write elements, in a row on the CPU."""
        row = self._rows[span.tensor]
        slot = self._slot(row, span)
        if slot is None:
            row[span.start : span.start + span.count].copy_(elements)
            return
        home, offset = slot
        home.write(offset, memory_of(elements.view(torch.uint8)))

    def _slot(self, row: torch.Tensor, span: Span) -> tuple[HomeStore, int] | None:
        """Return the home on a disk and the offset at which a span begins; None if it is in memory."""
        face = self._faces.find(row)
        if face is None or row.storage_offset():
            return None
        home = self._faces.store_of(face)
        return None if home.in_memory else (home, face.offset + span.start * row.element_size())


def _row(tensor: torch.Tensor) -> torch.Tensor:
    """View all elements of a tensor in memory order."""
    row = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return row.set_(tensor.untyped_storage(), tensor.storage_offset(), (tensor.numel(),), (1,))


def new_row(count: int) -> torch.Tensor:
    """Return page-aligned bytes, for direct I/O."""
    return tensor_over(Region(map_anonymous(count), count).memory(0, count))


class Layout:
    """The layout of a step's gradients, the same for all workers.

    ``spans`` are all elements, in pieces; ``digest`` is a number that differs for other gradients.
    """

    def __init__(self, gradients: Sequence[torch.Tensor]) -> None:
        self._shapes = [(tuple(g.shape), g.stride(), g.dtype) for g in gradients]
        extents = [Extent(str(g.dtype), g.element_size(), g.numel()) for g in gradients]
        self.spans = pieces(extents, PIECE_BYTES)
        self.itemsizes = [extent.itemsize for extent in extents]
        self.dtypes = [g.dtype for g in gradients]
        self.bytes = sum(extent.itemsize * extent.elements for extent in extents)
        self.digest = crc32(repr(self._shapes).encode())

    def is_of(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Return whether gradients have this layout."""
        return self._shapes == [(tuple(g.shape), g.stride(), g.dtype) for g in gradients]

    def new(self, faces: Faces) -> Tensors:
        """Allocate tensors of this layout, large ones at home."""
        made: list[torch.Tensor] = []
        for shape, stride, dtype in self._shapes:
            count = torch.Size(shape).numel() * dtype.itemsize
            base = faces.birth(count) if is_large(count) else torch.empty(count, dtype=torch.uint8)
            row = torch.empty(0, dtype=dtype)
            made.append(row.set_(base.untyped_storage(), 0, shape, stride))
        return Tensors(made, faces)


def keep(gradients: Tensors, kept: Tensors, layout: Layout, *, add: bool) -> None:
    """Write gradients to ``kept``, or add them to it."""
    for spans in layout.spans:
        for span in spans:
            elements = gradients.get(span)
            kept.put(span, kept.get(span).add_(elements) if add else elements)
