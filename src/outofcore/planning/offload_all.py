"""Everything is offloaded between any two uses: the smallest budget, and a baseline."""

from __future__ import annotations

from outofcore.analysis.gaps import gaps_of, is_large
from outofcore.costs import Costs
from outofcore.graph import StepGraph, StorageKind
from outofcore.plan import Decision, Plan, Residency
from outofcore.planning.problem import Problem


def offload_all(graph: StepGraph, budget: int, *, strict: bool = False, costs: Costs | None = None) -> Plan:
    """Return the plan that evicts large storages in their gaps, to the nearest home with room.

    ``budget`` is only recorded in the plan. ``strict`` offloads between two consecutive ops, too: more copies, but
    tighter placements. ``costs`` names the homes, the nearest to be filled first; by default one home without limit.
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
    """Map each storage that can be evicted to the nearest home with room; return {} if the homes are too small."""
    problem = Problem.of(graph, costs, 0)
    choice = problem.fit_homes(0 * problem.all_resident())
    if choice is None:
        return {}
    return {info.gap.storage: int(home) for info, home in zip(problem.gaps, choice, strict=True)}
