"""From a plan to a placed program: lowered, given addresses, wired, simulated; and what programs are compared by.

A block is a rectangle: its bytes by the instructions over which it is held (see ``placement``). Small blocks (below 64
KiB) lie below all large ones, so that large ones stay aligned to pages; where that does not fit, some take whole pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd

import numpy as np
from numpy.typing import NDArray

from outofcore.analysis.gaps import constant_bytes, is_large, placed_bytes
from outofcore.costs import Costs
from outofcore.errors import BudgetError
from outofcore.graph import StepGraph, StorageKind
from outofcore.lowering import lower, room_at_homes, wire
from outofcore.plan import Plan
from outofcore.planning.placement import Packing, PlacementParams, Rectangle, pack
from outofcore.program import Block, CopyOut, Program, Run, Timeline
from outofcore.simulator import simulate
from outofcore.units import PAGE_BYTES, round_up

# How much to search for a placement, in rectangles looked at (see ``placement``): plans are placed many times, so some
# hundredths of a second at most.
EFFORT = 4_000_000
# How often a policy is asked again for less, because its blocks could not be placed closely enough.
ATTEMPTS = 16
# What a second of copying counts for beside a second of the step: of equally quick plans, the one that moves less wins.
_COPY_WEIGHT = 0.002


@dataclass(frozen=True)
class Outcome:
    """What came of a candidate plan.

    Attributes:
        how: how it was found.
        plan: its decisions.
        arena_bytes: how high its blocks reach; infinity where the homes cannot hold what leaves.
        seconds: of a step, simulated; None where it could not be placed within the budget.
        verdict: in words, why it was chosen or lost.
    """

    how: str
    plan: Plan
    arena_bytes: float
    seconds: float | None
    verdict: str


@dataclass(frozen=True)
class Planned:
    """A plan with its program, wired and placed, and the simulated timeline.

    Attributes:
        plan: the decisions.
        program: that carries them out.
        timeline: of the program under the costs that it was planned for.
        candidates: every plan that was placed, this one among them, in the order in which they were tried.
    """

    plan: Plan
    program: Program
    timeline: Timeline
    candidates: tuple[Outcome, ...] = ()


# Addresses


def place(program: Program, capacity: int | None = None, effort: int = EFFORT) -> Program:
    """Give each block an offset.

    Args:
        program: as lowered.
        capacity: bytes that would do; the search stops at the first placement that stays within them.
        effort: see ``placement.pack``; 0: the quick rules only.

    Returns:
        The program with all offsets set and ``arena_bytes`` the height reached, which may lie above ``capacity``: it is
        for the caller to compare.
    """
    low = [block for block in program.blocks if not is_large(block.bytes)]
    high = [block for block in program.blocks if is_large(block.bytes)]
    end = len(program.instructions)
    below = _pack(low, end, None, effort)
    if capacity is not None:
        # Recomputation may make more small blocks than fit below: where there is room, they lie between the large ones.
        held = _held(high, end)
        peak = int(held.max(initial=0))
        if round_up(below.height, PAGE_BYTES) + peak > capacity:
            lifted = _lifted(program, low, held > peak - PAGE_BYTES)
            high += [replace(block, bytes=round_up(block.bytes, PAGE_BYTES)) for block in low if block.id in lifted]
            low = [block for block in low if block.id not in lifted]
            below = _pack(low, end, None, effort)
    base = round_up(below.height, PAGE_BYTES)
    above = _pack(high, end, None if capacity is None else max(capacity - base, 0), effort)
    offsets = {block.id: offset for block, offset in zip(low, below.offsets, strict=True)}
    offsets |= {block.id: base + offset for block, offset in zip(high, above.offsets, strict=True)}
    blocks = tuple(Block(b.id, b.storage, b.bytes, b.born, b.dies, b.wraps, offsets[b.id]) for b in program.blocks)
    return replace(program, blocks=blocks, arena_bytes=base + above.height)


def _held(blocks: Sequence[Block], end: int) -> NDArray[np.int64]:
    """Return the bytes that blocks take at each of ``end`` instructions."""
    change = np.zeros(end + 1, dtype=np.int64)
    for block in blocks:
        for first, last in rectangle_of(block, end).segments:
            change[first] += block.bytes
            change[last] -= block.bytes
    return np.cumsum(change)[:-1]


def _lifted(program: Program, small: Sequence[Block], is_full: NDArray[np.bool_]) -> set[int]:
    """Return the small blocks that recomputation alone touches, and only at instructions that are not full."""
    again, others = set[int](), set[int]()
    for instruction in program.instructions:
        if isinstance(instruction, Run):
            touched = {*instruction.blocks, *(() if instruction.workspace is None else (instruction.workspace,))}
            (again if instruction.again else others).update(touched)
        else:
            others.add(instruction.block)
    brief = again - others
    return {block.id for block in small if block.id in brief and not is_full[block.born : block.dies].any()}


def _pack(blocks: Sequence[Block], end: int, capacity: int | None, effort: int) -> Packing:
    return pack(
        [rectangle_of(block, end) for block in blocks], capacity=capacity, params=PlacementParams(effort=effort)
    )


def rectangle_of(block: Block, end: int) -> Rectangle:
    """A block of a program with ``end`` instructions, as what is placed."""
    if not block.wraps:
        return Rectangle(block.id, block.born, block.dies, block.bytes)
    gap = None if block.born == block.dies == 0 else (block.dies, block.born)
    return Rectangle(block.id, 0, end, block.bytes, gap=gap)


def small_region_bytes(whole: Program) -> int:
    """Arena bytes below the large blocks, for small ones, which never leave; of a program in which nothing does."""
    small = [block for block in whole.blocks if not is_large(block.bytes)]
    return round_up(_pack(small, len(whole.instructions), None, EFFORT).height, PAGE_BYTES)


def room_for_large(graph: StepGraph, costs: Costs, budget: int, whole: Program | None = None) -> int:
    """Bytes of a budget that large blocks may take, which are all that a plan decides about.

    Where all of these are multiples of some size, as in recurrent networks, what is left over is of no use to any plan.

    Args:
        graph: the step.
        costs: measured or assumed.
        budget: bytes of the arena.
        whole: the program in which nothing leaves, if it is there already.
    """
    room = budget - small_region_bytes(whole or lower(graph, costs, keep_all(0))) - constant_bytes(graph)
    return room - room % _common_size(graph, costs)


def most_held(program: Program) -> int:
    """The most bytes that blocks take at once: no arena for the program is smaller."""
    return int(_held(program.blocks, len(program.instructions)).max(initial=0))


def _common_size(graph: StepGraph, costs: Costs) -> int:
    """The largest size that the bytes of all large blocks are multiples of."""
    sizes = {placed_bytes(s.bytes) for s in graph.storages if is_large(s.bytes) and s.kind is not StorageKind.CONSTANT}
    sizes |= {placed_bytes(cost.workspace_bytes) for cost in costs.ops if is_large(cost.workspace_bytes)}
    return gcd(*sizes) or 1


# Programs


def keep_all(budget: int) -> Plan:
    """The plan in which nothing ever leaves: in-core training."""
    return Plan("keep-all", budget, ())


def fit_once(graph: StepGraph, costs: Costs, budget: int, plan: Plan, effort: int = EFFORT) -> Planned | None:
    """Lower, place and simulate one plan; None if its blocks cannot be placed within the budget."""
    lowered = lower(graph, costs, plan)
    if room_at_homes(graph, costs, lowered) is None:
        return None
    program = place(lowered, budget, effort)
    return finish(graph, costs, plan, program) if program.arena_bytes <= budget else None


def finish(graph: StepGraph, costs: Costs, plan: Plan, program: Program) -> Planned:
    """Wire and simulate a placed program."""
    program = wire(graph, program, costs)
    return Planned(plan, program, simulate(graph, costs, program))


def resimulated(graph: StepGraph, costs: Costs, planned: Planned) -> Planned:
    """A plan with its timeline under other costs."""
    return replace(planned, timeline=simulate(graph, costs, planned.program))


def fit(graph: StepGraph, costs: Costs, budget: int, policy: Callable[[int], Plan]) -> Planned | None:
    """Ask a policy for plans with less and less room, until its blocks can be placed within the budget.

    Where it has none for so little any more, it is asked for something in between.

    Args:
        graph: the step.
        costs: measured or assumed.
        budget: bytes of the arena.
        policy: makes a plan within a number of bytes of large blocks; may raise ``BudgetError``.

    Returns:
        None if no plan of the policy could be placed.
    """
    room = room_for_large(graph, costs, budget)
    most, least = room, 0  # the least room whose plan could not be placed; the most for which there is none
    before, over = None, 0
    for attempt in range(ATTEMPTS):
        if room <= least:
            room = (most + least) // 2
        if room <= 0 or (attempt and most - room < PAGE_BYTES):
            return None
        try:
            plan = policy(room)
        except BudgetError:
            if not attempt:
                return None
            least = room
            continue
        if plan.decisions != before:
            before = plan.decisions
            lowered = lower(graph, costs, plan)
            if room_at_homes(graph, costs, lowered) is None:
                return None
            program = place(lowered, budget)
            if program.arena_bytes <= budget:
                return finish(graph, costs, plan, program)
            over = program.arena_bytes - budget
        most = room
        room -= max(min(over, room // 16), room // 64, PAGE_BYTES)
    return None


def worth(costs: Costs, planned: Planned) -> float:
    """Seconds by which programs are compared: of the step, and a little for copies.

    What copies take from the ops beside them is in the simulated time already where a home says how much that is.
    """
    if costs.homes and costs.homes[0].compute_slowdown:
        return planned.timeline.step_seconds
    copying = 0.0
    for instruction in planned.program.instructions:
        if costs.homes and not isinstance(instruction, Run):
            home = costs.homes[instruction.home]
            count = planned.program.blocks[instruction.block].bytes
            copying += home.out_seconds(count) if isinstance(instruction, CopyOut) else home.in_seconds(count)
    return planned.timeline.step_seconds + _COPY_WEIGHT * copying
