"""Keep, swap or recompute each feature map by simulation: PoocH (arXiv 1907.05013)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from outofcore.costs import Costs
from outofcore.errors import BudgetError
from outofcore.graph import StepGraph
from outofcore.plan import Plan
from outofcore.planning.baselines.one_home import use_farthest_home
from outofcore.planning.baselines.trial import MapClass, SimulatedStep, StepSimulator
from outofcore.planning.policy import Asked, CheckedPolicy
from outofcore.units import format_bytes


@dataclass(frozen=True)
class PoocH(CheckedPolicy):
    """Keeps, swaps or recomputes each feature map, by a simulated timeline.

    Ito, Imai, Le, Negishi, Kawachiya, Matsumiya & Endo, "Profiling based Out-of-core Hybrid Method for Large Neural
    Networks" (arXiv 1907.05013), section 4. A simulation classifies the feature maps, which wait for the backward pass:

    - Keep or swap: all are swapped at first. A tree search tries to keep, one after the other, maps whose copy-in
      stalled the backward pass. At each node, maps whose copy-out stalled the forward pass are kept, the last made
      first, up to the first that does not fit; then all others that fit, in the same order.
    - Swap or recompute: the map with the smallest ratio of seconds added by recomputing to those added by swapping is
      recomputed, the ratios are simulated again, and so on while one is below 1.
    - Copies-in are hoisted to the earliest op from which their room is free, then delayed as far as they stay hidden.
      Both timings are simulated; the better one is used.

        forward    A1 A2 A3 A4 A5 | turn      A4, A5  keep: used soonest, and they fit
        home       A1 ->   A3 ->              A1, A3  swap: their copies hide behind the convolutions
        backward   A5 A4 (A3 in) (A2 again) (A1 in)   A2  recompute: slower to copy than to run again

    Different from the paper (the authors' code is ``optimize_swap_targets`` of their fork of Chainer): a feature map is
    any storage that waits over the turn. A chain's intermediate results serve other maps, too. Ratios are updated only
    when they come up as the smallest. ``effort`` limits the simulations. Copies are timed by the links' rates. Storages
    below 64 KiB stay. Of several homes the farthest is used; without homes there is no plan unless everything fits. As
    in the paper, parameters, gradients, optimizer states and storages of one pass stay, and inputs are there from the
    start.

    Attributes:
        effort: ops that the simulations of ratios may run for one plan; the tree search may run a quarter of it.

    >>> PoocH(effort=100_000)
    PoocH(effort=100000)
    """

    name = "pooch"
    effort: int = 500_000

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("effort", self.effort >= 0, "0 or more")

    def variants(self, graph: StepGraph, costs: Costs, budget: int) -> Sequence[Asked]:
        def plan(home_costs: Costs, room: int) -> Plan:
            return pooch(graph, home_costs, room, effort=self.effort)

        return (use_farthest_home(graph, costs, plan),) if costs.homes else ()


def pooch(graph: StepGraph, costs: Costs, budget: int, *, effort: int = 500_000) -> Plan:
    """Plan a step by the method of ``PoocH``; raise ``BudgetError`` if no plan fits."""
    trials = StepSimulator.of(graph, costs, budget)
    in_core = trials.run([MapClass.KEEP] * len(trials.maps))
    if in_core is not None:
        return Plan("pooch", budget, in_core.decisions)
    classes = [MapClass.SWAP] * len(trials.maps)
    if not costs.homes or trials.run(classes) is None:
        reason = "even with every feature map swapped" if costs.homes else "and pooch has no home to swap to"
        raise BudgetError(
            f"the step needs more than {format_bytes(budget)} {reason}: raise the budget, or choose another policy"
        )
    search = _Classifier(trials, effort)
    _, classes = search.search_kept_maps(classes, frozenset())
    return Plan("pooch", budget, search.recompute_swapped_maps(classes).decisions)


@dataclass
class _Classifier:
    """Chooses for each feature map by simulation whether to keep, swap or recompute it."""

    trials: StepSimulator
    effort: int
    visited: int = field(default=0)  # nodes of the tree search

    def search_kept_maps(self, classes: list[MapClass], tried: frozenset[int]) -> tuple[float, list[MapClass]]:
        """Search for the feature maps to keep on the device; return the step's seconds and the best classes."""
        self.visited += 1
        trial = self.trials.run(classes)
        if trial is None:
            return inf, classes
        best = self._keep_fitting(classes, trial.stalling_out)
        for m in sorted(trial.stalling_in - tried, key=lambda m: (self.trials.maps[m].end, m)):
            if self.visited * self.trials.ops * 8 > self.effort:
                break
            tried = tried | {m}
            candidate = self.search_kept_maps([*classes[:m], MapClass.KEEP, *classes[m + 1 :]], tried)
            best = min(best, candidate, key=lambda pair: pair[0])
        return best

    def _keep_fitting(self, classes: list[MapClass], stalling: frozenset[int]) -> tuple[float, list[MapClass]]:
        """Keep swapped maps on the device where they fit, ``stalling`` maps first; return seconds and classes."""
        filled, room = list(classes), self.trials.room_with_kept_maps(classes)
        order = sorted(range(len(filled)), key=lambda m: (-self.trials.maps[m].start, m))
        for maps, stops in (([m for m in order if m in stalling], True), (order, False)):
            for m in maps:
                if filled[m] is MapClass.SWAP:
                    if self.trials.reserve(room, m):
                        filled[m] = MapClass.KEEP
                    elif stops:
                        break
        trial = self.trials.run(filled)
        return (inf if trial is None else trial.seconds), filled

    def recompute_swapped_maps(self, classes: list[MapClass]) -> SimulatedStep:
        """Recompute swapped maps where that is faster than swapping; return the simulated step."""
        trials, classes, now = self.trials, list(classes), self._run(classes)
        swapped = [m for m, map_class in enumerate(classes) if map_class is MapClass.SWAP and trials.can_recompute(m)]
        group_size = 3 * len(swapped) * trials.ops // max(self.effort, 1) + 1
        if group_size > 1:
            swapped.sort(key=lambda m: (trials.chain_seconds(m, classes) / (trials.copy_seconds(m) or 1e-12), m))
        groups = [tuple(swapped[i : i + group_size]) for i in range(0, len(swapped), group_size)]
        queue = [(0.0, g, -1) for g in range(len(groups))]  # ratio, group, number of choices when it was computed
        chosen = 0
        while queue:
            _, g, version = heappop(queue)
            if version == chosen:
                for m in groups[g]:
                    classes[m] = MapClass.RECOMPUTE
                now, chosen = self._run(classes), chosen + 1
                continue
            ratio = self._added_seconds_ratio(classes, groups[g], now)
            if ratio < 1:
                heappush(queue, (ratio, g, chosen))
        return now

    def _run(self, classes: list[MapClass]) -> SimulatedStep:
        trial = self.trials.run(classes)
        if trial is None:
            raise BudgetError(
                "the recomputed feature maps do not fit; raise the budget, or choose another policy than pooch"
            )
        return trial

    def _added_seconds_ratio(self, classes: list[MapClass], group: tuple[int, ...], step: SimulatedStep) -> float:
        """Return the seconds that recomputing a group of maps adds, divided by the seconds that swapping it adds."""

        def with_class(new_class: MapClass) -> list[MapClass]:
            return [new_class if m in group else map_class for m, map_class in enumerate(classes)]

        without_copies, recomputed = self.trials.without_copies(group).run(classes), with_class(MapClass.RECOMPUTE)
        if without_copies is None or step.seconds <= without_copies.seconds or self.trials.run(recomputed) is None:
            return inf
        added = self.trials.compute_seconds(recomputed) - self.trials.compute_seconds(with_class(MapClass.KEEP))
        return added / (step.seconds - without_copies.seconds)
