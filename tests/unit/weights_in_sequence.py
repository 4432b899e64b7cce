"""A step that uses its weights in order, and then again in reverse order."""

from __future__ import annotations

from outofcore.costs import Costs, Home, OpCost
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.planning import in_core_budget, policy_of
from outofcore.units import MIB

LAYERS = 5
WINDOW = policy_of("window")


def chain(count: int = LAYERS) -> StepGraph:
    storages = tuple(Storage(i, MIB, StorageKind.PARAMETER, f"w{i}") for i in range(count))
    order = [*range(count), *reversed(range(count))]
    return StepGraph(storages, tuple(Op(n, "use", (i,), (i,), (), source=f"{n}") for n, i in enumerate(order)))


GRAPH = chain()
COSTS = Costs((OpCost(0.01),) * 2 * LAYERS, (Home("disk", None, 1e9, 1e9),))
BUDGET = in_core_budget(GRAPH, COSTS) // 2
