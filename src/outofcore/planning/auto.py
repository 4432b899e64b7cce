"""The best plan that is found: ``policy="auto"``.

Three sources of plans, each asked as long as that may pay:

- ``priced``: what to offload, by linear programming, with several guesses of the time that copies take;
- ``dropping`` and ``annealing``: what to compute again, by greedy changes and then random ones;
- ``mixed``: both at once. How much of the bytes that are too many is computed again, and how much offloaded, is a
  single number; the best is looked for on a grid, and then nearer and nearer around the best.

Every plan is lowered, placed within the budget and simulated, and the one that is worth most is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from outofcore.costs import Costs
from outofcore.graph import StepGraph
from outofcore.plan import Plan
from outofcore.planning.annealing import anneal
from outofcore.planning.chains import Choices
from outofcore.planning.contents import Contents
from outofcore.planning.dropping import Dropping
from outofcore.planning.mixed import mixed
from outofcore.planning.model import Ints, Model
from outofcore.planning.placing import Planned, fit_locally, op_times, room_for_large, worth

# Changes that the annealing tries for each gap that could be computed again.
_TRIES = 200
# The most of them, so that the largest steps are planned in time that grows no faster than they.
_MOST_TRIES = 400_000
# Steps no longer than this, in multiples of their ops, are not worth any more search.
_GOOD = 1.0005
# Shares of the overload that are offloaded, to start with; the rest is computed again.
_SHARES = (0.0, 0.25, 0.5, 0.75)
# How often the best share is looked for more closely.
_ZOOMS = 2
_TRANSITS = (1.0, 0.0, 2.0, 4.0)
# How often a plan is made again with the times at which ops really start.
_REFINEMENTS = 4
# How often no-home plans are made again with less room where blocks stick out.
_NEVER_AWAY = 6


def auto(graph: StepGraph, costs: Costs, budget: int) -> list[Planned]:
    """Plans worth comparing, the best among them.

    Args:
        graph: the step.
        costs: measured or assumed.
        budget: bytes of the arena.
    """
    search = _Search(graph, costs, budget)
    search.run()
    return search.found


@dataclass
class _Search:
    graph: StepGraph
    costs: Costs
    budget: int
    found: list[Planned] = field(default_factory=list[Planned])

    def __post_init__(self) -> None:
        room = room_for_large(self.graph, self.costs, self.budget)
        self.model = Model.of(self.graph, self.costs, room)
        self.contents = Contents.of(self.graph, self.costs)
        self.nothing: Ints = np.zeros(len(self.graph.ops), dtype=np.int64)
        self.dropped: dict[int, Choices | None] = {}

    def run(self) -> None:
        if not self.costs.homes:
            self._only_again()
            return
        kept = Choices(self.model, self.contents)
        peak = int((kept.held + kept.need).max(initial=0))
        excess = max(peak - self.model.limit, 0)
        self._refined(kept, 1.0)
        if self._is_good():
            return
        steps: dict[float, float] = {1.0: self._best_worth()}
        for share in _SHARES:
            steps[share] = self._shared(excess, share)
        for _ in range(_ZOOMS):
            order = sorted(steps)
            at = order.index(min(order, key=lambda share: (steps[share], -share)))
            for near in (at - 1, at + 1):
                if 0 <= near < len(order):
                    middle = (order[at] + order[near]) / 2
                    steps[middle] = self._shared(excess, middle)
        best = min(sorted(steps), key=lambda share: (steps[share], -share))
        choices = self._dropped(excess, best)
        for transit in _TRANSITS[1:]:
            if choices is not None and not self._is_good():
                self._refined(choices, transit)

    def _is_good(self) -> bool:
        return self._best_worth() <= self.costs.compute_seconds * _GOOD

    def _best_worth(self) -> float:
        return min((worth(self.costs, planned) for planned in self.found), default=float("inf"))

    def _only_again(self) -> None:
        def policy(spared: Ints) -> Plan | None:
            free = np.where(self.model.free > 0, np.maximum(self.model.free - spared, 0), self.model.free)
            model = replace(self.model, free=free)
            choices = Choices(model, self.contents)
            return mixed(choices, model, spared, 0.0) if self._search(choices, _TRIES) else None

        planned = fit_locally(self.graph, self.costs, self.budget, policy, _NEVER_AWAY)
        self.found += [planned] if planned else []

    def _search(self, choices: Choices, tries: int) -> bool:
        dropping = Dropping(choices)
        fits = dropping.drop()
        dropping.settle()
        if tries:
            fits = anneal(choices, min(tries * len(choices.free), _MOST_TRIES))
            dropping.settle()
        return fits

    def _dropped(self, excess: int, share: float) -> Choices | None:
        """What is computed again if a share of the bytes that are too many is not."""
        limit = self.model.limit + int(excess * share)
        if limit not in self.dropped:
            choices = Choices(self.model, self.contents, limit)
            fits = share >= 1 or self._search(choices, 0)
            self.dropped[limit] = choices if fits else None
        return self.dropped[limit]

    def _shared(self, excess: int, share: float) -> float:
        choices = self._dropped(excess, share)
        planned = None if choices is None else self._placed(choices, 1.0, None)
        return float("inf") if planned is None else worth(self.costs, planned)

    def _placed(self, choices: Choices, transit: float, times: Sequence[float] | None) -> Planned | None:
        def policy(spared: Ints) -> Plan | None:
            return mixed(choices, self.model, spared, transit, times)

        planned = fit_locally(self.graph, self.costs, self.budget, policy)
        self.found += [planned] if planned else []
        return planned

    def _refined(self, choices: Choices, transit: float) -> None:
        """Plans made again with the times at which ops really start, while that helps."""
        times: Sequence[float] | None = None
        least = float("inf")
        for _ in range(_REFINEMENTS):
            planned = self._placed(choices, transit, times)
            if planned is None or worth(self.costs, planned) >= least or self._is_good():
                return
            least = worth(self.costs, planned)
            times = op_times(planned)
