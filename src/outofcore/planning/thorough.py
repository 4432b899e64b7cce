"""What more ``auto`` does for small steps: it searches for the optimum, and polishes what it has.

The search of ``exact`` ends for most steps of up to 30 ops within a few seconds. What it finds is the best as long as
addresses do not matter; so its plans, and the best that was there before, are placed, and ``polishing`` makes
them better.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from outofcore.costs import Costs
from outofcore.graph import StepGraph
from outofcore.planning.bounds import lower_bound_seconds
from outofcore.planning.exact import optimum
from outofcore.planning.model import Model
from outofcore.planning.placing import Planned, fit_once, worth
from outofcore.planning.polishing import Polish

# Partial schedules that the search looks at: about a second for steps of 30 ops.
EFFORT = 4000
# The most ops of a step that is searched; the most of its storages that may be elsewhere when it begins, and the most
# gaps that begin at one op: the search goes through all that these could be.
_OPS, _BEGUN, _AT_ONE = 30, 10, 6
# What a step that is about to run is worth: a search as long as this many of them, of which one unit takes so long.
_STEPS_WORTH, _UNIT_SECONDS = 200, 0.0015
# A plan that takes no longer than this, in multiples of a lower bound, need not be made better.
_GOOD = 1.0005
# Of the effort: how many changes are tried each time that something is polished.
_CHANGES = 5
# How often the best plan that was there before is polished, with other draws.
_ROUNDS = 3


def effort_worth(costs: Costs) -> int:
    """The effort to spend on a step that waits to run: no more than some hundred runs of it could win back."""
    return min(EFFORT, int(_STEPS_WORTH * costs.compute_seconds / _UNIT_SECONDS))


def thorough(
    graph: StepGraph, costs: Costs, budget: int, known: Sequence[Planned], effort: int = EFFORT
) -> list[Planned]:
    """Better plans than those known, if the step is small and any are found.

    Args:
        graph: the step.
        costs: measured or assumed.
        budget: bytes of the arena.
        known: plans within the budget.
        effort: partial schedules to look at, and so on; 0: look for nothing.
    """
    if not effort or len(graph.ops) > _OPS:
        return []
    good = (lower_bound_seconds(graph, costs, budget) or 0.0) * _GOOD
    if any(planned.timeline.step_seconds <= good for planned in known):
        return []
    polish = Polish(graph, costs, budget, good)
    changes = effort // _CHANGES
    start = min(known, key=lambda planned: worth(costs, planned), default=None)
    found = [polish.improve(start, changes, seed) for seed in range(_ROUNDS)] if start is not None else []
    if _is_searchable(Model.of(graph, costs, budget)):
        seconds = min((planned.timeline.step_seconds for planned in found), default=None)
        best = optimum(graph, costs, budget, known=seconds, effort=effort)
        for plan in best.plans if best is not None else ():
            planned = fit_once(graph, costs, budget, plan)
            if planned is not None:
                found.append(polish.improve(planned, changes))
    return found


def _is_searchable(model: Model) -> bool:
    begun = sum(1 for info in model.gaps if info.cyclic)
    at_one = Counter(info.gap.start for info in model.gaps if not info.cyclic)
    return begun <= _BEGUN and max(at_one.values(), default=0) <= _AT_ONE
