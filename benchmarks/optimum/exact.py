"""Exact search for the optimal plan of a small graph, over all choices and all orders of allocation.

Best-first branch and bound (Land & Doig 1960) decides residencies and copy times together, op by op. The model
(``fluid``) is the simulator's, with memory as a fluid: a copy or an op starts when enough bytes are free, regardless of
addresses. A placed program is therefore never faster than the same choices in the model.

A partial schedule is pruned if another schedule with the same choices is nowhere later, or if it cannot beat the best
known plan. Its lower bound combines:

- the linear program of ``prices``: its optimum, plus the reduced cost of each choice made;
- compute: elapsed time, the remaining ops, and one rerun of each dropped storage's writer;
- due copies-in, in the order of their uses, each followed by the ops from that use on.

The optimum covers schedules in which

- a gap of a large storage is kept, offloaded or recomputed as a whole, and kept if the uses are adjacent ops;
- values are evicted right after the use that begins their gap, and a later-needed value is fetched first only if its
  copy can start sooner;
- copies-in for a rerun start no earlier than the preceding op;
- a dropped value is recomputed right before an op that uses it, or as an input of another rerun;
- a rerun reads a block that is being copied out only during that copy;
- during reruns only their own inputs are copied in, except during the last one;
- gradients left by the step go home like all outputs (see ``planning.resident_gradients``);
- the first home is used, and addresses are ignored.

Beyond about 30 ops, or a dozen gaps that compete for room, the search may hit its limit; the result is then a proven
lower bound.
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
    """The result of the search.

    Attributes:
        lower_seconds: lower bound on every schedule of the class.
        seconds: of the best schedule, ignoring addresses; None if the search found none.
        plans: plans of that schedule: the literal one, then one with room taken as early as possible. Placed plans may
            take longer.
        proved: whether the result is proven optimal.
        looked_at: number of partial schedules examined.
    """

    lower_seconds: float
    seconds: float | None
    plans: tuple[Plan, ...]
    proved: bool
    looked_at: int


def optimum(
    graph: StepGraph, costs: Costs, budget: int, *, known: float | None = None, effort: int = 100_000
) -> Optimum | None:
    """Search for the optimal plan.

    Args:
        known: seconds of a known plan; only faster plans are searched.
        effort: maximum number of partial schedules to examine.

    Returns:
        None if no plan fits the budget. With several homes, the best plan for the first home, without a proof.
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
        """Return a lower bound on steps that begin with this schedule."""
        return max(self.prices.lower_seconds + moment.penalty, self.fluid.lower_bound(moment))
