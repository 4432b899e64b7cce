"""From a plan to a placed program: lower it, give its blocks addresses, wire and simulate it.

Small blocks (below 64 KiB) are placed below all large ones, so that large blocks stay aligned to pages. Where they do
not fit there, some take whole pages between the large ones.
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
from outofcore.lowering import copies_in_before_room, lower, wire
from outofcore.plan import Plan
from outofcore.planning.placement import Packing, PlacementParams, Rectangle, pack
from outofcore.program import Block, CopyOut, Program, Run, Timeline
from outofcore.simulator import simulate
from outofcore.units import PAGE_BYTES, round_up

# Effort of one placement, in rectangles inspected (see ``placement``). Plans are placed many times, so one may take
# some hundredths of a second.
EFFORT = 4_000_000
# How often a policy is asked for a plan with less room because its blocks did not fit.
ATTEMPTS = 16
# The cost of a second of copying, in seconds of the step. Of equally fast plans, the plan with fewer copies wins.
_COPY_WEIGHT = 0.002


@dataclass(frozen=True)
class CandidateOutcome:
    """The result of placing a candidate plan."""

    how: str  # how the candidate was found
    plan: Plan
    arena_bytes: float  # the height of its blocks; infinity if the homes are too small
    seconds: float | None  # of the simulated step; None if it does not fit the budget
    verdict: str  # why it was chosen or lost, in words


@dataclass(frozen=True)
class Planned:
    """A plan with its wired and placed program and the simulated timeline.

    Attributes:
        plan: the decisions.
        program: the instructions that carry them out.
        timeline: of the program under the costs that it was planned for.
        candidates: every plan that was placed, including this one, in the order of their trials.
    """

    plan: Plan
    program: Program
    timeline: Timeline
    candidates: tuple[CandidateOutcome, ...] = ()


# Addresses


def place(program: Program, capacity: int | None = None, effort: int = EFFORT) -> Program:
    """Return the program with an offset for each block; its arena exceeds ``capacity`` if no placement fits."""
    small = [block for block in program.blocks if not is_large(block.bytes)]
    large = [block for block in program.blocks if is_large(block.bytes)]
    end = len(program.instructions)
    below = _pack(small, end, None, effort)
    if capacity is not None:
        # Recomputation may create more small blocks than fit below the large ones; place those between large ones.
        live = _live_bytes(large, end)
        peak = int(live.max(initial=0))
        if round_up(below.height, PAGE_BYTES) + peak > capacity:
            lifted = _liftable_blocks(program, small, live > peak - PAGE_BYTES)
            large += [replace(block, bytes=round_up(block.bytes, PAGE_BYTES)) for block in small if block.id in lifted]
            small = [block for block in small if block.id not in lifted]
            below = _pack(small, end, None, effort)
    base = round_up(below.height, PAGE_BYTES)
    above = _pack(large, end, None if capacity is None else max(capacity - base, 0), effort)
    offsets = {block.id: offset for block, offset in zip(small, below.offsets, strict=True)}
    offsets |= {block.id: base + offset for block, offset in zip(large, above.offsets, strict=True)}
    blocks = tuple(Block(b.id, b.storage, b.bytes, b.born, b.dies, b.wraps, offsets[b.id]) for b in program.blocks)
    return replace(program, blocks=blocks, arena_bytes=base + above.height)


def _live_bytes(blocks: Sequence[Block], instruction_count: int) -> NDArray[np.int64]:
    """Return the bytes of live blocks at each instruction."""
    change = np.zeros(instruction_count + 1, dtype=np.int64)
    for block in blocks:
        for first, last in rectangle_of(block, instruction_count).segments:
            change[first] += block.bytes
            change[last] -= block.bytes
    return np.cumsum(change)[:-1]


def _liftable_blocks(program: Program, small: Sequence[Block], is_full: NDArray[np.bool_]) -> set[int]:
    """Return the ids of small blocks, used by recomputation only, that may be placed among the large blocks."""
    recomputation, elsewhere = set[int](), set[int]()
    for instruction in program.instructions:
        if isinstance(instruction, Run):
            touched = {*instruction.blocks, *(() if instruction.workspace is None else (instruction.workspace,))}
            (recomputation if instruction.again else elsewhere).update(touched)
        else:
            elsewhere.add(instruction.block)
    movable = recomputation - elsewhere
    return {block.id for block in small if block.id in movable and not is_full[block.born : block.dies].any()}


def _pack(blocks: Sequence[Block], end: int, capacity: int | None, effort: int) -> Packing:
    return pack(
        [rectangle_of(block, end) for block in blocks], capacity=capacity, params=PlacementParams(effort=effort)
    )


def rectangle_of(block: Block, instruction_count: int) -> Rectangle:
    """Return a block as a rectangle of its lifetime and bytes, for placement."""
    if not block.wraps:
        return Rectangle(block.id, block.born, block.dies, block.bytes)
    gap = None if block.born == block.dies == 0 else (block.dies, block.born)
    return Rectangle(block.id, 0, instruction_count, block.bytes, gap=gap)


def small_region_bytes(whole: Program) -> int:
    """Return the bytes that the small blocks take, below the large ones, without evictions."""
    small = [block for block in whole.blocks if not is_large(block.bytes)]
    return round_up(_pack(small, len(whole.instructions), None, EFFORT).height, PAGE_BYTES)


def room_for_large(graph: StepGraph, costs: Costs, budget: int, whole: Program | None = None) -> int:
    """Return the bytes of a budget that large blocks may take."""
    room = budget - small_region_bytes(whole or lower(graph, costs, keep_all(0))) - constant_bytes(graph)
    return room - room % _common_divisor(graph, costs)  # plans cannot use the remainder


def peak_bytes(program: Program) -> int:
    """Return the most bytes that blocks take at once, a lower bound of the arena."""
    return int(_live_bytes(program.blocks, len(program.instructions)).max(initial=0))


def _common_divisor(graph: StepGraph, costs: Costs) -> int:
    """Return the greatest common divisor of the bytes of all large blocks."""
    sizes = {placed_bytes(s.bytes) for s in graph.storages if is_large(s.bytes) and s.kind is not StorageKind.CONSTANT}
    sizes |= {placed_bytes(cost.workspace_bytes) for cost in costs.ops if is_large(cost.workspace_bytes)}
    return gcd(*sizes) or 1


# Programs


def keep_all(budget: int) -> Plan:
    """Return the plan in which everything stays on the device: in-core training."""
    return Plan("keep-all", budget, ())


def fit_plan(graph: StepGraph, costs: Costs, budget: int, plan: Plan, effort: int = EFFORT) -> Planned | None:
    """Lower, place and simulate one plan; return None if it exceeds the budget or a home."""
    lowered = lower(graph, costs, plan)
    if copies_in_before_room(graph, costs, lowered) is None:
        return None
    program = place(lowered, budget, effort)
    return wire_and_simulate(graph, costs, plan, program) if program.arena_bytes <= budget else None


def wire_and_simulate(graph: StepGraph, costs: Costs, plan: Plan, program: Program) -> Planned:
    program = wire(graph, program, costs)
    return Planned(plan, program, simulate(graph, costs, program))


def resimulate(graph: StepGraph, costs: Costs, planned: Planned) -> Planned:
    """Return a plan with its timeline under other costs."""
    return replace(planned, timeline=simulate(graph, costs, planned.program))


def fit_policy(graph: StepGraph, costs: Costs, budget: int, policy: Callable[[int], Plan]) -> Planned | None:
    """Plan with less and less room until the plan can be placed within the budget; None if that fails."""
    room = room_for_large(graph, costs, budget)
    too_large, too_small = room, 0  # the smallest room whose plan does not fit; the largest room without a plan
    previous_decisions, excess_bytes = None, 0
    for attempt in range(ATTEMPTS):
        if room <= too_small:  # the policy has no plan for so little
            room = (too_large + too_small) // 2
        if room <= 0 or (attempt and too_large - room < PAGE_BYTES):
            return None
        try:
            plan = policy(room)
        except BudgetError:
            if not attempt:
                return None
            too_small = room
            continue
        if plan.decisions != previous_decisions:
            previous_decisions = plan.decisions
            lowered = lower(graph, costs, plan)
            if copies_in_before_room(graph, costs, lowered) is None:
                return None
            program = place(lowered, budget)
            if program.arena_bytes <= budget:
                return wire_and_simulate(graph, costs, plan, program)
            excess_bytes = program.arena_bytes - budget
        too_large = room
        room -= max(min(excess_bytes, room // 16), room // 64, PAGE_BYTES)
    return None


def comparison_seconds(costs: Costs, planned: Planned) -> float:
    """Return the seconds of a step plus a penalty for its copies, to compare plans."""
    if costs.homes and costs.homes[0].compute_slowdown:  # the simulated time contains the cost of copies
        return planned.timeline.step_seconds
    copying = 0.0
    for instruction in planned.program.instructions:
        if costs.homes and not isinstance(instruction, Run):
            home = costs.homes[instruction.home]
            count = planned.program.blocks[instruction.block].bytes
            copying += home.out_seconds(count) if isinstance(instruction, CopyOut) else home.in_seconds(count)
    return planned.timeline.step_seconds + _COPY_WEIGHT * copying
