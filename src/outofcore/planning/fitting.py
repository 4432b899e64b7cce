"""From a policy to a placed program within the budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outofcore.analysis.gaps import constant_bytes, is_large, large_needs, placed_bytes
from outofcore.costs import Costs
from outofcore.errors import BudgetError
from outofcore.graph import StepGraph
from outofcore.lowering import lower, room_at_homes, wire
from outofcore.plan import Plan
from outofcore.planning.addresses import place
from outofcore.planning.offload_all import offload_all
from outofcore.planning.pooch import pooch
from outofcore.planning.priced import priced
from outofcore.planning.sqrt_checkpoint import segment_counts, sqrt_checkpoint
from outofcore.planning.superneurons import superneurons
from outofcore.planning.tflms import tflms
from outofcore.planning.window import window
from outofcore.program import CopyOut, Program, Run, Timeline
from outofcore.simulator import simulate
from outofcore.units import PAGE_BYTES, format_bytes, round_up

# How many storages an error message names.
_NAMED = 8
# How often a policy is asked again for less, because its blocks could not be placed closely enough.
_ATTEMPTS = 16
# How often the priced policy is asked again, with times from the simulation.
_REFINEMENTS = 4
# What share of the seconds of copies that are hidden behind compute the compute is longer.
_INTERFERENCE = 0.05


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
    return _small_region(place(lower(graph, costs, offload_all(graph, 0))))


def _small_region(program: Program) -> int:
    return round_up(max((b.offset + b.bytes for b in program.blocks if not is_large(b.bytes)), default=0), PAGE_BYTES)


def smallest_budget(graph: StepGraph, costs: Costs) -> int:
    """The least budget in bytes that can hold the step: the need of the op that needs the most."""
    return small_region_bytes(graph, costs) + constant_bytes(graph) + max(large_needs(graph, costs), default=0)


def in_core_budget(graph: StepGraph, costs: Costs) -> int:
    """The least budget in bytes at which nothing needs to leave, as placed."""
    return place(lower(graph, costs, keep_all(0))).arena_bytes


def explain_too_small(
    graph: StepGraph, costs: Costs, budget: int, describe: Callable[[int], str] | None = None
) -> BudgetError:
    """The error for a budget that cannot hold the step: which op needs the most, and what would do.

    Args:
        graph: the step.
        costs: of which only the workspaces matter here.
        budget: bytes.
        describe: text for a storage, such as its name with shape; by default its name.
    """
    needs = large_needs(graph, costs)
    smallest = smallest_budget(graph, costs)
    worst = max(range(len(needs)), key=needs.__getitem__) if needs else None
    lines = [f"the budget of {format_bytes(budget)} ({budget} bytes) cannot hold this step."]
    if worst is not None:
        op = graph.ops[worst]
        where = f" in module {op.module}" if op.module else ""
        source = f" ({op.source})" if op.source else ""
        lines.append(f"The op that needs the most is {op.name}{where}{source}; while it runs it needs")
        largest = sorted(op.touched, key=lambda s: -graph.storages[s].bytes)
        for storage in largest[:_NAMED]:
            data = graph.storages[storage]
            text = describe(storage) if describe else data.name or f"storage {storage}"
            lines.append(f"  {format_bytes(data.bytes):>10}  {text} ({data.kind.value})")
        if len(largest) > _NAMED:
            rest = sum(graph.storages[s].bytes for s in largest[_NAMED:])
            lines.append(f"  {format_bytes(rest):>10}  {len(largest) - _NAMED} more")
        if costs.ops[worst].workspace_bytes:
            lines.append(f"  {format_bytes(placed_bytes(costs.ops[worst].workspace_bytes)):>10}  workspace of the op")
        fixed = smallest - needs[worst]
        lines.append(f"  {format_bytes(fixed):>10}  constants and storages below 64 KiB, which always stay")
    lines.append(
        f"The smallest budget that would do is {smallest} bytes ({format_bytes(smallest)}): "
        "raise the budget to at least that, or make the batch or the model smaller."
    )
    return BudgetError("\n".join(lines), smallest)


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
    room = budget - small_region_bytes(graph, costs) - constant_bytes(graph)
    for _ in range(_ATTEMPTS):
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
            program = wire(graph, program, costs)
            return Planned(plan, program, simulate(graph, costs, program))
        over = program.arena_bytes - budget
        room -= max(min(over, room // 16), room // 64, PAGE_BYTES)
    return None


def _smallest(graph: StepGraph, costs: Costs, budget: int) -> Planned | None:
    if not costs.homes:
        return None
    gentle = fit(graph, costs, budget, lambda room: offload_all(graph, room))
    return gentle or fit(graph, costs, budget, lambda room: offload_all(graph, room, strict=True))


def _windows(graph: StepGraph, costs: Costs, budget: int, reaches: Sequence[float]) -> list[Planned]:
    if not costs.homes:
        return []
    planned = [fit(graph, costs, budget, lambda room, r=r: window(graph, costs, room, reach=r)) for r in reaches]
    return [p for p in planned if p is not None]


def _priced(graph: StepGraph, costs: Costs, budget: int, transits: Sequence[float]) -> list[Planned]:
    """Plans by ``priced``, each made again with the times at which ops really start, while that helps."""
    if not costs.homes:
        return []
    found: list[Planned] = []
    for transit in transits:
        times: Sequence[float] | None = None
        best: Planned | None = None
        for _ in range(_REFINEMENTS):

            def policy(room: int, transit: float = transit, times: Sequence[float] | None = times) -> Plan:
                return priced(graph, costs, room, transit=transit, times=times)

            planned = fit(graph, costs, budget, policy)
            if planned is None:
                break
            if best is not None and worth(costs, planned) >= worth(costs, best):
                break
            best = planned
            times = op_times(planned)
            if planned.timeline.step_seconds <= costs.compute_seconds * 1.005:
                break
        found += [best] if best else []
    return found


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

    Copies that hide behind compute still take memory bandwidth from it: on a CPU, some 5 % of their time. Where the
    home says how much, the simulated time has it already.
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


POLICIES = ("auto", "keep-all", "offload-all", "pooch", "priced", "sqrt-checkpoint", "superneurons", "tflms", "window")


def plan_step(
    graph: StepGraph,
    costs: Costs,
    budget: int,
    policy: str = "auto",
    describe: Callable[[int], str] | None = None,
) -> Planned:
    """Plan, place and simulate a step.

    Args:
        graph: the step.
        costs: measured or assumed.
        budget: bytes of the arena, for all blocks: workspaces and fragmentation included.
        policy: one of ``POLICIES``. Where everything fits, every policy but ``offload-all`` keeps it all.
        describe: text for a storage in the error message.

    Raises:
        BudgetError: the budget is below the smallest that could do, or this policy finds no plan.
        ValueError: the policy is not known.
    """
    if policy not in POLICIES:
        raise ValueError(f"there is no policy {policy!r}; choose one of {', '.join(POLICIES)}")
    if budget < smallest_budget(graph, costs):
        raise explain_too_small(graph, costs, budget, describe)
    found: list[Planned] = []
    if policy != "offload-all":
        in_core = fit_once(graph, costs, budget, keep_all(budget))
        if in_core is not None:
            return in_core
    if policy in ("auto", "window"):
        found += _windows(graph, costs, budget, (0.5, 1.0, 1.5) if policy == "auto" else (1.5,))
    if policy in ("auto", "priced"):
        found += _priced(graph, costs, budget, (0.0, 1.0, 2.0, 4.0) if policy == "auto" else (1.0,))
    if policy == "sqrt-checkpoint":
        plans = [sqrt_checkpoint(graph, budget, segments=count) for count in segment_counts(graph)]
        found += [p for p in (fit_once(graph, costs, budget, plan) for plan in plans) if p is not None]
    if policy == "superneurons":
        for recompute in (False, True):
            planned = fit(graph, costs, budget, lambda room, r=recompute: superneurons(graph, costs, room, recompute=r))
            found += [planned] if planned else []
    if policy == "tflms":
        for synchronous in (False, True):
            planned = fit(graph, costs, budget, lambda room, s=synchronous: tflms(graph, costs, room, synchronous=s))
            found += [planned] if planned else []
    if policy == "pooch":
        planned = fit(graph, costs, budget, lambda room: pooch(graph, costs, room))
        found += [planned] if planned else []
    if policy == "offload-all" or (policy == "auto" and not found):
        smallest = _smallest(graph, costs, budget)
        found += [smallest] if smallest else []
    if not found:
        raise BudgetError(
            f"the policy {policy!r} finds no plan within {format_bytes(budget)}: its blocks cannot be placed closely "
            "enough; raise the budget a little, or take policy='auto', which falls back to others",
            smallest_budget(graph, costs),
        )
    return min(found, key=lambda p: worth(costs, p))


def fit_once(graph: StepGraph, costs: Costs, budget: int, plan: Plan) -> Planned | None:
    """Lower, place and simulate one plan; None if its blocks cannot be placed within the budget."""
    lowered = lower(graph, costs, plan)
    if room_at_homes(graph, costs, lowered) is None:
        return None
    program = place(lowered, budget)
    if program.arena_bytes > budget:
        return None
    program = wire(graph, program, costs)
    return Planned(plan, program, simulate(graph, costs, program))
