"""Exact search for the optimal plan of a small graph, over all choices and all orders of allocation.

Best-first branch and bound (Land & Doig 1960) decides residencies and copy times together, op by op. The model
(``fluid``) is the simulator's, with memory as a fluid: addresses are ignored, so a placed program is never faster than
the same choices in the model. A partial schedule is pruned if another one with the same choices is no later anywhere,
or if it cannot beat the best known plan. The lower bound combines the linear program of ``prices``, the remaining ops,
and the due copies-in in the order of their uses.

The optimum covers schedules in which

- a gap of a large storage is kept, offloaded or recomputed as a whole, and kept if the uses are adjacent ops;
- values are evicted right after the use that begins their gap; a later-needed value is fetched first only if its copy
  can start sooner;
- copies-in for a rerun start no earlier than the preceding op;
- a dropped value is recomputed right before an op that uses it, or as an input of another rerun;
- a rerun reads a block that is being copied out only during that copy;
- during reruns only their own inputs are copied in, except during the last one;
- gradients left by the step go home like all outputs (see ``planning.resident_gradients``);
- the first home is used.

Beyond about 30 ops, the search may hit its limit; the result is then a proven lower bound.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count

from optimum.fluid import Fluid, Moment
from optimum.prices import Prices, price_choices
from optimum.reach import decisions_of, initial_moments, relax_times
from outofcore.costs import Costs
from outofcore.graph import StepGraph
from outofcore.plan import Plan

# Step times within this relative difference are equal.
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Optimum:
    """The result of the search; ``plans`` are the literal plan and one with room taken as early as possible."""

    lower_seconds: float
    seconds: float | None
    plans: tuple[Plan, ...]
    proved: bool
    looked_at: int


def optimum(
    graph: StepGraph, costs: Costs, budget: int, *, known: float | None = None, effort: int = 100_000
) -> Optimum | None:
    """Search for a plan faster than ``known_seconds``, examining at most ``effort`` partial schedules.

    Returns None if no plan fits the budget. With several homes, the best plan for the first home, without a proof.
    """
    priced = price_choices(graph, costs, budget)
    if priced is None:
        return None
    best = _ExactSearch(Fluid.of(graph, costs, budget), priced, known, effort).run(budget)
    if len(costs.homes) > 1:
        # Using the other homes' links concurrently could be faster.
        return replace(best, lower_seconds=costs.compute_seconds, proved=False)
    return best


@dataclass
class _ExactSearch:
    fluid: Fluid
    prices: Prices
    known: float | None
    effort: int

    def run(self, budget: int) -> Optimum:
        order = count()
        limit = float("inf") if self.known is None else self.known * (1 - _TOLERANCE)
        queue: list[tuple[float, int, int, Moment]] = []
        visited: dict[tuple[object, ...], list[Moment]] = defaultdict(list)
        looked_at = 0

        def offer(moment: Moment) -> None:
            bound = self._bound(moment)
            if bound >= limit:
                return
            key = moment.key
            for visited_moment in visited[key]:
                if visited_moment.dominates(moment):
                    return
            visited[key] = [visited_moment for visited_moment in visited[key] if not moment.dominates(visited_moment)]
            visited[key].append(moment)
            heappush(queue, (bound, -moment.op, next(order), moment))

        for moment in initial_moments(self.fluid, self.prices):
            offer(moment)
        while queue:
            bound, _, _, moment = heappop(queue)
            if all(visited_moment is not moment for visited_moment in visited[moment.key]):
                continue
            if looked_at >= self.effort:
                return Optimum(bound, self.known, (), False, looked_at)
            looked_at += 1
            if moment.finished:
                literal = decisions_of(self.fluid, moment)
                plans = tuple(
                    Plan("exact", budget, decisions) for decisions in (literal, relax_times(self.fluid, literal))
                )
                return Optimum(bound, bound, plans, True, looked_at)
            for successor in self.fluid.successors(moment, self.prices):
                offer(successor)
        if self.known is None:
            return Optimum(float("inf"), None, (), True, looked_at)
        return Optimum(self.known, self.known, (), True, looked_at)

    def _bound(self, moment: Moment) -> float:
        return max(self.prices.lower_seconds + moment.penalty, self.fluid.lower_bound(moment))
