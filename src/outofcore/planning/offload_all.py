"""Everything leaves between any two uses: the smallest budget, and a baseline.

The budget it needs is that of the op that needs the most. Nothing runs ahead: each op waits for its
own copies-in, and the next for the copies-out that make its room. Between two ops in a row a
storage stays where it is, unless ``strict``; that saves copies, but what stays may lie in the way
of a tight placement.
"""

from __future__ import annotations

from outofcore.analysis.gaps import gaps_of, is_large
from outofcore.graph import StepGraph, StorageKind
from outofcore.plan import Decision, Plan, Residency


def offload_all(graph: StepGraph, budget: int, *, strict: bool = False) -> Plan:
    """Offload each gap of each large storage, as early as can be, and fetch it as late as can be.

    Args:
        graph: the step.
        budget: bytes, noted in the plan; this policy does the same whatever the budget.
        strict: offload even between an op and the very next one.
    """
    n = len(graph.ops)
    decisions: list[Decision] = []
    for storage in graph.storages:
        if not is_large(storage.bytes) or storage.kind is StorageKind.CONSTANT:
            continue
        for gap in gaps_of(graph, storage.id):
            if gap.start >= 0 and gap.end == gap.start + 1 and not strict:
                continue
            release = min(gap.start + 1, n)
            decisions.append(Decision(gap, Residency.OFFLOAD, release, gap.end))
    return Plan("offload-all", budget, tuple(decisions))
