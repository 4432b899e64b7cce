"""Everything leaves between any two uses: the smallest budget, and a baseline.

The budget it needs is that of the op that needs the most. Nothing runs ahead: each op waits for its
own copies-in, and the next for the copies-out that make its room. Between two ops in a row a
storage stays where it is, unless ``strict``; that saves copies, but what stays may lie in the way
of a tight placement.
"""

from __future__ import annotations

from outofcore.analysis.gaps import gaps_of, is_large
from outofcore.costs import Costs
from outofcore.graph import StepGraph, StorageKind
from outofcore.plan import Decision, Plan, Residency
from outofcore.planning.problem import Problem


def offload_all(graph: StepGraph, budget: int, *, strict: bool = False, costs: Costs | None = None) -> Plan:
    """Offload each gap of each large storage, as early as can be, and fetch it as late as can be.

    Args:
        graph: the step.
        budget: bytes, noted in the plan; this policy does the same whatever the budget.
        strict: offload even between an op and the very next one.
        costs: says which homes there are, the nearest of which takes what it holds; None: there is one, without limit.
    """
    n = len(graph.ops)
    homes = {} if costs is None else _homes(graph, costs)
    elsewhere = 0 if costs is None else max(len(costs.homes) - 1, 0)
    decisions: list[Decision] = []
    for storage in graph.storages:
        if not is_large(storage.bytes) or storage.kind is StorageKind.CONSTANT:
            continue
        first = storage.arrives or storage.id in graph.outputs
        home = 0 if first else homes.get(storage.id, elsewhere)
        for gap in gaps_of(graph, storage.id):
            if gap.start >= 0 and gap.end == gap.start + 1 and not strict:
                continue
            release = min(gap.start + 1, n)
            decisions.append(Decision(gap, Residency.OFFLOAD, release, gap.end, home))
    return Plan("offload-all", budget, tuple(decisions))


def _homes(graph: StepGraph, costs: Costs) -> dict[int, int]:
    """For each storage with ops between its uses the nearest home that has room for it."""
    problem = Problem.of(graph, costs, 0)
    choice = problem.within_homes(0 * problem.nothing_leaves())
    if choice is None:
        return {}
    return {info.gap.storage: int(home) for info, home in zip(problem.gaps, choice, strict=True)}
