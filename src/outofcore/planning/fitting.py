"""Policies by name: which plans each makes of a step under a budget, and the smallest budget there is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outofcore.analysis.gaps import constant_bytes, large_needs, placed_bytes
from outofcore.costs import Costs
from outofcore.errors import BudgetError
from outofcore.graph import StepGraph
from outofcore.lowering import lower
from outofcore.plan import Plan
from outofcore.planning.addresses import place
from outofcore.planning.auto import auto
from outofcore.planning.offload_all import offload_all
from outofcore.planning.placing import (
    Planned,
    fit,
    fit_once,
    fit_or_height,
    keep_all,
    op_times,
    small_region_bytes,
    worth,
)
from outofcore.planning.pooch import pooch
from outofcore.planning.priced import priced
from outofcore.planning.sqrt_checkpoint import segment_counts, sqrt_checkpoint
from outofcore.planning.streamed import tries
from outofcore.planning.superneurons import superneurons
from outofcore.planning.tflms import tflms
from outofcore.planning.window import window
from outofcore.units import format_bytes

# How many storages an error message names.
_NAMED = 8
# How often the priced policy is asked again, with times from the simulation.
_REFINEMENTS = 4


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


def _streamed(graph: StepGraph, costs: Costs, budget: int) -> list[Planned]:
    """Plans by flows over the links."""
    fixed = small_region_bytes(graph, costs) + constant_bytes(graph)
    found: list[Planned] = []

    def attempt(plan: Plan) -> tuple[float, float | None]:
        height, planned = fit_or_height(graph, costs, budget, plan)
        if planned is None:
            return (height - fixed) / (budget - fixed), None
        found.append(planned)
        return (height - fixed) / (budget - fixed), planned.timeline.step_seconds

    if costs.homes and budget > fixed:
        tries(graph, costs, budget - fixed, attempt)
    return found


# The published policies that ``auto`` takes its start from, and is never slower than.
_RIVALS = ("priced", "window", "superneurons", "sqrt-checkpoint", "tflms", "pooch")
POLICIES = (
    "auto",
    "keep-all",
    "offload-all",
    "pooch",
    "priced",
    "sqrt-checkpoint",
    "streamed",
    "superneurons",
    "tflms",
    "window",
)


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
    if policy != "offload-all":
        in_core = fit_once(graph, costs, budget, keep_all(budget))
        if in_core is not None:
            return in_core
    found: list[Planned] = []
    if policy == "auto" and len(costs.homes) > 1:
        found = _streamed(graph, costs, budget)  # all others know of one home only
    if found:
        return min(found, key=lambda p: p.timeline.step_seconds)
    if policy == "auto":
        others = [planned for name in _RIVALS for planned in _plans(graph, costs, budget, name)]
        found = auto(graph, costs, budget) + others
        if not found:
            found = _plans(graph, costs, budget, "offload-all")
        # What copies cost beside the time that is predicted must not make a plan slower than a rival's.
        least = min((planned.timeline.step_seconds for planned in others), default=float("inf"))
        found = [planned for planned in found if planned.timeline.step_seconds <= least]
    else:
        found = _plans(graph, costs, budget, policy)
    if not found:
        bounded = any(home.bytes is not None for home in costs.homes)
        raise BudgetError(
            f"the policy {policy!r} finds no plan within {format_bytes(budget)}: its blocks cannot be placed closely "
            f"enough{', or the homes cannot hold what has to leave' if bounded else ''}; raise the budget a little, "
            "or take policy='auto', which falls back to others",
            smallest_budget(graph, costs),
        )
    return min(found, key=lambda p: worth(costs, p))


def _plans(graph: StepGraph, costs: Costs, budget: int, policy: str) -> list[Planned]:
    """The plans of a published policy, or of a building block."""
    match policy:
        case "window":
            return _windows(graph, costs, budget, (1.5,))
        case "priced":
            return _priced(graph, costs, budget, (1.0,))
        case "sqrt-checkpoint":
            plans = [sqrt_checkpoint(graph, budget, segments=count) for count in segment_counts(graph)]
            return _found([fit_once(graph, costs, budget, plan) for plan in plans])
        case "superneurons":
            both = (False, True) if costs.homes else (True,)
            return _found([fit(graph, costs, budget, _superneurons(graph, costs, again)) for again in both])
        case "streamed":
            return _streamed(graph, costs, budget)
        case "tflms":
            return _found([fit(graph, costs, budget, _tflms(graph, costs, waits)) for waits in (False, True)])
        case "pooch":
            return _found([fit(graph, costs, budget, lambda room: pooch(graph, costs, room))])
        case "offload-all":
            return _found([_smallest(graph, costs, budget)])
        case _:
            return []  # keep-all, which has been tried


def _found(plans: Sequence[Planned | None]) -> list[Planned]:
    return [planned for planned in plans if planned is not None]


def _superneurons(graph: StepGraph, costs: Costs, recompute: bool) -> Callable[[int], Plan]:
    return lambda room: superneurons(graph, costs, room, recompute=recompute)


def _tflms(graph: StepGraph, costs: Costs, synchronous: bool) -> Callable[[int], Plan]:
    return lambda room: tflms(graph, costs, room, synchronous=synchronous)
