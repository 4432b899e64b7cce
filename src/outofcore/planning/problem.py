"""The planning problem in arrays: the gaps (use intervals) of a step, the bytes they hold, and the room that is left.

Only storages of 64 KiB and more are in it; smaller ones stay on the device. A *choice* says for each gap where its
bytes are: ``KEPT`` on the device, or at the home with that index. What is computed again is decided before (``remat``),
and is no longer among the gaps that a choice is about.
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

# In a choice: the gap's bytes stay on the device.
KEPT = -1


@dataclass(frozen=True, slots=True)
class GapInfo:
    """A gap of a large storage that has ops inside.

    Attributes:
        gap: the use interval, in op indices.
        bytes: taken in the arena.
        copied: bytes that a copy moves.
        segment: number of the stretch between two writes that the gap lies in; a copy at home made in one serves all
            gaps of the same stretch.
        cyclic: it lasts over the end of the step.
        arriving: it lies before an input's first use, so there is nothing to keep.
        fetched: the use at its end needs the bytes.
        final: it lies behind the last use of what the user sees after the step.
        leaves: its bytes may not be kept: they must be at home when the step ends.
        homes: indices of the homes that its bytes may go to, the nearest first.
    """

    gap: Gap
    bytes: int
    copied: int
    segment: int
    cyclic: bool
    arriving: bool
    fetched: bool
    final: bool
    leaves: bool
    homes: tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """A step under a limit.

    Attributes:
        graph: the step.
        costs: measured or assumed.
        limit: bytes that large blocks may take together.
        gaps: all that can be decided about, by storage and then in order of time.
        free: shape (ops,), the bytes left at each op beside what it touches and its workspace.
        changed: persistent storages that the step writes.
    """

    graph: StepGraph
    costs: Costs
    limit: int
    gaps: tuple[GapInfo, ...]
    free: Ints
    changed: frozenset[int]

    @staticmethod
    def of(graph: StepGraph, costs: Costs, limit: int) -> Problem:
        """The problem of a step in which large blocks may take ``limit`` bytes."""
        n = len(graph.ops)
        written: dict[int, list[int]] = {}
        for op in graph.ops:
            for storage in dict.fromkeys(op.mutates + op.creates):
                written.setdefault(storage, []).append(op.id)
        everywhere = tuple(range(len(costs.homes)))
        found: list[GapInfo] = []
        for storage in graph.storages:
            if not is_large(storage.bytes) or storage.kind is StorageKind.CONSTANT:
                continue
            # Inputs come from the first home, and outputs go there: they have room there anyway.
            first = storage.arrives or storage.id in graph.outputs
            homes = everywhere[:1] if first else everywhere
            writes = written.get(storage.id, [])
            last = final_gap(graph, storage.id) if homes else None
            for gap in (*gaps_of(graph, storage.id), *((last,) if last else ())):
                if gap.end == gap.start + 1 and gap != last:
                    continue
                segment = sum(1 for w in writes if w <= gap.start)
                found.append(
                    GapInfo(
                        gap,
                        placed_bytes(storage.bytes),
                        storage.bytes,
                        segment,
                        cyclic=gap.end >= n and gap != last,
                        arriving=gap.start < 0,
                        fetched=gap != last and is_fetched(graph, gap),
                        final=gap == last,
                        leaves=gap == last and storage.id not in graph.gradients_left,
                        homes=homes,
                    )
                )
        needs = np.array(large_needs(graph, costs), dtype=np.int64)
        changed = frozenset(s for s in written if s in graph.persistent)
        return Problem(graph, costs, limit, tuple(found), limit - needs, changed)

    @property
    def homes(self) -> tuple[Home, ...]:
        """Where bytes can go; empty: nothing can be offloaded."""
        return self.costs.homes

    @property
    def is_feasible(self) -> bool:
        """Whether each op fits by itself."""
        return not len(self.free) or int(self.free.min()) >= 0

    @cached_property
    def movable(self) -> tuple[int, ...]:
        """The gaps before which their bytes are on the device: all but those of arriving inputs."""
        return tuple(g for g, info in enumerate(self.gaps) if not info.arriving)

    def nothing_leaves(self) -> Ints:
        """The choice, of shape (gaps,), that keeps everything; inputs arrive from the first home, outputs go there."""
        return np.where(self._moving, 0, KEPT)

    def inside(self, info: GapInfo) -> tuple[tuple[int, int], ...]:
        """The ranges of ops within a gap, half-open; a cyclic gap has two."""
        n = len(self.graph.ops)
        if not info.cyclic:
            return ((info.gap.start + 1, info.gap.end),)
        return ((info.gap.start + 1, n), (0, info.gap.end - n))

    def held(self, keep: NDArray[np.bool_]) -> Ints:
        """Bytes of kept gaps over each op, of shape (ops,); ``keep`` has shape (gaps,)."""
        first, last, again, sizes = self._ranges
        delta = np.zeros(len(self.graph.ops) + 1, dtype=np.int64)
        kept = sizes * keep
        np.add.at(delta, first, kept)
        np.add.at(delta, last, -kept)
        delta[0] += int(kept[again > 0].sum())
        np.add.at(delta, again, -np.where(again > 0, kept, 0))
        return np.cumsum(delta)[:-1]

    def take(self, room: Ints, g: int, count: int) -> None:
        """Take ``count`` bytes of ``room``, of shape (ops,), over the ops within a gap."""
        for first, last in self.inside(self.gaps[g]):
            room[first:last] -= count

    def has_room(self, room: Ints, g: int) -> bool:
        """Whether a gap can be kept where ``room``, of shape (ops,), is left."""
        info = self.gaps[g]
        return all(bool(np.all(room[first:last] >= info.bytes)) for first, last in self.inside(info))

    def copies_needed(self, choice: Ints) -> list[bool]:
        """For each gap whether offloading it takes a copy-out: its home is out of date by then."""
        leaving: dict[int, list[int]] = {}
        at_home: dict[tuple[int, int], int] = {}
        where: list[int] = choice.tolist()
        for g, info in enumerate(self.gaps):
            storage = info.gap.storage
            if info.arriving:
                at_home[storage, 0] = 0
            elif where[g] != KEPT:
                leaving.setdefault(storage, []).append(g)
                if info.cyclic:
                    at_home[storage, where[g]] = 0
        needed = [False] * len(self.gaps)
        for storage, gaps in leaving.items():
            if self.graph.storages[storage].arrives:
                at_home[storage, 0] = 0
            elif storage in self.graph.frozen and not any(self.gaps[g].cyclic for g in gaps):
                at_home[storage, where[gaps[0]]] = 0  # it stays there from step to step (see ``Program.clean``)
            for g in gaps:
                key, segment = (storage, where[g]), self.gaps[g].segment
                if at_home.get(key) != segment:
                    needed[g] = True
                    at_home[key] = segment
        return needed

    def within_homes(self, choice: Ints, shares: NDArray[np.float64] | None = None) -> Ints | None:
        """The choice with storages moved to other homes where a limited one would be given more than it holds.

        Those stay whose share was the largest, and of these the ones that are copied the most for each op over which
        they take room.

        Args:
            choice: shape (gaps,).
            shares: shape (gaps, homes), how much of each gap had best go where; None: all alike.

        Returns:
            Shape (gaps,); None if the homes cannot hold what leaves.
        """
        if all(home.bytes is None for home in self.homes):
            return choice
        choice = choice.copy()
        room = [None if home.bytes is None else np.full(len(self.graph.ops), home.bytes) for home in self.homes]
        if room and room[0] is not None:
            room[0] -= self.lasting_at_first
            if room[0].min(initial=0) < 0:
                return None
        stays: dict[tuple[int, int], list[int]] = {}
        for g in self.movable:
            if choice[g] != KEPT:
                stays.setdefault((self.gaps[g].gap.storage, int(choice[g])), []).append(g)

        def rank(key: tuple[int, int]) -> tuple[float, float]:
            gaps, home = stays[key], key[1]
            first, last = self._span(gaps)
            share = 0.0 if shares is None else float(shares[gaps, home].mean())
            return -share, -len(gaps) / max(last - first, 1)

        for storage, wanted in sorted(stays, key=lambda key: (rank(key), key)):
            gaps = stays[storage, wanted]
            if self.is_first_homed(storage):
                continue
            first, last = self._span(gaps)
            count = slot_bytes(self.graph.storages[storage].bytes)
            for home in (wanted, *(h for h in self.gaps[gaps[0]].homes if h != wanted)):
                left = room[home]
                if left is None:
                    break
                if int(left[first:last].min(initial=count)) >= count:
                    left[first:last] -= count
                    break
            else:
                return None
            choice[gaps] = home
        return choice

    def _span(self, gaps: Iterable[int]) -> tuple[int, int]:
        """The ops over which a storage takes room at a home that these gaps of it go to."""
        infos = [self.gaps[g] for g in gaps]
        # What is frozen is kept at home from step to step.
        if any(info.cyclic or info.gap.storage in self.graph.frozen for info in infos):
            return 0, len(self.graph.ops)
        return min(info.gap.start for info in infos), max(info.gap.end for info in infos) + 1

    def is_first_homed(self, storage: int) -> bool:
        """Whether a storage has its place at the first home all the time: inputs and outputs."""
        return storage in self.graph.outputs or self.graph.storages[storage].arrives

    @cached_property
    def lasting_at_first(self) -> int:
        """Bytes that inputs and outputs take at the first home."""
        return sum(slot_bytes(s.bytes) for s in self.graph.storages if self.is_first_homed(s.id))

    @cached_property
    def _moving(self) -> NDArray[np.bool_]:
        return np.array([info.arriving or info.leaves for info in self.gaps], dtype=np.bool_)

    @cached_property
    def _ranges(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Of each gap the range inside, where the range that it has at the start of the step ends, and its bytes."""
        n = len(self.graph.ops)
        inside = [self.inside(info) for info in self.gaps]
        ranges = np.array([ranges[0] for ranges in inside], dtype=np.int64).reshape(-1, 2)
        again = np.array([ranges[1][1] if len(ranges) > 1 else 0 for ranges in inside], dtype=np.int64)
        sizes = np.array([info.bytes for info in self.gaps], dtype=np.int64)
        return np.minimum(ranges[:, 0], n), ranges[:, 1], again, sizes
