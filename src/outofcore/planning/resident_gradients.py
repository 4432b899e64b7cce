"""Keep gradients in ``.grad`` on the device until the next step begins, as far as they fit.

Only gradients without a decision are considered; the search for plans decides about large ones itself (``tuner``). The
others go home after their last use, where the user sees them, too. They are not fetched: the next step writes them
again.
"""

from __future__ import annotations

from dataclasses import replace

from outofcore.costs import Costs
from outofcore.graph import StepGraph
from outofcore.plan import Plan
from outofcore.planning.placing import Planned, comparison_seconds, fit_plan

# Number of bisection steps for the number of gradients.
_TRIES = 6


def undecided_gradients(graph: StepGraph, plan: Plan) -> list[int]:
    """Return the gradients without a decision, in the order of their last uses, the latest first."""
    decided = {decision.gap.storage for decision in plan.decisions}.union(plan.staying)
    return sorted(graph.gradients_left - decided, key=lambda storage: (-graph.uses[storage][-1], storage))


def keep_all_gradients(graph: StepGraph, plan: Plan) -> Plan:
    """Return the plan in which all gradients without a decision stay."""
    return replace(plan, staying=tuple(sorted(undecided_gradients(graph, plan))))


def keep_fitting_gradients(graph: StepGraph, costs: Costs, budget: int, planned: Planned) -> Planned:
    """Return the plan with as many gradients kept on the device as fit without a slowdown."""
    order = undecided_gradients(graph, planned.plan)
    best, max_worth = planned, comparison_seconds(costs, planned)
    fits, too_many, count = 0, len(order) + 1, len(order)
    for _ in range(_TRIES):
        if not fits < count < too_many:
            break
        plan = replace(planned.plan, staying=tuple(sorted((*planned.plan.staying, *order[:count]))))
        candidate = fit_plan(graph, costs, budget, plan, effort=0)
        if candidate is not None and comparison_seconds(costs, candidate) <= max_worth:
            best, max_worth, fits = (
                replace(candidate, candidates=planned.candidates),
                comparison_seconds(costs, candidate),
                count,
            )
        else:
            too_many = count
        count = (fits + too_many) // 2
    return best
