"""Choose which ops are split, along which axes and into how many parts, and the cells of storages between them.

1. Ops that need more memory than they may, and their neighbours, form the region that is split.
2. ``analysis.agreement`` chooses an axis for each op so that little is gathered.
3. Each op gets the least number of parts that suffices, equal for neighbours on the same axis.
4. Storages get cells where the parts begin. What turns out not to fit stays whole, and the search begins again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from fractions import Fraction
from math import gcd, lcm, prod

from outofcore._torch_internals import OpOverload
from outofcore.analysis.agreement import WHOLE, Uses, agreed
from outofcore.analysis.boxes import Axes, Box, Lines, Placed, lines_of, placed
from outofcore.capture.captured import Call, Captured, Value
from outofcore.capture.tables import covers
from outofcore.graph import StorageKind
from outofcore.transforms.passes import PASSING
from outofcore.transforms.split.cells import WORTH, CellMap, window_of
from outofcore.transforms.split.exactness import can_be_tried, claims_of_gathered
from outofcore.transforms.split.rules import is_elementwise, ways_of
from outofcore.transforms.split.state_ranges import is_update, page_ends, rangeable, ways_of_update
from outofcore.transforms.split.tensors import named_refs, ref_at, refs_of
from outofcore.transforms.split.ways import AS_ONE, Choice, Cut, Way

# How many parts an op is cut into at most.
MOST_PARTS = 64
# A part that needs so little more than the least, as a fraction of that, is small enough.
_NEAR = 32
# Of ways that need more than an op may, those are as good as each other that differ by less than this part of that.
_SAME = 32


class Search:
    """Chooses which ops are split along which axes into how many parts, and the cells of storages."""

    def __init__(
        self,
        captured: Captured,
        most: int,
        refused: frozenset[str],
        parts: int | None,
        least: int,
        workspaces: Mapping[str, int],
        home: int | None,
    ) -> None:
        self.captured, self.graph, self.values = captured, captured.graph, captured.values
        self.most, self.parts, self.least, self.workspaces = most, parts, least, workspaces
        self.refused = refused
        self._refused_ways = {key.rpartition(" at [")[0] for key in refused}
        self._ways: dict[int, list[Way]] = {}
        self.home = home
        self.ranged = rangeable(captured, most, parts, home)
        self.lines = self._cuttable()
        self.places = {
            index: place
            for index, value in enumerate(self.values)
            if value.storage in self.lines and (place := placed(self.lines[value.storage], window_of(value)))
        }
        self.axes: dict[int, Axes] = {}
        self.cuts: dict[int, list[list[int]]] = {}

    def _cuttable(self) -> dict[int, Lines]:
        """Return the lines of the storages that may be cut."""
        graph, outputs = self.graph, set(self.graph.outputs)
        used: dict[int, list[Value]] = {}
        for index in {ref.value for call in self.captured.calls for ref in refs_of(call)} | {
            value for call in self.captured.calls for value in call.results if value is not None
        }:
            value = self.values[index]
            used.setdefault(value.storage, []).append(value)
        found: dict[int, Lines] = {}
        for storage in graph.storages:
            values = used.get(storage.id, [])
            passes = storage.kind in PASSING and storage.id in graph.creator and storage.id not in outputs
            if (
                not (passes or storage.id in self.ranged)
                or storage.bytes < self.least
                or len({v.dtype for v in values}) != 1
                or any(v.foreign or v.conjugate or v.negated for v in values)
            ):
                continue
            size = values[0].dtype.itemsize
            if storage.bytes % size:
                continue
            lines = lines_of(storage.bytes // size, map(window_of, values))
            if lines is not None and all(placed(lines, window_of(v)) for v in values):
                found[storage.id] = lines
        return found

    def ways(self, op: int) -> list[Way]:
        """Return the ways to split an op that are not refused."""
        if op not in self._ways:
            graph_op, call = self.graph.ops[op], self.captured.calls[op]
            found = [] if graph_op.communicates or graph_op.random else ways_of(call, self.values)
            if is_update(self.captured, op, self.home):
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

    def _size(self, index: int) -> int:
        value = self.values[index]
        return prod(value.shape) * value.dtype.itemsize

    def need(self, op: int) -> int:
        """Return the bytes that a whole op needs; of storages that may be cut, only what it accesses."""
        call, storages = self.captured.calls[op], self.graph.storages
        seen: dict[int, int] = {}
        for index in dict.fromkeys(
            [*(ref.value for ref in refs_of(call)), *(v for v in call.results if v is not None)]
        ):
            storage = self.values[index].storage
            if storage in self.lines:
                seen[storage] = seen.get(storage, 0) + self._size(index)
        touched = (storages[s] for s in self.graph.ops[op].touched)
        return self._workspace(op) + sum(
            min(seen.get(s.id, s.bytes), s.bytes) for s in touched if s.kind is not StorageKind.CONSTANT
        )

    def _workspace(self, op: int) -> int:
        return self.workspaces.get(self.graph.ops[op].family, 0)

    def _need_in_parts(self, op: int, way: Way, parts: int) -> int:
        """Return the bytes that a part of an op needs."""
        call, storages = self.captured.calls[op], self.graph.storages
        ends = way.ends(parts)
        width = max(high - low for low, high in itertools.pairwise(ends))
        seen: dict[int, float] = {}
        # What a kernel needs beside its tensors is mostly as large as these.
        counted = self._workspace(op) * width / way.extent

        def count(index: int, cut: Cut | None) -> None:
            nonlocal counted
            value = self.values[index]
            storage = value.storage
            kind = storages[storage].kind
            if kind is StorageKind.CONSTANT:
                return
            if storage not in self.lines or cut is None:
                seen[storage] = max(seen.get(storage, 0), storages[storage].bytes if storage not in self.lines else 0)
                if storage in self.lines:
                    seen[storage] = max(seen[storage], self._size(index))
                return
            extent = prod(value.shape[cut.dims[0] : cut.dims[1]])
            counted += self._size(index) * min(1.0, (width * cut.scale + cut.before + cut.after) / extent)

        for name, index in named_refs(call):
            if name[0] not in way.unread:
                count(index, way.given.get(name))
        for place, index in enumerate(call.results):
            if index is not None:
                count(index, way.made.get(place))
        return int(counted + sum(seen.values()))

    def _cut_values(self, op: int, way: Way) -> Iterator[tuple[int, Cut]]:
        """Yield the values on cuttable storages that a way cuts."""
        call = self.captured.calls[op]
        for name, cut in way.given.items():
            if name[0] in way.unread:
                continue
            index = ref_at(call, name).value
            if self.values[index].storage in self.lines:
                yield index, cut
        for place, cut in way.made.items():
            index = call.results[place]
            if index is not None and self.values[index].storage in self.lines:
                yield index, cut

    def _axis(self, index: int, cut: Cut) -> int:
        """Return the line of its storage at which the axis of a cut begins."""
        run = Axes.run(self.places[index], cut.dims)
        return -1 if run is None else run[0]

    def chosen(self) -> dict[int, Choice]:
        """Choose ways, parts and ends for the ops that are split; sets ``axes`` and ``cuts``."""
        dropped: set[int] = set()
        whole: set[int] = set()
        while True:
            ops, storages = self._region(dropped, whole)
            ways = self._agreed(ops, storages)
            parts = self._parts(ways, storages)
            ways = {op: way for op, way in ways.items() if parts[op] > 1}
            unfit = self._settled(ways, parts, storages, whole)
            if unfit is None:
                return {op: Choice(way, self._ends[op]) for op, way in ways.items()}
            dropped |= unfit

    def cell_map(self) -> CellMap:
        """Return the cells of the last choice."""
        return CellMap(self.axes, self.cuts, self.places, self.ranged)

    def _wants(self, op: int) -> bool:
        return self.parts is not None or self.need(op) > self.most

    def _region(self, dropped: set[int], whole: set[int]) -> tuple[list[int], set[int]]:
        """Return the ops to split, if possible, and the storages that may then have cells."""
        graph = self.graph
        ops = {op.id for op in graph.ops if op.id not in dropped and self._wants(op.id) and self.ways(op.id)}
        storages: set[int] = set()
        todo = sorted(ops)
        while todo:
            op = todo.pop()
            for way in self.ways(op):
                for index, _ in self._cut_values(op, way):
                    storage = self.values[index].storage
                    if storage in storages or storage in whole or not self._is_worth(storage):
                        continue
                    storages.add(storage)
                    new = [o for o in graph.uses[storage] if o not in ops and o not in dropped and self.ways(o)]
                    ops.update(new)
                    todo += new
        # What an op that stays whole writes in place stays whole as well; so does what it reads, if there is room.
        written = {s for op in graph.ops if op.id not in ops for s in op.mutates}
        needed = {
            s for op in graph.ops if op.id not in ops for s in op.reads if 2 * graph.storages[s].bytes <= self.most
        }
        return sorted(ops), storages - written - needed

    def _is_worth(self, storage: int) -> bool:
        return self.parts is not None or self.graph.storages[storage].bytes * WORTH > self.most

    def _agreed(self, ops: Sequence[int], storages: Set[int]) -> dict[int, Way]:
        """Choose a way for each op such that it needs little memory and little is copied between parts."""

        def beyond(op: int, way: Way) -> int:
            least = self._need_in_parts(op, way, min(MOST_PARTS, way.extent))
            return max(least - self.most, 0) // max(self.most // _SAME, 1)

        ways: dict[int, list[Way]] = {}
        for op in ops:
            needs = [beyond(op, way) for way in self.ways(op)]
            ways[op] = [way for way, need in zip(self.ways(op), needs, strict=True) if need == min(needs)]
        uses = {op: [self._uses(op, way, storages) for way in ways[op]] for op in ops}
        others: dict[int, int] = {}  # bytes that ops which stay whole look at
        users = {op for storage in storages for op in self.graph.uses[storage]}
        for op in sorted(users.difference(ops)):
            for storage, _, count in self._uses(op, AS_ONE, storages).cells:
                others[storage] = others.get(storage, 0) + count
        flexible = {op for op in ops if _is_pointwise(self.captured.calls[op])}
        single = {storage for storage in storages if self._has_one_axis(storage)}
        chosen = agreed(uses, others, flexible, single)
        return {op: ways[op][place] for op, place in chosen.items()}

    def _has_one_axis(self, storage: int) -> bool:
        """Return whether a storage is cut along one axis alone, so that ops split along another one copy.

        Where cells are cut along several axes, all ops copy. But a part of an op that is split along another axis
        accesses all cells, which should then stay on the device: they do where they need no more than an op.
        """
        return self.graph.storages[storage].bytes <= self.most and storage not in self.ranged

    def _uses(self, op: int, way: Way, storages: Set[int]) -> Uses:
        """Return what the parts of an op access, and the bytes that are copied if that is cut otherwise."""
        call = self.captured.calls[op]
        written = self.graph.ops[op].mutates
        named = [(index, way.given.get(name)) for name, index in named_refs(call) if name[0] not in way.unread]
        made = [(index, way.made.get(place)) for place, index in enumerate(call.results) if index is not None]
        cells: list[tuple[int, int, int]] = []
        copied = 0
        for index, cut in [*named, *made]:
            value = self.values[index]
            storage = value.storage
            count = self._size(index) * (2 if storage in written else 1)  # there and back
            if storage in storages:
                cells.append((storage, WHOLE if cut is None else self._axis(index, cut), count))
            elif cut is not None and prod(value.shape[: cut.dims[0]]) > 1:
                copied += count  # what is not side by side in memory
        return Uses(tuple(cells), copied)

    def _parts(self, ways: Mapping[int, Way], storages: set[int]) -> dict[int, int]:
        """Choose the number of parts of each op: the least that suffices, equal for neighbours on the same axis."""
        found: dict[int, int] = {}
        for op, way in ways.items():
            if self.parts is not None:
                found[op] = min(self.parts, way.extent)
                continue
            parts = 1
            if self.need(op) > self.most:
                finest = min(way.extent, MOST_PARTS)
                # What is given whole is there as a whole: finer parts save nothing worth their number.
                least = self._need_in_parts(op, way, finest)
                enough = max(self.most, least + least // _NEAR)
                while parts * 2 <= finest and self._need_in_parts(op, way, parts) > enough:
                    parts *= 2
            found[op] = parts
        changed = True
        while changed:
            changed = False
            most: dict[tuple[int, int], int] = {}
            for op, way in ways.items():
                for index, cut in self._cut_values(op, way):
                    if self.values[index].storage in storages:
                        key = self.values[index].storage, self._axis(index, cut)
                        most[key] = max(most.get(key, 1), found[op])
            for op, way in ways.items():
                wanted = [
                    most.get((self.values[index].storage, self._axis(index, cut)), 1)
                    for index, cut in self._cut_values(op, way)
                ]
                more = min(max(wanted, default=1), way.extent)
                if more > found[op]:
                    found[op], changed = more, True
        return found

    def _settled(
        self, ways: Mapping[int, Way], parts: Mapping[int, int], storages: set[int], whole: set[int]
    ) -> set[int] | None:
        """Set axes, ends and cuts; or return the ops that cannot be cut so, and add to ``whole`` what stays whole."""
        starts: dict[int, set[int]] = {}
        for op, way in ways.items():
            for index, cut in self._cut_values(op, way):
                storage = self.values[index].storage
                if storage in storages:
                    starts.setdefault(storage, {0}).add(self._axis(index, cut))
        self.axes = {s: Axes(self.lines[s], tuple(sorted(starts[s]))) for s in starts}
        self._ends: dict[int, tuple[int, ...]] = {}
        units: dict[int, int] = {}
        unfit: set[int] = set()
        for op, way in ways.items():
            unit = 1
            for index, cut in self._cut_values(op, way):
                axes = self.axes.get(self.values[index].storage)
                if axes is not None:
                    grain = axes.grain(self.places[index], cut.dims)
                    if grain is None or (grain > 1 and not cut.plain):
                        unfit.add(op)
                    unit = lcm(unit, grain or 1)
            units[op] = unit
        for op, way in self._with_neighbours(ways, parts, units).items():
            ends = way.ends(parts[op], units[op])
            if len(ends) < 3 or not self._is_placeable(op, way, ends):
                unfit.add(op)
            self._ends[op] = ends
        # What cannot be looked at through a box by all its users has no cells.
        unboxed = {
            self.values[index].storage
            for index, place in self.places.items()
            if self.values[index].storage in self.axes
            and not _has_box(self.axes[self.values[index].storage], place, self.values[index])
        }
        if unfit or unboxed:
            whole |= unboxed
            return unfit
        self._set_cuts(ways)
        # So has what is written in place by an op that stays whole after all.
        written = {s for op in self.graph.ops if op.id not in ways for s in op.mutates}
        crowded = {s for s, cuts in self.cuts.items() if prod(len(ends) - 1 for ends in cuts) > MOST_PARTS**2}
        crowded |= self._unfit_to_gather(ways)
        if crowded or not written.isdisjoint(self.cuts):
            whole |= crowded | written
            return set()
        return None

    def _with_neighbours(
        self, ways: Mapping[int, Way], parts: Mapping[int, int], units: Mapping[int, int]
    ) -> dict[int, Way]:
        """Set grains such that neighbours on the same axis begin their parts alike.

        Otherwise each begins at multiples of its own, so that a part needs pieces of several parts. Grains are counted
        in parts of the axis: the common one is the least that is a multiple of each.
        """
        group = {op: op for op in ways}

        def found(op: int) -> int:
            while group[op] != op:
                group[op] = op = group[group[op]]
            return op

        known: dict[tuple[int, int], int] = {}
        for op, way in ways.items():
            for index, cut in self._cut_values(op, way):
                storage = self.values[index].storage
                axes = self.axes.get(storage)
                box = axes.part(self.places[index], cut.dims, 0, way.extent) if axes is not None and cut.plain else None
                if axes is None or box is None:
                    continue
                axis = axes.starts.index(self._axis(index, cut))
                if box[axis] == (0, axes.sizes[axis]):
                    group[found(op)] = found(known.setdefault((storage, axis), op))
        grains: dict[int, Fraction] = {}
        for op, way in ways.items():
            grain = Fraction(lcm(way.grain, units[op]), way.extent)
            other = grains.get(found(op), grain)
            grains[found(op)] = Fraction(
                lcm(grain.numerator, other.numerator), gcd(grain.denominator, other.denominator)
            )
        return {
            op: replace(way, grain=int(grains[found(op)] * way.extent)) if grains[found(op)] * parts[op] <= 1 else way
            for op, way in ways.items()
        }

    def _unfit_to_gather(self, ways: Iterable[int]) -> set[int]:
        """Return cut storages whose gathered layout would change what whole ops compute."""
        found: set[int] = set()
        for op, claim in claims_of_gathered(self.captured, self.cell_map(), ways):
            if claim.key in self.refused or not can_be_tried(op, claim.call):
                named = dict(named_refs(claim.call))
                found |= {self.values[named[name]].storage for name in claim.laid}
        return found

    def _is_placeable(self, op: int, way: Way, ends: Sequence[int]) -> bool:
        """Return whether each part of an op finds its parts of cut storages evenly spaced in memory."""
        for index, cut in self._cut_values(op, way):
            value = self.values[index]
            axes, place = self.axes.get(value.storage), self.places[index]
            if axes is None:
                continue
            for low, high in itertools.pairwise(ends):
                first, last = cut.ends(low, high)
                box = axes.part(place, cut.dims, first, last)
                shape = (*value.shape[: cut.dims[0]], last - first, *value.shape[cut.dims[1] :])
                if box is None or axes.strides(place, shape, box, cut.dims) is None:
                    return False
        return True

    def _set_cuts(self, ways: Mapping[int, Way]) -> None:
        found: dict[int, list[set[int]]] = {s: [{0, size} for size in axes.sizes] for s, axes in self.axes.items()}
        looked: dict[int, dict[int, int]] = {}  # bytes by axis
        for op, way in ways.items():
            for storage, axis, count in self._uses(op, way, self.axes.keys()).cells:
                if axis != WHOLE:
                    counts = looked.setdefault(storage, {})
                    counts[axis] = counts.get(axis, 0) + count
        only = {
            storage: min(counts, key=lambda axis: (-counts[axis], axis))
            for storage, counts in looked.items()
            if self._has_one_axis(storage)
        }

        def add(storage: int, box: Box) -> None:
            for ends, (low, high), size in zip(found[storage], box, self.axes[storage].sizes, strict=True):
                ends.update(end for end in (low, high) if 0 < end < size)

        for op, way in ways.items():
            for index, cut in self._cut_values(op, way):
                storage = self.values[index].storage
                if storage in self.axes and only.get(storage) in (None, self._axis(index, cut)):
                    ends = self._ends[op]
                    for low, high in itertools.pairwise(ends):
                        box = self.axes[storage].part(self.places[index], cut.dims, *cut.ends(low, high))
                        if box is not None:
                            add(storage, box)
        for op, call in enumerate(self.captured.calls):
            if op not in ways:
                for index in [*(v for _, v in named_refs(call)), *(v for v in call.results if v is not None)]:
                    storage = self.values[index].storage
                    box = self.axes[storage].box_of(self.places[index]) if storage in self.axes else None
                    if box is not None:
                        add(storage, box)
        self.cuts = {s: [sorted(ends) for ends in axes] for s, axes in found.items()}
        for storage in self.ranged & self.cuts.keys():
            # Ranges at home are of bytes in a row.
            outer, *inner = self.axes[storage].sizes
            row = self.graph.storages[storage].bytes // outer
            self.cuts[storage] = [page_ends(self.cuts[storage][0], row), *([0, size] for size in inner)]
        self.cuts = {s: cuts for s, cuts in self.cuts.items() if any(len(ends) > 2 for ends in cuts)}


def _has_box(axes: Axes, place: Placed, value: Value) -> bool:
    box = axes.box_of(place)
    return box is not None and axes.strides(place, value.shape, box) is not None


def _is_pointwise(call: Call) -> bool:
    return isinstance(call.func, OpOverload) and is_elementwise(call.func)
