"""Gradients that a step leaves in ``.grad`` and about which a plan says nothing: as many as there is room for stay on
the device until the next step begins. The search for plans decides about large ones itself (``tuner``).

The others go home after their last use, where the user sees them as well. Nothing needs those copies: the next step
makes all of these gradients anew. Those used last stay first, since they hold their room for the shortest time.
"""

from __future__ import annotations

from dataclasses import replace

from outofcore.costs import Costs
from outofcore.graph import StepGraph
from outofcore.plan import Plan
from outofcore.planning.placing import Planned, fit_once, worth

# How often another number of gradients is tried; each time halves what is not known.
_TRIES = 6


def candidates(graph: StepGraph, plan: Plan) -> list[int]:
    """The gradients about which a plan says nothing, those used last first."""
    decided = {decision.gap.storage for decision in plan.decisions}.union(plan.staying)
    return sorted(graph.gradients_left - decided, key=lambda storage: (-graph.uses[storage][-1], storage))


def all_staying(graph: StepGraph, plan: Plan) -> Plan:
    """The plan with every gradient staying that could."""
    return replace(plan, staying=tuple(sorted(candidates(graph, plan))))


def let_stay(graph: StepGraph, costs: Costs, budget: int, planned: Planned) -> Planned:
    """The plan with as many gradients staying as there is room for; never a slower one.

    Args:
        graph: the step.
        costs: measured or assumed.
        budget: bytes of the arena.
        planned: a plan within the budget.
    """
    order = candidates(graph, planned.plan)
    best, most = planned, worth(costs, planned)
    fits, too_many, count = 0, len(order) + 1, len(order)
    for _ in range(_TRIES):
        if not fits < count < too_many:
            break
        plan = replace(planned.plan, staying=tuple(sorted((*planned.plan.staying, *order[:count]))))
        found = fit_once(graph, costs, budget, plan, effort=0)
        if found is not None and worth(costs, found) <= most:
            best, most, fits = replace(found, candidates=planned.candidates), worth(costs, found), count
        else:
            too_many = count
        count = (fits + too_many) // 2
    return best
