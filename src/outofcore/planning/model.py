"""The planning problem in arrays: gaps, the bytes they hold, and what a choice costs.

Shared by the relaxation, which prices the gaps, and the timing, which lays copies in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from outofcore.analysis.gaps import gaps_of, is_large, large_needs, placed_bytes
from outofcore.costs import Costs, Home
from outofcore.graph import StepGraph, StorageKind
from outofcore.plan import Gap

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class GapInfo:
    """One gap of a large storage that has ops inside.

    ``segment`` numbers the stretches of the step in which the storage is not written: a copy at
    home made in one serves all gaps of the same stretch.
    """

    gap: Gap
    bytes: int  # as placed
    segment: int
    cyclic: bool
    arriving: bool  # the gap before an input's first use: there is nothing to keep


@dataclass(frozen=True)
class Model:
    """A step under a limit.

    Attributes:
        graph: the step.
        costs: measured or assumed.
        home: where things go; None: nothing can be offloaded.
        limit: bytes of large blocks.
        gaps: all that could be decided about.
        free: for each op the bytes left beside what it touches and its workspace.
        times: when each op starts, and at the end when the step ends; by default as if nothing ever stalled.
        changed: storages that the step writes and that persist.
    """

    graph: StepGraph
    costs: Costs
    home: Home | None
    limit: int
    gaps: tuple[GapInfo, ...]
    free: Ints
    times: tuple[float, ...]
    changed: frozenset[int]

    @staticmethod
    def of(graph: StepGraph, costs: Costs, limit: int, times: Sequence[float] | None = None) -> Model:
        """The model of a step in which large blocks may take ``limit`` bytes.

        ``times`` says when each op starts, and when the step ends, where that is known better than by adding up
        the ops: from a simulation with stalls.
        """
        n = len(graph.ops)
        written: dict[int, list[int]] = {}
        for op in graph.ops:
            for storage in dict.fromkeys(op.mutates + op.creates):
                written.setdefault(storage, []).append(op.id)
        found: list[GapInfo] = []
        for storage in graph.storages:
            if not is_large(storage.bytes) or storage.kind is StorageKind.CONSTANT:
                continue
            writes = written.get(storage.id, [])
            for gap in gaps_of(graph, storage.id):
                cyclic = gap.end >= n
                if gap.end == gap.start + 1:
                    continue
                segment = sum(1 for w in writes if w <= gap.start)
                found.append(GapInfo(gap, placed_bytes(storage.bytes), segment, cyclic, gap.start < 0))
        needs = np.array(large_needs(graph, costs), dtype=np.int64)
        if times is None:
            times = (0.0, *accumulate(cost.seconds for cost in costs.ops))
        home = costs.homes[0] if costs.homes else None
        changed = frozenset(s for s in written if s in graph.persistent)
        return Model(graph, costs, home, limit, tuple(found), limit - needs, tuple(times), changed)

    def inside(self, info: GapInfo) -> tuple[tuple[int, int], ...]:
        """The ranges of ops within a gap, half-open; a cyclic gap has two."""
        n = len(self.graph.ops)
        if not info.cyclic:
            return ((info.gap.start + 1, info.gap.end),)
        return ((info.gap.start + 1, n), (0, info.gap.end - n))

    def seconds_inside(self, info: GapInfo) -> float:
        """Seconds between the two uses that a gap lies between."""
        n, times = len(self.graph.ops), self.times
        end = times[info.gap.end] if info.gap.end <= n else times[n] + times[info.gap.end - n]
        return end - times[info.gap.start + 1]

    def held(self, keep: NDArray[np.bool_]) -> Ints:
        """For each op the bytes of gaps that are kept over it."""
        first, last, again, sizes = self._ranges
        n = len(self.graph.ops)
        delta = np.zeros(n + 1, dtype=np.int64)
        kept = sizes * keep
        np.add.at(delta, first, kept)
        np.add.at(delta, last, -kept)
        delta[0] += int(kept[again > 0].sum())
        np.add.at(delta, again, -np.where(again > 0, kept, 0))
        return np.cumsum(delta)[:-1]

    def around(self, op: int) -> NDArray[np.bool_]:
        """Which gaps have an op inside."""
        first, last, again, _ = self._ranges
        return ((first <= op) & (op < last)) | (op < again)

    @cached_property
    def arriving(self) -> NDArray[np.bool_]:
        """For each gap whether it arrives."""
        return np.array([info.arriving for info in self.gaps], dtype=np.bool_)

    @cached_property
    def _ranges(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Of each gap the range inside, where the range that it has at the start of the step ends, and its bytes."""
        n = len(self.graph.ops)
        inside = [self.inside(info) for info in self.gaps]
        ranges = np.array([ranges[0] for ranges in inside], dtype=np.int64).reshape(-1, 2)
        again = np.array([ranges[1][1] if len(ranges) > 1 else 0 for ranges in inside], dtype=np.int64)
        sizes = np.array([info.bytes for info in self.gaps], dtype=np.int64)
        return np.minimum(ranges[:, 0], n), ranges[:, 1], again, sizes
