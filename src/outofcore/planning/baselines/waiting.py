"""The storages that the forward pass leaves for the backward pass, found from the graph alone."""

from __future__ import annotations

from itertools import accumulate

from outofcore.analysis.gaps import gaps_of, is_large, placed_bytes
from outofcore.graph import StepGraph
from outofcore.plan import Gap


def waiting_gaps(graph: StepGraph) -> tuple[Gap, ...]:
    """Return the gaps that span the *turn*, of large storages that the step creates.

    The turn is the op over which most bytes wait for later uses: in a training step the end of the forward pass.
    """
    gaps = [
        gap
        for storage in graph.creator
        if is_large(graph.storages[storage].bytes)
        for gap in gaps_of(graph, storage)
        if gap.end > gap.start + 1
    ]
    change = [0] * (len(graph.ops) + 1)
    for gap in gaps:
        count = placed_bytes(graph.storages[gap.storage].bytes)
        change[gap.start + 1] += count
        change[gap.end] -= count
    waiting_bytes = list(accumulate(change))
    turn = max(range(len(waiting_bytes)), key=waiting_bytes.__getitem__)
    return tuple(sorted(gap for gap in gaps if gap.start < turn < gap.end))
