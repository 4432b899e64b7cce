"""Choose which ops are split, along which axes, into how many parts, and the cells of storages.

1. Ops that need more than the op budget, and their neighbours, form the region to split.
2. ``analysis.agreement`` chooses an axis for each op so that few bytes are gathered.
3. Each op gets the smallest sufficient number of parts, equal for neighbours on the same axis.
4. Storages get cells at the ends of the parts. Ops and storages that do not fit stay whole, and the search restarts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from fractions import Fraction
from math import gcd, lcm, prod

from outofcore._torch_internals import OpOverload
from outofcore.analysis.agreement import WHOLE, choose_splits
from outofcore.analysis.boxes import Axes, Box, PlacedWindow
from outofcore.capture.captured import Call, Value
from outofcore.transforms.split.cells import WORTH_FRACTION, CellMap
from outofcore.transforms.split.exactness import checks_of_gathered, is_triable
from outofcore.transforms.split.needs import SplitNeeds
from outofcore.transforms.split.rules import is_elementwise
from outofcore.transforms.split.state_ranges import page_aligned_ends
from outofcore.transforms.split.tensors import named_refs, values_of
from outofcore.transforms.split.ways import UNSPLIT, ChosenSplit, OpSplit

# Largest number of parts of an op.
MOST_PARTS = 64
# Differences in bytes below this fraction (1/32) are ignored, both between a part and the smallest possible part and
# between splits that exceed the op budget.
_NEGLIGIBLE = 32


class SplitSearch:
    """Chooses how to split the ops that need more than ``max_bytes``, or with ``parts`` all ops that can be split."""

    def __init__(self, needs: SplitNeeds, max_bytes: int, refused: frozenset[str], parts: int | None) -> None:
        self.captured, self.graph, self.values = needs.captured, needs.graph, needs.values
        self.needs, self.max_bytes, self.refused, self.parts = needs, max_bytes, refused, parts
        self.axes: dict[int, Axes] = {}
        self.cuts: dict[int, list[list[int]]] = {}
        self._ends: dict[int, tuple[int, ...]] = {}

    def choose(self) -> dict[int, ChosenSplit]:
        """Return the chosen split of each op; set ``axes`` and ``cuts``, along which and where storages are cut."""
        dropped: set[int] = set()
        whole: set[int] = set()
        while True:
            ops, storages = self._find_candidates(dropped, whole)
            splits = self._choose_splits(ops, storages)
            parts = self._choose_part_counts(splits, storages)
            splits = {op: split for op, split in splits.items() if parts[op] > 1}
            unfit = self._place_cuts(splits, parts, storages, whole)
            if unfit is None:
                return {op: ChosenSplit(split, self._ends[op]) for op, split in splits.items()}
            dropped |= unfit

    def cell_map(self) -> CellMap:
        return CellMap(self.axes, self.cuts, self.needs.places, self.needs.ranged)

    def _must_split(self, op: int) -> bool:
        return self.parts is not None or self.needs.whole_bytes(op) > self.max_bytes

    def _find_candidates(self, dropped: set[int], whole: set[int]) -> tuple[list[int], set[int]]:
        """Return the ops and storages that may be split, except ``dropped`` ops and ``whole`` storages."""
        graph = self.graph
        ops = {
            op.id for op in graph.ops if op.id not in dropped and self._must_split(op.id) and self.needs.splits(op.id)
        }
        storages: set[int] = set()
        pending = sorted(ops)
        while pending:
            op = pending.pop()
            for split in self.needs.splits(op):
                for index, _ in self.needs.cut_values(op, split):
                    storage = self.values[index].storage
                    if storage in storages or storage in whole or not self._is_worth_cutting(storage):
                        continue
                    storages.add(storage)
                    new = [o for o in graph.uses[storage] if o not in ops and o not in dropped and self.needs.splits(o)]
                    ops.update(new)
                    pending += new
        # Storages that an unsplit op writes in place stay whole, and storages that it reads, if they are small enough.
        written = {s for op in graph.ops if op.id not in ops for s in op.mutates}
        needed = {
            s for op in graph.ops if op.id not in ops for s in op.reads if 2 * graph.storages[s].bytes <= self.max_bytes
        }
        return sorted(ops), storages - written - needed

    def _is_worth_cutting(self, storage: int) -> bool:
        return self.parts is not None or self.graph.storages[storage].bytes * WORTH_FRACTION > self.max_bytes

    def _choose_splits(self, ops: Sequence[int], storages: Set[int]) -> dict[int, OpSplit]:
        """Choose a split for each op: its parts fit into ``max_bytes`` if possible, and few bytes are copied."""

        def excess(op: int, split: OpSplit) -> int:
            min_bytes = self.needs.part_bytes(op, split, min(MOST_PARTS, split.extent))
            return max(min_bytes - self.max_bytes, 0) // max(self.max_bytes // _NEGLIGIBLE, 1)

        splits: dict[int, list[OpSplit]] = {}
        for op in ops:
            needs = [excess(op, split) for split in self.needs.splits(op)]
            splits[op] = [split for split, need in zip(self.needs.splits(op), needs, strict=True) if need == min(needs)]
        uses = {op: [self.needs.uses(op, split, storages) for split in splits[op]] for op in ops}
        whole_bytes: dict[int, int] = {}  # bytes that unsplit ops access
        users = {op for storage in storages for op in self.graph.uses[storage]}
        for op in sorted(users.difference(ops)):
            for storage, _, count in self.needs.uses(op, UNSPLIT, storages).cells:
                whole_bytes[storage] = whole_bytes.get(storage, 0) + count
        flexible = {op for op in ops if _is_pointwise(self.captured.calls[op])}
        single = {storage for storage in storages if self._has_one_axis(storage)}
        positions = choose_splits(uses, whole_bytes, flexible, single)
        return {op: splits[op][position] for op, position in positions.items()}

    def _has_one_axis(self, storage: int) -> bool:
        """Return whether to divide a storage along only one axis."""
        # With several axes all ops copy. With one, parts along another axis access all cells, which must be resident.
        return self.graph.storages[storage].bytes <= self.max_bytes and storage not in self.needs.ranged

    def _choose_part_counts(self, splits: Mapping[int, OpSplit], storages: set[int]) -> dict[int, int]:
        """Return the number of parts of each op: enough for ``max_bytes``, and no fewer than its neighbours have."""
        counts: dict[int, int] = {}
        for op, split in splits.items():
            if self.parts is not None:
                counts[op] = min(self.parts, split.extent)
                continue
            parts = 1
            if self.needs.whole_bytes(op) > self.max_bytes:
                finest = min(split.extent, MOST_PARTS)
                # Uncut arguments are a fixed cost, so finer parts stop saving memory at some number.
                min_bytes = self.needs.part_bytes(op, split, finest)
                enough = max(self.max_bytes, min_bytes + min_bytes // _NEGLIGIBLE)
                while parts * 2 <= finest and self.needs.part_bytes(op, split, parts) > enough:
                    parts *= 2
            counts[op] = parts
        changed = True
        while changed:
            changed = False
            max_counts: dict[tuple[int, int], int] = {}
            for op, split in splits.items():
                for index, cut in self.needs.cut_values(op, split):
                    if self.values[index].storage in storages:
                        key = self.values[index].storage, self.needs.axis(index, cut)
                        max_counts[key] = max(max_counts.get(key, 1), counts[op])
            for op, split in splits.items():
                neighbour_counts = [
                    max_counts.get((self.values[index].storage, self.needs.axis(index, cut)), 1)
                    for index, cut in self.needs.cut_values(op, split)
                ]
                needed_count = min(max(neighbour_counts, default=1), split.extent)
                if needed_count > counts[op]:
                    counts[op], changed = needed_count, True
        return counts

    def _place_cuts(
        self, splits: Mapping[int, OpSplit], parts: Mapping[int, int], storages: set[int], whole: set[int]
    ) -> set[int] | None:
        """Divide the storages and return None; on failure, return ops to leave unsplit, and extend ``whole``."""
        starts: dict[int, set[int]] = {}
        for op, split in splits.items():
            for index, cut in self.needs.cut_values(op, split):
                storage = self.values[index].storage
                if storage in storages:
                    starts.setdefault(storage, {0}).add(self.needs.axis(index, cut))
        self.axes = {s: Axes(self.needs.lines[s], tuple(sorted(starts[s]))) for s in starts}
        self._ends = {}
        units: dict[int, int] = {}
        unfit: set[int] = set()
        for op, split in splits.items():
            unit = 1
            for index, cut in self.needs.cut_values(op, split):
                axes = self.axes.get(self.values[index].storage)
                if axes is not None:
                    grain = axes.cut_unit(self.needs.places[index], cut.dims)
                    if grain is None or (grain > 1 and not cut.is_adjacent):
                        unfit.add(op)
                    unit = lcm(unit, grain or 1)
            units[op] = unit
        for op, split in self._align_with_neighbours(splits, parts, units).items():
            ends = split.ends(parts[op], units[op])
            if len(ends) < 3 or not self._is_placeable(op, split, ends):
                unfit.add(op)
            self._ends[op] = ends
        # A storage has no cells unless each of its values is a box.
        unboxed = {
            self.values[index].storage
            for index, place in self.needs.places.items()
            if self.values[index].storage in self.axes
            and not _has_box(self.axes[self.values[index].storage], place, self.values[index])
        }
        if unfit or unboxed:
            whole |= unboxed
            return unfit
        self._set_cuts(splits)
        # The same holds for storages that an unsplit op writes in place.
        written = {s for op in self.graph.ops if op.id not in splits for s in op.mutates}
        crowded = {s for s, cuts in self.cuts.items() if prod(len(ends) - 1 for ends in cuts) > MOST_PARTS**2}
        crowded |= self._storages_unfit_to_gather(splits)
        if crowded or not written.isdisjoint(self.cuts):
            whole |= crowded | written
            return set()
        return None

    def _align_with_neighbours(
        self, splits: Mapping[int, OpSplit], parts: Mapping[int, int], units: Mapping[int, int]
    ) -> dict[int, OpSplit]:
        """Return the splits, with aligned cut positions for ops that share an axis of a storage, if possible."""
        group = {op: op for op in splits}

        def root(op: int) -> int:
            while group[op] != op:
                group[op] = op = group[group[op]]
            return op

        first_ops: dict[tuple[int, int], int] = {}
        for op, split in splits.items():
            for index, cut in self.needs.cut_values(op, split):
                storage = self.values[index].storage
                axes = self.axes.get(storage)
                if axes is None or not cut.is_adjacent:
                    continue
                box = axes.box_of_part(self.needs.places[index], cut.dims, 0, split.extent)
                if box is None:
                    continue
                axis = axes.starts.index(self.needs.axis(index, cut))
                if box[axis] == (0, axes.sizes[axis]):
                    group[root(op)] = root(first_ops.setdefault((storage, axis), op))
        grains: dict[int, Fraction] = {}  # as fractions of the axis
        for op, split in splits.items():
            grain = Fraction(lcm(split.grain, units[op]), split.extent)
            group_grain = grains.get(root(op), grain)
            grains[root(op)] = Fraction(
                lcm(grain.numerator, group_grain.numerator), gcd(grain.denominator, group_grain.denominator)
            )
        return {
            op: replace(split, grain=int(grains[root(op)] * split.extent))
            if grains[root(op)] * parts[op] <= 1
            else split
            for op, split in splits.items()
        }

    def _storages_unfit_to_gather(self, split_ops: Iterable[int]) -> set[int]:
        """Return the divided storages that an unsplit op cannot read as a joined copy without changed results."""
        storages: set[int] = set()
        for op, check in checks_of_gathered(self.captured, self.cell_map(), split_ops):
            if check.key in self.refused or not is_triable(op, check.call):
                named = dict(named_refs(check.call))
                storages |= {self.values[named[name]].storage for name in check.gathered_strides}
        return storages

    def _is_placeable(self, op: int, split: OpSplit, ends: Sequence[int]) -> bool:
        """Return whether every part of a split accesses boxes of the divided storages, with regular strides."""
        for index, cut in self.needs.cut_values(op, split):
            value = self.values[index]
            axes, place = self.axes.get(value.storage), self.needs.places[index]
            if axes is None:
                continue
            for low, high in itertools.pairwise(ends):
                box = axes.box_of_part(place, cut.dims, *cut.ends(low, high))
                shape = cut.part_shape(value.shape, low, high)
                if box is None or axes.strides(place, shape, box, cut.dims) is None:
                    return False
        return True

    def _set_cuts(self, splits: Mapping[int, OpSplit]) -> None:
        """Divide storages at the borders of the boxes that ops and their parts access."""
        ends_by_storage: dict[int, list[set[int]]] = {
            s: [{0, size} for size in axes.sizes] for s, axes in self.axes.items()
        }
        accessed: dict[int, dict[int, int]] = {}  # bytes by axis
        for op, split in splits.items():
            for storage, axis, count in self.needs.uses(op, split, self.axes.keys()).cells:
                if axis != WHOLE:
                    counts = accessed.setdefault(storage, {})
                    counts[axis] = counts.get(axis, 0) + count
        single_axis = {
            storage: min(counts, key=lambda axis: (-counts[axis], axis))
            for storage, counts in accessed.items()
            if self._has_one_axis(storage)
        }

        def add(storage: int, box: Box) -> None:
            for ends, (low, high), size in zip(ends_by_storage[storage], box, self.axes[storage].sizes, strict=True):
                ends.update(end for end in (low, high) if 0 < end < size)

        for op, split in splits.items():
            for index, cut in self.needs.cut_values(op, split):
                storage = self.values[index].storage
                if storage in self.axes and single_axis.get(storage) in (None, self.needs.axis(index, cut)):
                    ends = self._ends[op]
                    for low, high in itertools.pairwise(ends):
                        box = self.axes[storage].box_of_part(self.needs.places[index], cut.dims, *cut.ends(low, high))
                        if box is not None:
                            add(storage, box)
        for op, call in enumerate(self.captured.calls):
            if op not in splits:
                for index in values_of(call):
                    storage = self.values[index].storage
                    box = self.axes[storage].box_of(self.needs.places[index]) if storage in self.axes else None
                    if box is not None:
                        add(storage, box)
        self.cuts = {s: [sorted(ends) for ends in axes] for s, axes in ends_by_storage.items()}
        for storage in self.needs.ranged & self.cuts.keys():
            # Ranges at home are contiguous bytes.
            outer, *inner = self.axes[storage].sizes
            row = self.graph.storages[storage].bytes // outer
            self.cuts[storage] = [page_aligned_ends(self.cuts[storage][0], row), *([0, size] for size in inner)]
        self.cuts = {s: cuts for s, cuts in self.cuts.items() if any(len(ends) > 2 for ends in cuts)}


def _has_box(axes: Axes, window: PlacedWindow, value: Value) -> bool:
    box = axes.box_of(window)
    return box is not None and axes.strides(window, value.shape, box) is not None


def _is_pointwise(call: Call) -> bool:
    return isinstance(call.func, OpOverload) and is_elementwise(call.func)
