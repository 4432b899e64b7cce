"""The best plan that is found: ``policy="auto"``.

Several ways of saying what is computed again are tried: nothing; what a relaxation says (``streams``), asked
once more with the seconds that chains then really take; and what ``dropping`` finds when only a share of the bytes that
are too many is to be computed again, on a grid of shares and then between the best of them. For each it is decided
what to offload, and the step is rehearsed (``mixed``). The best are tuned, placed within the budget and simulated.

Without homes everything that does not stay is computed again; what that is, is found by ``dropping`` and then
``annealing``.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from outofcore.costs import Costs
from outofcore.graph import StepGraph
from outofcore.plan import Plan
from outofcore.planning.annealing import anneal
from outofcore.planning.chains import AGAIN, Choices
from outofcore.planning.contents import Contents
from outofcore.planning.dropping import Dropping, patience
from outofcore.planning.local import Attempts, fit_locally
from outofcore.planning.mixed import Offer, again_decisions, eased
from outofcore.planning.model import Ints, Model
from outofcore.planning.placing import ATTEMPTS, Planned, room_for_large, worth
from outofcore.planning.streams import solve

# Changes that the annealing tries for each gap that could be computed again, and the most of them.
_TRIES, _MOST_TRIES = 600, 400_000
# Steps no longer than this, in multiples of their ops, are not worth any more search.
_GOOD = 1.0005
# Shares of the overload that are offloaded, to start with; the rest is computed again.
_SHARES = (0.25, 0.5)
# Steps of no more ops are short. How often the best share is looked for more closely, in short steps and in long ones.
_SHORT = 3000
_ZOOMS = (2, 1)
# How often the relaxation is asked what to compute again.
_ASKED = 2
# How many offers are tuned, likewise, and how many ops their rehearsals may run through, at most and for small steps.
_TUNED, _REHEARSED, _MOST_REHEARSALS = (4, 2), 60_000, 600
# How many plans are placed: at most, and of the longest steps; up to which length it is the most; and how many times as
# many where none fits.
_MOST_PLACED, _LEAST_PLACED, _LENGTH, _STUBBORN = 16, 4, 2000, 2
# How many offers give way more generously where none fits.
_FALLEN_BACK = 16
# How often a plan without homes is made again with less room where blocks stick out.
_NEVER_AWAY = 6


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
    offers: list[Offer] = field(default_factory=list[Offer])
    shares: dict[float, float] = field(default_factory=dict[float, float])

    def __post_init__(self) -> None:
        room = room_for_large(self.graph, self.costs, self.budget)
        self.model = Model.of(self.graph, self.costs, room)
        self.contents = Contents.of(self.graph, self.costs)
        self.is_long = len(self.graph.ops) > _SHORT

    def compute_again(self) -> None:
        """Without homes."""

        def policy(spared: Ints) -> Plan | None:
            free = np.where(self.model.free > 0, np.maximum(self.model.free - spared, 0), self.model.free)
            choices = Choices(replace(self.model, free=free), self.contents)
            if not _dropped(choices, _TRIES):
                return None
            return Plan("auto", self.model.limit, again_decisions(choices))

        planned = fit_locally(self.graph, self.costs, self.budget, policy, _NEVER_AWAY)
        self.found += [planned] if planned else []

    def mix(self) -> None:
        """With homes."""
        kept = Choices(self.model, self.contents)
        self._offer(kept)
        if not self._is_good():
            self._ask_relaxation(kept)
            for share in _SHARES:
                self._share(kept, share)
            for _ in range(_ZOOMS[self.is_long]):
                self._zoom(kept)
        tries = min(_REHEARSED // max(len(self.graph.ops), 1), _MOST_REHEARSALS)
        self.offers.sort(key=lambda offer: offer.value)
        tuned = [offer.tuned(tries) for offer in self.offers[: _TUNED[self.is_long]]]
        self._race([*tuned, *self.offers])

    def _race(self, offers: list[Offer]) -> None:
        """Place what looks best, over and over; what does not fit gives way in place and is worth less from then on."""
        length = len(self.graph.ops)
        most = min(max(_MOST_PLACED * _LENGTH // max(length, 1), _LEAST_PLACED), _MOST_PLACED)
        heap: list[tuple[float, int, Plan, Attempts, Offer]] = []

        def enter(number: int, offer: Offer, tried: Attempts) -> None:
            found = None if tried.ended or tried.made >= ATTEMPTS else offer.sparing(tried.spared)
            if found is not None:
                heapq.heappush(heap, (found[0], number, found[1], tried, offer))

        for number, offer in enumerate(offers):
            enter(number, offer, Attempts(self.graph, self.costs, self.budget))
        best, made = inf, 0
        while heap and heap[0][0] < best and made < (most if self.found else _MOST_PLACED * _STUBBORN):
            _, number, plan, tried, offer = heapq.heappop(heap)
            planned = tried.place(plan)
            made += 1
            if planned is None:
                enter(number, offer, tried)
            else:
                self.found.append(planned)
                best = min(best, worth(self.costs, planned))
        for offer in offers[:_FALLEN_BACK] if not self.found else ():

            def policy(spared: Ints, offer: Offer = offer) -> Plan | None:
                found = offer.sparing(spared)
                return None if found is None else found[1]

            planned = fit_locally(self.graph, self.costs, self.budget, policy)
            self.found += [planned] if planned else []

    def _is_good(self) -> bool:
        return any(offer.value <= self.costs.compute_seconds * _GOOD for offer in self.offers)

    def _offer(self, choices: Choices) -> float:
        rest = eased(choices, self.model)
        offer = None if rest is None else Offer.of(rest)
        if offer is None:
            return float("inf")
        if not any(offer.is_same(other) for other in self.offers):
            self.offers.append(offer)
        return offer.value

    def _ask_relaxation(self, kept: Choices) -> None:
        """Compute again what the relaxation says, first as if all else were there, then with what it said before."""
        seconds = _chain_seconds(kept)
        for _ in range(_ASKED):
            streams = solve(self.model, seconds)
            if streams is None:
                return
            choices = Choices(self.model, self.contents, like=kept)
            enough = choices.work + patience(len(choices.free))
            for g in choices.free:
                if streams.again[g] >= 0.5 and choices.work < enough:
                    choices.set(g, AGAIN, choices.end[g])
            Dropping(choices).settle(keep=False)
            self._offer(choices)
            seconds = _chain_seconds(choices)

    def _share(self, kept: Choices, share: float) -> None:
        """Compute again so much that this share of the bytes that are too many is left."""
        excess = max(int((kept.held + kept.need).max(initial=0)) - self.model.limit, 0)
        choices = Choices(self.model, self.contents, self.model.limit + int(excess * share), like=kept)
        self.shares[share] = self._offer(choices) if _dropped(choices, 0) else float("inf")

    def _zoom(self, kept: Choices) -> None:
        values = {0.0: float("inf"), 1.0: float("inf")} | self.shares
        shares = sorted(values)
        at = min(range(len(shares)), key=lambda i: (values[shares[i]], -i))
        for near in (at - 1, at + 1):
            if 0 <= near < len(shares):
                self._share(kept, (shares[at] + shares[near]) / 2)


def _chain_seconds(choices: Choices) -> Mapping[int, float]:
    """For each gap that may be computed again the seconds of that, with everything else as it is."""
    found: dict[int, float] = {}
    for g in choices.free:
        if choices.kind[g] == AGAIN:
            at = choices.fetch[g]
            found[g] = choices.chains[at].seconds / len(choices.targets[at])
            continue
        chain = choices.chain(choices.end[g], (g,))
        if chain is not None:
            found[g] = chain.seconds
    return found


def _dropped(choices: Choices, tries: int) -> bool:
    """Choose what to compute again; whether it fits then."""
    dropping = Dropping(choices)
    fits = dropping.drop()
    dropping.settle()
    if tries:
        fits = anneal(choices, min(tries * len(choices.free), _MOST_TRIES))
        dropping.settle()
    return fits
