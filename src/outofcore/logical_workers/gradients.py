"""The gradients of one process: of the current turn, and those stored at home for earlier workers."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from zlib import crc32

import torch

from outofcore import OpenHome
from outofcore.logical_workers.chain import Extent, Span, cut_pieces

# Bytes that are sent and added at once: a multiple of the page size, large enough to hide the cost of a message.
PIECE_BYTES = 1 << 20


class TensorRows:
    """Dense tensors in memory or at a home, each viewed as one flat row of elements."""

    def __init__(self, tensors: Sequence[torch.Tensor], home: OpenHome) -> None:
        self._rows = [_row(tensor) for tensor in tensors]
        self._home = home

    def read(self, span: Span, elements: torch.Tensor) -> None:
        self._home.copy(self.view(span), elements)

    def write(self, span: Span, elements: torch.Tensor) -> None:
        self._home.copy(elements, self.view(span))

    def view(self, span: Span) -> torch.Tensor:
        return self._rows[span.tensor][span.start : span.start + span.count]


def _row(tensor: torch.Tensor) -> torch.Tensor:
    """View all elements of a tensor in memory order."""
    row = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return row.set_(tensor.untyped_storage(), tensor.storage_offset(), (tensor.numel(),), (1,))


class GradientLayout:
    """The shapes, strides and dtypes of a step's gradients, the same for all workers."""

    def __init__(self, gradients: Sequence[torch.Tensor]) -> None:
        self._shapes = [(tuple(g.shape), g.stride(), g.dtype) for g in gradients]
        extents = [Extent(str(g.dtype), g.element_size(), g.numel()) for g in gradients]
        self.spans = cut_pieces(extents, PIECE_BYTES)
        self.itemsizes = [extent.itemsize for extent in extents]
        self.dtypes = [g.dtype for g in gradients]
        self.bytes = sum(extent.itemsize * extent.elements for extent in extents)
        self.digest = crc32(repr(self._shapes).encode())

    def matches(self, gradients: Sequence[torch.Tensor]) -> bool:
        return self._shapes == [(tuple(g.shape), g.stride(), g.dtype) for g in gradients]

    def allocate(self, home: OpenHome) -> TensorRows:
        return TensorRows([home.empty(torch.Size(shape).numel(), dtype) for shape, _, dtype in self._shapes], home)


class PieceBuffers:
    """Buffers for pieces of gradients, page-aligned as direct I/O requires."""

    def __init__(self, count: int) -> None:
        # Pages take memory only once they are written.
        self._bytes = [
            torch.frombuffer(mmap.mmap(-1, PIECE_BYTES, flags=mmap.MAP_PRIVATE), dtype=torch.uint8)
            for _ in range(count)
        ]

    def row(self, number: int, layout: GradientLayout, spans: Sequence[Span]) -> torch.Tensor:
        """View a buffer as the elements of a piece."""
        first = spans[0].tensor
        count = sum(span.count for span in spans) * layout.itemsizes[first]
        return self._bytes[number][:count].view(layout.dtypes[first])


class Gradients:
    """The gradients in ``.grad`` after a turn, and gradients of earlier turns, stored at a home."""

    def __init__(self, parameters: Sequence[torch.Tensor], home: OpenHome) -> None:
        self._parameters, self._home = parameters, home
        self._buffers = PieceBuffers(2)
        self.layout: GradientLayout | None = None
        self.stored: dict[int, TensorRows] = {}  # by the number of the turn

    @property
    def bytes(self) -> int:
        return 0 if self.layout is None else self.layout.bytes

    def current(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def tensors(self) -> TensorRows:
        return TensorRows(self.current(), self._home)

    def clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def update_layout(self) -> GradientLayout:
        """Return the layout of the gradients in ``.grad``; if it has changed, discard stored gradients."""
        gradients = self.current()
        if self.layout is None or not self.layout.matches(gradients):
            self.layout = GradientLayout(gradients)
            self.stored.clear()
        return self.layout

    def store(self, turn: int, *, add: bool) -> None:
        """Move the gradients in ``.grad`` to the home; with ``add``, add them to gradients stored for the turn."""
        layout = self.update_layout()
        if turn not in self.stored:
            self.stored[turn] = layout.allocate(self._home)
        current, stored = self.tensors(), self.stored[turn]
        for span in (part for spans in layout.spans for part in spans):
            if not add:
                self._home.copy(current.view(span), stored.view(span))
                continue
            elements, total = (self._buffers.row(number, layout, [span]) for number in (0, 1))
            current.read(span, elements)
            stored.read(span, total)
            stored.write(span, total.add_(elements))
        self.clear()
