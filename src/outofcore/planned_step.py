"""A captured step with its plan, as frozen data: how it is planned first, and again where steps show that it was wrong.

It is wrong if steps take longer or shorter than predicted (``replanning`` says so), or if an op asks for memory that no
plan foresaw. Nothing here touches the user's model: whoever runs a
planned step makes its runner.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain

from outofcore import planning
from outofcore.background import Answer, PlanJob, Running
from outofcore.capture import Captured
from outofcore.costs import Costs
from outofcore.errors import BudgetError, SpillError, ValidationError
from outofcore.graph import StepGraph
from outofcore.planning import Planned, Policy
from outofcore.planning.placement.requests import Requests
from outofcore.planning.policy import quick_policy
from outofcore.profiling.ops import OpProfile
from outofcore.program import CopyIn, CopyOut, Timeline
from outofcore.proving import proved
from outofcore.refine import is_off, refined
from outofcore.runtime.homes import HomeStore
from outofcore.runtime.slots import needed_bytes
from outofcore.step_plans import Choice
from outofcore.units import format_bytes
from outofcore.variant import LOWEST_MEMORY, Variant

_log = logging.getLogger("outofcore")


@dataclass(frozen=True)
class PlannedStep:
    """A captured step, planned and proved.

    Attributes:
        captured: the step.
        budget: bytes of the arena.
        costs: that it was planned with.
        planned: the plan, with its program and the simulated timeline.
        profiles: of each op.
        variant: of the step.
        is_quick: whether the plan was found by a quick search, so that another may be better.
        planning_seconds: that the search took; 0: an earlier process has made the plan.
        choice: of the variant, by which the plan is stored; None: it is not.
    """

    captured: Captured
    budget: int
    costs: Costs
    planned: Planned
    profiles: tuple[OpProfile, ...]
    variant: Variant = LOWEST_MEMORY
    is_quick: bool = False
    planning_seconds: float = 0.0
    choice: Choice | None = None

    @property
    def graph(self) -> StepGraph:
        """The step as storages and ops."""
        return self.captured.graph

    @property
    def seconds(self) -> float:
        """The predicted seconds of a step."""
        return self.planned.timeline.step_seconds

    @property
    def arena_bytes(self) -> int:
        """The bytes of the arena that the plan takes."""
        return self.planned.program.arena_bytes

    @property
    def leaves_device(self) -> bool:
        """Whether anything does."""
        return self.planned.plan.policy != "keep-all"

    @property
    def ported(self) -> frozenset[int]:
        """The storages that are copied between the arena and the caller's memory, and not a home."""
        captured = self.captured
        return frozenset({captured.values[b.value].storage for b in captured.inputs} | set(captured.graph.outputs))

    @property
    def spilled(self) -> frozenset[int]:
        """The storages that the program moves between the arena and its homes."""
        program = self.planned.program
        moved = {program.blocks[i.block].storage for i in program.instructions if isinstance(i, CopyOut | CopyIn)}
        return frozenset(s for s in moved if s is not None and s not in self.ported)


def plan_in_core(
    captured: Captured, costs: Costs, profiles: tuple[OpProfile, ...], budget: int, stores: Sequence[HomeStore]
) -> PlannedStep | None:
    """The step with the plan in which nothing leaves; None if the budget cannot hold it, or its proof fails.

    Raises:
        SpillError: a home has no room for the gradients that do not stay.
    """
    found = planning.plan_in_core(captured.graph, costs, budget)
    if found is None:
        return None
    try:
        found = proved(captured.graph, costs, budget, [found])
    except ValidationError:
        return None  # reported already
    check_spill(captured.graph, costs, found, stores)
    return PlannedStep(captured, budget, costs, found, profiles)


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
    """The step with the best plan that passes the validator.

    Args:
        captured: the step.
        costs: of its ops and homes.
        profiles: of its ops.
        budget: bytes of the arena.
        policy: how to plan; the last resort is that everything leaves.
        stores: the homes, nearest first.
        quickly: whether a plan will do that a quick search finds, where it finds one.

    Raises:
        BudgetError: the budget cannot hold the step.
        SpillError: a home has no room for what must leave.
        ValidationError: no plan passes.
    """
    graph, begin = captured.graph, time.perf_counter()
    found = _planned_quickly(captured, costs, budget, policy) if quickly else None
    is_quick = found is not None
    try:
        found = found or _planned_whole(captured, costs, budget, policy)
    except BudgetError:
        _check_last_home(graph, costs, budget, policy, stores)
        raise
    seconds = time.perf_counter() - begin
    check_spill(graph, costs, found, stores)
    return PlannedStep(captured, budget, costs, found, profiles, is_quick=is_quick, planning_seconds=seconds)


def _planned_quickly(captured: Captured, costs: Costs, budget: int, policy: Policy) -> Planned | None:
    """The plan of a quick search; None where there is no such search, or it finds none."""
    quick = quick_policy(policy)
    if quick is policy or not costs.homes:
        return None
    try:
        return proved(captured.graph, costs, budget, planning.plans_of_step(captured.graph, costs, budget, quick))
    except (BudgetError, ValidationError):
        return None  # reported already, if that is a fault


def _planned_whole(captured: Captured, costs: Costs, budget: int, policy: Policy) -> Planned:
    graph = captured.graph
    plans = planning.plans_of_step(graph, costs, budget, policy, describer(captured))
    return proved(graph, costs, budget, chain(plans, _everything_leaves(graph, costs, budget)))


def job_of(step: PlannedStep, policy: Policy, measured: Sequence[Timeline]) -> PlanJob:
    """How the step is planned with the times that ops and copies took.

    Args:
        step: planned.
        policy: how to plan.
        measured: steps by its plan.
    """
    running = Running(step.planned, tuple(measured), step.spilled)
    return PlanJob(step.graph, step.costs, step.budget, policy, running)


def with_answer(step: PlannedStep, answer: Answer, seconds: float, stores: Sequence[HomeStore]) -> PlannedStep | None:
    """The step with the plan that was made of such a job; None where there is none, or a home has no room for it.

    Args:
        step: as the job was made of it.
        answer: to the job.
        seconds: that steps took.
        stores: the homes, nearest first.
    """
    reason = answer.reason
    if answer.planned is not None and answer.costs is not None:
        try:
            check_spill(step.graph, answer.costs, answer.planned, stores)
        except SpillError as error:
            reason = str(error)
        else:
            again = with_plan(step, answer.costs, answer.planned)
            _say_times(step, again, seconds)
            return again
    _log.warning("the plan stays as it is, although another was to be made: %s", reason)
    return None


def with_plan(step: PlannedStep, costs: Costs, planned: Planned) -> PlannedStep:
    """The step with another of its plans, and costs as they are believed now."""
    profiles = tuple(replace(p, cost=cost) for p, cost in zip(step.profiles, costs.ops, strict=True))
    return replace(step, costs=costs, planned=planned, profiles=profiles, is_quick=False)


def with_times(
    step: PlannedStep,
    measured: Sequence[Timeline],
    policy: Policy,
    stores: Sequence[HomeStore],
) -> PlannedStep | None:
    """Return the step planned with the times that ops and copies took in steps; None where there is no such plan."""
    families = [op.family for op in step.graph.ops]
    costs = refined(step.costs, step.planned.program, measured, step.spilled, families)
    profiles = tuple(replace(p, cost=cost) for p, cost in zip(step.profiles, costs.ops, strict=True))
    try:
        again = plan(step.captured, costs, profiles, step.budget, policy, stores)
    except (BudgetError, SpillError, ValidationError) as error:
        _log.warning("the plan stays as it is, although its prediction was off: %s", error)
        return None
    _say_times(step, again, measured[-1].step_seconds)
    return replace(again, variant=step.variant)


def _say_times(before: PlannedStep, again: PlannedStep, seconds: float) -> None:
    _log.info(
        "planned again with measured costs: a step was predicted to take %.3f s and took %.3f s; now %.3f s by %s",
        before.planned.timeline.step_seconds,
        seconds,
        again.planned.timeline.step_seconds,
        again.planned.plan.policy,
    )


def grown_requests(step: PlannedStep, seen: Mapping[int, Requests]) -> dict[int, Requests]:
    """Those of the requests seen in a run, by op, that need more scratch memory than the plan has for the op.

    Others fit into the op's workspace in another order. As needs only grow, planning for them again and again ends.
    """
    ops = step.costs.ops
    return {op: requests for op, requests in seen.items() if requests.workspace_bytes > ops[op].workspace_bytes}


def remember_requests(
    step: PlannedStep, requests: Mapping[int, Requests], first: Set[int] = frozenset()
) -> PlannedStep:
    """The step with what ops turned out to ask for in its costs and profiles; its plan does not know of it yet.

    Args:
        step: planned.
        requests: by op.
        first: the ops that ask for it in their first run alone.
    """
    profiles, ops = list(step.profiles), list(step.costs.ops)
    for index, seen in requests.items():
        cost, op = ops[index], step.graph.ops[index]
        # Never less than before: an op that asked for more may yet ask for less again.
        ops[index] = replace(cost, workspace_bytes=max(cost.workspace_bytes, seen.workspace_bytes))
        profiles[index] = replace(profiles[index], cost=ops[index])
        if index in first:
            profiles[index] = replace(profiles[index], first_requests=seen)
        else:
            profiles[index] = replace(profiles[index], requests=seen)
        _log.info(
            "op %d (%s, %s) asked for memory that no plan foresaw: scratch memory of %s, and not of %s",
            index,
            op.name,
            op.source,
            format_bytes(seen.workspace_bytes),
            format_bytes(cost.workspace_bytes),
        )
    return replace(step, costs=replace(step.costs, ops=tuple(ops)), profiles=tuple(profiles))


def with_requests(
    step: PlannedStep,
    surprises: Mapping[int, Requests],
    policy: Policy,
    stores: Sequence[HomeStore],
) -> PlannedStep | None:
    """Return the step planned with the requests that ops turned out to make; None where there is no such plan."""
    wanted = remember_requests(step, surprises)
    try:
        again = plan(wanted.captured, wanted.costs, wanted.profiles, step.budget, policy, stores)
    except (BudgetError, SpillError, ValidationError) as error:
        _log.warning("the plan stays as it is, although ops asked for memory that it does not foresee: %s", error)
        return None
    _log.info(
        "planned again for %d ops: %.3f s predicted by %s",
        len(surprises),
        again.planned.timeline.step_seconds,
        again.planned.plan.policy,
    )
    return replace(again, variant=step.variant)


def is_wrong(step: PlannedStep, measured: Sequence[Timeline]) -> bool:
    """Whether steps took so much longer or shorter than predicted that another plan may be better."""
    return step.leaves_device and is_off(step.planned.timeline.step_seconds, measured)


def describer(captured: Captured) -> Callable[[int], str]:
    """Tells of a storage of a step what it is, with its shape and dtype, for people."""
    shapes = {}
    for value in captured.values:
        shapes.setdefault(value.storage, (value.shape, value.dtype))

    def describe(storage: int) -> str:
        name = captured.graph.storages[storage].name or f"storage {storage}"
        shape, dtype = shapes.get(storage, ((), None))
        return f"{name} {tuple(shape)} {str(dtype).removeprefix('torch.')}"

    return describe


def check_spill(graph: StepGraph, costs: Costs, planned: Planned, stores: Sequence[HomeStore]) -> None:
    """Refuse a plan that takes more of a home than there is.

    Raises:
        SpillError: it does.
    """
    for home, count in zip(stores, needed_bytes(graph, costs, planned.program), strict=True):
        home.check(max(count, home.bytes))
        _log.info("away from the device, at %s: %s at most", home.name, format_bytes(count))


def _everything_leaves(graph: StepGraph, costs: Costs, budget: int) -> Iterator[Planned]:
    yield from planning.plans_of_step(graph, costs, budget, "offload-all")


def _check_last_home(graph: StepGraph, costs: Costs, budget: int, policy: Policy, stores: Sequence[HomeStore]) -> None:
    """Refuse the last home where a plan would be found if that had no limit: the disk may be full.

    Raises:
        SpillError: the home has to hold so much, and has room for so much.
    """
    if not costs.homes or costs.homes[-1].bytes is None:
        return
    unlimited = replace(costs, homes=(*costs.homes[:-1], replace(costs.homes[-1], bytes=None)))
    try:
        found = planning.plan_step(graph, unlimited, budget, policy)
    except BudgetError:
        return
    check_spill(graph, unlimited, found, stores)
