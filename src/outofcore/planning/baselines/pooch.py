"""Every feature map is kept, swapped or computed again, as a simulation finds best: PoocH.

Ito, Imai, Le, Negishi, Kawachiya, Matsumiya & Endo, "Profiling based Out-of-core Hybrid Method for Large Neural
Networks" (arXiv 1907.05013). An iteration in which everything is swapped is profiled; then the feature maps, which the
forward pass leaves for the backward pass, are classified with a simulation of the timeline (``trial``):

1. keep or swap: all are swapped at first. Those whose copy-out held the forward pass up, the last made first, are
   kept as long as everything fits; then all others in the same order.
2. swap or recompute: for each that is still swapped, what the step gains if it is not swapped, against what it
   takes to compute it again. That with the best ratio is computed again, the simulation is asked anew, and so on until
   nothing is gained.
3. copies-in: hoisted to the earliest op from which on their room is free, then delayed as far as that leaves them
   hidden. Both timings are simulated, and the better one is taken.

    forward    A1 A2 A3 A4 A5 | turn      A4, A5  keep: used soonest, and they fit
    home       A1 ->   A3 ->              A1, A3  swap: their copies hide behind the convolutions
    backward   A5 A4 [A3 in] [A2 again] [A1 in]   A2  recompute: dearer to copy than to run again

Different from the paper: a feature map here is any storage that waits over the turn (``waiting``), with several uses
beyond it if it has them, and what a chain makes on its way to one recomputed map serves the others too. In step 2
ratios that an earlier choice has made old are only computed anew when they come up as the best, and in networks of
many maps neighbours in rank are judged together, so that the number of simulations grows no faster than that of maps.
Without homes there is no plan unless everything fits: the search starts where all maps are swapped.
Left out: profiling (costs are measured before). As in the paper parameters, gradients, optimizer states and what
lives in one pass only stay, and inputs are there from the start.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from outofcore.costs import Costs
from outofcore.errors import BudgetError
from outofcore.graph import StepGraph
from outofcore.plan import Plan
from outofcore.planning.baselines.trial import Class, Trial, Trials

# How many ops all simulations of step 2 together may run through.
_EFFORT = 500_000


def pooch(graph: StepGraph, costs: Costs, budget: int) -> Plan:
    """Plan a step by classification.

    Args:
        graph: the step.
        costs: measured or assumed.
        budget: bytes of large blocks that may be resident.

    Raises:
        BudgetError: it does not fit even with every feature map away.
    """
    trials = Trials.of(graph, costs, budget)
    in_core = trials.run([Class.KEEP] * len(trials.maps))
    if in_core is not None:
        return Plan("pooch", budget, in_core.decisions)
    classes = [Class.SWAP] * len(trials.maps)
    swapped = trials.run(classes) if costs.homes else None
    if swapped is None:
        raise BudgetError(f"with every feature map away more than {budget} bytes are needed")
    search = _Search(trials, classes, swapped)
    search.keep()
    search.recompute()
    return Plan("pooch", budget, search.best.decisions)


@dataclass
class _Search:
    trials: Trials
    classes: list[Class]
    best: Trial

    def keep(self) -> None:
        """Step 1: what is in the way of the forward pass stays, then whatever fits."""
        stalling = self.best.stalling
        room = self.trials.least_room(self.classes)
        for m in sorted(range(len(self.classes)), key=lambda m: (m not in stalling, -self.trials.maps[m].start, m)):
            if self.trials.take(room, m):
                self.classes[m] = Class.KEEP
        self.best = self.trials.run(self.classes) or self.best

    def recompute(self) -> None:
        """Step 2: the best ratio of gain to cost is computed again, as long as there is a gain."""
        swapped = [m for m, found in enumerate(self.classes) if found is Class.SWAP and self.trials.can_recompute(m)]
        cost = {m: self.trials.chain_seconds(m, self.classes) for m in swapped}
        ranked = sorted(swapped, key=lambda m: (cost[m] / max(self.trials.copy_seconds(m), 1e-12), m))
        together = 3 * len(ranked) * self.trials.ops // _EFFORT + 1
        groups = [tuple(ranked[i : i + together]) for i in range(0, len(ranked), together)]
        queue: list[tuple[float, int, int]] = []  # the ratio, negated; the group; how many choices it knows of
        for g, group in enumerate(groups):
            queue.append((-self._ratio(group, cost), g, 0))
        heapify(queue)
        chosen = 0
        while queue:
            ratio, g, known = heappop(queue)
            if ratio >= 0:
                continue
            if known < chosen:
                heappush(queue, (-self._ratio(groups[g], cost), g, chosen))
                continue
            trial = self._with(groups[g])
            if trial is None or trial.seconds >= self.best.seconds:
                continue
            for m in groups[g]:
                self.classes[m] = Class.RECOMPUTE
            self.best = trial
            chosen += 1

    def _with(self, group: Iterable[int]) -> Trial | None:
        classes = list(self.classes)
        for m in group:
            classes[m] = Class.RECOMPUTE
        return self.trials.run(classes)

    def _ratio(self, group: tuple[int, ...], cost: dict[int, float]) -> float:
        """Seconds gained per second of chains that run again; nothing gained, or no fit: below zero."""
        trial = self._with(group)
        if trial is None or trial.seconds >= self.best.seconds:
            return -1.0
        return (self.best.seconds - trial.seconds) / max(sum(cost[m] for m in group), 1e-9)
