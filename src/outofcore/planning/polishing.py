"""A better plan by changing one, a little at a time, and placing and simulating it each time.

What address a block has decides what it has to wait for, and no model of the step but the simulator knows that. So
this finds what is lost between a plan on paper and the placed program; it is slow, and for small steps only.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from outofcore.analysis.recipes import History, can_recompute
from outofcore.costs import Costs
from outofcore.graph import StepGraph
from outofcore.lowering import lower, room_at_homes, wire
from outofcore.plan import Decision, Gap, Plan, Residency
from outofcore.planning.addresses import place
from outofcore.planning.model import Model
from outofcore.planning.placing import Planned, worth
from outofcore.program import Program
from outofcore.simulator import busiest_seconds, simulate

# By how many ops times are moved.
_SHIFTS = (-5, -3, -2, -1, -1, 1, 1, 2, 3, 5)
# How many changes are made at once.
_AT_ONCE = (1, 1, 2, 3)
# How often something is changed that is decided already, and not another gap drawn.
_DECIDED = 0.7
# Of decisions to offload: how often each is dropped, and comes back at another time, and leaves at another time. Of
# those to compute again: how often each is dropped, and comes back at another time. Else it becomes the other kind.
_OFFLOADED = (0.25, 0.6, 0.9)
_COMPUTED = (0.3, 0.7)
# How often a gap that could be either is offloaded.
_OFFLOADS = 0.7

_Choices = dict[Gap, Decision]


@dataclass
class Polish:
    """A search for better plans near given ones.

    Attributes:
        graph: the step.
        costs: measured or assumed.
        budget: bytes of the arena.
        goal: seconds of a step that are good enough.
    """

    graph: StepGraph
    costs: Costs
    budget: int
    goal: float = 0.0
    _seen: dict[tuple[Decision, ...], Planned | None] = field(
        default_factory=dict[tuple[Decision, ...], Planned | None], repr=False
    )

    def __post_init__(self) -> None:
        gaps = [info.gap for info in Model.of(self.graph, self.costs, self.budget).gaps]
        history, inner = History.of(self.graph), range(len(self.graph.ops))
        self._again = frozenset(
            gap for gap in gaps if gap.start >= 0 and gap.end in inner and can_recompute(history, gap.storage, gap.end)
        )
        # An input has to come, and without homes the rest can only be computed again.
        self._gaps = [gap for gap in gaps if gap in self._again or (self.costs.homes and gap.start >= 0)]

    def improve(self, planned: Planned, tries: int, seed: int = 0) -> Planned:
        """The best plan that is come by; the given one if none is better.

        Args:
            planned: where to start; within the budget.
            tries: changes to try.
            seed: of what is drawn.
        """
        draw = random.Random(seed)
        best, value = planned, worth(self.costs, planned)
        for _ in range(tries):
            if best.timeline.step_seconds <= self.goal:
                break
            found = self._try(self._changed({d.gap: d for d in best.plan.decisions}, draw), value)
            if found is not None and (made := worth(self.costs, found)) <= value:
                best, value = found, made
        return best

    def _try(self, choices: _Choices, most: float) -> Planned | None:
        """What comes of it; None if it does not fit, or takes more than ``most`` seconds for sure."""
        decisions = tuple(choices[gap] for gap in sorted(choices))
        if decisions not in self._seen:
            plan = Plan("auto", self.budget, decisions)
            lowered = lower(self.graph, self.costs, plan)
            if busiest_seconds(self.graph, self.costs, lowered) > most:
                return None  # not for ever: another may be glad of it
            self._seen[decisions] = self._fitted(plan, lowered)
        return self._seen[decisions]

    def _fitted(self, plan: Plan, lowered: Program) -> Planned | None:
        if room_at_homes(self.graph, self.costs, lowered) is None:
            return None
        program = place(lowered, self.budget, effort=0)
        if program.arena_bytes > self.budget:
            return None
        program = wire(self.graph, program, self.costs)
        return Planned(plan, program, simulate(self.graph, self.costs, program))

    def _changed(self, choices: _Choices, draw: random.Random) -> _Choices:
        for _ in range(draw.choice(_AT_ONCE)):
            if choices and draw.random() < _DECIDED:
                self._change(choices, choices[draw.choice(sorted(choices))], draw)
            elif self._gaps:
                gap = draw.choice(self._gaps)
                if gap not in choices:
                    choices[gap] = self._new(gap, draw)
        return choices

    def _change(self, choices: _Choices, decision: Decision, draw: random.Random) -> None:
        gap, kind, shift = decision.gap, draw.random(), draw.choice(_SHIFTS)
        n = len(self.graph.ops)
        if decision.residency is Residency.RECOMPUTE:
            if kind < _COMPUTED[0]:
                del choices[gap]
            elif kind < _COMPUTED[1]:
                back = min(max(decision.fetch_at + shift, gap.start + 1), gap.end)
                choices[gap] = replace(decision, fetch_at=back)
            elif self.costs.homes:
                choices[gap] = Decision(gap, Residency.OFFLOAD, min(gap.start + 2, gap.end), gap.end)
            return
        first = max(gap.start, -1) + 1 if gap.end < n else n  # the earliest op before which it can come back
        if gap.start < 0:
            choices[gap] = replace(decision, fetch_at=min(max(decision.fetch_at + shift, 0), gap.end))
        elif kind < _OFFLOADED[0]:
            del choices[gap]
        elif kind < _OFFLOADED[1]:
            back = min(max(decision.fetch_at + shift, first), gap.end)
            choices[gap] = replace(decision, fetch_at=back, release_by=min(decision.release_by, back))
        elif kind < _OFFLOADED[2]:
            most = decision.fetch_at if gap.end < n else n
            choices[gap] = replace(decision, release_by=min(max(decision.release_by + shift, gap.start + 1), most))
        elif gap in self._again:
            choices[gap] = Decision(gap, Residency.RECOMPUTE, gap.start + 1, gap.end)

    def _new(self, gap: Gap, draw: random.Random) -> Decision:
        if gap in self._again and (not self.costs.homes or draw.random() >= _OFFLOADS):
            return Decision(gap, Residency.RECOMPUTE, gap.start + 1, gap.end)
        n = len(self.graph.ops)
        left = draw.randint(gap.start + 1, min(gap.end, n))
        return Decision(gap, Residency.OFFLOAD, left, gap.end)
