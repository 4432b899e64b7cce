"""Plans for steps from which nothing can be offloaded: the least recomputation for each budget.

Without homes a plan says what is recomputed, and a step takes the seconds of its ops and of those that run again. The
*front* of a step [Pareto front] holds the states with the fewest seconds for their bytes. Annealing finds them
(``remat.compiled``) on a thousand limits, from the bytes that cannot leave to those of everything, in two walks:

- *down*: from the highest limit, where everything is kept, from limit to limit, to the lowest on which a state is
  found, by annealing or by the greedy search. How high the blocks of the lowest state reach is the smallest budget.
- *up*: from there, on each limit from the best state of those below; and on every sixteenth also from the state in
  which everything is kept, with more changes and from a higher temperature, since the best state there may be of
  another kind than those below.

Neither walk depends on the budget, but the walk up ends with it. A budget takes the quickest state, found in the walk
down or up to the first limit that is no lower, whose blocks can be placed within it. A larger budget has the same
states and more, so its plan is never slower.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from outofcore.analysis.gaps import constant_bytes
from outofcore.costs import Costs
from outofcore.graph import StepGraph
from outofcore.lowering import lower
from outofcore.plan import Plan
from outofcore.planning.parameters import SearchParams
from outofcore.planning.placing import Outcome, Planned, finish, keep_all, place, small_region_bytes
from outofcore.planning.problem import Problem
from outofcore.planning.remat.chains import Choices, arrivals, decisions_again
from outofcore.planning.remat.compiled import Annealed
from outofcore.planning.remat.contents import Contents
from outofcore.planning.remat.selection import choices_of, patience
from outofcore.program import Program
from outofcore.units import PAGE_BYTES, format_bytes, round_up

# Limits from the bytes that cannot leave to those of everything, as a geometric series.
_LIMITS = 1000
# Random changes on each limit: in the walk down for each gap, and in both at most.
_CHANGES_DOWN, _MOST_CHANGES = 20, 3000
# Ops that the annealing of one walk may look at, fresh starts aside: in large steps there are fewer changes on a limit.
_WORK = 2_000_000_000
# The walk down ends after so many limits in turn on which no state was found.
_MOST_FAILED = 50
# Then the greedy search, and longer runs of annealing, look for a state so many limits lower, and each time that there
# is none half as many lower.
_DIVE, _DIVE_EFFORT = 16, 32
# In the walk up every so many limits have a fresh start, which may try so many times the changes.
_FRESH_EVERY, _FRESH_EFFORT = 16, 16
# Temperatures in the beginning, in mean seconds of an op that may run again: from a neighbour's state, and otherwise.
_WARM, _HOT = 0.1, 0.3
_KEEP_ALL: array[int] = array("q")


@dataclass(frozen=True)
class State:
    """A state of the front.

    Attributes:
        how: in which walk, and on which limit.
        bytes: the most that large blocks take at an op.
        seconds: of the runs that recompute.
        pairs: the gaps that are recomputed, each followed by the op before which it comes back.
    """

    how: str
    bytes: int
    seconds: float
    pairs: array[int]


@dataclass
class Front:
    """The front of a step; what is asked for is worked out, and kept.

    Attributes:
        graph: the step.
        costs: measured or assumed, without homes.
        params: how much is searched.
    """

    graph: StepGraph
    costs: Costs
    params: SearchParams = field(default_factory=SearchParams)

    def __post_init__(self) -> None:
        graph, costs = self.graph, self.costs
        whole = lower(graph, costs, keep_all(0))
        self.in_core = place(whole).arena_bytes
        self.beside = small_region_bytes(whole) + constant_bytes(graph)
        self.choices = Choices(Problem.of(graph, costs, self.in_core), Contents.of(graph, costs))
        kept, needed = self.choices.held.copy(), self.choices.alone
        highest = int((kept + needed).max(initial=0))
        for g in self.choices.free:
            kept[self.choices.start[g] + 1 : self.choices.end[g]] -= self.choices.bytes[g]
        lowest = max(int((kept + needed).max(initial=0)), 1)
        self.limits = sorted({int(lowest * (highest / lowest) ** (k / _LIMITS)) for k in range(_LIMITS)} | {highest})
        self.search = self.choices.search()
        self._up: list[State] = []  # the best state on each limit, from that of the lowest state on
        self._placed: dict[int, tuple[Plan, Program]] = {}

    def _anneal(self, walk: str, k: int, each: int, effort: int = 1, hot: float = _WARM) -> State | None:
        """Anneal within limit k, from the present state on, with so many changes for each gap; None: no state fits."""
        changes = effort * min(each * len(self.choices.free), _MOST_CHANGES)
        return self._state(
            walk, k, self.search.run(self.limits[k], changes, effort * _WORK // len(self.limits), hot, k)
        )

    def _drop(self, k: int) -> State | None:
        """Search greedily within limit k, from everything kept."""
        limit = self.limits[k]
        self.search.restore(_KEEP_ALL)
        return self._state("greedy search", k, self.search.drop(limit, limit, patience(self.choices)))

    def _state(self, how: str, k: int, found: Annealed | None) -> State | None:
        how = f"{how}, limit {k + 1} of {len(self.limits)}"
        return None if found is None else State(how, found.bytes, found.seconds, found.pairs)

    @cached_property
    def _down(self) -> list[State]:
        """The states found in the walk down, the lowest last."""
        found: list[State] = []
        lowest = failed = 0
        for k in reversed(range(len(self.limits))):
            state = self._anneal("walk down", k, _CHANGES_DOWN)
            if state is not None:
                found.append(state)
                lowest, failed = k, 0
                continue
            failed += 1
            if failed == _MOST_FAILED:
                break
        step = _DIVE
        while step and lowest:
            k = max(lowest - step, 0)
            state = self._drop(k)
            if state is None:
                self.search.restore(found[-1].pairs)
                state = self._anneal("dive", k, _CHANGES_DOWN, _DIVE_EFFORT, _HOT)
            if state is None:
                step //= 2
            else:
                found.append(state)
                lowest = k
        return found

    def _climb(self, last: int) -> list[State]:
        """Walk up as far as a limit; the best states found up to there, by limit."""
        each, first = self.params.annealing, bisect_left(self.limits, self._down[-1].bytes)
        for k in range(first + len(self._up), last + 1) if each else ():
            found = [state for state in (*self._down, *self._up[-1:]) if state.bytes <= self.limits[k]]
            best = min(found, key=lambda state: state.seconds)
            self.search.restore(best.pairs)
            tried = [best, self._anneal("walk up", k, each)]
            if k % _FRESH_EVERY == 0:
                self.search.restore(_KEEP_ALL)
                tried.append(self._anneal("fresh start", k, each, _FRESH_EFFORT, _HOT))
            self._up.append(min((state for state in tried if state is not None), key=lambda state: state.seconds))
        return self._up[: max(last + 1 - first, 0)]

    def _place(self, state: State) -> tuple[Plan, Program]:
        """Return the plan of a state and its placed program, the same for all budgets."""
        key = id(state.pairs)
        if key not in self._placed:
            choices = choices_of(self.choices, state.pairs, state.bytes)
            decisions = sorted((*arrivals(choices), *decisions_again(choices)), key=lambda decision: decision.gap)
            plan = Plan("auto", state.bytes + self.beside, tuple(decisions))
            self._placed[key] = plan, place(lower(self.graph, self.costs, plan), round_up(plan.budget, PAGE_BYTES))
        return self._placed[key]

    @cached_property
    def smallest(self) -> int:
        """The smallest budget in bytes for which there is a plan; the same for all params."""
        smallest = self.in_core
        for state in sorted(self._down, key=lambda state: state.bytes):
            if state.bytes + self.beside >= smallest:
                break
            smallest = min(smallest, self._place(state)[1].arena_bytes)
        return smallest

    def plan(self, budget: int) -> Planned | None:
        """The best plan for a budget, with the candidates that were placed; None if there is none.

        Args:
            budget: bytes of the arena.
        """
        if budget < self.smallest:
            return None
        outcomes: list[Outcome] = []
        for state in self._states(budget - self.beside):
            plan, program = self._place(state)
            height = program.arena_bytes
            if height <= budget:
                planned = finish(self.graph, self.costs, plan, program)
                outcomes.append(Outcome(state.how, plan, height, planned.timeline.step_seconds, "chosen"))
                return replace(planned, candidates=tuple(outcomes))
            why = f"its blocks reach {format_bytes(height)}, above the budget"
            outcomes.append(Outcome(state.how, plan, height, None, why))
        return None

    def _states(self, room: int) -> Iterator[State]:
        """The states that take no more than a number of bytes, the quickest first."""
        found = (*self._down, *self._climb(min(bisect_left(self.limits, room), len(self.limits) - 1)))
        apart = {id(state.pairs): state for state in found if state.bytes <= room}
        yield from sorted(apart.values(), key=lambda state: (state.seconds, state.bytes))
