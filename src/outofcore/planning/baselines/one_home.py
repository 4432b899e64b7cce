"""The published systems know one home. Where there are several it is the farthest, which holds the most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from outofcore.costs import Costs
from outofcore.graph import StepGraph
from outofcore.plan import Decision, Plan, Residency
from outofcore.planning.policy import Asked


def for_one_home(graph: StepGraph, costs: Costs, plan: Callable[[Costs, int], Plan]) -> Asked:
    """A policy of one home for a step with any number of them.

    Args:
        graph: the step.
        costs: with all homes.
        plan: of costs with one home at most, and of bytes of room.

    Returns:
        From bytes of room to a plan in which what leaves goes to the farthest home; but inputs come from the first, and
        outputs go there in the end, so that they leave for it in between as well.
    """
    one, last = replace(costs, homes=costs.homes[-1:]), len(costs.homes) - 1

    def at_home(decision: Decision) -> Decision:
        storage = decision.gap.storage
        first = storage in graph.outputs or graph.storages[storage].arrives
        return decision if first or decision.residency is not Residency.OFFLOAD else replace(decision, home=last)

    def asked(room: int) -> Plan:
        made = plan(one, room)
        return made if last < 1 else replace(made, decisions=tuple(map(at_home, made.decisions)))

    return asked
