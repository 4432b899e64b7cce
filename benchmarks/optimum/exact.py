"""The best plan for a small graph, proved: a search over all choices and all orders of taking room.

What a gap's bytes do, and when its copies run, is decided together, op by op, by best-first branch and bound
(Land & Doig 1960). The model (``fluid``) is that of the simulator with memory as a fluid: a copy or an op starts when
enough bytes are free, wherever they lie. So a placed program can only be slower than the same choices are there.

A partial schedule is left where another has made the same choices and is nowhere later, or where it cannot beat
the best known. How good it may still become is bounded by

- the linear program of ``prices``: its least step time, and for each gap and choice the reduced cost, by which
  any schedule with that choice is at least longer;
- compute: what is done, and the ops that are left, what was dropped once more among them;
- the copies-in that are due: in the order of their uses, which is the best for this, each after those before it,
  and after it the ops from its use on.

The optimum is one over schedules in which

- each gap of a large storage is kept, offloaded or recomputed as a whole; from one op to the very next it is kept;
- values leave right after the use that begins their gap; what is needed later comes back before what is needed
  sooner only where it can start sooner;
- what runs again is not preceded by copies-in for it before the op in front of it has started;
- what is dropped is computed again right before an op that uses it, or on the way to something else that is;
- what is made again reads from a block that is being copied out only while that copy lasts;
- while ops run again no copies-in start but those that they read, except during the last of them;
- gradients that the step leaves go home as all outputs do (see ``planning.resident_gradients``);
- all goes to the first home, and addresses do not matter.

Beyond some 30 ops, or a dozen gaps that compete for room, the search may not end within its limit: then there is still
a bound that is proved.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count

from optimum.fluid import Fluid, Moment
from optimum.prices import Prices, prices
from optimum.reach import decisions_of, spread, starts
from outofcore.costs import Costs
from outofcore.graph import StepGraph
from outofcore.plan import Plan

# Two step times that differ by less than this share are the same.
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Optimum:
    """What the search found.

    Attributes:
        lower_seconds: no schedule of the class takes less.
        seconds: of the best schedule found, in which addresses do not matter; None: none within what was asked for.
        plans: plans that do what it does, the literal one first, then with room taken as early as there is some to
            spare. As placed, they may take longer.
        proved: whether nothing better is left to be found.
        looked_at: partial schedules.
    """

    lower_seconds: float
    seconds: float | None
    plans: tuple[Plan, ...]
    proved: bool
    looked_at: int


def optimum(
    graph: StepGraph, costs: Costs, budget: int, *, known: float | None = None, effort: int = 100_000
) -> Optimum | None:
    """Search for the best plan.

    Args:
        graph: the step.
        costs: measured or assumed.
        budget: bytes of the arena.
        known: seconds of a plan that is there already; only better ones are looked for.
        effort: how many partial schedules to look at.

    Returns:
        None if no plan can hold the step within the budget. With several homes the best plan for the first of them,
        and no proof.
    """
    priced = prices(graph, costs, budget)
    if priced is None:
        return None
    best = _Search(Fluid.of(graph, costs, budget), priced, known, effort).run(budget)
    if len(costs.homes) > 1:
        # The links of other homes could be used at the same time.
        return replace(best, lower_seconds=costs.compute_seconds, proved=False)
    return best


@dataclass
class _Search:
    fluid: Fluid
    prices: Prices
    known: float | None
    effort: int

    def run(self, budget: int) -> Optimum:
        order = count()
        limit = float("inf") if self.known is None else self.known * (1 - _TOLERANCE)
        queue: list[tuple[float, int, int, Moment]] = []
        seen: dict[tuple[object, ...], list[Moment]] = defaultdict(list)
        looked_at = 0

        def offer(moment: Moment) -> None:
            bound = self._bound(moment)
            if bound >= limit:
                return
            key = moment.key
            for other in seen[key]:
                if other.dominates(moment):
                    return
            seen[key] = [other for other in seen[key] if not moment.dominates(other)]
            seen[key].append(moment)
            heappush(queue, (bound, -moment.op, next(order), moment))

        for moment in starts(self.fluid, self.prices):
            offer(moment)
        while queue:
            bound, _, _, moment = heappop(queue)
            if all(other is not moment for other in seen[moment.key]):
                continue
            if looked_at >= self.effort:
                return Optimum(bound, self.known, (), False, looked_at)
            looked_at += 1
            if moment.finished:
                literal = decisions_of(self.fluid, moment)
                plans = tuple(Plan("exact", budget, made) for made in (literal, spread(self.fluid, literal)))
                return Optimum(bound, bound, plans, True, looked_at)
            for following in self.fluid.following(moment, self.prices):
                offer(following)
        if self.known is None:
            return Optimum(float("inf"), None, (), True, looked_at)
        return Optimum(self.known, self.known, (), True, looked_at)

    def _bound(self, moment: Moment) -> float:
        """Seconds that a step takes at least which begins like this."""
        return max(self.prices.least + moment.penalty, self.fluid.least(moment))
