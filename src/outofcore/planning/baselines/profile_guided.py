"""Addresses by best fit over the skyline, from a profile of one step (arXiv 1804.10001)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outofcore.analysis.gaps import is_large
from outofcore.costs import Costs
from outofcore.graph import StepGraph
from outofcore.lowering import lower
from outofcore.planning.placement import best_fit
from outofcore.planning.placing import Planned, keep_all, rectangle_of, wire_and_simulate
from outofcore.planning.policy import Asked, CheckedPolicy
from outofcore.planning.resident_gradients import keep_all_gradients
from outofcore.program import Block, Program
from outofcore.units import PAGE_BYTES, round_up


@dataclass(frozen=True)
class ProfileGuided(CheckedPolicy):
    """In-core training with addresses by one rule: best fit over the skyline.

    Sekiyama, Imamichi, Imai & Raymond, "Profile-guided memory optimization for deep neural networks" (arXiv
    1804.10001), section 3. The lowest free offset over time is a skyline. Of the blocks whose lifetime is within its
    lowest segment (the leftmost of equals), the longest-lived is placed there. If no block fits, the segment is raised
    to its lower neighbour.

        offset ^        |  C  |            the lowest segment is that above B; D lives longer than E, and
               |  A     |-----|=====       is within it, so D comes next, then E next to it or above
               |--------|  B       |
               +------------------------> time

    It has a plan if these addresses stay within the budget. Other policies use the lowest of several placements.

    Different from the paper: lifetimes and sizes come from the captured step, and workspaces of ops from measurements.
    A block that is resident at the end of a step wraps around the end of time. Small blocks (below 64 KiB) are below
    the others, and blocks that live through the whole step are lowest. Left out: reoptimization and interruption of a
    plan.

    >>> ProfileGuided().name
    'profile-guided'
    """

    name = "profile-guided"

    def variants(self, graph: StepGraph, costs: Costs, budget: int) -> Sequence[Asked]:
        return (keep_all,)

    def place(self, graph: StepGraph, costs: Costs, budget: int) -> Planned | None:
        """Return a plan without evictions, placed by best fit; None if it exceeds the budget."""
        keep_gradients = keep_all_gradients(graph, keep_all(budget)) if graph.gradients_left else keep_all(budget)
        plans = dict.fromkeys((keep_gradients, keep_all(budget)))
        for plan in plans:
            program = _place_by_rule(lower(graph, costs, plan))
            if program.arena_bytes <= budget:
                return wire_and_simulate(graph, costs, replace(plan, policy=self.name), program)
        return None


def _place_by_rule(program: Program) -> Program:
    """Return the program with its blocks placed by best fit."""
    small = [block for block in program.blocks if not is_large(block.bytes)]
    large = [block for block in program.blocks if is_large(block.bytes)]
    offsets: dict[int, int] = {}
    top = 0
    for blocks in (small, large):
        base = round_up(top, PAGE_BYTES)
        packing = best_fit([rectangle_of(block, len(program.instructions)) for block in blocks])
        offsets |= {block.id: base + offset for block, offset in zip(blocks, packing.offsets, strict=True)}
        top = base + packing.height
    blocks = tuple(Block(b.id, b.storage, b.bytes, b.born, b.dies, b.wraps, offsets[b.id]) for b in program.blocks)
    return replace(program, blocks=blocks, arena_bytes=top)
