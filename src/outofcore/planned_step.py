"""A captured step with its plan, as frozen data, and functions that plan it first and again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain

from outofcore import planning
from outofcore.background import PlanJob, PlanResult, RunningPlan
from outofcore.capture import Captured
from outofcore.costs import Costs
from outofcore.errors import BudgetError, SpillError, ValidationError
from outofcore.graph import StepGraph
from outofcore.planning import Planned, Policy
from outofcore.planning.placement.requests import Requests
from outofcore.planning.policy import quick_policy
from outofcore.profiling.ops import OpProfile
from outofcore.program import CopyIn, CopyOut, Timeline
from outofcore.proving import prove_plan
from outofcore.refine import is_off, refine_costs
from outofcore.runtime.homes import HomeStore
from outofcore.runtime.slots import needed_bytes
from outofcore.step_plans import VariantChoice
from outofcore.units import format_bytes
from outofcore.variant import LOWEST_MEMORY, Variant

_log = logging.getLogger("outofcore")


@dataclass(frozen=True)
class PlannedStep:
    """A captured step with a proved plan.

    Attributes:
        budget: bytes of the arena.
        is_quick: whether a quick search found the plan, so that a full search may find a better one.
        planning_seconds: of the search; 0: the plan comes from an earlier process.
        choice: the variant under which the plan is stored; None: it is not stored.
    """

    captured: Captured
    budget: int
    costs: Costs
    planned: Planned
    profiles: tuple[OpProfile, ...]
    variant: Variant = LOWEST_MEMORY
    is_quick: bool = False
    planning_seconds: float = 0.0
    choice: VariantChoice | None = None

    @property
    def graph(self) -> StepGraph:
        return self.captured.graph

    @property
    def seconds(self) -> float:
        return self.planned.timeline.step_seconds

    @property
    def arena_bytes(self) -> int:
        return self.planned.program.arena_bytes

    @property
    def has_evictions(self) -> bool:
        return self.planned.plan.policy != "keep-all"

    @property
    def caller_storages(self) -> frozenset[int]:
        """The storages copied between the arena and the caller's memory instead of a home."""
        captured = self.captured
        return frozenset({captured.values[b.value].storage for b in captured.inputs} | set(captured.graph.outputs))

    @property
    def home_storages(self) -> frozenset[int]:
        """The storages that the program moves between the arena and its homes."""
        program = self.planned.program
        moved = {program.blocks[i.block].storage for i in program.instructions if isinstance(i, CopyOut | CopyIn)}
        return frozenset(s for s in moved if s is not None and s not in self.caller_storages)


def plan_in_core(
    captured: Captured, costs: Costs, profiles: tuple[OpProfile, ...], budget: int, stores: Sequence[HomeStore]
) -> PlannedStep | None:
    """Plan a step without evictions; return None if no such plan fits the budget."""
    planned = planning.plan_in_core(captured.graph, costs, budget)
    if planned is None:
        return None
    try:
        planned = prove_plan(captured.graph, costs, budget, [planned])
    except ValidationError:
        return None  # logged already
    check_spill(captured.graph, costs, planned, stores)
    return PlannedStep(captured, budget, costs, planned, profiles)


def plan(
    captured: Captured,
    costs: Costs,
    profiles: tuple[OpProfile, ...],
    budget: int,
    policy: Policy,
    stores: Sequence[HomeStore],
    *,
    quickly: bool = False,
) -> PlannedStep:
    """Plan a step within a budget, and return it with the first plan that is valid.

    With ``quickly``, a quick search is tried first.

    Raises:
        BudgetError: the budget is too small for the step.
        SpillError: a home is too small for the evicted storages.
        ValidationError: no plan passes validation.
    """
    graph, begin = captured.graph, time.perf_counter()
    planned = _plan_quickly(captured, costs, budget, policy) if quickly else None
    is_quick = planned is not None
    try:
        planned = planned or _plan_fully(captured, costs, budget, policy)
    except BudgetError:
        _check_last_home(graph, costs, budget, policy, stores)
        raise
    seconds = time.perf_counter() - begin
    check_spill(graph, costs, planned, stores)
    return PlannedStep(captured, budget, costs, planned, profiles, is_quick=is_quick, planning_seconds=seconds)


def _plan_quickly(captured: Captured, costs: Costs, budget: int, policy: Policy) -> Planned | None:
    """Return a valid plan from a quicker search than the policy's own; None if there is no such plan."""
    quick = quick_policy(policy)
    if quick is policy or not costs.homes:
        return None
    try:
        return prove_plan(captured.graph, costs, budget, planning.plans_of_step(captured.graph, costs, budget, quick))
    except (BudgetError, ValidationError):
        return None  # logged already if it is a bug


def _plan_fully(captured: Captured, costs: Costs, budget: int, policy: Policy) -> Planned:
    """Return the first valid plan of a full search; the plan of ``offload-all`` is tried last."""
    graph = captured.graph
    plans = planning.plans_of_step(graph, costs, budget, policy, storage_describer(captured))
    return prove_plan(graph, costs, budget, chain(plans, _offload_all_plans(graph, costs, budget)))


def job_of(step: PlannedStep, policy: Policy, measured: Sequence[Timeline]) -> PlanJob:
    """Return a job to plan a step again, with its costs corrected by ``measured`` timelines of the current plan."""
    running = RunningPlan(step.planned, tuple(measured), step.home_storages)
    return PlanJob(step.graph, step.costs, step.budget, policy, running)


def with_planning_result(
    step: PlannedStep, result: PlanResult, measured_seconds: float, stores: Sequence[HomeStore]
) -> PlannedStep | None:
    """Return the step with the plan of a finished planning job; None if the job failed or a home is too small."""
    reason = result.reason
    if result.planned is not None and result.costs is not None:
        try:
            check_spill(step.graph, result.costs, result.planned, stores)
        except SpillError as error:
            reason = str(error)
        else:
            new_step = with_plan(step, result.costs, result.planned)
            _log_times(step, new_step, measured_seconds)
            return new_step
    _log.warning("the plan is kept, although a new one was requested: %s", reason)
    return None


def with_plan(step: PlannedStep, costs: Costs, planned: Planned) -> PlannedStep:
    """Return the step with a new plan from a full search, and with the costs that this plan is based on."""
    profiles = tuple(replace(p, cost=cost) for p, cost in zip(step.profiles, costs.ops, strict=True))
    return replace(step, costs=costs, planned=planned, profiles=profiles, is_quick=False)


def plan_with_times(
    step: PlannedStep,
    measured: Sequence[Timeline],
    policy: Policy,
    stores: Sequence[HomeStore],
) -> PlannedStep | None:
    """Plan a step again with measured times of ops and copies; warn and return None if that fails."""
    families = [op.family for op in step.graph.ops]
    costs = refine_costs(step.costs, step.planned.program, measured, step.home_storages, families)
    profiles = tuple(replace(p, cost=cost) for p, cost in zip(step.profiles, costs.ops, strict=True))
    try:
        new_step = plan(step.captured, costs, profiles, step.budget, policy, stores)
    except (BudgetError, SpillError, ValidationError) as error:
        _log.warning("the plan is kept, although its prediction was off: %s", error)
        return None
    _log_times(step, new_step, measured[-1].step_seconds)
    return replace(new_step, variant=step.variant)


def _log_times(before: PlannedStep, after: PlannedStep, seconds: float) -> None:
    """Log the measured seconds of a step, and the seconds that its old and new plans predict."""
    _log.info(
        "planned again with measured costs: a step was predicted to take %.3f s and took %.3f s; now %.3f s by %s",
        before.planned.timeline.step_seconds,
        seconds,
        after.planned.timeline.step_seconds,
        after.planned.plan.policy,
    )


def select_grown_requests(step: PlannedStep, observed: Mapping[int, Requests]) -> dict[int, Requests]:
    """Return the observed memory requests, by op, that need more scratch memory than planned."""
    ops = step.costs.ops
    return {op: requests for op, requests in observed.items() if requests.workspace_bytes > ops[op].workspace_bytes}


def with_new_requests(
    step: PlannedStep, requests: Mapping[int, Requests], first_run_ops: Set[int] = frozenset()
) -> PlannedStep:
    """Return the step with newly observed memory requests for some of its ops."""
    profiles, ops = list(step.profiles), list(step.costs.ops)
    for index, observed in requests.items():
        cost, op = ops[index], step.graph.ops[index]
        # Never less than before: the needs of an op may vary from run to run.
        ops[index] = replace(cost, workspace_bytes=max(cost.workspace_bytes, observed.workspace_bytes))
        profiles[index] = replace(profiles[index], cost=ops[index])
        if index in first_run_ops:
            profiles[index] = replace(profiles[index], first_requests=observed)
        else:
            profiles[index] = replace(profiles[index], requests=observed)
        _log.info(
            "op %d (%s, %s) requested unplanned memory: scratch memory of %s instead of %s",
            index,
            op.name,
            op.source,
            format_bytes(observed.workspace_bytes),
            format_bytes(cost.workspace_bytes),
        )
    return replace(step, costs=replace(step.costs, ops=tuple(ops)), profiles=tuple(profiles))


def plan_with_requests(
    step: PlannedStep,
    unplanned: Mapping[int, Requests],
    policy: Policy,
    stores: Sequence[HomeStore],
) -> PlannedStep | None:
    """Plan a step again with the memory that its ops requested; warn and return None if that fails."""
    updated = with_new_requests(step, unplanned)
    try:
        new_step = plan(updated.captured, updated.costs, updated.profiles, step.budget, policy, stores)
    except (BudgetError, SpillError, ValidationError) as error:
        _log.warning("the plan is kept, although ops requested unplanned memory: %s", error)
        return None
    _log.info(
        "planned again for %d ops: %.3f s predicted by %s",
        len(unplanned),
        new_step.planned.timeline.step_seconds,
        new_step.planned.plan.policy,
    )
    return replace(new_step, variant=step.variant)


def is_prediction_wrong(step: PlannedStep, measured: Sequence[Timeline]) -> bool:
    """Return whether measured times of a plan with evictions differ from its prediction by over 10 %."""
    return step.has_evictions and is_off(step.planned.timeline.step_seconds, measured)


def storage_describer(captured: Captured) -> Callable[[int], str]:
    """Return a function that maps a storage id to text: the storage's name, shape and dtype."""
    shapes = {}
    for value in captured.values:
        shapes.setdefault(value.storage, (value.shape, value.dtype))

    def describe(storage: int) -> str:
        name = captured.graph.storages[storage].name or f"storage {storage}"
        shape, dtype = shapes.get(storage, ((), None))
        return f"{name} {tuple(shape)} {str(dtype).removeprefix('torch.')}"

    return describe


def check_spill(graph: StepGraph, costs: Costs, planned: Planned, stores: Sequence[HomeStore]) -> None:
    """Raise ``SpillError`` if a plan needs more bytes of a home than are available."""
    for home, count in zip(stores, needed_bytes(graph, costs, planned.program), strict=True):
        home.check(max(count, home.bytes))
        _log.info("peak use of home %s: %s", home.name, format_bytes(count))


def _offload_all_plans(graph: StepGraph, costs: Costs, budget: int) -> Iterator[Planned]:
    """Yield the plan of ``offload-all``; raise its errors only when it is requested."""
    yield from planning.plans_of_step(graph, costs, budget, "offload-all")


def _check_last_home(graph: StepGraph, costs: Costs, budget: int, policy: Policy, stores: Sequence[HomeStore]) -> None:
    """Raise ``SpillError`` if the step has no plan only because its last home, such as a disk, is too small."""
    if not costs.homes or costs.homes[-1].bytes is None:
        return
    unlimited = replace(costs, homes=(*costs.homes[:-1], replace(costs.homes[-1], bytes=None)))
    try:
        planned = planning.plan_step(graph, unlimited, budget, policy)
    except BudgetError:
        return
    check_spill(graph, unlimited, planned, stores)
