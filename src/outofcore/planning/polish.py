"""A local search over placed plans: change a plan slightly, simulate it, keep it if it is no slower.

Only the simulator accounts for waits that addresses cause, so this regains time lost in placement. It is slow, for
small steps only; effort is counted in ops lowered.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

from outofcore.analysis.recipes import History, can_recompute
from outofcore.lowering import copies_in_before_room, lower
from outofcore.plan import Decision, Gap, Plan, Residency
from outofcore.planning.bound import lower_bound_seconds
from outofcore.planning.parameters import SearchParams
from outofcore.planning.placing import Planned, comparison_seconds, place, wire_and_simulate
from outofcore.planning.problem import Problem
from outofcore.simulator import busiest_seconds

# In steps of more ops it would take most of planning's time and improve no plan.
MAX_OPS = 100
# Maximum changes from each start; number of starts, in turn; and the most time that the changes may take, in steps,
# because the plan must save that time again.
_TRIES, _ROUNDS, _RUNS = 800, 4, 200
# Shifts of release and fetch, in ops.
_SHIFTS = (-5, -3, -2, -1, -1, 1, 1, 2, 3, 5)
# Number of simultaneous changes.
_AT_ONCE = (1, 1, 2, 3)
# Cumulative probabilities: change a decision; swap it with a resident gap; otherwise a resident gap is drawn.
_DECIDED, _SWAPPED = 0.65, 0.8
# Cumulative probabilities for an offloaded gap: keep it, fetch it at another time, release it at another time, use
# another home; otherwise recompute it. For a recomputed gap: keep it, fetch it at another time; otherwise offload it.
_OFFLOADED = (0.25, 0.6, 0.85, 0.9)
_COMPUTED = (0.3, 0.7)
# Probability that a gap is offloaded if it could be recomputed, too.
_OFFLOADS = 0.7
# Assumed seconds of one change, the same on every machine.
_TRY_SECONDS = 0.0015
# The search ends at this ratio of step time to lower bound.
_GOOD = 1.0005
# Penalty, in multiples of the step time, for blocks that exceed the budget by 100 %.
_OVER = 10.0

_Decisions = dict[Gap, Decision]


def polish_plan(
    problem: Problem, budget: int, best: Planned | None, starts: Sequence[Plan], params: SearchParams
) -> Planned | None:
    """Search for a better plan than ``best`` by random changes to ``starts``; None if that fails."""
    worthwhile = int(_RUNS * problem.costs.compute_seconds / _TRY_SECONDS)
    tries = min(params.polish_ops // max(len(problem.graph.ops), 1), _TRIES, worthwhile)
    goal = (lower_bound_seconds(problem.graph, problem.costs, budget) or 0.0) * _GOOD
    if not tries or not starts or (best is not None and best.timeline.step_seconds <= goal):
        return None
    search = _Polisher(problem, budget, goal)
    results = [search.improve(starts[turn % len(starts)], tries, turn) for turn in range(_ROUNDS)]
    results = [result for result in results if result is not None and result.program.arena_bytes <= budget]
    better = min(results, key=search.value, default=None)
    return better if better is not None and (best is None or search.value(better) < search.value(best)) else None


@dataclass
class _Polisher:
    """A local search for a faster plan; plans that it has placed are cached."""

    problem: Problem
    budget: int
    goal: float  # seconds of a step that are good enough
    placed_plans: dict[Plan, Planned | None] = field(default_factory=dict[Plan, Planned | None], repr=False)

    def __post_init__(self) -> None:
        graph = self.problem.graph
        self.graph, self.costs, self.n = graph, self.problem.costs, len(graph.ops)
        history = History.of(graph)
        infos = self.problem.gaps
        self.homes = {info.gap: info.homes for info in infos}
        self.recomputable = frozenset(
            info.gap
            for info in infos
            if not (info.arriving or info.cyclic or info.final)
            and can_recompute(history, info.gap.storage, info.gap.end)
        )
        # Inputs must be fetched.
        self.gaps = [i.gap for i in infos if not i.arriving and not i.final and (i.homes or i.gap in self.recomputable)]
        self.final = frozenset(i.gap for i in infos if i.final)

    def value(self, planned: Planned) -> float:
        """Return the objective: seconds of the step, and a penalty for blocks above the budget."""
        over = max(planned.program.arena_bytes - self.budget, 0) / self.budget
        return comparison_seconds(self.costs, planned) * (1 + _OVER * over)

    def improve(self, start: Plan, tries: int, seed: int) -> Planned | None:
        """Improve a plan by up to ``tries`` random changes; None if the homes are too small for it."""
        draw, staying = random.Random(seed), start.staying
        best = self._place({d.gap: d for d in start.decisions}, staying, inf)
        if best is None:
            return None
        value = self.value(best)
        for _ in range(tries):
            if value <= self.goal:
                break
            result = self._place(self._change_randomly({d.gap: d for d in best.plan.decisions}, draw), staying, value)
            if result is not None and (result_value := self.value(result)) <= value:
                best, value = result, result_value
        return best

    def _place(self, decisions: _Decisions, staying: tuple[int, ...], max_seconds: float) -> Planned | None:
        """Place and simulate a plan; None if a home is too small or the step surely exceeds ``max_seconds``."""
        decided = {gap.storage for gap in decisions}
        plan = Plan(
            "auto",
            self.budget,
            tuple(decisions[gap] for gap in sorted(decisions)),
            tuple(storage for storage in staying if storage not in decided),
        )
        if plan not in self.placed_plans:
            lowered = lower(self.graph, self.costs, plan)
            if busiest_seconds(self.graph, self.costs, lowered) > max_seconds:
                return None  # not cached: another call may allow more time
            fits = copies_in_before_room(self.graph, self.costs, lowered) is not None
            placed = place(lowered, self.budget, effort=0) if fits else None
            self.placed_plans[plan] = (
                None if placed is None else wire_and_simulate(self.graph, self.costs, plan, placed)
            )
        return self.placed_plans[plan]

    def _change_randomly(self, decisions: _Decisions, draw: random.Random) -> _Decisions:
        """Apply one to three random changes to the decisions in place, and return them."""
        for _ in range(draw.choice(_AT_ONCE)):
            kind = draw.random()
            decided = [decisions[gap] for gap in sorted(decisions) if gap not in self.final]
            if decided and kind < _DECIDED:
                self._change_decision(decisions, draw.choice(decided), draw)
            elif decided and kind < _SWAPPED:
                self._swap_gaps(decisions, draw.choice(decided), draw)
            elif self.gaps:
                gap = draw.choice(self.gaps)
                if gap not in decisions:
                    decisions[gap] = self._new_decision(gap, draw)
        return decisions

    def _swap_gaps(self, decisions: _Decisions, decision: Decision, draw: random.Random) -> None:
        """Keep the gap of a decision resident, and evict a random overlapping gap instead."""
        gap = decision.gap
        partners = [o for o in self.gaps if o not in decisions and o.start < gap.end and gap.start < o.end]
        if partners and gap.start >= 0:
            del decisions[gap]
            partner = draw.choice(partners)
            decisions[partner] = self._new_decision(partner, draw)

    def _change_decision(self, decisions: _Decisions, decision: Decision, draw: random.Random) -> None:
        """Change or delete a decision at random."""
        gap, kind, shift = decision.gap, draw.random(), draw.choice(_SHIFTS)
        homes = self.homes.get(gap, tuple(range(len(self.costs.homes))))
        if decision.residency is Residency.RECOMPUTE:
            if kind < _COMPUTED[0]:
                del decisions[gap]
            elif kind < _COMPUTED[1]:
                fetch = min(max(decision.fetch_at + shift, gap.start + 1), gap.end)
                decisions[gap] = replace(decision, fetch_at=fetch)
            elif homes:
                decisions[gap] = Decision(gap, Residency.OFFLOAD, min(gap.start + 2, gap.end), gap.end, homes[0])
            return
        first = max(gap.start, -1) + 1 if gap.end < self.n else self.n  # the earliest op before which it can come back
        if gap.start < 0:
            decisions[gap] = replace(decision, fetch_at=min(max(decision.fetch_at + shift, 0), gap.end))
        elif kind < _OFFLOADED[0]:
            del decisions[gap]
        elif kind < _OFFLOADED[1]:
            fetch = min(max(decision.fetch_at + shift, first), gap.end)
            decisions[gap] = replace(decision, fetch_at=fetch, release_by=min(decision.release_by, fetch))
        elif kind < _OFFLOADED[2]:
            latest = decision.fetch_at if gap.end < self.n else self.n
            release = min(max(decision.release_by + shift, gap.start + 1), latest)
            decisions[gap] = replace(decision, release_by=release)
        elif kind < _OFFLOADED[3] and len(homes) > 1:
            decisions[gap] = replace(decision, home=draw.choice(homes))
        elif gap in self.recomputable:
            decisions[gap] = Decision(gap, Residency.RECOMPUTE, gap.start + 1, gap.end)

    def _new_decision(self, gap: Gap, draw: random.Random) -> Decision:
        """Return a decision to recompute or offload a gap, at random."""
        homes = self.homes[gap]
        if gap in self.recomputable and (not homes or draw.random() >= _OFFLOADS):
            return Decision(gap, Residency.RECOMPUTE, gap.start + 1, gap.end)
        release = draw.randint(gap.start + 1, min(gap.end, self.n))
        return Decision(gap, Residency.OFFLOAD, release, gap.end, draw.choice(homes) if homes[1:] else homes[0])
