"""Plans with less and less room, but only over the ops at which blocks stick out of the budget.

A plan says what fits by its bytes; placed at addresses, some of it may not. ``Attempts`` places one plan after the
other and keeps book of how many bytes the next had better leave free, and where.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from outofcore.analysis.gaps import gaps_of, is_large
from outofcore.costs import Costs
from outofcore.graph import StepGraph, StorageKind
from outofcore.lowering import lower, room_at_homes
from outofcore.plan import Decision, Plan, Residency
from outofcore.planning.addresses import place
from outofcore.planning.model import Ints
from outofcore.planning.placing import ATTEMPTS, Planned, finish
from outofcore.program import Program, Run
from outofcore.units import PAGE_BYTES

# After how many attempts what stays between two ops in a row has to leave as well, where blocks stick out.
_PATIENCE = 5
# By how many ops the stretch in which blocks stick out is widened each time.
_WIDER = 4
# Over how many ops a block that sticks out may be held for its neighbours to leave between any two ops.
_BRIEF = 12

_Stuck = list[tuple[int, int, int]]


@dataclass
class Attempts:
    """Attempts to place plans that come from the same idea.

    Attributes:
        graph: the step.
        costs: measured or assumed.
        budget: bytes of the arena.
        spared: for each op the bytes that the next plan had better leave free.
        made: how many plans were tried.
        ended: no plan will do: the homes cannot hold what leaves.
        generous: spare the more bytes the more blocks stick out together.
    """

    graph: StepGraph
    costs: Costs
    budget: int
    spared: Ints = field(init=False)
    made: int = 0
    ended: bool = False
    generous: bool = False

    def __post_init__(self) -> None:
        self.spared = np.zeros(len(self.graph.ops), dtype=np.int64)
        self._apart: set[int] = set()
        self._last: tuple[Plan, _Stuck] | None = None

    def place(self, plan: Plan) -> Planned | None:
        """What comes of a plan; None, and ``spared`` is more, if its blocks cannot be placed within the budget."""
        graph, costs, n = self.graph, self.costs, len(self.graph.ops)
        if self._apart and costs.homes:
            decisions = (*plan.decisions, *_parted(graph, plan, self._apart))
            plan = replace(plan, decisions=tuple(sorted(decisions, key=lambda d: d.gap)))
        if self._last is not None and self._last[0] == plan:
            stuck = self._last[1]  # as before
        else:
            lowered = lower(graph, costs, plan)
            if room_at_homes(graph, costs, lowered) is None:
                self.ended = True
                return None
            program = place(lowered, self.budget)
            if program.arena_bytes <= self.budget:
                return finish(graph, costs, plan, program)
            stuck = _stuck(program, self.budget, n)
            self._last = plan, stuck
        more = np.zeros(n, dtype=np.int64)
        for first, last, over in stuck:
            # Ever more ops around them: what is in the way of a block need not be so over all of its life.
            wider = _WIDER * self.made
            around = more[max(first - wider, 0) : last + wider]
            # What sticks out together, one above the other, is too much by what the highest is.
            if self.generous:
                around += max(over // 2, PAGE_BYTES)
            else:
                np.maximum(around, max(over, PAGE_BYTES), out=around)
        self.spared += more
        if self.made >= _PATIENCE:
            for first, last, _ in stuck:
                if last - first <= _BRIEF:
                    self._apart.update(range(max(first - 1, 0), min(last + 1, n)))
        self.made += 1
        return None


def fit_locally(
    graph: StepGraph, costs: Costs, budget: int, policy: Callable[[Ints], Plan | None], attempts: int = ATTEMPTS
) -> Planned | None:
    """Ask for plans with less and less room, but only over the ops at which blocks stick out of the budget.

    Args:
        graph: the step.
        costs: measured or assumed.
        budget: bytes of the arena.
        policy: makes a plan; is given for each op the bytes that it is to leave free there, as far as it can;
            None if it finds none.
        attempts: how often to ask.
    """
    tried = Attempts(graph, costs, budget, generous=True)
    while tried.made < attempts and not tried.ended:
        plan = policy(tried.spared)
        planned = None if plan is None else tried.place(plan)
        if plan is None or planned is not None:
            return planned
    return None


def _stuck(program: Program, budget: int, n: int) -> _Stuck:
    """The ranges of ops over which blocks stick out of the budget, and by how many bytes."""
    op_at: list[int] = []  # of each instruction the op that runs first at it or after it
    upcoming = n
    for instruction in reversed(program.instructions):
        if isinstance(instruction, Run) and not instruction.again:
            upcoming = instruction.op
        op_at.append(upcoming)
    op_at.reverse()
    op_at.append(n)
    found: _Stuck = []
    for block in program.blocks:
        over = block.offset + block.bytes - budget
        if over <= 0:
            continue
        spans = [(block.born, block.dies)]
        if block.wraps:
            end = len(program.instructions)
            spans = [(0, end)] if block.born == block.dies == 0 else [(0, block.dies), (block.born, end)]
        found += [(op_at[first], max(op_at[last], op_at[first] + 1), over) for first, last in spans if first < last]
    return found


def _parted(graph: StepGraph, plan: Plan, apart: set[int]) -> list[Decision]:
    """What stays between two ops in a row leaves between them, where a block is in the way of others."""
    decided = {decision.gap for decision in plan.decisions}
    found: list[Decision] = []
    for storage in graph.storages:
        if not is_large(storage.bytes) or storage.kind is StorageKind.CONSTANT:
            continue
        for gap in gaps_of(graph, storage.id):
            near = gap.start in apart and gap.end in apart
            if near and gap.end == gap.start + 1 and gap not in decided:
                found.append(Decision(gap, Residency.OFFLOAD, gap.end, gap.end))
    return found
