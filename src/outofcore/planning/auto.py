"""The best plan that is found: ``policy="auto"``.

What to compute again is found by ``dropping`` and ``annealing``, what to offload by linear programming
(``priced``), and both at once by ``mixed``. How much of the bytes that are too many is computed again, and how much
is offloaded, is a single number; so is the guess of the time that copies take. For pairs of the two the step is
simulated with addresses that are somewhat too generous (``outlook``), on a grid and then nearer and nearer to the best.
Only the most promising are placed within the budget, and made again with the times at which ops really start.
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
from outofcore.planning.placing import Planned, fit_locally, op_times, outlook, room_for_large, worth

# Changes that the annealing tries for each gap that could be computed again, and the most of them.
_TRIES, _MOST_TRIES = 300, 300_000
# Steps no longer than this, in multiples of their ops, are not worth any more search.
_GOOD = 1.0005
# Shares of the overload that are offloaded, to start with; the rest is computed again.
_SHARES = (1.0, 0.0, 0.25, 0.5, 0.75)
# How often the best share is looked for more closely.
_ZOOMS = 2
# How often over the copies of a gap are charged the seconds that they take.
_TRANSITS = (1.0, 0.0, 2.0, 4.0)
# How many of the promising plans are placed within the budget, and how many more if none could be.
_PLACED, _PATIENCE = 2, 6
# How often a plan is made again with the times at which ops really start.
_REFINEMENTS = 4
# How often a plan without homes is made again with less room where blocks stick out.
_NEVER_AWAY = 6

Key = tuple[float, float]  # share, transit


def auto(graph: StepGraph, costs: Costs, budget: int) -> list[Planned]:
    """Plans within the budget that are worth comparing; the best is among them.

    Args:
        graph: the step.
        costs: measured or assumed.
        budget: bytes of the arena.
    """
    search = _Search(graph, costs, budget)
    if costs.homes:
        search.mix()
    else:
        search.compute_again()
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
        self.dropped: dict[float, Choices | None] = {}
        self.looks: dict[Key, float] = {}

    # Without homes

    def compute_again(self) -> None:
        """Plans that only compute again."""

        def policy(spared: Ints) -> Plan | None:
            free = np.where(self.model.free > 0, np.maximum(self.model.free - spared, 0), self.model.free)
            model = replace(self.model, free=free)
            choices = Choices(model, self.contents)
            return mixed(choices, model, spared, 0.0) if _dropped(choices, _TRIES) else None

        planned = fit_locally(self.graph, self.costs, self.budget, policy, _NEVER_AWAY)
        self.found += [planned] if planned else []

    # With homes

    def mix(self) -> None:
        """Plans that offload and compute again."""
        self._look((1.0, 1.0))
        if self._place((1.0, 1.0)) <= self.costs.compute_seconds * _GOOD:
            return
        for share in _SHARES:
            self._look((share, 1.0))
        for _ in range(_ZOOMS):
            self._zoom()
        best = self._promising()[0][0]
        for transit in _TRANSITS:
            self._look((best, transit))
        placed = 1
        for number, key in enumerate(self._promising()):
            if key == (1.0, 1.0):
                continue
            if placed > _PLACED and (self.found or number >= _PATIENCE):
                break
            self._place(key)
            placed += 1

    def _promising(self) -> list[Key]:
        """The shares and transits looked at, the best first."""
        return sorted(self.looks, key=lambda key: (self.looks[key], key))

    def _zoom(self) -> None:
        shares = sorted(share for share, transit in self.looks if transit == 1.0)
        at = min(range(len(shares)), key=lambda i: (self.looks[shares[i], 1.0], i))
        for near in (at - 1, at + 1):
            if 0 <= near < len(shares):
                self._look(((shares[at] + shares[near]) / 2, 1.0))

    def _look(self, key: Key) -> None:
        if key in self.looks:
            return
        plan = self._plan(key, self.nothing, None)
        seconds = float("inf")
        if plan is not None:
            seconds = worth(self.costs, outlook(self.graph, self.costs, self.budget, plan))
        self.looks[key] = seconds

    def _plan(self, key: Key, spared: Ints, times: Sequence[float] | None) -> Plan | None:
        share, transit = key
        choices = self._choices(share)
        return None if choices is None else mixed(choices, self.model, spared, transit, times)

    def _choices(self, share: float) -> Choices | None:
        """What is computed again if a share of the bytes that are too many is not."""
        if share not in self.dropped:
            kept = Choices(self.model, self.contents)
            excess = max(int((kept.held + kept.need).max(initial=0)) - self.model.limit, 0)
            choices = Choices(self.model, self.contents, self.model.limit + int(excess * share))
            self.dropped[share] = choices if share >= 1 or _dropped(choices, 0) else None
        return self.dropped[share]

    def _place(self, key: Key) -> float:
        """Plans placed within the budget, made again with the times at which ops really start while that helps."""
        times: Sequence[float] | None = None
        least = float("inf")
        for _ in range(_REFINEMENTS):

            def policy(spared: Ints, times: Sequence[float] | None = times) -> Plan | None:
                return self._plan(key, spared, times)

            planned = fit_locally(self.graph, self.costs, self.budget, policy)
            if planned is None or worth(self.costs, planned) >= least:
                break
            self.found.append(planned)
            least = worth(self.costs, planned)
            times = op_times(planned)
            if least <= self.costs.compute_seconds * _GOOD:
                break
        return least


def _dropped(choices: Choices, tries: int) -> bool:
    """Choose what to compute again; whether it fits then."""
    dropping = Dropping(choices)
    fits = dropping.drop()
    dropping.settle()
    if tries:
        fits = anneal(choices, min(tries * len(choices.free), _MOST_TRIES))
        dropping.settle()
    return fits
