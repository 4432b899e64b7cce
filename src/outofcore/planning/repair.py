"""Repair of plans whose blocks exceed the budget once they are placed at addresses.

``Attempts`` places one plan after the other and records how many bytes the next plan should leave free at each op: more
only at ops where blocks exceed the budget.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from outofcore.analysis.gaps import is_large
from outofcore.costs import Costs
from outofcore.graph import StepGraph
from outofcore.lowering import copies_in_before_room, lower
from outofcore.plan import Plan
from outofcore.planning.placing import Planned, place, wire_and_simulate
from outofcore.planning.problem import Ints
from outofcore.program import Program, Run
from outofcore.units import PAGE_BYTES

# Number of consecutive attempts without improvement before giving up.
_MAX_STALE = 6
# Ops by which the range around an excess is widened each time.
_WIDER = 4
# A block that repeatedly exceeds the budget by at least this share of its bytes, but not wholly, is always offloaded.
_MOSTLY = 0.5

_Excesses = list[tuple[int, int, int, int]]


@dataclass
class Attempts:
    """Places successive plans of one candidate, and records the bytes that the next plan should leave free."""

    graph: StepGraph
    costs: Costs
    budget: int
    spared_bytes: Ints = field(init=False)  # shape (ops,), bytes that the next plan should leave free
    # Storages that the next plan should not keep on the device between two uses.
    forced_offloads: set[int] = field(default_factory=set[int])
    count: int = 0  # number of plans tried
    is_exhausted: bool = False  # whether no plan will fit: the homes are too small, or attempts do not improve
    height: float = 0.0  # of the last plan's blocks, in bytes
    is_repeat: bool = False  # whether the last plan equals the one before, so that it was not placed again

    def __post_init__(self) -> None:
        self.spared_bytes = np.zeros(len(self.graph.ops), dtype=np.int64)
        self._mostly: set[int] = set()
        self._last: tuple[Plan, _Excesses] | None = None
        self._lowest, self._stale = float("inf"), 0

    def place(self, plan: Plan) -> Planned | None:
        """Place a plan within the budget; None if a block ends above it or a home is too small."""
        graph, costs, n = self.graph, self.costs, len(self.graph.ops)
        self.is_repeat = self._last is not None and self._last[0] == plan
        if self._last is not None and self.is_repeat:
            stuck = self._last[1]
            self._stale += 1
        else:
            lowered = lower(graph, costs, plan)
            if copies_in_before_room(graph, costs, lowered) is None:
                self.is_exhausted, self.height = True, float("inf")
                return None
            program = place(lowered, self.budget)
            self.height = program.arena_bytes
            if program.arena_bytes <= self.budget:
                return wire_and_simulate(graph, costs, plan, program)
            stuck = _find_excesses(program, self.budget, n)
            area = sum(over * (last - first) for first, last, over, _ in stuck)
            self._stale = 0 if area < self._lowest else self._stale + 1
            self._lowest = min(self._lowest, area)
            self._last = (plan, stuck)
        self.is_exhausted = self._stale >= _MAX_STALE
        mostly_over = {storage for *_, storage in stuck if storage >= 0}
        more, doubled = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
        for first, last, over, storage in stuck:
            if storage in self._mostly and storage not in self.forced_offloads:
                self.forced_offloads.add(storage)
                continue
            # Widen the range with each attempt, since an obstructing block may live elsewhere in the block's lifetime.
            wider = _WIDER * self.count
            around = slice(max(first - wider, 0), last + wider)
            more[around] += max(over, PAGE_BYTES)
            doubled[around] = np.maximum(doubled[around], self.spared_bytes[first:last].max())
        self._mostly = mostly_over
        # From the second excess on, spare at least twice the bytes spared before.
        self.spared_bytes = np.minimum(self.spared_bytes + np.maximum(more, doubled), self.budget)
        self.count += 1
        return None


def _find_excesses(program: Program, budget: int, op_count: int) -> _Excesses:
    """List the blocks that end above the budget: first op, end op, bytes above it, and storage (or -1)."""
    op_at: list[int] = []  # for each instruction, the op that runs first at it or after it
    upcoming = op_count
    for instruction in reversed(program.instructions):
        if isinstance(instruction, Run) and not instruction.again:
            upcoming = instruction.op
        op_at.append(upcoming)
    op_at.reverse()
    op_at.append(op_count)
    excesses: _Excesses = []
    for block in program.blocks:
        over = block.offset + block.bytes - budget
        if over <= 0:
            continue
        spans = [(block.born, block.dies)]
        if block.wraps:
            end = len(program.instructions)
            spans = [(0, end)] if block.born == block.dies == 0 else [(0, block.dies), (block.born, end)]
        # A block that is wholly above the budget is there because of blocks below it.
        is_mostly = is_large(block.bytes) and _MOSTLY * block.bytes <= over <= block.bytes
        storage = block.storage if block.storage is not None and is_mostly else -1
        ranges = ((op_at[first], max(op_at[last], op_at[first] + 1)) for first, last in spans if first < last)
        excesses += [(first, last, min(over, block.bytes), storage) for first, last in ranges]
    return excesses
