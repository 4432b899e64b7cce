"""Adapter for published policies, which have one home: of several, the farthest is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from outofcore.costs import Costs
from outofcore.graph import StepGraph
from outofcore.plan import Decision, Plan, Residency
from outofcore.planning.policy import Asked


def use_farthest_home(graph: StepGraph, costs: Costs, planner: Callable[[Costs, int], Plan]) -> Asked:
    """Turn a planner for one home into a planner that offloads to the last of several homes."""
    far_costs, last = replace(costs, homes=costs.homes[-1:]), len(costs.homes) - 1

    def at_home(decision: Decision) -> Decision:
        storage = decision.gap.storage
        first = storage in graph.outputs or graph.storages[storage].arrives
        return decision if first or decision.residency is not Residency.OFFLOAD else replace(decision, home=last)

    def plan_for_homes(room: int) -> Plan:
        planned = planner(far_costs, room)
        return planned if last < 1 else replace(planned, decisions=tuple(map(at_home, planned.decisions)))

    return plan_for_homes
