"""Planning without homes: the least recomputation for each budget.

Without homes a plan is a choice of gaps to recompute. The *front* of a step [Pareto front] holds the states with the
fewest seconds for their bytes. Annealing (``remat.compiled``) finds them on a thousand limits, from the bytes that must
stay to the bytes of the whole step, in two walks:

- *down*: from limit to limit, from the highest, where everything is resident, to the lowest with a state. The height of
  the lowest state's blocks is the smallest budget.
- *up*: on each limit from the best state of those below. Every sixteenth limit also starts from the in-core state, at a
  higher temperature, since its best state may be far from those below.

A budget takes the fastest state, of the walk down or of the walk up to this budget, with blocks that fit. A larger
budget has the same states and more, so its plan is never slower.
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
from outofcore.planning.placing import CandidateOutcome, Planned, keep_all, place, small_region_bytes, wire_and_simulate
from outofcore.planning.problem import Problem
from outofcore.planning.remat.chains import Choices, arrival_decisions, recompute_decisions
from outofcore.planning.remat.compiled import BestState
from outofcore.planning.remat.contents import StepContents
from outofcore.planning.remat.selection import choices_from_pairs, max_chain_runs
from outofcore.program import Program
from outofcore.units import PAGE_BYTES, format_bytes, round_up

# Number of limits, a geometric series from the bytes that must stay to the bytes of the whole step.
_LIMITS = 1000
# Random changes on each limit: for each gap in the walk down; and at most, in both walks.
_CHANGES_DOWN, _MAX_CHANGES = 20, 3000
# Ops that the annealing of one walk may inspect, without fresh starts. Large steps get fewer changes on a limit.
_WORK = 2_000_000_000
# The walk down ends after this many consecutive limits without a state.
_MAX_FAILED = 50
# Then the greedy search and longer annealing look for a state this many limits lower; the distance halves after each
# failure.
_DIVE, _DIVE_EFFORT = 16, 32
# In the walk up: limits between fresh starts, and how many times more changes a fresh start may try.
_FRESH_EVERY, _FRESH_EFFORT = 16, 16
# Initial temperatures, in mean seconds of an op that may run again: from a neighbour's state, and from any other.
_WARM, _HOT = 0.1, 0.3
_KEEP_ALL: array[int] = array("q")


@dataclass(frozen=True)
class FrontState:
    """A set of gaps to recompute, the peak ``bytes`` of large blocks, and the ``seconds`` of recomputation."""

    how: str  # the walk and the limit that found it
    bytes: int
    seconds: float
    pairs: array[int]  # the recomputed gaps, each followed by the op before which it is fetched


@dataclass
class Front:
    """The least recomputation for each budget, for a step without homes; computed on demand and cached."""

    graph: StepGraph
    costs: Costs
    params: SearchParams = field(default_factory=SearchParams)

    def __post_init__(self) -> None:
        graph, costs = self.graph, self.costs
        whole = lower(graph, costs, keep_all(0))
        self.in_core = place(whole).arena_bytes
        self.fixed_bytes = small_region_bytes(whole) + constant_bytes(graph)
        self.choices = Choices(Problem.of(graph, costs, self.in_core), StepContents.of(graph, costs))
        resident, needed = self.choices.held.copy(), self.choices.alone
        highest = int((resident + needed).max(initial=0))
        for g in self.choices.recomputable:
            resident[self.choices.start[g] + 1 : self.choices.end[g]] -= self.choices.bytes[g]
        lowest = max(int((resident + needed).max(initial=0)), 1)
        self.limits = sorted({int(lowest * (highest / lowest) ** (k / _LIMITS)) for k in range(_LIMITS)} | {highest})
        self.search = self.choices.open_search()
        self._states_up: list[FrontState] = []  # the best state on each limit, from the lowest state's limit upward
        self._placed: dict[int, tuple[Plan, Program]] = {}

    def _anneal(
        self, origin: str, k: int, changes_each: int, effort: int = 1, temperature: float = _WARM
    ) -> FrontState | None:
        """Search by simulated annealing for the best state within ``limits[k]``; None if no state fits."""
        changes = effort * min(changes_each * len(self.choices.recomputable), _MAX_CHANGES)
        return self._state(
            origin, k, self.search.anneal(self.limits[k], changes, effort * _WORK // len(self.limits), temperature, k)
        )

    def _search_greedily(self, k: int) -> FrontState | None:
        """Search greedily from the in-core state; return a state within ``limits[k]``, or None."""
        limit = self.limits[k]
        self.search.restore(_KEEP_ALL)
        return self._state("greedy search", k, self.search.drop(limit, limit, max_chain_runs(self.choices)))

    def _state(self, origin: str, k: int, annealed: BestState | None) -> FrontState | None:
        origin = f"{origin}, limit {k + 1} of {len(self.limits)}"
        return None if annealed is None else FrontState(origin, annealed.bytes, annealed.seconds, annealed.pairs)

    @cached_property
    def _states_down(self) -> list[FrontState]:
        """The states found under ever lower limits; the last one needs the fewest bytes."""
        states: list[FrontState] = []
        lowest = failed = 0
        for k in reversed(range(len(self.limits))):
            state = self._anneal("walk down", k, _CHANGES_DOWN)
            if state is not None:
                states.append(state)
                lowest, failed = k, 0
                continue
            failed += 1
            if failed == _MAX_FAILED:
                break
        step = _DIVE
        while step and lowest:
            k = max(lowest - step, 0)
            state = self._search_greedily(k)
            if state is None:
                self.search.restore(states[-1].pairs)
                state = self._anneal("dive", k, _CHANGES_DOWN, _DIVE_EFFORT, _HOT)
            if state is None:
                step //= 2
            else:
                states.append(state)
                lowest = k
        return states

    def _climb(self, last: int) -> list[FrontState]:
        """Anneal under ever higher limits up to ``limits[last]``; return the best state under each limit."""
        changes_each, first = self.params.annealing, bisect_left(self.limits, self._states_down[-1].bytes)
        for k in range(first + len(self._states_up), last + 1) if changes_each else ():
            fitting = [state for state in (*self._states_down, *self._states_up[-1:]) if state.bytes <= self.limits[k]]
            best = min(fitting, key=lambda state: state.seconds)
            self.search.restore(best.pairs)
            candidates = [best, self._anneal("walk up", k, changes_each)]
            if k % _FRESH_EVERY == 0:
                self.search.restore(_KEEP_ALL)
                candidates.append(self._anneal("fresh start", k, changes_each, _FRESH_EFFORT, _HOT))
            self._states_up.append(
                min((state for state in candidates if state is not None), key=lambda state: state.seconds)
            )
        return self._states_up[: max(last + 1 - first, 0)]

    def _place(self, state: FrontState) -> tuple[Plan, Program]:
        """Return the plan of a state, and the plan's placed program."""
        key = id(state.pairs)
        if key not in self._placed:
            choices = choices_from_pairs(self.choices, state.pairs, state.bytes)
            decisions = sorted(
                (*arrival_decisions(choices), *recompute_decisions(choices)), key=lambda decision: decision.gap
            )
            plan = Plan("auto", state.bytes + self.fixed_bytes, tuple(decisions))
            self._placed[key] = plan, place(lower(self.graph, self.costs, plan), round_up(plan.budget, PAGE_BYTES))
        return self._placed[key]

    @cached_property
    def smallest(self) -> int:
        """The smallest budget in bytes that has a plan; the same for all params."""
        smallest = self.in_core
        for state in sorted(self._states_down, key=lambda state: state.bytes):
            if state.bytes + self.fixed_bytes >= smallest:
                break
            smallest = min(smallest, self._place(state)[1].arena_bytes)
        return smallest

    def plan(self, budget: int) -> Planned | None:
        """Return the fastest plan found within a budget; None if no plan fits."""
        if budget < self.smallest:
            return None
        outcomes: list[CandidateOutcome] = []
        for state in self._states(budget - self.fixed_bytes):
            plan, program = self._place(state)
            height = program.arena_bytes
            if height <= budget:
                planned = wire_and_simulate(self.graph, self.costs, plan, program)
                outcomes.append(CandidateOutcome(state.how, plan, height, planned.timeline.step_seconds, "chosen"))
                return replace(planned, candidates=tuple(outcomes))
            verdict = f"its blocks reach {format_bytes(height)}, above the budget"
            outcomes.append(CandidateOutcome(state.how, plan, height, None, verdict))
        return None

    def _states(self, room: int) -> Iterator[FrontState]:
        """Yield the states that take at most ``room`` bytes, the fastest first."""
        states = (*self._states_down, *self._climb(min(bisect_left(self.limits, room), len(self.limits) - 1)))
        distinct = {id(state.pairs): state for state in states if state.bytes <= room}
        yield from sorted(distinct.values(), key=lambda state: (state.seconds, state.bytes))
