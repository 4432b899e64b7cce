"""Policies by name: which plans each makes of a step under a budget, and the smallest budget there is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from outofcore.analysis.gaps import constant_bytes, large_needs, placed_bytes
from outofcore.costs import Costs
from outofcore.errors import BudgetError
from outofcore.graph import StepGraph
from outofcore.lowering import lower
from outofcore.plan import Plan
from outofcore.planning.addresses import place
from outofcore.planning.auto import auto
from outofcore.planning.model import Model
from outofcore.planning.offload_all import offload_all
from outofcore.planning.placing import (
    Planned,
    fit,
    fit_once,
    fit_or_height,
    keep_all,
    room_for_large,
    small_region_bytes,
    worth,
)
from outofcore.planning.published import PUBLISHED, plans_of, rivals
from outofcore.planning.relaxation import relax
from outofcore.planning.staying import all_staying, let_stay
from outofcore.planning.streamed import tries
from outofcore.planning.thorough import EFFORT, thorough
from outofcore.planning.tiers import farthest, lasting_at_first, over_tiers, relieved
from outofcore.units import format_bytes

# Of longer steps ``auto`` does not ask the policy ``streamed``, which takes longer than all others together.
_STREAMED = 250
# A step that takes no longer than this, in multiples of its ops, is as good as any.
_GOOD = 1.0005
# Plans for the farthest home alone that are slower than those for all of them by more than this lead nowhere.
_HOPELESS = 1.25
# Plans that are slower than the best by no more than this may be the best where gradients stay on the device.
_NEARLY = 1.1
# How many storages an error message names.
_NAMED = 8


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


def _offloaded(graph: StepGraph, costs: Costs, budget: int) -> list[Planned]:
    if not costs.homes:
        return []
    gentle = fit(graph, costs, budget, lambda room: offload_all(graph, room))
    planned = gentle or fit(graph, costs, budget, lambda room: offload_all(graph, room, strict=True))
    return [planned] if planned else []


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
    *,
    effort: int = EFFORT,
) -> Planned:
    """Plan, place and simulate a step.

    Args:
        graph: the step.
        costs: measured or assumed.
        budget: bytes of the arena, for all blocks: workspaces and fragmentation included.
        policy: one of ``POLICIES``. Where everything fits, every policy but ``offload-all`` keeps it all.
        describe: text for a storage in the error message.
        effort: how hard ``auto`` searches for the optimum of a small step (see ``thorough``); 0: not at all.

    Raises:
        BudgetError: the budget is below the smallest that could do, or this policy finds no plan.
        ValueError: the policy is not known.
    """
    if policy not in POLICIES:
        raise ValueError(f"there is no policy {policy!r}; choose one of {', '.join(POLICIES)}")
    if budget < smallest_budget(graph, costs):
        raise explain_too_small(graph, costs, budget, describe)
    if policy != "offload-all":
        in_core = plan_in_core(graph, costs, budget)
        if in_core is not None:
            return in_core
    if len(costs.homes) > 1:
        _check_first_home(graph, costs)
    found = _plans(graph, costs, budget, policy, effort)
    if not found:
        bounded = any(home.bytes is not None for home in costs.homes)
        raise BudgetError(
            f"the policy {policy!r} finds no plan within {format_bytes(budget)}: its blocks cannot be placed closely "
            f"enough{', or the homes cannot hold what has to leave' if bounded else ''}; raise the budget a little, "
            "or take policy='auto', which falls back to others",
            smallest_budget(graph, costs),
        )
    stayed = [let_stay(graph, costs, budget, planned) for planned in _near_best(graph, costs, found)]
    return min(stayed, key=lambda planned: worth(costs, planned))


def _near_best(graph: StepGraph, costs: Costs, found: Sequence[Planned]) -> list[Planned]:
    """The best plan, and where gradients may stay on the device the best of each policy that is nearly as good.

    A plan that leaves room for those gradients may then be the quickest of them.
    """
    ranked = sorted(found, key=lambda planned: worth(costs, planned))
    if not graph.gradients_left:
        return ranked[:1]
    of_policy: dict[str, Planned] = {}
    for planned in ranked:
        of_policy.setdefault(planned.plan.policy, planned)
    return [p for p in of_policy.values() if worth(costs, p) <= worth(costs, ranked[0]) * _NEARLY]


def plan_in_core(graph: StepGraph, costs: Costs, budget: int) -> Planned | None:
    """The plan in which nothing leaves, but for gradients that no room is left for; None if the budget cannot hold it.

    Args:
        graph: the step.
        costs: measured or assumed.
        budget: bytes of the arena.
    """
    if not graph.gradients_left:
        return fit_once(graph, costs, budget, keep_all(budget))
    planned = fit_once(graph, costs, budget, all_staying(graph, keep_all(budget)))
    if planned is None:
        planned = fit_once(graph, costs, budget, keep_all(budget))
        planned = None if planned is None else let_stay(graph, costs, budget, planned)
    return planned


def _plans(graph: StepGraph, costs: Costs, budget: int, policy: str, effort: int) -> list[Planned]:
    if policy == "streamed":
        return _streamed(graph, costs, budget)
    if len(costs.homes) > 1:  # all other policies know of one home only
        found = _streamed(graph, costs, budget) if policy == "auto" else []
        before = len(found)
        known = min((planned.timeline.step_seconds for planned in found), default=inf)
        if known <= costs.compute_seconds * _GOOD:
            return found
        alone = _plans(graph, farthest(costs), budget, policy, effort)
        for planned in alone:
            found += over_tiers(graph, costs, budget, planned)
        least = min(alone, key=lambda p: p.timeline.step_seconds, default=None)
        hopeless = min((planned.timeline.step_seconds for planned in found[before:]), default=inf) > known * _HOPELESS
        together = None if least is None or policy != "auto" or hopeless else relieved(graph, costs, least)
        if together is not None:
            for planned in _plans(graph, together, budget, policy, effort):
                found += over_tiers(graph, costs, budget, planned)
        return found
    if policy == "auto":
        return _best(graph, costs, budget, effort)
    if policy == "offload-all":
        return _offloaded(graph, costs, budget)
    return plans_of(graph, costs, budget, policy) if policy in PUBLISHED else []


def _may_be_quicker(graph: StepGraph, costs: Costs, budget: int, seconds: float) -> bool:
    """Whether a step in which nothing is computed again may take less than this, by what its copies take at least."""
    if seconds == inf:
        return True
    if not costs.homes or seconds <= costs.compute_seconds:
        return False
    relaxed = relax(Model.of(graph, costs, room_for_large(graph, costs, budget)))
    return relaxed is not None and relaxed.step_seconds < seconds


def _check_first_home(graph: StepGraph, costs: Costs) -> None:
    home, needed = costs.homes[0], lasting_at_first(graph)
    if home.bytes is not None and home.bytes < needed:
        raise BudgetError(
            f"the inputs and outputs of the step take {format_bytes(needed)}, and the home {home.name!r}, where they "
            f"count, holds {format_bytes(home.bytes)}; give it at least {needed} bytes, or leave it out"
        )


def _best(graph: StepGraph, costs: Costs, budget: int, effort: int) -> list[Planned]:
    """Plans of ``auto`` and of published policies, none of them slower than any published policy's."""
    found = auto(graph, costs, budget)
    least = min((planned.timeline.step_seconds for planned in found), default=inf)
    others = rivals(graph, costs, budget, least)
    least = min((planned.timeline.step_seconds for planned in (*found, *others)), default=inf)
    if _may_be_quicker(graph, costs, budget, least):
        others += _offloaded(graph, costs, budget)
        others += _streamed(graph, costs, budget) if len(graph.ops) <= _STREAMED else []
    found += thorough(graph, costs, budget, [*found, *others], effort)
    # What copies cost beside the time that is predicted must not make a plan slower than a rival's.
    least = min((planned.timeline.step_seconds for planned in others), default=inf)
    return [planned for planned in (*found, *others) if planned.timeline.step_seconds <= least]
