"""Plans where nothing can be offloaded: a ladder of budgets, each with the best that was found on it or below.

Without homes a plan is what is computed again, and its seconds are those of the ops with what runs again. The rungs are
budgets that depend on the step alone, and each rung starts from the plan of the rung below, which fits there too. So a
larger budget never gives a slower plan: a budget is planned as the highest rung that it reaches, of the plans of that
rung and of those below the quickest is taken that can be placed there, and on the next rung the same plans are there.
The lowest rung is the first for which a plan is found and placed; how high its blocks reach is the smallest budget.

What is tried on each rung is greedy eviction as the step runs (``remat.eviction``); on some also that settled, and the
greedy search over the whole step (``remat.selection``); and on some the best is annealed. All of it is tried in several
*ways*: with chains that run each op once, and with chains that run some several times where they would take more than a
share of the room (``remat.nesting``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil

import numpy as np

from outofcore.analysis.gaps import constant_bytes
from outofcore.costs import Costs
from outofcore.graph import StepGraph
from outofcore.lowering import lower, room_at_homes
from outofcore.plan import Plan
from outofcore.planning.candidates import arrivals, decisions_again, orders_again
from outofcore.planning.parameters import SearchParams
from outofcore.planning.placing import Outcome, Planned, finish, keep_all, place, small_region_bytes
from outofcore.planning.problem import Ints, Problem
from outofcore.planning.remat.chains import Choices
from outofcore.planning.remat.contents import Contents
from outofcore.planning.remat.eviction import evicted_online
from outofcore.planning.remat.selection import Greedy, Snapshot, anneal
from outofcore.units import PAGE_BYTES, format_bytes, round_up

# From what cannot leave to what everything takes, as a geometric series.
_RUNGS = 64
# Every so many rungs everything is tried; on the others greedy eviction and the best of the rung below.
_SEARCHED_EVERY = 4
# Every so many the best is annealed.
_ANNEALED_EVERY = 6
# In steps of more ops chains run each op once: to nest them there takes minutes.
_MOST_NESTED_OPS = 1000
# Random changes there at most.
_CHANGES = 6_000
# Random changes where nothing fits otherwise: for each gap, and at most. They say what the smallest budget is, so they
# are the same for all params.
_SEARCHED_EACH, _SEARCHED = 200, 20_000
_EVICTED = "greedy eviction"


@dataclass(frozen=True)
class Found:
    """What is computed again.

    Attributes:
        how: how it was found.
        rung: on which.
        seconds: of what runs again.
        snapshot: the gaps, as a change to choices in which all is kept.
        share: of the room that is left at an op, what its chain may take; None: as much as it does.
    """

    how: str
    rung: int
    seconds: float
    snapshot: Snapshot
    share: float | None = None


@dataclass(frozen=True)
class _Lowest:
    """The first rung with a plan, that plan, and what was found below and could not be placed there."""

    rung: int
    planned: Planned
    below: tuple[Found, ...]


@dataclass
class Ladder:
    """The rungs of a step without homes; what is asked for is worked out, and kept.

    Attributes:
        graph: the step.
        costs: measured or assumed. If there are homes, inputs come from there and outputs go there, and nothing else.
        params: how much is searched.
    """

    graph: StepGraph
    costs: Costs
    params: SearchParams = field(default_factory=SearchParams)
    _fresh: dict[tuple[int, float | None], list[Found]] = field(
        default_factory=dict[tuple[int, float | None], list[Found]]
    )
    _evicted: dict[tuple[int, float | None], Found | None] = field(
        default_factory=dict[tuple[int, float | None], Found | None]
    )

    def __post_init__(self) -> None:
        graph, costs = self.graph, self.costs
        self.in_core = place(lower(graph, costs, keep_all(0))).arena_bytes
        self.beside = small_region_bytes(graph, costs) + constant_bytes(graph)
        self.contents = Contents.of(graph, costs)
        self.like = Choices(Problem.of(graph, costs, self.in_core), self.contents)
        # No plan takes less than this, since some gaps can only be kept.
        everything_leaves = self.like.held.copy()
        for g in self.like.free:
            everything_leaves[self.like.start[g] + 1 : self.like.end[g]] -= self.like.bytes[g]
        self.lasting = everything_leaves
        self.nested = self.params.nested if len(graph.ops) <= _MOST_NESTED_OPS else ()
        self.ways: tuple[float | None, ...] = (None, *self.nested)
        bound = self.beside + int((everything_leaves + self.like.alone).max(initial=0))
        lowest, highest = min(round_up(bound, PAGE_BYTES), self.in_core), self.in_core
        count = _RUNGS
        budgets = (lowest * (highest / max(lowest, 1)) ** (k / count) for k in range(count))
        self.budgets = tuple(dict.fromkeys(min(ceil(b / PAGE_BYTES) * PAGE_BYTES, highest) for b in budgets))

    # What fits by counting bytes

    def _bound(self, limit: int, share: float | None) -> Ints | None:
        """Bytes that each op may take with its chain, of shape (ops,)."""
        if share is None:
            return None
        room = np.maximum(limit - self.lasting, 0)
        return np.maximum(self.like.alone, (room * share).astype(np.int64))

    def _choices(self, rung: int, share: float | None) -> Choices:
        whole, limit = self.like.problem, self.budgets[rung] - self.beside
        return Choices(
            replace(whole, limit=limit, free=whole.free + (limit - whole.limit)),
            self.contents,
            like=self.like,
            bound=self._bound(limit, share),
        )

    def _from(self, rung: int, snapshot: Snapshot, share: float | None) -> Choices | None:
        choices = self._choices(rung, share)
        return choices if choices.begin(snapshot) else None

    def _found(self, how: str, rung: int, choices: Choices, share: float | None) -> Found:
        nested = any(chain.is_nested for chain in choices.chains.values())
        if share is not None and nested:
            how = f"{how}, chains nested within {share:.0%} of the room"
        return Found(how, rung, choices.seconds, choices.snapshot(), share if nested else None)

    def evicted(self, rung: int, share: float | None = None) -> Found | None:
        """What greedy eviction comes to on a rung; None if that does not fit."""
        if (rung, share) not in self._evicted:
            found = None
            limit = self.budgets[rung] - self.beside
            snapshot = evicted_online(self.like, limit, self._bound(limit, share))
            choices = None if snapshot is None else self._from(rung, snapshot, share)
            if choices is not None and (not choices.over().any() or Greedy(choices).drop()):
                found = self._found(_EVICTED, rung, choices, share)
            self._evicted[rung, share] = found
        return self._evicted[rung, share]

    def fresh(self, rung: int, share: float | None = None) -> list[Found]:
        """What is found on a rung by itself and fits there, by counting bytes."""
        if (rung, share) not in self._fresh:
            found: list[Found] = []
            evicted = self.evicted(rung, share)
            starts: list[tuple[str, Snapshot]] = [("greedy search", ())]
            if evicted is not None:
                found.append(evicted)
                starts.append((f"{_EVICTED}, settled", evicted.snapshot))
            for how, start in starts:
                choices = self._from(rung, start, share)
                if choices is None or (choices.over().any() and not Greedy(choices).drop()):
                    continue
                Greedy(choices).settle()
                found.append(self._found(how, rung, choices, share))
            # Eviction takes the first way that it comes upon.
            alone = all(each.how.startswith(_EVICTED) for each in found)
            if (alone if share is None else not found) and (passed := self._searched(rung, share)) is not None:
                found.append(passed)
            self._fresh[rung, share] = found
        return self._fresh[rung, share]

    def _searched(self, rung: int, share: float | None) -> Found | None:
        """What random changes lead to where nothing else fits: they pass through states that do not, and come back."""
        choices = self._choices(rung, share)
        Greedy(choices).drop()
        return self._annealed(rung, choices, min(_SEARCHED_EACH * len(choices.free), _SEARCHED), share)

    def _annealed(self, rung: int, choices: Choices, changes: int, share: float | None) -> Found | None:
        """What random changes to these choices lead to; None if nothing fits."""
        if not anneal(choices, changes):
            return None
        Greedy(choices).settle()
        return self._found("annealed", rung, choices, share)

    # Addresses

    def _place(self, rung: int, found: Found) -> tuple[Plan, int, Planned | None]:
        """The plan, how high its blocks reach, and the plan as placed if that is within the rung's budget."""
        choices = self._from(found.rung, found.snapshot, found.share)
        plan = Plan("auto", self.budgets[found.rung], ())
        if choices is not None:
            plan = replace(
                plan,
                decisions=tuple(sorted((*arrivals(choices), *decisions_again(choices)), key=lambda d: d.gap)),
                chains=orders_again(choices),
            )
        program = place(lower(self.graph, self.costs, plan), self.budgets[rung])
        within = program.arena_bytes <= self.budgets[rung]
        within = within and room_at_homes(self.graph, self.costs, program) is not None
        return plan, program.arena_bytes, finish(self.graph, self.costs, plan, program) if within else None

    def _first_placed(self, rung: int, found: list[Found]) -> tuple[Planned | None, list[Outcome]]:
        """The quickest that can be placed on a rung."""
        outcomes: list[Outcome] = []
        seen: set[tuple[Snapshot, float | None, int]] = set()
        for each in sorted(found, key=lambda each: (each.seconds, -each.rung)):
            # How chains are nested depends on the rung as well.
            said = each.snapshot, each.share, 0 if each.share is None else each.rung
            if said in seen:
                continue
            seen.add(said)
            plan, height, planned = self._place(rung, each)
            how = f"{each.how}, rung {each.rung + 1} of {len(self.budgets)}"
            if planned is not None:
                outcomes.append(Outcome(how, planned.plan, height, planned.timeline.step_seconds, "chosen"))
                return planned, outcomes
            why = f"its blocks reach {format_bytes(height)}, above the budget"
            outcomes.append(Outcome(how, plan, height, None, why))
        return None, outcomes

    @cached_property
    def _lowest_once(self) -> _Lowest | None:
        return self._lowest_of((None,))

    @cached_property
    def _lowest_nested(self) -> _Lowest | None:
        return self._lowest_of(self.nested, self._lowest_once) if self.nested else None

    def _lowest_of(self, ways: Sequence[float | None], known: _Lowest | None = None) -> _Lowest | None:
        """The first rung with a plan in some ways, by halving; None if there is none below what everything takes.

        Args:
            ways: that are tried.
            known: what is known in other ways; then only rungs up to its first are looked at.
        """
        first, last = 0, len(self.budgets) if known is None else known.rung + 1
        placed: dict[int, Planned] = {}
        below: list[Found] = []  # too high for their rungs once they had addresses, and perhaps not for those above
        while first < last:
            middle = (first + last) // 2
            planned, found = None, list(below)
            for share in ways:
                found += self.fresh(middle, share)
                planned, _ = self._first_placed(middle, found)
                if planned is not None:
                    break
            if planned is None:
                below, first = found, middle + 1
            else:
                placed[middle] = planned
                last = middle
        return _Lowest(first, placed[first], tuple(below)) if first in placed else known

    @property
    def smallest(self) -> int:
        """The smallest budget in bytes for which there is a plan."""
        lowest = [each.planned.program.arena_bytes for each in (self._lowest_once, self._lowest_nested) if each]
        return min(lowest, default=self.in_core)

    def plan(self, budget: int) -> Planned | None:
        """The best plan for a budget, with the candidates that were placed; None if there is none.

        Args:
            budget: bytes of the arena.
        """
        once, nested = self._lowest_once, self._lowest_nested
        found = [
            planned
            for lowest, ways in ((once, (None,)), (nested, self.nested))
            if lowest is not None and (planned := self._plan(budget, lowest, ways)) is not None
        ]
        if not found:
            return None
        if (evicted := self._by_eviction(budget)) is not None:
            found.append(evicted)
        best = min(found, key=lambda planned: planned.timeline.step_seconds)
        others = [
            replace(outcome, verdict="slower than the best") if outcome.verdict == "chosen" else outcome
            for planned in found
            if planned is not best
            for outcome in planned.candidates
        ]
        return replace(best, candidates=(*others, *best.candidates))

    def _plan(self, budget: int, lowest: _Lowest, ways: Sequence[float | None]) -> Planned | None:
        """The best plan in some ways."""
        if budget < lowest.planned.program.arena_bytes:
            return None
        # The highest rung that the budget reaches, the lowest for all from the smallest budget on.
        rung = max((k for k, reached in enumerate(self.budgets) if reached <= budget), default=0)
        if rung <= lowest.rung:
            return lowest.planned
        planned, outcomes = self._first_placed(rung, self._climbed(lowest, rung, ways))
        return replace(planned or lowest.planned, candidates=tuple(outcomes))

    def plan_by_eviction(self, budget: int) -> Planned | None:
        """The quickest plan for a budget of those that greedy eviction comes to on the rungs up to it, or None."""
        planned = self._by_eviction(budget)
        return None if planned is None else replace(planned, candidates=())

    def _by_eviction(self, budget: int) -> Planned | None:
        rung = next((k for k in reversed(range(len(self.budgets))) if self.budgets[k] <= budget), None)
        if rung is None:
            return None
        found = [self._evicted_somehow(k) for k in range(self._first_evicted, rung + 1)]
        planned, outcomes = self._first_placed(rung, [each for each in found if each is not None])
        return None if planned is None else replace(planned, candidates=tuple(outcomes))

    def _evicted_somehow(self, rung: int) -> Found | None:
        """What greedy eviction comes to on a rung, in the first way in which it fits."""
        return next((found for share in self.ways if (found := self.evicted(rung, share)) is not None), None)

    @cached_property
    def _first_evicted(self) -> int:
        """The first rung that greedy eviction has something for, by halving: for each it takes a while to have none."""
        rungs = range(len(self.budgets))
        return bisect_left(rungs, True, key=lambda rung: self._evicted_somehow(rung) is not None)

    def _climbed(self, lowest: _Lowest, rung: int, ways: Sequence[float | None]) -> list[Found]:
        """What is found in some ways on the rungs up to one, the best of each rung after what it comes from."""
        first, found = lowest.rung, list(lowest.below)
        best: Found | None = None
        each = self.params.annealing
        for k in range(first, rung + 1):
            here: list[Found] = []
            for share in ways:
                evicted = self.evicted(k, share)
                if k == first or k % _SEARCHED_EVERY == 0:
                    here += self.fresh(k, share)
                elif evicted is not None:
                    here.append(evicted)
            higher = None if best is None else self._from(k, best.snapshot, best.share)
            if best is not None and higher is not None:
                Greedy(higher).settle()
                here.append(self._found("the rung below, settled", k, higher, best.share))
            if not here:
                continue
            best = min(here, key=lambda each: each.seconds)
            if k > first and k % _ANNEALED_EVERY == 0 and self.params.annealing:
                choices = self._from(k, best.snapshot, best.share)
                count = min(each * len(self.like.free), _CHANGES)
                changed = None if choices is None else self._annealed(k, choices, count, best.share)
                if changed is not None:
                    here.append(changed)
                    best = min(here, key=lambda each: each.seconds)
            found += here
        return found
