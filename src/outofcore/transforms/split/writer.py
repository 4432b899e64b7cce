"""Add the ops of a split step, with the ops that gather arguments from cells and copy results to them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import prod
from typing import TypeVar

import torch

from outofcore.analysis.boxes import Box, TensorWindow, cells, clip_box, count_elements, window_within
from outofcore.analysis.chunks import is_dense
from outofcore.capture.captured import Call, Captured, Ref, StateRange, Value
from outofcore.capture.operators import family_text
from outofcore.capture.tables import covers
from outofcore.graph import Op, Storage, StorageKind
from outofcore.transforms.split.cells import CellMap
from outofcore.transforms.split.tensors import dense_like
from outofcore.transforms.split.ways import Cut

T = TypeVar("T")

_aten = torch.ops.aten
# A whole result that is gathered at most this many ops later is reused.
_REUSE_OPS = 6


class LimitError(Exception):
    """The split step would have too many ops."""


class UnfitError(Exception):
    """An operator refuses a slice of its arguments; never reaches the user."""

    def __init__(self, op: int) -> None:
        super().__init__(op)
        self.op = op


def require(item: T | None, op: Op) -> T:
    """Return an item; raises ``UnfitError`` for the op if it is None."""
    if item is None:
        raise UnfitError(op.id)
    return item


@dataclass
class OpPiece:
    """One part of an op, or a whole op, with the ops that gather its arguments and store its results."""

    op: int  # of the original step
    ops: list[tuple[Op, Call]] = field(default_factory=list[tuple[Op, Call]])


class StepWriter:
    """Adds ops, storages and values to a step that is being split."""

    def __init__(self, captured: Captured, cell_map: CellMap, limit: int | None) -> None:
        self.captured, self.cell_map, self.limit = captured, cell_map, limit
        self.storages: list[Storage] = list(captured.graph.storages)
        self.values: list[Value] = list(captured.values)
        self.ranges: dict[int, StateRange] = {}
        # Boxes of cut storages that exist as a whole: their storage, and the op that made it.
        self.whole_boxes: dict[tuple[int, Box], tuple[int, int]] = {}
        self._index: dict[Value, int] = {}
        for index, value in enumerate(self.values):
            self._index.setdefault(value, index)
        self._cells: dict[tuple[int, Box], int] = {}
        self._existing: set[int] = set()  # storages that already exist
        self._piece = OpPiece(-1)
        self._emitted = 0

    def begin_piece(self, op: Op) -> OpPiece:
        self._piece = OpPiece(op.id)
        return self._piece

    def index_of(self, value: Value) -> int:
        if value not in self._index:
            self._index[value] = len(self.values)
            self.values.append(value)
        return self._index[value]

    def new_storage(self, count: int, name: str) -> int:
        self.storages.append(Storage(len(self.storages), count, StorageKind.ACTIVATION, name))
        return len(self.storages) - 1

    def _cell(self, storage: int, box: Box) -> int:
        """Return the storage of a cell (a box of a divided storage); create it at the first call."""
        if (storage, box) not in self._cells:
            old = self.storages[storage]
            size = old.bytes // prod(self.cell_map.axes[storage].sizes)
            cell = self.new_storage(count_elements(box) * size, old.name)
            kind = old.kind
            if storage in self.cell_map.ranged:
                (low, high), *inner = box
                row = size * count_elements(tuple(inner))
                kind, self.ranges[cell] = StorageKind.STATE_RANGE, StateRange(storage, low * row)
                self.storages[cell] = replace(self.storages[cell], name=f"{old.name} [{low}:{high}]")
            self.storages[cell] = replace(self.storages[cell], kind=kind)
            self._cells[storage, box] = cell
        return self._cells[storage, box]

    def emit(
        self,
        like: Op,
        call: Call,
        reads: Iterable[int] = (),
        mutates: Iterable[int] = (),
        discards: Iterable[int] = (),
        name: str = "",
    ) -> None:
        """Add a part of the op ``like``, or a helper op if ``name`` is empty; raises ``LimitError`` above the limit."""
        creates = dict.fromkeys(self.values[v].storage for v in call.results if v is not None)
        op = Op(
            -1,
            name or str(call.func),
            tuple(dict.fromkeys(reads)),
            tuple(dict.fromkeys(mutates)),
            tuple(creates),
            like.rerunnable or not name,
            family=family_text(name or str(call.func), call.args, call.kwargs, self.values),
            module=like.module,
            source=like.source,
            discards=tuple(dict.fromkeys(discards)),
            module_class=like.module_class,
        )
        self._piece.ops.append((op, call))
        self._emitted += 1
        if self.limit is not None and self._emitted > self.limit:
            raise LimitError

    def make_empty(self, like: Op, value: Value) -> int:
        """Add an op that creates an uninitialized value and its storage; return the value's index."""
        index = self.index_of(value)
        kwargs = {"dtype": value.dtype, "device": self.captured.device, "pin_memory": False}
        self.emit(like, Call(_aten.empty_strided.default, (list(value.shape), list(value.stride)), kwargs, (index,)))
        return index

    def make_zero(self, like: Op, value: Value) -> None:
        call = Call(_aten.zero_.default, (Ref(self.make_empty(like, value)),), {}, (None,))
        self.emit(like, call, (), [value.storage])

    def copy(self, like: Op, target: Value, source: Value) -> None:
        whole = covers(target, self.storages[target.storage].bytes)
        reads = [source.storage] if whole else [source.storage, target.storage]
        args = (Ref(self.index_of(target)), Ref(self.index_of(source)))
        self.emit(like, Call(_aten.copy_.default, args, {}, (None,)), reads, [target.storage])

    def _gather(self, like: Op, storage: int, dtype: torch.dtype, box: Box, *, reusable: bool) -> int:
        """Return a storage that holds a box of a divided storage; add ops that copy several pieces if necessary."""
        axes = self.cell_map.axes[storage]
        inside = clip_box(box, axes.whole_box())
        overlapping = list(cells(self.cell_map.cuts[storage], inside)) if inside else []
        if len(overlapping) == 1 and overlapping[0] == box:
            return self._cell(storage, box)
        existing = self.whole_boxes.get((storage, box))
        if existing is not None and like.id - existing[1] <= _REUSE_OPS:
            return existing[0]
        gathered = self.new_storage(count_elements(box) * dtype.itemsize, f"{self.storages[storage].name} part".strip())
        make = self.make_empty if inside == box else self.make_zero
        make(like, Value(gathered, dtype, *_flat_layout(box)))
        for cell in overlapping:
            part = clip_box(cell, box)
            if part is not None:
                target, source = window_within(box, part), window_within(cell, part)
                self.copy(
                    like,
                    _window_value(gathered, dtype, target),
                    _window_value(self._cell(storage, cell), dtype, source),
                )
        if reusable or storage in self.cell_map.ranged:
            self.whole_boxes[storage, box] = gathered, like.id
        return gathered

    def scatter(self, like: Op, storage: int, dtype: torch.dtype, box: Box, source: int) -> None:
        """Add ops that copy a box from the storage ``source`` into the overlapping pieces of a divided storage."""
        written: set[int] = set()
        for cell in cells(self.cell_map.cuts[storage], box):
            part = clip_box(cell, box)
            if part is None:
                continue
            target = self._cell(storage, cell)
            if target == source:
                continue
            if target not in written and not self._mark_existing(target):
                self.make_empty(like, Value(target, dtype, *_flat_layout(cell)))
            written.add(target)
            self.copy(
                like,
                _window_value(target, dtype, window_within(cell, part)),
                _window_value(source, dtype, window_within(box, part)),
            )

    def _mark_existing(self, storage: int) -> bool:
        """Mark a storage as existing; return whether it existed before."""
        if storage in self._existing or storage in self.ranges:
            return True
        self._existing.add(storage)
        return False

    def forget_copies(self, storage: int) -> None:
        self.whole_boxes = {key: entry for key, entry in self.whole_boxes.items() if key[0] != storage}

    def gather_argument(self, op: Op, index: int, cut: Cut | None, low: int, high: int) -> Value:
        """Return an argument, or its slice for the part ``low:high``; add ops that copy it if necessary."""
        value, cell_map = self.captured.values[index], self.cell_map
        storage = value.storage
        if storage in cell_map.cuts:
            axes, place = cell_map.axes[storage], cell_map.places[index]
            box = require(cell_map.box_of(storage, index, cut, low, high), op)
            dims, shape = (None, value.shape) if cut is None else (cut.dims, cut.part_shape(value.shape, low, high))
            stride = require(axes.strides(place, shape, box, dims), op)
            gathered = self._gather(op, storage, value.dtype, box, reusable=cut is None)
            return Value(gathered, value.dtype, shape, stride)
        if cut is None:
            return value
        first, last = cut.ends(low, high)
        whole = require(value.merge_dims(cut.dims), op)
        dim = cut.dims[0]
        inside_ends = max(first, 0), min(last, whole.shape[dim])
        part = whole.narrow(dim, *inside_ends)
        is_usable = is_dense(part.shape, part.stride) or not is_dense(whole.shape, whole.stride)
        if inside_ends == (first, last) and is_usable:
            return part
        shape = (*part.shape[:dim], last - first, *part.shape[dim + 1 :])
        gathered = self.new_storage(prod(shape) * value.dtype.itemsize, f"{self.storages[storage].name} part".strip())
        copy = Value(gathered, value.dtype, shape, dense_like(shape, whole.stride))
        make = self.make_empty if inside_ends == (first, last) else self.make_zero
        make(op, copy)
        if inside_ends[1] > inside_ends[0]:
            self.copy(op, copy.narrow(dim, inside_ends[0] - first, inside_ends[1] - first), part)
        return copy

    def place_result(
        self,
        op: Op,
        index: int,
        cut: Cut | None,
        layout_and_bytes: tuple[Value, int],
        low: int,
        high: int,
        unplaced: list[tuple[int, Cut | None, Value]],
    ) -> int:
        """Return the index of the value that a part writes; add values that must be copied later to ``unplaced``."""
        old, (value, count) = self.captured.values[index], layout_and_bytes
        cell_map = self.cell_map
        if cut is None and old.storage not in cell_map.cuts:
            return index
        if old.storage in cell_map.cuts:
            axes, place = cell_map.axes[old.storage], cell_map.places[index]
            if cut is None:
                box, stride = axes.box_of(place), axes.strides(place, value.shape, axes.whole_box())
            else:
                box = axes.box_of_part(place, cut.dims, *cut.ends(low, high))
                stride = axes.strides(place, value.shape, box, cut.dims) if box else None
            box = require(box, op)
            is_cell = list(cells(cell_map.cuts[old.storage], box)) == [box]
            full = count_elements(box) * old.dtype.itemsize == count
            if is_cell and full and stride == value.stride and not self._mark_existing(self._cell(old.storage, box)):
                return self.index_of(replace(value, storage=self._cell(old.storage, box)))
        storage = self.new_storage(count, self.storages[old.storage].name)
        result = replace(value, storage=storage)
        unplaced.append((index, cut, result))
        return self.index_of(result)

    def store_result(self, op: Op, index: int, cut: Cut | None, result: Value, low: int, high: int) -> None:
        """Add ops that copy a part's result to its place in the whole result."""
        old, cell_map = self.captured.values[index], self.cell_map
        storage = old.storage
        if storage not in cell_map.cuts:
            cut = require(cut, op)
            if not self._mark_existing(storage):
                self.make_empty(op, old)
            whole = require(old.merge_dims(cut.dims), op)
            self.copy(op, whole.narrow(cut.dims[0], *cut.ends(low, high)), result)
            return
        axes, place = cell_map.axes[storage], cell_map.places[index]
        dims = None if cut is None else cut.dims
        box = require(cell_map.box_of(storage, index, cut, low, high), op)
        stride = require(axes.strides(place, result.shape, box, dims), op)
        source = result
        if result.stride != stride or not covers(result, self.storages[result.storage].bytes):
            laid_out = self.new_storage(count_elements(box) * result.dtype.itemsize, self.storages[storage].name)
            source = Value(laid_out, result.dtype, result.shape, stride)
            self.make_empty(op, source)
            self.copy(op, source, result)
        self.scatter(op, storage, result.dtype, box, source.storage)
        self.whole_boxes[storage, box] = source.storage, op.id

    def store_written(self, op: Op, index: int, cut: Cut | None, part: Value, low: int, high: int) -> None:
        """Add ops that copy an argument written in place back to the memory that it was copied from."""
        old, cell_map = self.captured.values[index], self.cell_map
        self.forget_copies(old.storage)
        if part.storage == old.storage:
            return
        if old.storage in cell_map.cuts:
            box = require(cell_map.box_of(old.storage, index, cut, low, high), op)
            self.scatter(op, old.storage, part.dtype, box, part.storage)
            return
        cut = require(cut, op)
        whole = require(old.merge_dims(cut.dims), op)
        self.copy(op, whole.narrow(cut.dims[0], *cut.ends(low, high)), part)


def _window_value(storage: int, dtype: torch.dtype, window: TensorWindow) -> Value:
    return Value(storage, dtype, window.shape, window.stride, window.offset)


def _flat_layout(box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and strides of contiguous memory that contains exactly a box."""
    window = window_within(box, box)
    return window.shape, window.stride
