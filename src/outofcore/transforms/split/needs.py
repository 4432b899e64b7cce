"""Bytes that the ops of a step need and access, whole and split; ``search`` decides by them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Set
from math import prod

from outofcore.analysis.agreement import WHOLE, SplitUses
from outofcore.analysis.boxes import Axes, Lines, lines_of, place_window
from outofcore.capture.captured import Captured, Value
from outofcore.capture.tables import covers
from outofcore.graph import StorageKind
from outofcore.transforms.passes import may_be_overwritten
from outofcore.transforms.split.rules import splits_of
from outofcore.transforms.split.state_ranges import can_update_by_ranges, splits_of_update
from outofcore.transforms.split.tensors import named_refs, ref_at, values_of
from outofcore.transforms.split.ways import Cut, OpSplit


class SplitNeeds:
    """The possible splits of each op, and the bytes that its parts need."""

    def __init__(
        self,
        captured: Captured,
        ranged: frozenset[int],
        min_bytes: int,
        refused: frozenset[str],
        workspaces: Mapping[str, int],
        home: int | None,
    ) -> None:
        """``refused`` has the keys of failed exactness checks; for the other parameters see ``step.split_step``."""
        self.captured, self.graph, self.values = captured, captured.graph, captured.values
        self.ranged, self._min_bytes, self._workspaces, self._home = ranged, min_bytes, workspaces, home
        self._refused_splits = {key.rpartition(" at [")[0] for key in refused}
        self._splits: dict[int, list[OpSplit]] = {}
        self.lines = self._lines_of_cuttable()  # of storages that may be cut
        self.places = {  # by value index
            index: place
            for index, value in enumerate(self.values)
            if value.storage in self.lines and (place := place_window(self.lines[value.storage], value.window()))
        }

    def _lines_of_cuttable(self) -> dict[int, Lines]:
        """Map each storage that may be split to an array layout in which its tensors are rectangles."""
        graph = self.graph
        values_by_storage: dict[int, list[Value]] = {}
        for index in dict.fromkeys(index for call in self.captured.calls for index in values_of(call)):
            value = self.values[index]
            values_by_storage.setdefault(value.storage, []).append(value)
        lines_by_storage: dict[int, Lines] = {}
        for storage in graph.storages:
            values = values_by_storage.get(storage.id, [])
            if (
                not (may_be_overwritten(graph, storage.id) or storage.id in self.ranged)
                or storage.bytes < self._min_bytes
                or len({v.dtype for v in values}) != 1
                or any(v.foreign or v.conjugate or v.negated for v in values)
            ):
                continue
            size = values[0].dtype.itemsize
            if storage.bytes % size:
                continue
            lines = lines_of(storage.bytes // size, map(Value.window, values))
            if lines is not None and all(place_window(lines, v.window()) for v in values):
                lines_by_storage[storage.id] = lines
        return lines_by_storage

    def splits(self, op: int) -> list[OpSplit]:
        """Return the possible splits of an op, without splits that failed their exactness check."""
        if op not in self._splits:
            graph_op, call = self.graph.ops[op], self.captured.calls[op]
            splits = [] if graph_op.communicates or graph_op.random else splits_of(call, self.values)
            if can_update_by_ranges(self.captured, op, self._home):
                splits = splits_of_update(self.captured, op)
            self._splits[op] = [
                split
                for split in splits
                if f"{graph_op.family} by {split.name}" not in self._refused_splits and self._is_sliceable(op, split)
            ]
        return self._splits[op]

    def _is_sliceable(self, op: int, split: OpSplit) -> bool:
        """Return whether every tensor that a split cuts can be sliced by a view."""
        call = self.captured.calls[op]
        for name, cut in split.argument_cuts.items():
            index = ref_at(call, name).value
            if not self._can_narrow(index, cut):
                return False
        for result, cut in split.result_cuts.items():
            index = call.results[result]
            value = self.values[index] if index is not None else None
            if index is None or value is None or not self._can_narrow(index, cut):
                return False
            if value.storage not in self.lines and not covers(value, self.graph.storages[value.storage].bytes):
                return False
        return True

    def _can_narrow(self, index: int, cut: Cut) -> bool:
        value = self.values[index]
        placed_well = index in self.places and Axes.lines_of_dims(self.places[index], cut.dims) is not None
        return (placed_well or value.storage not in self.lines) and value.merge_dims(cut.dims) is not None

    def value_bytes(self, index: int) -> int:
        value = self.values[index]
        return prod(value.shape) * value.dtype.itemsize

    def whole_bytes(self, op: int) -> int:
        """Return the bytes that an unsplit op needs; counts only accessed parts of storages that may be split."""
        storages = self.graph.storages
        accessed: dict[int, int] = {}
        for index in dict.fromkeys(values_of(self.captured.calls[op])):
            storage = self.values[index].storage
            if storage in self.lines:
                accessed[storage] = accessed.get(storage, 0) + self.value_bytes(index)
        touched = (storages[s] for s in self.graph.ops[op].touched)
        return self._workspace(op) + sum(
            min(accessed.get(s.id, s.bytes), s.bytes) for s in touched if s.kind is not StorageKind.CONSTANT
        )

    def _workspace(self, op: int) -> int:
        return self._workspaces.get(self.graph.ops[op].family, 0)

    def part_bytes(self, op: int, split: OpSplit, parts: int) -> int:
        """Return the bytes that the largest of ``parts`` parts of an op needs."""
        storages = self.graph.storages
        part_length = max(high - low for low, high in itertools.pairwise(split.ends(parts)))
        accessed: dict[int, int] = {}
        # A kernel's scratch memory grows mostly in proportion to its tensors.
        cut_bytes = self._workspace(op) * part_length / split.extent
        for index, cut in self.accesses(op, split):
            value = self.values[index]
            storage = storages[value.storage]
            if storage.kind is StorageKind.CONSTANT:
                continue
            if storage.id not in self.lines:
                accessed[storage.id] = storage.bytes
            elif cut is None:
                accessed[storage.id] = max(accessed.get(storage.id, 0), self.value_bytes(index))
            else:
                extent = prod(value.shape[cut.dims[0] : cut.dims[1]])
                cut_bytes += self.value_bytes(index) * min(
                    1.0, (part_length * cut.scale + cut.before + cut.after) / extent
                )
        return int(cut_bytes + sum(accessed.values()))

    def accesses(self, op: int, split: OpSplit) -> Iterator[tuple[int, Cut | None]]:
        """Yield the index of each value that a split op accesses, and how it is cut (None: not at all)."""
        call = self.captured.calls[op]
        for name, index in named_refs(call):
            if name[0] not in split.shape_only:
                yield index, split.argument_cuts.get(name)
        for place, index in enumerate(call.results):
            if index is not None:
                yield index, split.result_cuts.get(place)

    def cut_values(self, op: int, split: OpSplit) -> Iterator[tuple[int, Cut]]:
        """Yield the index and the cut of each value that a split cuts, on storages that may be divided."""
        for index, cut in self.accesses(op, split):
            if cut is not None and self.values[index].storage in self.lines:
                yield index, cut

    def axis(self, index: int, cut: Cut) -> int:
        """Return the array dimension at which the axis of a cut begins in a value's storage; -1 for no axis."""
        run = Axes.lines_of_dims(self.places[index], cut.dims)
        return -1 if run is None else run[0]

    def uses(self, op: int, split: OpSplit, storages: Set[int]) -> SplitUses:
        """Return how a split op accesses ``storages``, and the bytes that it copies from other storages."""
        written = self.graph.ops[op].mutates
        cells: list[tuple[int, int, int]] = []
        copied = 0
        for index, cut in self.accesses(op, split):
            value = self.values[index]
            storage = value.storage
            count = self.value_bytes(index) * (2 if storage in written else 1)  # copied in and out
            if storage in storages:
                cells.append((storage, WHOLE if cut is None else self.axis(index, cut), count))
            elif cut is not None and prod(value.shape[: cut.dims[0]]) > 1:
                copied += count  # the slice is not contiguous
        return SplitUses(tuple(cells), copied)
