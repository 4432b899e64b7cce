"""Split ops that need more memory than there is; what passes between parts has storages of its own.

The pass rewrites a captured step into other ops and storages, which planner and executor treat like any others. A large
op is split along an axis on which its parts do not mix (``split_rules``), and its neighbours with it. Large tensors
between them are cut into cells: boxes of the storage (``analysis.boxes``), one for each part where all cut it alike.
Otherwise a part gathers its argument from several cells, as for the overlapping planes of a convolution. Inputs and
results of the step stay whole, and parts view them through windows.

A parameter that takes most of the budget, and the optimizer state of any that is updated in parts, are at home between
steps. Their cells are ranges of whole pages (``StorageKind.STATE_RANGE``), fetched in each step like inputs and written
back if they change. Updates are cut by elements, tables that are looked up by rows.

Parts run depth first: the next op's part as soon as its arguments exist. So in a chain of ops that are cut alike no
tensor ever exists as a whole. ``analysis.agreement`` chooses axes so that little is gathered.

The same tensors and the same op budget give the same step. Cutting ops along dimensions that do not mix is the idea of
"Tofu" (Wang, Huang, Li: EuroSys 2019) and of FlexFlow's SOAP dimensions (Jia, Zaharia, Aiken: MLSys 2019), there for
several devices; here the parts follow one another on one.

Limits: ``split_rules`` says which operators can be split. Gradients that are left to the user are not. Updates are of
optimizers of ``torch.optim`` that go element by element, in float32 and float64, on the CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from fractions import Fraction
from heapq import heappop, heappush
from math import gcd, inf, lcm, prod
from typing import Any, TypeVar

import torch

from outofcore._torch_internals import FakeTensorMode, OpOverload, result_leaves
from outofcore.analysis import LARGE_BYTES
from outofcore.analysis.agreement import WHOLE, Uses, agreed
from outofcore.analysis.boxes import (
    Axes,
    Box,
    Lines,
    Placed,
    Window,
    cells,
    clipped,
    elements,
    lines_of,
    placed,
    window_within,
)
from outofcore.analysis.chunks import is_dense
from outofcore.capture.assembly import compacted
from outofcore.capture.captured import Call, Captured, Ref, StateBinding, StateRange, Value, with_ops
from outofcore.capture.operators import by_name, family_text, made_up, repaired, traits, written_arguments
from outofcore.capture.optimizer_steps import call_of_update, family_of_update
from outofcore.capture.optimizers import OptimizerUpdate
from outofcore.capture.tables import covers, leaves_in, map_leaves
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.lowering.slots import slot_bytes
from outofcore.transforms.passes import PASSING, by_shape, halves_of_norm, split
from outofcore.transforms.split_rules import Cut, Name, Way, is_elementwise, rebased, ways_of
from outofcore.units import PAGE_BYTES

T = TypeVar("T")

_aten = torch.ops.aten
# How an op runs that is not cut.
_AS_ONE = Way("as one", 1, {}, {})
# How many parts an op is cut into at most.
MOST_PARTS = 64
# A storage is worth cutting if it takes at least this part of what an op may need.
_WORTH = 8
# A part that needs so little more than the least, as a fraction of that, is small enough.
_NEAR = 32
# Of ways that need more than an op may, those are as good as each other that differ by less than this part of that.
_SAME = 32
# A result that was made whole, and is gathered again so few ops later, is used as it is.
_SOON = 6


@dataclass(frozen=True)
class Claim:
    """An exactness check to be made: that the parts of an op compute, to the bit, what the whole op does.

    Attributes:
        key: the op's family, the axis and where parts begin; equal keys mean the same check.
        ends: where the parts begin, and the last one ends.
        of: the call whose results the op must reproduce; None: its own.
        laid: strides of arguments that are given whole but gathered, where those differ from the unsplit op's, or begin
            at the start of memory of their own.
    """

    key: str
    call: Call
    way: Way
    ends: tuple[int, ...]
    of: Call | None = None
    laid: Mapping[Name, tuple[int, ...]] = field(default_factory=dict[Name, tuple[int, ...]])


@dataclass(frozen=True)
class Tiled:
    """A step with split ops.

    ``claims`` are what its bits rely on, ``values`` what the refs of the claims' calls name. ``is_cut`` tells whether
    an op is split, which may need no claims.
    """

    captured: Captured
    claims: tuple[Claim, ...]
    values: tuple[Value, ...]
    is_cut: bool = False


def tiled(
    traced: Captured,
    most: int,
    *,
    refused: Iterable[str] = (),
    parts: int | None = None,
    least: int = LARGE_BYTES,
    limit: int | None = None,
    workspaces: Mapping[str, int] | None = None,
    home: int | None = None,
) -> Tiled:
    """Split ops that need more than ``most`` bytes, as far as that is possible.

    Args:
        refused: keys of claims that do not hold.
        parts: split all ops that can be into this many parts, whatever they need.
        least: storages of fewer bytes stay whole.
        limit: with more ops than this the step stays unchanged.
        workspaces: known bytes of scratch memory of whole ops, by family.
        home: capacity in bytes of the first home, None without limit. Cut parameters and optimizer state are there
            between steps; with 0 they are not, and updates stay whole.
    """
    captured = _small_losses(split(by_shape(traced)), most if parts is None else 0)
    unfit = set(refused)
    captured, halved = _halved(captured, most if parts is None else 0, unfit)
    while True:
        search = _Search(captured, most, frozenset(unfit), parts, least, workspaces or {}, home)
        chosen = search.chosen()
        try:
            found = _Builder(captured, search, chosen, limit).built() if chosen else None
        except _LimitError:
            found = None
        except _UnfitError as error:
            if error.op not in chosen or search.is_update(error.op):
                return Tiled(captured, (), captured.values)
            unfit.add(search.claim(error.op, chosen[error.op]).key)
            continue
        break
    if found is None:
        return Tiled(captured, (), captured.values)
    # What is looked up is copied, and updates are of elements.
    tried = [op for op in sorted(chosen) if not search.is_update(op) and not chosen[op].way.looks_up]
    cut = [search.claim(op, chosen[op]) for op in tried]
    claims = {claim.key: claim for claim in (*halved, *cut, *search.gathered(chosen))}
    return Tiled(found, tuple(claims.values()), captured.values, is_cut=True)


# --- what to cut, and how --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Choice:
    way: Way
    ends: tuple[int, ...] = ()


class _Search:
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
        self.ranged = self._rangeable()
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
        for index in {ref.value for call in self.captured.calls for ref in _refs(call)} | {
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

    def _rangeable(self) -> frozenset[int]:
        """Return the storages of parameters and optimizer state that may be at home and come range by range.

        Parameters only where one by itself takes what an op may need.
        """
        graph, captured = self.graph, self.captured
        bound: dict[int, list[StateBinding]] = {}
        for binding in captured.states:
            bound.setdefault(self.values[binding.value].storage, []).append(binding)
        left = inf if self.home is None else self.home
        left -= sum(slot_bytes(s.bytes) for s in graph.storages if s.arrives or s.id in graph.outputs)
        found: set[int] = set()
        for storage, bindings in sorted(bound.items(), key=lambda item: (-graph.storages[item[0]].bytes, item[0])):
            uses, count = graph.uses[storage], graph.storages[storage].bytes
            if (
                len(bindings) > 1
                or slot_bytes(count) > left
                or not uses
                or storage in graph.outputs
                or count < 2 * LARGE_BYTES
                or not _is_flat(self.values[bindings[0].value], captured.own_bytes(storage))
                or any(graph.ops[op].communicates for op in uses)
            ):
                continue
            updated = len(uses) == 1 and self.is_update(uses[0])
            needed = self.parts is not None or count + count // _WORTH > self.most
            kind = bindings[0].kind
            if (kind is StorageKind.OPTIMIZER_STATE and updated) or (kind is StorageKind.PARAMETER and needed):
                found.add(storage)
                left -= slot_bytes(count)
        return frozenset(found)

    def is_update(self, op: int) -> bool:
        """Return whether an op updates a parameter that may be updated range by range."""
        call = self.captured.calls[op]
        return (
            isinstance(call.func, OptimizerUpdate)
            and call.func.has_ranges()
            and self.captured.device.type == "cpu"
            and self.home != 0
            and call.args[1][0] is not None
        )

    def _ways_of_update(self, op: int) -> list[Way]:
        """Return the ways to update element ranges of the parameter, its gradient and all state but counts."""
        named = [(name, self.values[index]) for name, index in _named_refs(self.captured.calls[op])]
        whole = named[0][1]
        cut = Cut((0, len(whole.shape)))
        if any(value.shape not in (whole.shape, ()) or value.dtype != whole.dtype for _, value in named if value.shape):
            return []
        size = whole.dtype.itemsize
        return [
            Way(
                "elements",
                prod(whole.shape),
                {name: cut for name, value in named if value.shape},
                {},
                grain=PAGE_BYTES // size,
                strict=True,
                # What is smaller has no place of its own at home.
                least=2 * LARGE_BYTES // size,
            )
        ]

    def ways(self, op: int) -> list[Way]:
        """Return the ways to split an op that are not refused."""
        if op not in self._ways:
            graph_op, call = self.graph.ops[op], self.captured.calls[op]
            found = [] if graph_op.communicates or graph_op.random else ways_of(call, self.values)
            if self.is_update(op):
                found = self._ways_of_update(op)
            self._ways[op] = [
                way
                for way in found
                if f"{graph_op.family} by {way.name}" not in self._refused_ways and self._fits(op, way)
            ]
        return self._ways[op]

    def claim(self, op: int, choice: _Choice) -> Claim:
        laid = self._laid(op, choice.way)
        name = f"{self.graph.ops[op].family} by {choice.way.name} at {list(choice.ends)}{self._lies(op, laid)}"
        return Claim(name, self.captured.calls[op], choice.way, choice.ends, laid=laid)

    def gathered(self, chosen: Iterable[int]) -> Iterator[Claim]:
        """Yield claims that whole ops compute the same if their arguments, gathered from cells, have other layouts."""
        return (claim for _, claim in self._gathered(chosen))

    def _gathered(self, chosen: Iterable[int]) -> Iterator[tuple[Op, Claim]]:
        cut = set(chosen)
        for op in self.graph.ops:
            laid = {} if op.id in cut or self.cuts.keys().isdisjoint(op.touched) else self._laid(op.id, None)
            if laid:
                key = f"{op.family} as one{self._lies(op.id, laid)}"
                yield op, Claim(key, self.captured.calls[op.id], _AS_ONE, (0, 1), laid=laid)

    def _lies(self, op: int, laid: Mapping[Name, tuple[int, ...]]) -> str:
        """Return a key of argument layouts that the op's family does not determine."""
        named = _named_refs(self.captured.calls[op])
        shifts = {name: shift for name, index in named if (shift := _misaligned(self.values[index]))}
        return "".join(f" {what} {sorted(d.items())}" for what, d in (("shifted", shifts), ("laid", laid)) if d)

    def _laid(self, op: int, way: Way | None) -> dict[Name, tuple[int, ...]]:
        """Return the strides of arguments that are given whole but gathered from cells, where those differ."""
        found: dict[Name, tuple[int, ...]] = {}
        for name, index in _named_refs(self.captured.calls[op]):
            value = self.values[index]
            if value.storage not in self.cuts or (way is not None and (name in way.given or name[0] in way.unread)):
                continue
            axes, place = self.axes[value.storage], self.places[index]
            box = axes.box_of(place)
            strides = None if box is None else axes.strides(place, value.shape, box)
            if strides is None:
                continue
            pairs = zip(strides, value.stride, value.shape, strict=True)
            if _misaligned(value) or any(new != old for new, old, size in pairs if size > 1):
                found[name] = strides
        return found

    def _fits(self, op: int, way: Way) -> bool:
        """Return whether everything that a way cuts can be viewed in parts."""
        call = self.captured.calls[op]
        for name, cut in way.given.items():
            index = _ref(call, name).value
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
        for index in dict.fromkeys([*(ref.value for ref in _refs(call)), *(v for v in call.results if v is not None)]):
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

        for name, index in _named_refs(call):
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
            index = _ref(call, name).value
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

    def chosen(self) -> dict[int, _Choice]:
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
                return {op: _Choice(way, self._ends[op]) for op, way in ways.items()}
            dropped |= unfit

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
        return self.parts is not None or self.graph.storages[storage].bytes * _WORTH > self.most

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
            for storage, _, count in self._uses(op, _AS_ONE, storages).cells:
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
        named = [(index, way.given.get(name)) for name, index in _named_refs(call) if name[0] not in way.unread]
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
        for op, claim in self._gathered(ways):
            if claim.key in self.refused or not _can_be_tried(op, claim.call):
                named = dict(_named_refs(claim.call))
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
                for index in [*(v for _, v in _named_refs(call)), *(v for v in call.results if v is not None)]:
                    storage = self.values[index].storage
                    box = self.axes[storage].box_of(self.places[index]) if storage in self.axes else None
                    if box is not None:
                        add(storage, box)
        self.cuts = {s: [sorted(ends) for ends in axes] for s, axes in found.items()}
        for storage in self.ranged & self.cuts.keys():
            # Ranges at home are of bytes in a row.
            outer, *inner = self.axes[storage].sizes
            row = self.graph.storages[storage].bytes // outer
            self.cuts[storage] = [_in_pages(self.cuts[storage][0], row), *([0, size] for size in inner)]
        self.cuts = {s: cuts for s, cuts in self.cuts.items() if any(len(ends) > 2 for ends in cuts)}


class _LimitError(Exception):
    """The split step would have too many ops."""


class _UnfitError(Exception):
    """An operator refuses a part of its arguments; never reaches the user."""

    def __init__(self, op: int) -> None:
        super().__init__(op)
        self.op = op


def _there(item: T | None, op: Op) -> T:
    if item is None:
        raise _UnfitError(op.id)
    return item


# --- the step in parts -----------------------------------------------------------------------------------------------


@dataclass
class _Piece:
    """A part of an op, preceded by the ops that gather its arguments."""

    op: int  # of the step before
    ops: list[tuple[Op, Call]] = field(default_factory=list[tuple[Op, Call]])


class _Builder:
    """Builds the ops of the split step."""

    def __init__(
        self, captured: Captured, search: _Search, chosen: Mapping[int, _Choice], limit: int | None = None
    ) -> None:
        self.old = captured
        self.limit = limit
        self.search, self.chosen = search, chosen
        self.storages: list[Storage] = list(captured.graph.storages)
        self.values: list[Value] = list(captured.values)
        self._index: dict[Value, int] = {}
        for index, value in enumerate(self.values):
            self._index.setdefault(value, index)
        self.cell: dict[tuple[int, Box], int] = {}
        self.fresh: dict[tuple[int, Box], tuple[int, int]] = {}  # what was made as a whole, and by which op
        self.ranges: dict[int, StateRange] = {}
        self._looked_up: dict[int, Value] = {}  # by op, where what is looked up part by part comes together
        self.begun: set[int] = set()  # whole results of which a part exists
        self.mode = FakeTensorMode()
        self._shapes: dict[str, list[tuple[Value, int] | None]] = {}
        self._piece = _Piece(-1)
        self._emitted = 0

    def built(self) -> Captured:
        """Build the step; raises ``_LimitError`` for too many ops, ``_UnfitError`` if an op cannot be cut as chosen."""
        rows: list[list[_Piece]] = []
        for op in self.old.graph.ops:
            choice = self.chosen.get(op.id)
            pieces = (
                [self._whole(op)]
                if choice is None
                else [self._part(op, choice, number) for number in range(len(choice.ends) - 1)]
            )
            if choice is not None and rows and rows[-1][-1].op in self.chosen:
                rows[-1] += pieces
            else:
                rows.append(pieces)
        ordered = [piece for row in rows for piece in _depth_first(row)]
        pairs = [pair for piece in ordered for pair in piece.ops]
        ops = tuple(replace(op, id=number) for number, (op, _) in enumerate(pairs))
        graph = StepGraph(tuple(self.storages), ops, self.old.graph.outputs)
        return compacted(
            replace(
                self.old,
                graph=graph,
                calls=tuple(call for _, call in pairs),
                values=tuple(self.values),
                ranges=self.ranges,
            )
        )

    # Values and storages.

    def _value(self, value: Value) -> int:
        if value not in self._index:
            self._index[value] = len(self.values)
            self.values.append(value)
        return self._index[value]

    def _new(self, count: int, name: str) -> int:
        self.storages.append(Storage(len(self.storages), count, StorageKind.ACTIVATION, name))
        return len(self.storages) - 1

    def _cell(self, storage: int, box: Box) -> int:
        if (storage, box) not in self.cell:
            old = self.storages[storage]
            size = old.bytes // prod(self.search.axes[storage].sizes)
            made = self._new(elements(box) * size, old.name)
            kind = old.kind
            if storage in self.search.ranged:
                (low, high), *inner = box
                row = size * elements(tuple(inner))
                kind, self.ranges[made] = StorageKind.STATE_RANGE, StateRange(storage, low * row)
                self.storages[made] = replace(self.storages[made], name=f"{old.name} [{low}:{high}]")
            self.storages[made] = replace(self.storages[made], kind=kind)
            self.cell[storage, box] = made
        return self.cell[storage, box]

    # Ops.

    def _emit(
        self,
        like: Op,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: tuple[int | None, ...],
        reads: Iterable[int] = (),
        mutates: Iterable[int] = (),
        discards: Iterable[int] = (),
        name: str = "",
    ) -> None:
        """Add an op: a part with its ``name``, or a copy without one."""
        creates = dict.fromkeys(self.values[v].storage for v in results if v is not None)
        op = Op(
            -1,
            name or str(func),
            tuple(dict.fromkeys(reads)),
            tuple(dict.fromkeys(mutates)),
            tuple(creates),
            like.rerunnable or not name,
            family=family_text(name or str(func), args, kwargs, self.values),
            module=like.module,
            source=like.source,
            discards=tuple(dict.fromkeys(discards)),
        )
        self._piece.ops.append((op, Call(func, args, kwargs, results)))
        self._emitted += 1
        if self.limit is not None and self._emitted > self.limit:
            raise _LimitError

    def _make_empty(self, like: Op, value: Value) -> int:
        """Create a storage, and the value that covers it."""
        index = self._value(value)
        kwargs = {"dtype": value.dtype, "device": self.old.device, "pin_memory": False}
        self._emit(like, _aten.empty_strided.default, (list(value.shape), list(value.stride)), kwargs, (index,))
        return index

    def _copy(self, like: Op, target: Value, source: Value) -> None:
        """Copy a value to one of the same shape; the rest of the target's storage is kept."""
        whole = covers(target, self.storages[target.storage].bytes)
        reads = [source.storage] if whole else [source.storage, target.storage]
        args = (Ref(self._value(target)), Ref(self._value(source)))
        self._emit(like, _aten.copy_.default, args, {}, (None,), reads, [target.storage])

    # Arguments.

    def _gathered(self, like: Op, storage: int, dtype: torch.dtype, box: Box, *, again: bool) -> int:
        """Return a storage with a box of a cut storage: a cell, or a copy that is zero beyond the edges.

        With ``again`` other parts of the same op reuse the copy.
        """
        axes = self.search.axes[storage]
        inside = clipped(box, axes.whole())
        found = list(cells(self.search.cuts[storage], inside)) if inside else []
        if len(found) == 1 and found[0] == box:
            return self._cell(storage, box)
        known = self.fresh.get((storage, box))
        if known is not None and like.id - known[1] <= _SOON:
            return known[0]
        made = self._new(elements(box) * dtype.itemsize, f"{self.storages[storage].name} part".strip())
        index = self._make_empty(like, Value(made, dtype, *_flat(box)))
        if inside != box:
            self._emit(like, _aten.zero_.default, (Ref(index),), {}, (None,), (), [made])
        for cell in found:
            part = clipped(cell, box)
            if part is not None:
                target, source = window_within(box, part), window_within(cell, part)
                self._copy(like, _windowed(made, dtype, target), _windowed(self._cell(storage, cell), dtype, source))
        if again or storage in self.search.ranged:
            self.fresh[storage, box] = made, like.id
        return made

    def _scattered(self, like: Op, storage: int, dtype: torch.dtype, box: Box, source: int) -> None:
        """Copy a storage that holds a box into the cells."""
        written: set[int] = set()
        for cell in cells(self.search.cuts[storage], box):
            part = clipped(cell, box)
            if part is None:
                continue
            target = self._cell(storage, cell)
            if target == source:
                continue
            if target not in written and not self._exists(target):
                self._make_empty(like, Value(target, dtype, *_flat(cell)))
            written.add(target)
            self._copy(
                like,
                _windowed(target, dtype, window_within(cell, part)),
                _windowed(source, dtype, window_within(box, part)),
            )

    def _exists(self, storage: int) -> bool:
        if storage in self.begun or storage in self.ranges:
            return True
        self.begun.add(storage)
        return False

    def _forget(self, storage: int) -> None:
        self.fresh = {key: made for key, made in self.fresh.items() if key[0] != storage}

    def _argument(self, op: Op, index: int, cut: Cut | None, low: int, high: int) -> Value:
        """Return a value, or the part of it for a part of an op, gathered if needed."""
        value, search = self.old.values[index], self.search
        storage = value.storage
        if storage in search.cuts:
            axes, place = search.axes[storage], search.places[index]
            if cut is None:
                box, dims, shape = axes.box_of(place), None, value.shape
            else:
                first, last = cut.ends(low, high)
                box, dims = axes.part(place, cut.dims, first, last), cut.dims
                shape = (*value.shape[: dims[0]], last - first, *value.shape[dims[1] :])
            box = _there(box, op)
            stride = _there(axes.strides(place, shape, box, dims), op)
            made = self._gathered(op, storage, value.dtype, box, again=cut is None)
            return Value(made, value.dtype, shape, stride)
        if cut is None:
            return value
        first, last = cut.ends(low, high)
        whole = _there(value.merged(cut.dims), op)
        dim = cut.dims[0]
        inside = max(first, 0), min(last, whole.shape[dim])
        part = whole.narrowed(dim, *inside)
        dense = is_dense(part.shape, part.stride) or not is_dense(whole.shape, whole.stride)
        if inside == (first, last) and dense:
            return part
        shape = (*part.shape[:dim], last - first, *part.shape[dim + 1 :])
        made = self._new(prod(shape) * value.dtype.itemsize, f"{self.storages[storage].name} part".strip())
        copy = Value(made, value.dtype, shape, dense_like(shape, whole.stride))
        filled = self._make_empty(op, copy)
        if inside != (first, last):
            self._emit(op, _aten.zero_.default, (Ref(filled),), {}, (None,), (), [made])
        if inside[1] > inside[0]:
            self._copy(op, copy.narrowed(dim, inside[0] - first, inside[1] - first), part)
        return copy

    # Pieces.

    def _whole(self, op: Op) -> _Piece:
        self._piece = piece = _Piece(op.id)
        call, cuts = self.old.calls[op.id], self.search.cuts
        if not any(s in cuts for s in op.touched):
            for storage in op.mutates:
                self._forget(storage)
            piece.ops.append((op, call))
            return piece
        instead: dict[int, int] = {}  # values
        moved: dict[int, int] = {}  # storages
        made: list[tuple[int, int]] = []
        for index in dict.fromkeys(ref.value for ref in _refs(call)):
            value = self.old.values[index]
            if value.storage in cuts and value.storage not in op.creates:
                part = self._argument(op, index, None, 0, 0)
                instead[index] = self._value(part)
                moved.setdefault(value.storage, part.storage)
                if value.storage in op.reads:
                    made.append((value.storage, part.storage))
        reads = [s for s in op.reads if s not in cuts] + [new for _, new in made]
        for index in (v for v in call.results if v is not None):
            value = self.old.values[index]
            if value.storage in cuts:
                if value.storage not in moved:
                    moved[value.storage] = self._new(
                        self.storages[value.storage].bytes, self.storages[value.storage].name
                    )
                instead[index] = self._value(replace(value, storage=moved[value.storage]))
        for ref in _refs(call):  # of what is created here: stands in for its shape alone
            index = ref.value
            value = self.old.values[index]
            if index not in instead and value.storage in moved:
                instead[index] = self._value(replace(value, storage=moved[value.storage]))

        def moved_ref(ref: Ref) -> Ref:
            return Ref(instead.get(ref.value, ref.value))

        args, kwargs = map_leaves((call.args, call.kwargs), moved_ref, Ref)
        results = tuple(None if v is None else instead.get(v, v) for v in call.results)
        new = replace(
            op,
            reads=tuple(dict.fromkeys(reads)),
            creates=tuple(moved.get(s, s) for s in op.creates),
            family=family_text(op.name, args, kwargs, self.values),
        )
        piece.ops.append((new, replace(call, args=args, kwargs=kwargs, results=results)))
        for storage in op.creates:
            if storage in cuts:
                dtype = next(v.dtype for v in self.old.values if v.storage == storage)
                box = self.search.axes[storage].whole()
                self._scattered(op, storage, dtype, box, moved[storage])
                self.fresh[storage, box] = moved[storage], op.id
        return piece

    def _part_of_update(self, op: Op, choice: _Choice, number: int) -> _Piece:
        self._piece = piece = _Piece(op.id)
        way, call = choice.way, self.old.calls[op.id]
        whole: Any = call.func
        low, high = choice.ends[number : number + 2]
        is_last = number == len(choice.ends) - 2
        update: OptimizerUpdate = whole.of_range(low, is_last=is_last)
        parts: list[Value] = []
        reads: list[int] = []
        mutates: list[int] = []
        for name, index in _named_refs(call):
            old = self.old.values[index]
            part = self._argument(op, index, way.given.get(name), low, high)
            parts.append(part)
            reads.append(part.storage)
            if old.storage in op.mutates and (old.shape or is_last):
                mutates.append(part.storage)
        refs = [Ref(self._value(part)) for part in parts]
        args = ([refs[0]], [refs[1]], [refs[2:]])
        made = replace(
            op,
            reads=tuple(dict.fromkeys(reads)),
            mutates=tuple(dict.fromkeys(mutates)),
            family=family_of_update(op.name, update, args, self.values),
        )
        piece.ops.append((made, call_of_update(update, args)))
        for (name, index), part in zip(_named_refs(call), parts, strict=True):
            if part.storage in mutates:
                self._put_back(op, index, way.given.get(name), part, low, high)
        return piece

    def _run(
        self, like: Op, func: OpOverload, args: tuple[Any, ...], shape: tuple[int, ...], dtype: torch.dtype
    ) -> Value:
        """Add an op on values; its result has memory of its own."""
        made = Value(
            self._new(prod(shape) * dtype.itemsize, f"{like.module} part".strip()),
            dtype,
            shape,
            dense_like(shape, tuple(range(len(shape), 0, -1))),
        )
        given = map_leaves(args, lambda value: Ref(self._value(value)), Value)
        reads = [value.storage for value in leaves_in(args, Value)]
        self._emit(like, func, given, {}, (self._value(made),), reads)
        return made

    def _rebased(self, op: Op, index: int, low: int, high: int, left_out: int = -1) -> Value:
        """Count indices into a table from the beginning of a part."""
        places = self._argument(op, index, None, 0, 0)

        def run(func: OpOverload, args: tuple[Any, ...]) -> Value:
            is_question = func in (_aten.ne.Tensor, _aten.eq.Scalar)
            return self._run(op, func, args, places.shape, torch.bool if is_question else places.dtype)

        return rebased(places, low, high, left_out, run)

    def _part_of_lookup(self, op: Op, choice: _Choice, number: int) -> _Piece:
        """Look up the rows that are in a part of a table.

        The first and last part also look up indices out of range, which the operator refuses.
        """
        self._piece = piece = _Piece(op.id)
        call, (low, high) = self.old.calls[op.id], choice.ends[number : number + 2]
        func: Any = call.func
        named = by_name(func, call.args, call.kwargs)
        table = self._argument(op, named["weight"].value, choice.way.given["weight", -1], low, high)
        places = self._argument(op, named["indices"].value, None, 0, 0)
        counted = self._run(op, _aten.sub.Scalar, (places, low), places.shape, places.dtype)
        last = number == len(choice.ends) - 2
        bounds = (0 if number else None, None if last else high - low - 1)
        inside = self._run(op, _aten.clamp.default, (counted, *bounds), places.shape, places.dtype)
        index: Any = call.results[0]
        whole = self.old.values[index]
        rows = self._run(op, _aten.embedding.default, (table, inside), whole.shape, whole.dtype)
        target = self._looked_up.get(op.id)
        if target is None:
            target = whole
            if whole.storage in self.search.cuts:
                target = replace(whole, storage=self._new(self.storages[whole.storage].bytes, "looked up"))
            self._looked_up[op.id] = target
            self._make_empty(op, target)
            self._copy(op, target, rows)
        else:
            here = self._run(op, _aten.eq.Tensor, (counted, inside), places.shape, torch.bool)
            column = replace(here, shape=(*here.shape, 1), stride=(*here.stride, 1))
            chosen = self._run(op, _aten.where.self, (column, rows, target), whole.shape, whole.dtype)
            self._copy(op, target, chosen)
        if last and target.storage != whole.storage:
            box = _there(self.search.axes[whole.storage].box_of(self.search.places[index]), op)
            self._scattered(op, whole.storage, whole.dtype, box, target.storage)
            self.fresh[whole.storage, box] = target.storage, op.id
        return piece

    def _part(self, op: Op, choice: _Choice, number: int) -> _Piece:
        if self.search.is_update(op.id):
            return self._part_of_update(op, choice, number)
        if choice.way.looks_up:
            return self._part_of_lookup(op, choice, number)
        self._piece = piece = _Piece(op.id)
        way, call = choice.way, self.old.calls[op.id]
        low, high = choice.ends[number : number + 2]
        func: Any = call.func  # ways are those of PyTorch's operators
        named = dict(by_name(func, call.args, call.kwargs))
        written = written_arguments(func, named)
        parts: dict[Name, Value] = {}
        reads: list[int] = []
        mutates: list[int] = []
        discards: list[int] = []
        back: list[tuple[int, Cut | None, Value]] = []
        standing: list[Name] = []
        for name, index in _named_refs(call):
            old = self.old.values[index]
            cut = way.given.get(name)
            if name[0] in way.unread or old.storage in op.creates:
                standing.append(name)
                parts[name] = self._shape_of(old, cut, low, high)
                continue
            part = parts[name] = self._argument(op, index, cut, low, high)
            if old.storage in op.reads or (name[0] in written and not self._is_all(part)):
                reads.append(part.storage)
            if name[0] in written:
                mutates.append(part.storage)
                if old.storage in op.discards:
                    discards.append(part.storage)
                back.append((index, cut, part))
        for name, item in named.items():
            if (name, -1) in parts:
                named[name] = parts[name, -1]
            elif isinstance(item, list | tuple) and any(isinstance(i, Ref) for i in item):
                named[name] = [parts.get((name, place), i) for place, i in enumerate(item)]
        if way.rebased:
            index = by_name(func, call.args, call.kwargs)[way.rebased].value
            parts[way.rebased, -1] = named[way.rebased] = self._rebased(op, index, low, high, named["padding_idx"])
            reads = [part.storage for name, part in parts.items() if name not in standing]
        if way.settle is not None:
            way.settle(named, low, high)
        try:
            shapes = self._results(func, call, named)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise _UnfitError(op.id) from error
        results: list[int | None] = []
        done: list[tuple[int, Cut | None, Value]] = []
        for place, index in enumerate(call.results):
            shape = shapes[place] if place < len(shapes) else None
            if index is None or shape is None or (place not in way.made and number):
                results.append(None)
                continue
            results.append(self._result(op, index, way.made.get(place), shape, low, high, done))
        # Where only a shape matters, the result stands in that has it; else memory that nobody fills.
        for name in standing:
            want = parts[name]
            same = (v for v in results if v is not None and _alike(self.values[v], want))
            index = next(same, None)
            if index is None:
                made = self._new(prod(want.shape) * want.dtype.itemsize, "shape")
                index = self._make_empty(op, replace(want, storage=made))
                reads.append(made)
            parts[name] = self.values[index]
            if name[1] < 0:
                named[name[0]] = parts[name]
            else:
                named[name[0]] = [parts[name] if p == name[1] else i for p, i in enumerate(named[name[0]])]
        args, kwargs = self._placed_call(func, call, named)
        self._emit(op, func, args, kwargs, tuple(results), reads, mutates, discards, op.name)
        for index, cut, part in back:
            self._put_back(op, index, cut, part, low, high)
        for index, cut, made in done:
            self._put(op, index, cut, made, low, high)
        return piece

    def _is_all(self, value: Value) -> bool:
        return covers(value, self.storages[value.storage].bytes)

    def _shape_of(self, value: Value, cut: Cut | None, low: int, high: int) -> Value:
        """Return a value without a storage for an argument, or a part of it, of which only the shape matters."""
        if cut is None:
            shape = value.shape
        else:
            first, last = cut.ends(low, high)
            shape = (*value.shape[: cut.dims[0]], last - first, *value.shape[cut.dims[1] :])
        whole = value if cut is None else value.merged(cut.dims)
        stride = dense_like(shape, whole.stride if whole is not None else value.stride)
        return Value(-1, value.dtype, shape, stride)

    def _results(self, func: Any, call: Call, named: dict[str, Any]) -> list[tuple[Value, int] | None]:
        """Return a part's results as its kernel makes them: values without storages, and the storages' bytes."""
        args, kwargs = self._placed_call(func, call, named, refs=False)
        texts: tuple[Any, dict[str, Any]] = _texts((args, kwargs))
        key = family_text(str(func), texts[0], texts[1], [])
        if key not in self._shapes:

            def fake(value: Value) -> torch.Tensor:
                return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=self.old.device)

            with self.mode, torch.no_grad():
                given, more = map_leaves((args, kwargs), fake, Value)
                there = by_name(func, given, more)
                result = made_up(func, there)
                if result is None:
                    result = repaired(func, there, func(*given, **more))
                leaves = result_leaves(result)
            self._shapes[key] = [
                (Value(-1, t.dtype, tuple(t.shape), t.stride()), t.untyped_storage().nbytes())
                if isinstance(t, torch.Tensor)
                else None
                for t in leaves
            ]
        return self._shapes[key]

    def _placed_call(
        self, func: Any, call: Call, named: dict[str, Any], *, refs: bool = True
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put named arguments back where the call had them; with refs in place of values."""

        def ref(value: Value) -> Any:
            return Ref(self._value(value)) if refs else value

        names = traits(func).names[: len(call.args)]
        args = tuple(map_leaves(named[name], ref, Value) for name in names)
        return args, {name: map_leaves(named[name], ref, Value) for name in call.kwargs}

    def _result(
        self,
        op: Op,
        index: int,
        cut: Cut | None,
        shape: tuple[Value, int],
        low: int,
        high: int,
        done: list[tuple[int, Cut | None, Value]],
    ) -> int:
        """Return where a part puts a result: in its cell if it is one, or in memory of its own."""
        old, (value, count) = self.old.values[index], shape
        search = self.search
        if cut is None and old.storage not in search.cuts:
            return index
        if old.storage in search.cuts:
            axes, place = search.axes[old.storage], search.places[index]
            if cut is None:
                box, stride = axes.box_of(place), axes.strides(place, value.shape, axes.whole())
            else:
                box = axes.part(place, cut.dims, *cut.ends(low, high))
                stride = axes.strides(place, value.shape, box, cut.dims) if box else None
            box = _there(box, op)
            one = list(cells(search.cuts[old.storage], box)) == [box]
            full = elements(box) * old.dtype.itemsize == count
            if one and full and stride == value.stride and not self._exists(self._cell(old.storage, box)):
                return self._value(replace(value, storage=self._cell(old.storage, box)))
        made = self._new(count, self.storages[old.storage].name)
        found = replace(value, storage=made)
        done.append((index, cut, found))
        return self._value(found)

    def _put(self, op: Op, index: int, cut: Cut | None, made: Value, low: int, high: int) -> None:
        """Copy a part's result to where others read it."""
        old, search = self.old.values[index], self.search
        storage = old.storage
        if storage not in search.cuts:
            cut = _there(cut, op)
            if not self._exists(storage):
                self._make_empty(op, old)
            whole = _there(old.merged(cut.dims), op)
            self._copy(op, whole.narrowed(cut.dims[0], *cut.ends(low, high)), made)
            return
        axes, place = search.axes[storage], search.places[index]
        dims = None if cut is None else cut.dims
        found = axes.box_of(place) if cut is None else axes.part(place, cut.dims, *cut.ends(low, high))
        box = _there(found, op)
        stride = _there(axes.strides(place, made.shape, box, dims), op)
        source = made
        if made.stride != stride or not covers(made, self.storages[made.storage].bytes):
            laid = self._new(elements(box) * made.dtype.itemsize, self.storages[storage].name)
            source = Value(laid, made.dtype, made.shape, stride)
            self._make_empty(op, source)
            self._copy(op, source, made)
        self._scattered(op, storage, made.dtype, box, source.storage)
        self.fresh[storage, box] = source.storage, op.id

    def _put_back(self, op: Op, index: int, cut: Cut | None, part: Value, low: int, high: int) -> None:
        """Copy what was written in place to where it was gathered from."""
        old, search = self.old.values[index], self.search
        self._forget(old.storage)
        if part.storage == old.storage:
            return
        if old.storage in search.cuts:
            axes, place = search.axes[old.storage], search.places[index]
            box = axes.box_of(place) if cut is None else axes.part(place, cut.dims, *cut.ends(low, high))
            box = _there(box, op)
            self._scattered(op, old.storage, part.dtype, box, part.storage)
            return
        cut = _there(cut, op)
        whole = _there(old.merged(cut.dims), op)
        self._copy(op, whole.narrowed(cut.dims[0], *cut.ends(low, high)), part)


def _depth_first(pieces: Sequence[_Piece]) -> list[_Piece]:
    """Order pieces so that each finds its arguments: of those that can run, one of the last op's."""
    last_write: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    after: list[list[int]] = [[] for _ in pieces]
    waits = [0] * len(pieces)
    for number, piece in enumerate(pieces):
        touched = {s for op, _ in piece.ops for s in op.touched}
        writes = {s for op, _ in piece.ops for s in op.mutates + op.creates}
        before = {last_write[s] for s in touched if s in last_write}
        before |= {reader for s in writes for reader in readers.get(s, ())}
        for other in before:
            after[other].append(number)
        waits[number] = len(before)
        for storage in touched:
            if storage in writes:
                last_write[storage] = number
                readers[storage] = []
            else:
                readers.setdefault(storage, []).append(number)
    ready: list[tuple[int, int]] = []
    for number, piece in enumerate(pieces):
        if not waits[number]:
            heappush(ready, (-piece.op, number))
    found: list[_Piece] = []
    while ready:
        _, number = heappop(ready)
        found.append(pieces[number])
        for other in after[number]:
            waits[other] -= 1
            if not waits[other]:
                heappush(ready, (-pieces[other].op, other))
    return found


def _halved(captured: Captured, most: int, refused: Set[str]) -> tuple[Captured, list[Claim]]:
    """Split norms' large backward passes into two ops, and return the claims that the bits are the same.

    The gradient of the input can be cut by rows, those of scale and offset by columns.
    """
    graph = captured.graph
    pairs: list[tuple[Op, Call]] = []
    claims: list[Claim] = []
    for op, call in zip(graph.ops, captured.calls, strict=True):
        need = sum(graph.storages[s].bytes for s in op.touched)
        halves = halves_of_norm(captured, op, call) if need > most else [(op, call)]
        found = [Claim(f"{half.family} as a half", of_half, _AS_ONE, (0, 1), call) for half, of_half in halves]
        if len(halves) == 1 or any(claim.key in refused for claim in found):
            pairs.append((op, call))
        else:
            pairs += halves
            claims += found
    return (with_ops(captured, pairs), claims) if claims else (captured, [])


def _small_losses(captured: Captured, most: int) -> Captured:
    """Let losses of large log-probabilities read only those of the targets, without changing a bit.

    ``nll_loss`` adds up one number for each row or place of an image. On a tensor with one class, that holds these
    numbers, it does the same.
    """
    graph, values = captured.graph, list(captured.values)
    storages = list(graph.storages)
    pairs: list[tuple[Op, Call]] = []
    for op, call in zip(graph.ops, captured.calls, strict=True):
        need = sum(storages[s].bytes for s in op.touched)
        rank = _LOSSES.get(call.func) if isinstance(call.func, OpOverload) else None
        if rank is None or need <= most or call.kwargs:
            pairs.append((op, call))
            continue
        logs, target, weight, reduction, ignored = call.args
        given, wanted = values[logs.value], values[target.value]
        if weight is not None or len(given.shape) != rank or wanted.dtype is not torch.int64:
            pairs.append((op, call))
            continue

        def made(
            func: OpOverload,
            args: tuple[Any, ...],
            reads: Sequence[int],
            dtype: torch.dtype,
            shape: tuple[int, ...],
            op: Op = op,
        ) -> int:
            storage = len(storages)
            count = prod(shape) * dtype.itemsize
            storages.append(Storage(storage, count, StorageKind.ACTIVATION, f"{op.module} loss".strip()))
            values.append(Value(storage, dtype, shape, dense_like(shape, tuple(range(len(shape), 0, -1)))))
            family = family_text(str(func), args, {}, values)
            pairs.append(
                (
                    Op(-1, str(func), tuple(reads), (), (storage,), family=family, module=op.module, source=op.source),
                    Call(func, args, {}, (len(values) - 1,)),
                )
            )
            return len(values) - 1

        shape = wanted.shape
        column = (shape[0], 1, *shape[1:])
        places = wanted.storage
        counts = made(_aten.ne.Scalar, (target, ignored), [places], torch.bool, shape)
        kept = made(_aten.mul.Tensor, (target, Ref(counts)), [places, values[counts].storage], torch.int64, shape)
        index = replace(values[kept], shape=column, stride=(values[kept].stride[0], *values[kept].stride))
        values.append(index)
        reads = [given.storage, index.storage]
        own = made(_aten.gather.default, (logs, 1, Ref(len(values) - 1)), reads, given.dtype, column)
        out = made(_aten.eq.Scalar, (target, ignored), [places], torch.bool, shape)
        first = made(_aten.mul.Scalar, (Ref(out), _NOWHERE), [values[out].storage], torch.int64, shape)
        args = (Ref(own), Ref(first), None, reduction, _NOWHERE)
        reads = [values[own].storage, values[first].storage]
        family = family_text(op.name, args, {}, values)
        pairs.append((replace(op, reads=tuple(reads), family=family), replace(call, args=args)))
    if len(pairs) == len(graph.ops):
        return captured
    ops = tuple(replace(op, id=index) for index, (op, _) in enumerate(pairs))
    return replace(
        captured,
        graph=StepGraph(tuple(storages), ops, graph.outputs),
        calls=tuple(call for _, call in pairs),
        values=tuple(values),
    )


_NOWHERE = -100  # a target that is left out
# Losses that look at one class of each row or place, with the dimensions of their log-probabilities.
_LOSSES: dict[OpOverload, int] = {_aten.nll_loss_forward.default: 2, _aten.nll_loss2d_forward.default: 4}


def _has_box(axes: Axes, place: Placed, value: Value) -> bool:
    box = axes.box_of(place)
    return box is not None and axes.strides(place, value.shape, box) is not None


def window_of(value: Value) -> Window:
    return Window(value.shape, value.stride, value.offset)


def _windowed(storage: int, dtype: torch.dtype, window: Window) -> Value:
    return Value(storage, dtype, window.shape, window.stride, window.offset)


def _flat(box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides of memory that holds a box."""
    window = window_within(box, box)
    return window.shape, window.stride


def _refs(call: Call) -> list[Ref]:
    return leaves_in((call.args, call.kwargs), Ref)


def _named_refs(call: Call) -> list[tuple[Name, int]]:
    func = call.func
    if not isinstance(func, OpOverload):
        return [(("", place), ref.value) for place, ref in enumerate(_refs(call))]
    found: list[tuple[Name, int]] = []
    for name, item in by_name(func, call.args, call.kwargs).items():
        if isinstance(item, Ref):
            found.append(((name, -1), item.value))
        elif isinstance(item, list | tuple):
            found += [((name, place), ref.value) for place, ref in enumerate(item) if isinstance(ref, Ref)]
    return found


def _in_pages(ends: Sequence[int], size: int) -> list[int]:
    """Return the range ends that are page ends and far enough apart, for elements of ``size`` bytes."""
    found = [0]
    for end in ends[1:-1]:
        far = min(end - found[-1], ends[-1] - end) * size >= LARGE_BYTES
        if far and not end * size % PAGE_BYTES:
            found.append(end)
    return [*found, ends[-1]]


def _is_flat(value: Value, count: int) -> bool:
    """Return whether a value is all of a storage of ``count`` bytes, element after element."""
    dense = tuple(prod(value.shape[dim + 1 :]) for dim in range(len(value.shape)))
    return covers(value, count) and all(
        n == 1 or a == b for n, a, b in zip(value.shape, value.stride, dense, strict=True)
    )


def _ref(call: Call, name: Name) -> Ref:
    func: Any = call.func
    if not isinstance(func, OpOverload):
        return _refs(call)[name[1]]
    item = by_name(func, call.args, call.kwargs)[name[0]]
    return item if name[1] < 0 else item[name[1]]


def dense_like(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return strides without gaps, in the order of other strides."""
    found = [0] * len(shape)
    step = 1
    for dim in sorted(range(len(shape)), key=lambda d: (stride[d], -d)):
        found[dim] = step
        step *= max(shape[dim], 1)
    return tuple(found)


def _alike(one: Value, other: Value) -> bool:
    return (one.dtype, one.shape, one.stride) == (other.dtype, other.shape, other.stride)


# Libraries may add up otherwise where memory does not begin at multiples of so many bytes.
ALIGNED = 64


def _can_be_tried(op: Op, call: Call) -> bool:
    """Return whether an op only makes results and draws no random numbers, which would be missing later."""
    plain = isinstance(call.func, OpOverload) and call.func.namespace == "aten" and call.rehearse is None
    return plain and not op.random and not op.communicates


def _misaligned(value: Value) -> int:
    return value.offset * value.dtype.itemsize % ALIGNED


def _is_pointwise(call: Call) -> bool:
    return isinstance(call.func, OpOverload) and is_elementwise(call.func)


def _texts(tree: Any) -> Any:
    return map_leaves(tree, lambda value: f"{value.dtype}{value.shape}{value.stride}", Value)
