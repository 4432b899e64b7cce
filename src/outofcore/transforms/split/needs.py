"""What the ops of a step need and access, as a whole and in parts: what ``search`` decides by."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Set
from math import prod

from outofcore.analysis.agreement import WHOLE, Uses
from outofcore.analysis.boxes import Axes, Lines, lines_of, placed
from outofcore.capture.captured import Captured, Value
from outofcore.capture.tables import covers
from outofcore.graph import StorageKind
from outofcore.transforms.passes import may_be_overwritten
from outofcore.transforms.split.rules import ways_of
from outofcore.transforms.split.state_ranges import is_update, ways_of_update
from outofcore.transforms.split.tensors import named_refs, ref_at, values_of
from outofcore.transforms.split.ways import Cut, Way


class Needs:
    """The ways to split each op, and what its parts need.

    Attributes:
        lines: of storages that may be cut, by storage id.
        places: of values on those storages, by index.
        ranged: storages of parameters and optimizer state that may come range by range.
    """

    def __init__(
        self,
        captured: Captured,
        ranged: frozenset[int],
        least: int,
        refused: frozenset[str],
        workspaces: Mapping[str, int],
        home: int | None,
    ) -> None:
        """``refused`` are keys of claims that do not hold; for the others see ``tiled``."""
        self.captured, self.graph, self.values = captured, captured.graph, captured.values
        self.ranged, self._least, self._workspaces, self._home = ranged, least, workspaces, home
        self._refused_ways = {key.rpartition(" at [")[0] for key in refused}
        self._ways: dict[int, list[Way]] = {}
        self.lines = self._cuttable()
        self.places = {
            index: place
            for index, value in enumerate(self.values)
            if value.storage in self.lines and (place := placed(self.lines[value.storage], value.window()))
        }

    def _cuttable(self) -> dict[int, Lines]:
        """Return the lines of the storages that may be cut."""
        graph = self.graph
        used: dict[int, list[Value]] = {}
        for index in dict.fromkeys(index for call in self.captured.calls for index in values_of(call)):
            value = self.values[index]
            used.setdefault(value.storage, []).append(value)
        found: dict[int, Lines] = {}
        for storage in graph.storages:
            values = used.get(storage.id, [])
            if (
                not (may_be_overwritten(graph, storage.id) or storage.id in self.ranged)
                or storage.bytes < self._least
                or len({v.dtype for v in values}) != 1
                or any(v.foreign or v.conjugate or v.negated for v in values)
            ):
                continue
            size = values[0].dtype.itemsize
            if storage.bytes % size:
                continue
            lines = lines_of(storage.bytes // size, map(Value.window, values))
            if lines is not None and all(placed(lines, v.window()) for v in values):
                found[storage.id] = lines
        return found

    def ways(self, op: int) -> list[Way]:
        """Return the ways to split an op that are not refused."""
        if op not in self._ways:
            graph_op, call = self.graph.ops[op], self.captured.calls[op]
            found = [] if graph_op.communicates or graph_op.random else ways_of(call, self.values)
            if is_update(self.captured, op, self._home):
                found = ways_of_update(self.captured, op)
            self._ways[op] = [
                way
                for way in found
                if f"{graph_op.family} by {way.name}" not in self._refused_ways and self._fits(op, way)
            ]
        return self._ways[op]

    def _fits(self, op: int, way: Way) -> bool:
        """Return whether everything that a way cuts can be viewed in parts."""
        call = self.captured.calls[op]
        for name, cut in way.given.items():
            index = ref_at(call, name).value
            if not self._can_narrow(index, cut):
                return False
        for result, cut in way.made.items():
            index = call.results[result]
            value = self.values[index] if index is not None else None
            if index is None or value is None or not self._can_narrow(index, cut):
                return False
            if value.storage not in self.lines and not covers(value, self.graph.storages[value.storage].bytes):
                return False
        return True

    def _can_narrow(self, index: int, cut: Cut) -> bool:
        value = self.values[index]
        placed_well = index in self.places and Axes.run(self.places[index], cut.dims) is not None
        return (placed_well or value.storage not in self.lines) and value.merged(cut.dims) is not None

    def size(self, index: int) -> int:
        """Return the bytes of a value's elements."""
        value = self.values[index]
        return prod(value.shape) * value.dtype.itemsize

    def whole(self, op: int) -> int:
        """Return the bytes that a whole op needs; of storages that may be cut, only what it accesses."""
        storages = self.graph.storages
        seen: dict[int, int] = {}
        for index in dict.fromkeys(values_of(self.captured.calls[op])):
            storage = self.values[index].storage
            if storage in self.lines:
                seen[storage] = seen.get(storage, 0) + self.size(index)
        touched = (storages[s] for s in self.graph.ops[op].touched)
        return self._workspace(op) + sum(
            min(seen.get(s.id, s.bytes), s.bytes) for s in touched if s.kind is not StorageKind.CONSTANT
        )

    def _workspace(self, op: int) -> int:
        return self._workspaces.get(self.graph.ops[op].family, 0)

    def in_parts(self, op: int, way: Way, parts: int) -> int:
        """Return the bytes that a part of an op needs."""
        storages = self.graph.storages
        width = max(high - low for low, high in itertools.pairwise(way.ends(parts)))
        seen: dict[int, int] = {}
        # What a kernel needs beside its tensors is mostly as large as these.
        counted = self._workspace(op) * width / way.extent
        for index, cut in self.accesses(op, way):
            value = self.values[index]
            storage = storages[value.storage]
            if storage.kind is StorageKind.CONSTANT:
                continue
            if storage.id not in self.lines:
                seen[storage.id] = storage.bytes
            elif cut is None:
                seen[storage.id] = max(seen.get(storage.id, 0), self.size(index))
            else:
                extent = prod(value.shape[cut.dims[0] : cut.dims[1]])
                counted += self.size(index) * min(1.0, (width * cut.scale + cut.before + cut.after) / extent)
        return int(counted + sum(seen.values()))

    def accesses(self, op: int, way: Way) -> Iterator[tuple[int, Cut | None]]:
        """Yield the values that the parts of an op access, with the cut of each; None: the whole value."""
        call = self.captured.calls[op]
        for name, index in named_refs(call):
            if name[0] not in way.unread:
                yield index, way.given.get(name)
        for place, index in enumerate(call.results):
            if index is not None:
                yield index, way.made.get(place)

    def cut_values(self, op: int, way: Way) -> Iterator[tuple[int, Cut]]:
        """Yield the values on cuttable storages that a way cuts."""
        for index, cut in self.accesses(op, way):
            if cut is not None and self.values[index].storage in self.lines:
                yield index, cut

    def axis(self, index: int, cut: Cut) -> int:
        """Return the line of its storage at which the axis of a cut begins."""
        run = Axes.run(self.places[index], cut.dims)
        return -1 if run is None else run[0]

    def uses(self, op: int, way: Way, storages: Set[int]) -> Uses:
        """Return what the parts of an op access, and the bytes that are copied if that is cut otherwise."""
        written = self.graph.ops[op].mutates
        cells: list[tuple[int, int, int]] = []
        copied = 0
        for index, cut in self.accesses(op, way):
            value = self.values[index]
            storage = value.storage
            count = self.size(index) * (2 if storage in written else 1)  # there and back
            if storage in storages:
                cells.append((storage, WHOLE if cut is None else self.axis(index, cut), count))
            elif cut is not None and prod(value.shape[: cut.dims[0]]) > 1:
                copied += count  # what is not side by side in memory
        return Uses(tuple(cells), copied)
