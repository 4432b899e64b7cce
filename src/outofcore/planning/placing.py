"""From a plan to a placed program within the budget, and what programs are compared by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outofcore.analysis.gaps import constant_bytes
from outofcore.costs import Costs
from outofcore.errors import BudgetError
from outofcore.graph import StepGraph
from outofcore.lowering import lower, room_at_homes, wire
from outofcore.plan import Plan, Residency
from outofcore.planning.addresses import place, place_small
from outofcore.planning.offload_all import offload_all
from outofcore.program import CopyOut, Program, Run, Timeline
from outofcore.simulator import busiest_seconds, simulate
from outofcore.units import PAGE_BYTES

# How often a policy is asked again for less, because its blocks could not be placed closely enough.
ATTEMPTS = 16
# How much larger an arena is in which plans are placed only to see what they would take.
_EASY = 1.1
# What a second of copying counts beside a second of the step: of plans as quick as each other, the one that moves less.
_INTERFERENCE = 0.002


@dataclass(frozen=True)
class Planned:
    """A plan with its program, wired and placed, and the simulated timeline."""

    plan: Plan
    program: Program
    timeline: Timeline


def keep_all(budget: int) -> Plan:
    """The plan in which nothing ever leaves: in-core training."""
    return Plan("keep-all", budget, ())


def small_region_bytes(graph: StepGraph, costs: Costs) -> int:
    """Arena bytes below the large blocks: small blocks, which never leave whatever the plan."""
    return place_small(lower(graph, costs, offload_all(graph, 0)))


def room_for_large(graph: StepGraph, costs: Costs, budget: int) -> int:
    """Bytes of a budget that large blocks may take, which are all that a plan decides about."""
    return budget - small_region_bytes(graph, costs) - constant_bytes(graph)


def fit_once(graph: StepGraph, costs: Costs, budget: int, plan: Plan) -> Planned | None:
    """Lower, place and simulate one plan; None if its blocks cannot be placed within the budget."""
    return fit_or_height(graph, costs, budget, plan)[1]


def fit_or_height(graph: StepGraph, costs: Costs, budget: int, plan: Plan) -> tuple[float, Planned | None]:
    """Lower, place and simulate one plan.

    Returns:
        How high its blocks reach in the arena, in bytes (infinity: the homes cannot hold what leaves), and what
        came of it if that is within the budget.
    """
    lowered = lower(graph, costs, plan)
    if room_at_homes(graph, costs, lowered) is None:
        return float("inf"), None
    program = place(lowered, budget)
    if program.arena_bytes > budget:
        return program.arena_bytes, None
    return program.arena_bytes, finish(graph, costs, plan, program)


def outlook(graph: StepGraph, costs: Costs, budget: int, plan: Plan, seconds: float) -> Planned | None:
    """What a plan would take if the arena were somewhat larger than the budget, so that placing it is easy.

    Returns:
        None where that is ``seconds`` or more. Where its ops alone take that, or the copies of one queue, nothing is
        placed to find that out.

    Raises:
        BudgetError: the homes cannot hold what leaves.
    """
    if least_seconds(graph, costs, plan) >= seconds:
        return None
    lowered = lower(graph, costs, plan)
    if room_at_homes(graph, costs, lowered) is None:
        raise BudgetError("the homes cannot hold what this plan sends there", budget)
    if busiest_seconds(graph, costs, lowered) >= seconds:
        return None
    planned = finish(graph, costs, plan, place(lowered, int(budget * _EASY), effort=0))
    return planned if planned.timeline.step_seconds < seconds else None


def least_seconds(graph: StepGraph, costs: Costs, plan: Plan) -> float:
    """Seconds that the step of a plan takes at least, found without lowering it.

    Its ops run one after the other, and so does, for each gap that is computed again, the op that last wrote its bytes;
    and what has left comes back over its link.
    """
    arrivals = [0.0] * len(costs.homes)
    again: set[tuple[int, int]] = set()  # before which op, and which op
    for decision in plan.decisions:
        storage = decision.gap.storage
        if decision.residency is Residency.OFFLOAD and decision.home < len(arrivals):
            arrivals[decision.home] += costs.homes[decision.home].in_seconds(graph.storages[storage].bytes)
        elif decision.residency is Residency.RECOMPUTE:
            writer = next(
                (
                    op
                    for op in reversed(graph.uses[storage])
                    if op <= decision.gap.start and _writes(graph, op, storage)
                ),
                None,
            )
            if writer is not None:
                again.add((decision.fetch_at, writer))
    running = costs.compute_seconds + sum(costs.ops[op].seconds for _, op in sorted(again))
    return max(running, *arrivals) if arrivals else running


def _writes(graph: StepGraph, op: int, storage: int) -> bool:
    return storage in graph.ops[op].mutates or storage in graph.ops[op].creates


def finish(graph: StepGraph, costs: Costs, plan: Plan, program: Program) -> Planned:
    """Wire and simulate a placed program."""
    program = wire(graph, program, costs)
    return Planned(plan, program, simulate(graph, costs, program))


def fit(graph: StepGraph, costs: Costs, budget: int, policy: Callable[[int], Plan]) -> Planned | None:
    """Ask a policy for plans, with less and less room, until its blocks can be placed within the budget.

    Args:
        graph: the step.
        costs: measured or assumed.
        budget: bytes of the arena.
        policy: makes a plan within a number of bytes of large blocks; may raise ``BudgetError``.

    Returns:
        None if no plan of the policy could be placed.
    """
    room = room_for_large(graph, costs, budget)
    for _ in range(ATTEMPTS):
        if room <= 0:
            return None
        try:
            plan = policy(room)
        except BudgetError:
            return None
        lowered = lower(graph, costs, plan)
        if room_at_homes(graph, costs, lowered) is None:
            return None
        program = place(lowered, budget)
        if program.arena_bytes <= budget:
            return finish(graph, costs, plan, program)
        over = program.arena_bytes - budget
        room -= max(min(over, room // 16), room // 64, PAGE_BYTES)
    return None


def op_times(planned: Planned) -> tuple[float, ...]:
    """When each op first starts in a simulated step, and when the step ends."""
    starts = [
        start
        for instruction, start in zip(planned.program.instructions, planned.timeline.starts, strict=True)
        if isinstance(instruction, Run) and not instruction.again
    ]
    return (*starts, planned.timeline.step_seconds)


def worth(costs: Costs, planned: Planned) -> float:
    """What plans are compared by: step time, and a little for every second of copying.

    What copies take from the ops beside them, the simulated time has already, where the home says how much that is.
    """
    if costs.homes and costs.homes[0].compute_slowdown:
        return planned.timeline.step_seconds
    copying = 0.0
    for instruction in planned.program.instructions:
        if costs.homes and not isinstance(instruction, Run):
            home = costs.homes[instruction.home]
            count = planned.program.blocks[instruction.block].bytes
            copying += home.out_seconds(count) if isinstance(instruction, CopyOut) else home.in_seconds(count)
    return planned.timeline.step_seconds + _INTERFERENCE * copying
