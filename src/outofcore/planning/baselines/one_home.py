"""Adapter for published policies, which have one home: of several, the farthest is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from outofcore.costs import Costs
from outofcore.graph import StepGraph
from outofcore.plan import Decision, Plan, Residency
from outofcore.planning.policy import Asked


def use_farthest_home(graph: StepGraph, costs: Costs, plan: Callable[[Costs, int], Plan]) -> Asked:
    """Adapt a planner for one home to several: inputs and outputs use the first home, other storages the last."""
    far_costs, last = replace(costs, homes=costs.homes[-1:]), len(costs.homes) - 1

    def at_home(decision: Decision) -> Decision:
        storage = decision.gap.storage
        first = storage in graph.outputs or graph.storages[storage].arrives
        return decision if first or decision.residency is not Residency.OFFLOAD else replace(decision, home=last)

    def plan_for_homes(room: int) -> Plan:
        planned = plan(far_costs, room)
        return planned if last < 1 else replace(planned, decisions=tuple(map(at_home, planned.decisions)))

    return plan_for_homes
