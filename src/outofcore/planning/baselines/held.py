"""Bytes held at each op under some decisions, from the graph alone; temporaries of recomputation are not counted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from outofcore.analysis.gaps import gaps_of, is_large, large_needs, placed_bytes
from outofcore.costs import Costs
from outofcore.graph import StepGraph, StorageKind
from outofcore.plan import Decision, Gap
from outofcore.planning.problem import Ints


@dataclass(frozen=True)
class Held:
    """Computes the bytes that a step holds at each op under given decisions."""

    graph: StepGraph
    kept: Ints  # bytes of large blocks at each op without eviction: tensors it touches, its workspace, and open gaps

    @staticmethod
    def of(graph: StepGraph, costs: Costs) -> Held:
        """Build the calculator for a step."""
        n = len(graph.ops)
        change = np.zeros(n + 1, dtype=np.int64)
        for storage in graph.storages:
            if not is_large(storage.bytes) or storage.kind is StorageKind.CONSTANT:
                continue
            for gap in gaps_of(graph, storage.id):
                _add(change, n, gap.start + 1, gap.end, placed_bytes(storage.bytes))
        return Held(graph, np.array(large_needs(graph, costs), dtype=np.int64) + np.cumsum(change)[:-1])

    def bytes_of(self, gap: Gap) -> int:
        return placed_bytes(self.graph.storages[gap.storage].bytes)

    def bytes_by_op(self, decisions: Iterable[Decision]) -> Ints:
        """Return the bytes held at each op under ``decisions``, which name each gap at most once."""
        n = len(self.kept)
        change = np.zeros(n + 1, dtype=np.int64)
        for decision in decisions:
            _add(change, n, decision.release_by, decision.fetch_at, -self.bytes_of(decision.gap))
        return self.kept + np.cumsum(change)[:-1]

    def peak(self, decisions: Iterable[Decision]) -> int:
        return int(self.bytes_by_op(decisions).max(initial=0))


def _add(change: Ints, n: int, first: int, last: int, count: int) -> None:
    """Add ``count`` bytes over ops [first, last), modulo ``n``, to the array of changes between ops."""
    for begin, end in ((first, min(last, n)), (max(first - n, 0), last - n)):
        if begin < end:
            change[begin] += count
            change[end] -= count
