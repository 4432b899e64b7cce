"""Choose which ops are split, along which axes and into how many parts, and the cells of storages between them.

1. Ops that need more memory than they may, and their neighbours, form the region that is split.
2. ``analysis.agreement`` chooses an axis for each op so that little is gathered.
3. Each op gets the least number of parts that suffices, equal for neighbours on the same axis.
4. Storages get cells where the parts begin. What turns out not to fit stays whole, and the search begins again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from fractions import Fraction
from math import gcd, lcm, prod

from outofcore._torch_internals import OpOverload
from outofcore.analysis.agreement import WHOLE, agreed
from outofcore.analysis.boxes import Axes, Box, Placed
from outofcore.capture.captured import Call, Value
from outofcore.transforms.split.cells import WORTH, CellMap
from outofcore.transforms.split.exactness import can_be_tried, claims_of_gathered
from outofcore.transforms.split.needs import Needs
from outofcore.transforms.split.rules import is_elementwise
from outofcore.transforms.split.state_ranges import page_ends
from outofcore.transforms.split.tensors import named_refs, values_of
from outofcore.transforms.split.ways import AS_ONE, Choice, Way

# How many parts an op is cut into at most.
MOST_PARTS = 64
# A difference in bytes below this part of the whole decides nothing: a part that needs so little more than the least is
# small enough, and ways that need more than an op may are as good as each other.
_NEAR = 32


class Search:
    """Chooses which ops are split along which axes into how many parts, and the cells of storages."""

    def __init__(self, needs: Needs, most: int, refused: frozenset[str], parts: int | None) -> None:
        self.captured, self.graph, self.values = needs.captured, needs.graph, needs.values
        self.needs, self.most, self.refused, self.parts = needs, most, refused, parts
        self.axes: dict[int, Axes] = {}
        self.cuts: dict[int, list[list[int]]] = {}
        self._ends: dict[int, tuple[int, ...]] = {}

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
        return CellMap(self.axes, self.cuts, self.needs.places, self.needs.ranged)

    def _wants(self, op: int) -> bool:
        return self.parts is not None or self.needs.whole(op) > self.most

    def _region(self, dropped: set[int], whole: set[int]) -> tuple[list[int], set[int]]:
        """Return the ops to split, if possible, and the storages that may then have cells."""
        graph = self.graph
        ops = {op.id for op in graph.ops if op.id not in dropped and self._wants(op.id) and self.needs.ways(op.id)}
        storages: set[int] = set()
        todo = sorted(ops)
        while todo:
            op = todo.pop()
            for way in self.needs.ways(op):
                for index, _ in self.needs.cut_values(op, way):
                    storage = self.values[index].storage
                    if storage in storages or storage in whole or not self._is_worth(storage):
                        continue
                    storages.add(storage)
                    new = [o for o in graph.uses[storage] if o not in ops and o not in dropped and self.needs.ways(o)]
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
            least = self.needs.in_parts(op, way, min(MOST_PARTS, way.extent))
            return max(least - self.most, 0) // max(self.most // _NEAR, 1)

        ways: dict[int, list[Way]] = {}
        for op in ops:
            needs = [beyond(op, way) for way in self.needs.ways(op)]
            ways[op] = [way for way, need in zip(self.needs.ways(op), needs, strict=True) if need == min(needs)]
        uses = {op: [self.needs.uses(op, way, storages) for way in ways[op]] for op in ops}
        others: dict[int, int] = {}  # bytes that ops which stay whole look at
        users = {op for storage in storages for op in self.graph.uses[storage]}
        for op in sorted(users.difference(ops)):
            for storage, _, count in self.needs.uses(op, AS_ONE, storages).cells:
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
        return self.graph.storages[storage].bytes <= self.most and storage not in self.needs.ranged

    def _parts(self, ways: Mapping[int, Way], storages: set[int]) -> dict[int, int]:
        """Choose the number of parts of each op: the least that suffices, equal for neighbours on the same axis."""
        found: dict[int, int] = {}
        for op, way in ways.items():
            if self.parts is not None:
                found[op] = min(self.parts, way.extent)
                continue
            parts = 1
            if self.needs.whole(op) > self.most:
                finest = min(way.extent, MOST_PARTS)
                # What is given whole is there as a whole: finer parts save nothing worth their number.
                least = self.needs.in_parts(op, way, finest)
                enough = max(self.most, least + least // _NEAR)
                while parts * 2 <= finest and self.needs.in_parts(op, way, parts) > enough:
                    parts *= 2
            found[op] = parts
        changed = True
        while changed:
            changed = False
            most: dict[tuple[int, int], int] = {}
            for op, way in ways.items():
                for index, cut in self.needs.cut_values(op, way):
                    if self.values[index].storage in storages:
                        key = self.values[index].storage, self.needs.axis(index, cut)
                        most[key] = max(most.get(key, 1), found[op])
            for op, way in ways.items():
                wanted = [
                    most.get((self.values[index].storage, self.needs.axis(index, cut)), 1)
                    for index, cut in self.needs.cut_values(op, way)
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
            for index, cut in self.needs.cut_values(op, way):
                storage = self.values[index].storage
                if storage in storages:
                    starts.setdefault(storage, {0}).add(self.needs.axis(index, cut))
        self.axes = {s: Axes(self.needs.lines[s], tuple(sorted(starts[s]))) for s in starts}
        self._ends = {}
        units: dict[int, int] = {}
        unfit: set[int] = set()
        for op, way in ways.items():
            unit = 1
            for index, cut in self.needs.cut_values(op, way):
                axes = self.axes.get(self.values[index].storage)
                if axes is not None:
                    grain = axes.grain(self.needs.places[index], cut.dims)
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
            for index, place in self.needs.places.items()
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
            for index, cut in self.needs.cut_values(op, way):
                storage = self.values[index].storage
                axes = self.axes.get(storage)
                if axes is None or not cut.plain:
                    continue
                box = axes.part(self.needs.places[index], cut.dims, 0, way.extent)
                if box is None:
                    continue
                axis = axes.starts.index(self.needs.axis(index, cut))
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
        for index, cut in self.needs.cut_values(op, way):
            value = self.values[index]
            axes, place = self.axes.get(value.storage), self.needs.places[index]
            if axes is None:
                continue
            for low, high in itertools.pairwise(ends):
                box = axes.part(place, cut.dims, *cut.ends(low, high))
                shape = cut.part_shape(value.shape, low, high)
                if box is None or axes.strides(place, shape, box, cut.dims) is None:
                    return False
        return True

    def _set_cuts(self, ways: Mapping[int, Way]) -> None:
        found: dict[int, list[set[int]]] = {s: [{0, size} for size in axes.sizes] for s, axes in self.axes.items()}
        looked: dict[int, dict[int, int]] = {}  # bytes by axis
        for op, way in ways.items():
            for storage, axis, count in self.needs.uses(op, way, self.axes.keys()).cells:
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
            for index, cut in self.needs.cut_values(op, way):
                storage = self.values[index].storage
                if storage in self.axes and only.get(storage) in (None, self.needs.axis(index, cut)):
                    ends = self._ends[op]
                    for low, high in itertools.pairwise(ends):
                        box = self.axes[storage].part(self.needs.places[index], cut.dims, *cut.ends(low, high))
                        if box is not None:
                            add(storage, box)
        for op, call in enumerate(self.captured.calls):
            if op not in ways:
                for index in values_of(call):
                    storage = self.values[index].storage
                    box = self.axes[storage].box_of(self.needs.places[index]) if storage in self.axes else None
                    if box is not None:
                        add(storage, box)
        self.cuts = {s: [sorted(ends) for ends in axes] for s, axes in found.items()}
        for storage in self.needs.ranged & self.cuts.keys():
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
