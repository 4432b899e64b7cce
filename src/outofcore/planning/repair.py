"""Plans that leave more bytes free, but only at the ops where blocks stick out of the budget.

A plan says what fits by counting bytes; placed at addresses, some of it may not. ``Attempts`` places one plan after the
other and records how many bytes the next plan should leave free at each op.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from outofcore.analysis.gaps import gaps_of, is_large
from outofcore.costs import Costs
from outofcore.graph import StepGraph, StorageKind
from outofcore.lowering import lower, room_at_homes
from outofcore.plan import Decision, Plan, Residency
from outofcore.planning.placing import Planned, finish, place
from outofcore.planning.problem import Ints
from outofcore.program import Program, Run
from outofcore.units import PAGE_BYTES

# After how many attempts storages also leave between two ops in a row, where blocks stick out.
_PATIENCE = 5
# After how many attempts in a row without lower blocks no more are made.
_STALE = 6
# By how many ops the stretch in which blocks stick out is widened each time.
_WIDER = 4
# Over how many ops a block that sticks out may be held for its neighbours to leave between ops in a row.
_BRIEF = 12

# A block that sticks out by at least this share of its bytes, and did so before, leaves altogether.
_MOSTLY = 0.5

_Stuck = list[tuple[int, int, int, int]]


@dataclass
class Attempts:
    """Attempts to place plans that come from the same candidate.

    Attributes:
        graph: the step.
        costs: measured or assumed.
        budget: bytes of the arena.
        spared: shape (ops,), bytes that the next plan should leave free.
        leaving: storages that the next plan should not keep between two uses.
        made: how many plans were tried.
        ended: whether no plan will do: the homes cannot hold what leaves, or blocks come no lower any more.
        generous: spare the more bytes the more blocks stick out together.
        height: how high the blocks of the last plan reached, in bytes.
        repeated: whether the last plan was the one before, so that there was nothing to place.
    """

    graph: StepGraph
    costs: Costs
    budget: int
    spared: Ints = field(init=False)
    leaving: set[int] = field(default_factory=set[int])
    made: int = 0
    ended: bool = False
    generous: bool = False
    height: float = 0.0
    repeated: bool = False

    def __post_init__(self) -> None:
        self.spared = np.zeros(len(self.graph.ops), dtype=np.int64)
        self._apart: set[int] = set()
        self._mostly: set[int] = set()
        self._last: tuple[Plan, _Stuck] | None = None
        self._lowest, self._stale, self._repeats = float("inf"), 0, 0

    def place(self, plan: Plan) -> Planned | None:
        """The plan, placed; None, with ``spared`` raised, if its blocks cannot be placed within the budget."""
        graph, costs, n = self.graph, self.costs, len(self.graph.ops)
        if self._apart and costs.homes:
            decisions = (*plan.decisions, *_parted(graph, plan, self._apart))
            plan = replace(plan, decisions=tuple(sorted(decisions, key=lambda d: d.gap)))
        self.repeated = self._last is not None and self._last[0] == plan
        if self._last is not None and self.repeated:
            stuck = self._last[1]
            self._stale += 1
            self._repeats += 1
        else:
            lowered = lower(graph, costs, plan)
            if room_at_homes(graph, costs, lowered) is None:
                self.ended, self.height = True, float("inf")
                return None
            program = place(lowered, self.budget)
            self.height = program.arena_bytes
            if program.arena_bytes <= self.budget:
                return finish(graph, costs, plan, program)
            stuck = _stuck(program, self.budget, n)
            area = sum(over * (last - first) for first, last, over, _ in stuck)
            self._stale = 0 if area < self._lowest else self._stale + 1
            self._lowest = min(self._lowest, area)
            self._last, self._repeats = (plan, stuck), 0
        self.ended = self._stale >= _STALE
        mostly = {storage for *_, storage in stuck if storage >= 0}
        more = np.zeros(n, dtype=np.int64)
        for first, last, over, storage in stuck:
            if storage in self._mostly and storage not in self.leaving and not self.generous:
                self.leaving.add(storage)
                continue
            # Ever more ops around them: what is in the way of a block need not be so over all of its life.
            wider = _WIDER * self.made
            around = more[max(first - wider, 0) : last + wider]
            # Where it is not the first time, twice as much.
            around += max(over, PAGE_BYTES, int(self.spared[first:last].max()))
        self._mostly = mostly
        # That the plan has not changed says that more has to be asked for, not again as much.
        self.spared += more
        if self.made >= _PATIENCE:
            for first, last, *_ in stuck:
                if last - first <= _BRIEF:
                    self._apart.update(range(max(first - 1, 0), min(last + 1, n)))
        self.made += 1
        return None


def _stuck(program: Program, budget: int, n: int) -> _Stuck:
    """The ranges of ops over which blocks stick out, by how many bytes, and their storage if most of it does, or -1."""
    op_at: list[int] = []  # for each instruction, the op that runs first at it or after it
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
        is_mostly = is_large(block.bytes) and over >= _MOSTLY * block.bytes
        storage = block.storage if block.storage is not None and is_mostly else -1
        ranges = ((op_at[first], max(op_at[last], op_at[first] + 1)) for first, last in spans if first < last)
        found += [(first, last, min(over, block.bytes), storage) for first, last in ranges]
    return found


def _parted(graph: StepGraph, plan: Plan, apart: set[int]) -> list[Decision]:
    """Evictions between two ops in a row, where a block is in the way of others."""
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
