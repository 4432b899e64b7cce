"""Bytes that are held at each op under a choice of decisions, found from the graph alone.

As in program order: room is counted as taken from ``fetch_at`` and as free from ``release_by``. What exists
only while something is computed again is not counted.
"""

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
    """A step in which everything stays.

    Attributes:
        graph: the step.
        kept: for each op the bytes of large blocks that are held if nothing leaves: what the op touches, its
            workspace, and what lies between two uses.
    """

    graph: StepGraph
    kept: Ints

    @staticmethod
    def of(graph: StepGraph, costs: Costs) -> Held:
        """What a step holds in which everything stays."""
        n = len(graph.ops)
        change = np.zeros(n + 1, dtype=np.int64)
        for storage in graph.storages:
            if not is_large(storage.bytes) or storage.kind is StorageKind.CONSTANT:
                continue
            for gap in gaps_of(graph, storage.id):
                _add(change, n, gap.start + 1, gap.end, placed_bytes(storage.bytes))
        return Held(graph, np.array(large_needs(graph, costs), dtype=np.int64) + np.cumsum(change)[:-1])

    def bytes_of(self, gap: Gap) -> int:
        """Bytes that a gap's storage takes."""
        return placed_bytes(self.graph.storages[gap.storage].bytes)

    def under(self, decisions: Iterable[Decision]) -> Ints:
        """For each op the bytes that are held under decisions, each about another gap."""
        n = len(self.kept)
        change = np.zeros(n + 1, dtype=np.int64)
        for decision in decisions:
            _add(change, n, decision.release_by, decision.fetch_at, -self.bytes_of(decision.gap))
        return self.kept + np.cumsum(change)[:-1]

    def peak(self, decisions: Iterable[Decision]) -> int:
        """The most bytes that are held under decisions."""
        return int(self.under(decisions).max(initial=0))


def _add(change: Ints, n: int, first: int, last: int, count: int) -> None:
    """Note ``count`` bytes over [first, last), in indices that run on into the next step."""
    for begin, end in ((first, min(last, n)), (max(first - n, 0), last - n)):
        if begin < end:
            change[begin] += count
            change[end] -= count
