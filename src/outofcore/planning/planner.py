"""The entry point of planning: from a graph, its costs and a budget to a placed plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from outofcore.analysis.gaps import constant_bytes, large_needs, placed_bytes
from outofcore.costs import Costs
from outofcore.errors import BudgetError
from outofcore.graph import StepGraph
from outofcore.lowering import lower
from outofcore.lowering.slots import slot_bytes
from outofcore.planning.baselines.profile_guided import ProfileGuided
from outofcore.planning.front import Front
from outofcore.planning.parameters import SearchParams
from outofcore.planning.placing import Planned, fit_plan, keep_all, peak_bytes, place, small_region_bytes
from outofcore.planning.policy import Auto, OffloadAll, Policy, PolicyLike, first_fitting_plan, fitting_plans
from outofcore.planning.registry import policy_of
from outofcore.planning.resident_gradients import keep_all_gradients, keep_fitting_gradients
from outofcore.planning.search import search
from outofcore.program import Program
from outofcore.units import format_bytes

_log = logging.getLogger("outofcore.planning")

# How many storages an error message names.
_NAMED = 8


def smallest_budget(graph: StepGraph, costs: Costs) -> int:
    """Return the smallest budget in bytes that has a plan.

    With homes, the op that needs the most bytes decides. Without homes, persistent state and the inputs of
    recomputation must stay on the device; a search then finds the smallest budget, which takes some seconds.
    """
    if not costs.homes:
        return Front(graph, costs).smallest
    return _min_feasible_bytes(graph, costs, lower(graph, costs, keep_all(0)))


def _min_feasible_bytes(graph: StepGraph, costs: Costs, whole: Program) -> int:
    """Return the bytes below which no plan is possible; ``whole`` is the in-core program."""
    return small_region_bytes(whole) + constant_bytes(graph) + max(large_needs(graph, costs), default=0)


def in_core_budget(graph: StepGraph, costs: Costs) -> int:
    """Return the smallest budget in bytes, as placed, that holds the whole step without eviction."""
    return place(lower(graph, costs, keep_all(0))).arena_bytes


def explain_too_small(
    graph: StepGraph,
    costs: Costs,
    budget: int,
    describe: Callable[[int], str] | None = None,
    smallest: int | None = None,
) -> BudgetError:
    """Return the error for a too small budget, with the op that needs the most bytes and the smallest budget."""
    needs = large_needs(graph, costs)
    smallest = smallest_budget(graph, costs) if smallest is None else smallest
    worst = max(range(len(needs)), key=needs.__getitem__) if needs else None
    lines = [f"the budget of {format_bytes(budget)} ({budget} bytes) cannot hold this step."]
    if worst is not None:
        op = graph.ops[worst]
        lines.append(f"The op that needs the most is {op.text}. While it runs it needs")
        largest = sorted(op.touched, key=lambda s: -graph.storages[s].bytes)
        for storage in largest[:_NAMED]:
            data = graph.storages[storage]
            text = describe(storage) if describe else data.name or f"storage {storage}"
            lines.append(f"  {format_bytes(data.bytes):>10}  {text} ({data.kind.value})")
        if len(largest) > _NAMED:
            rest_bytes = sum(graph.storages[s].bytes for s in largest[_NAMED:])
            lines.append(f"  {format_bytes(rest_bytes):>10}  {len(largest) - _NAMED} more")
        if costs.ops[worst].workspace_bytes:
            lines.append(f"  {format_bytes(placed_bytes(costs.ops[worst].workspace_bytes)):>10}  workspace of the op")
        neediest = _min_feasible_bytes(graph, costs, lower(graph, costs, keep_all(0)))
        fixed = neediest - needs[worst]
        if fixed:
            lines.append(f"  {format_bytes(fixed):>10}  constants and tensors below 64 KiB, which stay on the device")
        if smallest > neediest:
            lines.append(
                "There is no home to evict tensors to: persistent state that stays on the device, and recomputation, "
                f"need {format_bytes(smallest - neediest)} more."
            )
    home = "" if costs.homes else "give the step a home in host memory or on a disk, "
    lines.append(
        f"The smallest budget that would do is {smallest} bytes ({format_bytes(smallest)}): "
        f"raise the budget to at least that, {home}or make the batch or the model smaller."
    )
    return BudgetError("\n".join(lines), smallest)


def plan_step(
    graph: StepGraph,
    costs: Costs,
    budget: int,
    policy: PolicyLike = "auto",
    *,
    params: SearchParams | None = None,
) -> Planned:
    """Plan, place and simulate a step.

    Args:
        graph: the step.
        costs: measured or assumed.
        budget: bytes of the arena, for all blocks: workspaces and fragmentation included.
        policy: a name or text that ``policy_of`` reads, a policy, or a function from graph, costs and bytes of room to
            a plan. If the whole step fits, every policy but ``offload-all`` keeps everything on the device.
        params: the techniques of ``auto`` and their effort; by default ``SearchParams()``.

    Returns:
        The best plan found, with all candidates.

    Raises:
        BudgetError: the budget is below the smallest possible one, or this policy has no plan for it.
        InputError: there is no such policy, or it did not return a ``Plan``.
        GraphError: its plan contradicts the step.
    """
    return next(plans_of_step(graph, costs, budget, policy, params=params))


def plans_of_step(
    graph: StepGraph,
    costs: Costs,
    budget: int,
    policy: PolicyLike = "auto",
    describe: Callable[[int], str] | None = None,
    *,
    params: SearchParams | None = None,
) -> Iterator[Planned]:
    """Yield plans that fit the budget, the best first; raises the errors of ``plan_step``."""
    policy = policy_of(policy)
    whole = lower(graph, costs, keep_all(budget))
    if budget < _min_feasible_bytes(graph, costs, whole):
        raise explain_too_small(graph, costs, budget, describe)
    if not isinstance(policy, OffloadAll | ProfileGuided):
        in_core = plan_in_core(graph, costs, budget) if peak_bytes(whole) <= budget else None
        if in_core is not None:
            yield in_core
            return
    _check_first_home(graph, costs)
    if isinstance(policy, Auto) and costs.homes:
        plans = search(graph, costs, budget, params or policy.params, whole)
    elif isinstance(policy, Auto):
        front = Front(graph, costs, params or policy.params)
        planned = front.plan(budget)
        if planned is None:
            raise explain_too_small(graph, costs, budget, describe, front.smallest)
        plans = [planned]
    else:
        plans = _plans_of_policy(graph, costs, budget, policy)
    if not plans:
        bounded = any(home.bytes is not None for home in costs.homes)
        smallest = smallest_budget(graph, costs)
        if budget < smallest:
            raise explain_too_small(graph, costs, budget, describe, smallest)
        advice = "" if isinstance(policy, Auto) else ", or take policy='auto', which tries more"
        raise BudgetError(
            f"the policy {policy.name!r} finds no plan within {format_bytes(budget)}: its blocks cannot be placed "
            f"closely enough{', or the homes are too small for the evicted tensors' if bounded else ''}; raise the "
            f"budget a little{advice}",
            smallest,
        )
    best = keep_fitting_gradients(graph, costs, budget, plans[0])
    _log.info(
        "%s: %.6f s a step predicted, %d candidates", policy.name, best.timeline.step_seconds, len(plans[0].candidates)
    )
    yield best
    yield from (planned for planned in plans if planned.plan is not best.plan)
    yield from first_fitting_plan(OffloadAll(), graph, costs, budget)


def plan_in_core(graph: StepGraph, costs: Costs, budget: int) -> Planned | None:
    """Return a plan without evictions; None if it exceeds the budget."""
    if not graph.gradients_left:
        return fit_plan(graph, costs, budget, keep_all(budget))
    planned = fit_plan(graph, costs, budget, keep_all_gradients(graph, keep_all(budget)))
    if planned is None:
        planned = fit_plan(graph, costs, budget, keep_all(budget))
        planned = None if planned is None else keep_fitting_gradients(graph, costs, budget, planned)
    return planned


def _plans_of_policy(graph: StepGraph, costs: Costs, budget: int, policy: Policy) -> list[Planned]:
    """Return the plans of any policy but ``auto`` that fit the budget, the best first."""
    if isinstance(policy, ProfileGuided):
        planned = policy.place(graph, costs, budget)
        return [] if planned is None else [planned]
    return (first_fitting_plan if isinstance(policy, OffloadAll) else fitting_plans)(policy, graph, costs, budget)


def _check_first_home(graph: StepGraph, costs: Costs) -> None:
    """Raise ``BudgetError`` if the first of several homes is too small for the inputs and outputs of the step."""
    if len(costs.homes) < 2:
        return
    home = costs.homes[0]
    lasting = set(graph.outputs) | {s.id for s in graph.storages if s.arrives}
    needed = sum(slot_bytes(graph.storages[s].bytes) for s in lasting)
    if home.bytes is not None and home.bytes < needed:
        raise BudgetError(
            f"the inputs and outputs of the step take {format_bytes(needed)}, and the home {home.name!r}, where they "
            f"are kept, holds {format_bytes(home.bytes)}; give it at least {needed} bytes, or leave it out"
        )
