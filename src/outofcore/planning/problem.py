"""The planning problem in arrays: the gaps of a step, their bytes, and the free bytes at each op.

Storages below 64 KiB stay on the device and are left out. A *choice* gives for each gap ``ON_DEVICE`` or the index of a
home. Recomputed gaps are chosen before (``remat``) and take no part in a choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from outofcore.analysis.gaps import final_gap, gaps_of, is_fetched, is_large, large_needs, placed_bytes
from outofcore.costs import Costs, Home
from outofcore.graph import StepGraph, StorageKind
from outofcore.lowering.slots import slot_bytes
from outofcore.plan import Gap

Ints = NDArray[np.int64]

# The value of a resident gap in a choice.
ON_DEVICE = -1


@dataclass(frozen=True, slots=True)
class GapInfo:
    """A gap of a large storage: one with ops inside, or the one after the last use."""

    gap: Gap  # the use interval, in op indices
    bytes: int  # size in the arena
    copied_bytes: int  # bytes that a copy moves
    segment: int  # index of the interval between two writes; one copy at home serves all gaps of it
    cyclic: bool  # whether it extends over the end of the step
    arriving: bool  # whether it ends at an input's first use, so that it cannot be resident
    fetched: bool  # whether the use at its end needs the bytes
    final: bool  # whether it follows the last use of a storage that the user sees after the step
    must_leave: bool  # whether the bytes must be at home when the step ends
    homes: tuple[int, ...]  # indices of the homes that may hold its bytes, the nearest first


@dataclass(frozen=True)
class Problem:
    """A step and the ``limit`` on the bytes of its large blocks."""

    graph: StepGraph
    costs: Costs
    limit: int
    gaps: tuple[GapInfo, ...]  # by storage, then by time
    free_bytes: Ints  # shape (ops,), bytes left at each op after the tensors it touches and its workspace
    written: frozenset[int]  # persistent storages that the step writes

    @staticmethod
    def of(graph: StepGraph, costs: Costs, limit: int) -> Problem:
        """Build the planning problem of a step in which large blocks may take ``limit`` bytes."""
        n = len(graph.ops)
        written: dict[int, list[int]] = {}
        for op in graph.ops:
            for storage in dict.fromkeys(op.mutates + op.creates):
                written.setdefault(storage, []).append(op.id)
        everywhere = tuple(range(len(costs.homes)))
        gaps: list[GapInfo] = []
        for storage in graph.storages:
            if not is_large(storage.bytes) or storage.kind is StorageKind.CONSTANT:
                continue
            # The first home always has a slot for every input and output.
            first = storage.arrives or storage.id in graph.outputs
            homes = everywhere[:1] if first else everywhere
            writes = written.get(storage.id, [])
            last = final_gap(graph, storage.id) if homes else None
            for gap in (*gaps_of(graph, storage.id), *((last,) if last else ())):
                if gap.end == gap.start + 1 and gap != last:
                    continue
                segment = sum(1 for w in writes if w <= gap.start)
                gaps.append(
                    GapInfo(
                        gap,
                        placed_bytes(storage.bytes),
                        storage.bytes,
                        segment,
                        cyclic=gap.end >= n and gap != last,
                        arriving=gap.start < 0,
                        fetched=gap != last and is_fetched(graph, gap),
                        final=gap == last,
                        must_leave=gap == last and storage.id not in graph.gradients_left,
                        homes=homes,
                    )
                )
        needs = np.array(large_needs(graph, costs), dtype=np.int64)
        changed = frozenset(s for s in written if s in graph.persistent)
        return Problem(graph, costs, limit, tuple(gaps), limit - needs, changed)

    @property
    def homes(self) -> tuple[Home, ...]:
        return self.costs.homes

    @property
    def is_feasible(self) -> bool:
        """Whether each op by itself stays within the limit."""
        return not len(self.free_bytes) or int(self.free_bytes.min()) >= 0

    @cached_property
    def movable(self) -> tuple[int, ...]:
        """The indices of all gaps, except gaps before an input's first use."""
        return tuple(g for g, info in enumerate(self.gaps) if not info.arriving)

    def all_resident(self) -> Ints:
        """Return the choice that offloads only inputs and outputs, to the first home."""
        return np.where(self._must_offload, 0, ON_DEVICE)

    def ops_inside(self, info: GapInfo) -> tuple[tuple[int, int], ...]:
        """Return the half-open ranges of ops inside a gap: two if it continues into the next step."""
        n = len(self.graph.ops)
        if not info.cyclic:
            return ((info.gap.start + 1, info.gap.end),)
        return ((info.gap.start + 1, n), (0, info.gap.end - n))

    def resident_bytes(self, is_kept: NDArray[np.bool_]) -> Ints:
        """Return the bytes held at each op by resident gaps; ``is_kept`` has shape (gaps,), the result (ops,)."""
        first, last, second_end, sizes = self._ranges
        delta = np.zeros(len(self.graph.ops) + 1, dtype=np.int64)
        kept_sizes = sizes * is_kept
        np.add.at(delta, first, kept_sizes)
        np.add.at(delta, last, -kept_sizes)
        delta[0] += int(kept_sizes[second_end > 0].sum())
        np.add.at(delta, second_end, -np.where(second_end > 0, kept_sizes, 0))
        return np.cumsum(delta)[:-1]

    def reserve(self, room: Ints, g: int, count: int) -> None:
        """Subtract ``count`` bytes from ``room``, of shape (ops,), over the ops inside a gap."""
        for first, last in self.ops_inside(self.gaps[g]):
            room[first:last] -= count

    def has_room(self, room: Ints, g: int) -> bool:
        info = self.gaps[g]
        return all(bool(np.all(room[first:last] >= info.bytes)) for first, last in self.ops_inside(info))

    def copies_needed(self, choice: Ints) -> list[bool]:
        """Return for each gap whether offloading it requires a copy out."""
        leaving: dict[int, list[int]] = {}
        at_home: dict[tuple[int, int], int] = {}
        home_of: list[int] = choice.tolist()
        for g, info in enumerate(self.gaps):
            storage = info.gap.storage
            if info.arriving:
                at_home[storage, 0] = 0
            elif home_of[g] != ON_DEVICE:
                leaving.setdefault(storage, []).append(g)
                if info.cyclic:
                    at_home[storage, home_of[g]] = 0
        needed = [False] * len(self.gaps)
        for storage, gaps in leaving.items():
            if self.graph.storages[storage].arrives:
                at_home[storage, 0] = 0
            elif storage in self.graph.frozen and not any(self.gaps[g].cyclic for g in gaps):
                at_home[storage, home_of[gaps[0]]] = 0  # clean from step to step (see ``Program.clean``)
            for g in gaps:
                key, segment = (storage, home_of[g]), self.gaps[g].segment
                if at_home.get(key) != segment:
                    needed[g] = True
                    at_home[key] = segment
        return needed

    def fit_homes(self, choice: Ints, shares: NDArray[np.float64] | None = None) -> Ints | None:
        """Return the choice of homes, changed so that no home overflows; None if a storage fits at no home.

        Storages are placed in order: first by the largest mean of ``shares[gap, home]`` over their gaps, then by the
        most gaps per op at home.
        """
        if all(home.bytes is None for home in self.homes):
            return choice
        choice = choice.copy()
        room = [None if home.bytes is None else np.full(len(self.graph.ops), home.bytes) for home in self.homes]
        if room and room[0] is not None:
            room[0] -= self.first_home_bytes
            if room[0].min(initial=0) < 0:
                return None
        stays: dict[tuple[int, int], list[int]] = {}
        for g in self.movable:
            if choice[g] != ON_DEVICE:
                stays.setdefault((self.gaps[g].gap.storage, int(choice[g])), []).append(g)

        def rank(key: tuple[int, int]) -> tuple[float, float]:
            gaps, home = stays[key], key[1]
            first, last = self._ops_at_home(gaps)
            share = 0.0 if shares is None else float(shares[gaps, home].mean())
            return -share, -len(gaps) / max(last - first, 1)

        for storage, preferred in sorted(stays, key=lambda key: (rank(key), key)):
            gaps = stays[storage, preferred]
            if self.is_at_first_home(storage):
                continue
            first, last = self._ops_at_home(gaps)
            count = slot_bytes(self.graph.storages[storage].bytes)
            for home in (preferred, *(h for h in self.gaps[gaps[0]].homes if h != preferred)):
                free = room[home]
                if free is None:
                    break
                if int(free[first:last].min(initial=count)) >= count:
                    free[first:last] -= count
                    break
            else:
                return None
            choice[gaps] = home
        return choice

    def _ops_at_home(self, gaps: Iterable[int]) -> tuple[int, int]:
        """Return the half-open range of ops during which the storage of these gaps needs a slot at home."""
        infos = [self.gaps[g] for g in gaps]
        # A frozen storage keeps its slot from step to step.
        if any(info.cyclic or info.gap.storage in self.graph.frozen for info in infos):
            return 0, len(self.graph.ops)
        return min(info.gap.start for info in infos), max(info.gap.end for info in infos) + 1

    def is_at_first_home(self, storage: int) -> bool:
        """Return whether a storage is an input or output, which always has a slot at the first home."""
        return storage in self.graph.outputs or self.graph.storages[storage].arrives

    @cached_property
    def first_home_bytes(self) -> int:
        """Bytes of the slots of inputs and outputs at the first home."""
        return sum(slot_bytes(s.bytes) for s in self.graph.storages if self.is_at_first_home(s.id))

    @cached_property
    def _must_offload(self) -> NDArray[np.bool_]:
        return np.array([info.arriving or info.must_leave for info in self.gaps], dtype=np.bool_)

    @cached_property
    def _ranges(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Arrays with a value for each gap: first op, end op, end op in the next step (or 0), and bytes."""
        n = len(self.graph.ops)
        inside = [self.ops_inside(info) for info in self.gaps]
        ranges = np.array([ranges[0] for ranges in inside], dtype=np.int64).reshape(-1, 2)
        second_end = np.array([ranges[1][1] if len(ranges) > 1 else 0 for ranges in inside], dtype=np.int64)
        sizes = np.array([info.bytes for info in self.gaps], dtype=np.int64)
        return np.minimum(ranges[:, 0], n), ranges[:, 1], second_end, sizes
