"""The processes that run one step together, as seen by one of them; one captures and plans for all."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from outofcore.capture import Captured
from outofcore.capture.captured import StateBinding
from outofcore.capture.collectives import Collective
from outofcore.capture.optimizers import OptimizerUpdate
from outofcore.capture.shards import Shards
from outofcore.costs import Costs
from outofcore.errors import GraphError, StateError, ValidationError
from outofcore.execution.interrupts import DeferredSignals
from outofcore.graph import StorageKind
from outofcore.planned_step import PlannedStep, check_spill, is_prediction_wrong, plan_with_requests, plan_with_times
from outofcore.planning import Planned
from outofcore.planning.placement.requests import Requests
from outofcore.profiling.groups import GroupCost, collectives_of
from outofcore.profiling.ops import OpProfile, profile_selected
from outofcore.program import Timeline
from outofcore.step_planner import Recapture, StepPlanner
from outofcore.validator import validate
from outofcore.variant import Variant

_log = logging.getLogger("outofcore")


@dataclass(frozen=True)
class StepFacts:
    """Facts about a step that a process sends to the other processes that run it."""

    versions: str
    budget: str
    policy: str
    states: tuple[tuple[str, str], ...] = ()  # the key of each parameter and buffer; its dtype and shape as text
    collectives: tuple[str, ...] = ()  # the collectives of the step, as text
    orders: tuple[tuple[int, ...], ...] = ()  # for each DDP module, parameter numbers in the order of their gradients
    graph: str = ""  # a digest of the captured step
    is_new: bool = False  # the process has no plan for this call
    error: str = ""  # why the process cannot run the step; empty: it can


class Ranks(Protocol):
    """The communication between the processes of a step; see ``distributed.agreement.Agreement``."""

    @property
    def is_joined(self) -> bool: ...
    def join(self, collectives: Sequence[Collective]) -> None: ...
    def rendezvous(self, facts: StepFacts | None, device: torch.device) -> bool: ...
    def compare_facts(self, facts: StepFacts) -> tuple[StepFacts, ...]: ...
    def costs(self, collectives: Sequence[Collective], device: torch.device) -> dict[int, GroupCost]: ...
    def from_leader(self, leader: int, make: Callable[[], Any]) -> Any: ...
    def synchronized(self) -> AbstractContextManager[None]: ...


class Peers:
    """The processes that run a step together, as seen by one of them.

    ``failure`` is the reason why this process is out of step with the others; empty if it is not.
    """

    def __init__(self, ranks: Ranks, shards: Shards | None, planner: StepPlanner) -> None:
        self._ranks, self._shards, self._planner = ranks, shards, planner
        self.failure = ""

    @property
    def joined(self) -> bool:
        """Whether there are other processes, as far as is known."""
        return self._ranks.is_joined

    @property
    def must_share_plan(self) -> bool:
        """Whether the processes share a model, and so must follow one plan."""
        return self._shards is not None

    def check(self) -> None:
        """Raise ``StateError`` if an earlier failure left this process out of step with the others."""
        if self.failure:
            raise StateError(
                f"an earlier call of this step failed while other processes ran it ({self.failure}), so this process "
                "is out of step with them; end it, and let torchrun start all of them again"
            )

    # The shared model

    def spread(self) -> None:
        """Shard the models over the processes that share them; only check models that are sharded already."""
        shards = self._shards
        if shards is None:
            return
        if shards.is_sharded:
            shards.check()
            return
        with DeferredSignals("the spreading of the model over the processes"):
            shards.shard()

    def show_gradients(self) -> None:
        if self._shards is not None:
            self._shards.show_gradients()

    def gather(self) -> None:
        """Collect the whole model in each process from its shards; only warn if a process has ended."""
        shards = self._shards
        if shards is None or not shards.is_sharded:
            return
        if self.failure:
            _log.warning("the model stays sharded, because one of its processes has ended; load a checkpoint")
            return
        with DeferredSignals("the gathering of the model from the processes"):
            shards.gather()

    # Plans

    def rendezvous(self, facts: StepFacts | None) -> bool:
        """Wait for the other processes; return whether all processes have a plan for the call."""
        return self._ranks.rendezvous(facts, self._planner.backend.device)

    def join_planning(self, step: PlannedStep, facts: StepFacts) -> None:
        """Communicate with other processes while they plan a step for which this process already has a plan."""
        _, leader, _ = self._exchange_facts(replace(facts, is_new=False), step.captured)
        self._ranks.from_leader(leader, lambda: None)
        with self._ranks.synchronized():
            pass  # the other processes plan in this block

    def plan_together(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], facts: StepFacts, alternatives: Sequence[PlannedStep]
    ) -> tuple[PlannedStep, StepFacts]:
        """Capture and plan a step, with other processes if any; return it, and ``facts`` completed from the capture."""
        ranks = self._ranks
        try:
            traced, recapture = self._planner.capture(args, kwargs)
            ranks.join(collectives_of(traced))
            facts = replace(facts, is_new=True, **_facts_of(traced, self._shards))
        except BaseException as error:
            if ranks.is_joined:
                with contextlib.suppress(BaseException):
                    ranks.compare_facts(replace(facts, error=f"{type(error).__name__}: {error}"))
            raise
        if not ranks.is_joined:
            return self._planner.plan_alone(traced, recapture, alternatives), facts
        everyone, leader, groups = self._exchange_facts(facts, traced)
        is_alike = everyone[leader].graph == facts.graph
        return self._plan_by_leader(leader, traced, recapture, groups, is_alike), facts

    def _exchange_facts(
        self, facts: StepFacts, captured: Captured
    ) -> tuple[tuple[StepFacts, ...], int, Mapping[int, GroupCost]]:
        """Compare facts with all processes; return all facts, the rank that plans, and the costs of collectives."""
        everyone = self._ranks.compare_facts(facts)
        groups = self._ranks.costs(collectives_of(captured), self._planner.backend.device)
        return everyone, next(rank for rank, facts_of_rank in enumerate(everyone) if facts_of_rank.is_new), groups

    def _plan_by_leader(
        self, leader: int, traced: Captured, recapture: Recapture, groups: Mapping[int, GroupCost], is_alike: bool
    ) -> PlannedStep:
        """Return the step with the leader's plan, or with a plan of this process if the leader's is not valid here.

        ``is_alike``: the leader captured the same graph. Raises ``StateError`` for an invalid plan that all must share.
        """
        planned_here: list[PlannedStep] = []

        def make() -> Any:
            plan = self._planner.plan(traced, recapture, groups)
            planned_here.append(plan)
            return plan.costs, plan.planned, plan.profiles, plan.budget, plan.variant

        received = self._ranks.from_leader(leader, make)
        with self._ranks.synchronized():
            if not planned_here:
                adopted = self._adopt_plan(traced, *received) if is_alike else None
                if adopted is None and self.must_share_plan:
                    raise StateError(
                        "the plan of another process is not valid here, but processes that share a model must follow "
                        "one plan: run them on identical machines, with the same versions and budget"
                    )
                planned_here.append(adopted or self._planner.plan(traced, recapture, groups))
        return planned_here[0]

    def _adopt_plan(
        self,
        traced: Captured,
        costs: Costs,
        planned: Planned,
        profiles: tuple[OpProfile, ...],
        room: int,
        variant: Variant,
    ) -> PlannedStep | None:
        """Return the step with another process's plan; None if that plan is not valid here."""
        planner = self._planner
        if planner.make_room(traced) != room:
            return None
        captured = planner.variants_of(traced).find_variant(variant)
        if captured is not None and _is_valid_plan(captured, room, costs, planned):
            check_spill(captured.graph, costs, planned, planner.stores)
            planner.links = costs.homes
            shorter = _shorter_updates(captured, self._shards)
            local = profile_selected(
                captured, shorter, measure_time=False, cache=planner.cache, backend=planner.backend
            )
            if all(local[op].cost.workspace_bytes <= costs.ops[op].workspace_bytes for op in local):
                profiles = _with_own_requests(profiles, local)
                return PlannedStep(captured, room, costs, planned, profiles, variant=variant)
        _log.warning("the plan of another process is not valid in this one, which now plans for itself")
        return None

    def replan(
        self,
        step: PlannedStep,
        measured: Sequence[Timeline],
        unplanned: Mapping[int, Requests],
        keep: Callable[[PlannedStep, bool], None],
    ) -> PlannedStep | None:
        """Plan a step again for all processes with the measurements of rank 0; return None if the old plan stays.

        ``unplanned``: new memory requests, by op. Rank 0 stores a new plan by ``keep(new_step, times_were_wrong)``.
        """
        policy, stores = self._planner.policy, self._planner.stores

        def decide() -> Any:
            """Return the costs, plan and profiles of the new step; None if the old plan stays."""
            new_step, are_times_wrong = step, is_prediction_wrong(step, measured)
            if unplanned:
                new_step = plan_with_requests(new_step, unplanned, policy, stores) or new_step
            if are_times_wrong:
                new_step = plan_with_times(new_step, measured, policy, stores) or new_step
            if new_step is step:
                return None
            keep(new_step, are_times_wrong)
            return new_step.costs, new_step.planned, new_step.profiles

        result = self._ranks.from_leader(0, decide)
        if result is None:
            return None
        costs, planned, profiles = result
        local_profiles = {op: step.profiles[op] for op in _shorter_updates(step.captured, self._shards)}
        new_step = replace(step, costs=costs, planned=planned, profiles=_with_own_requests(profiles, local_profiles))
        with self._ranks.synchronized():
            validate(new_step.graph, planned.program, new_step.budget, costs)
            check_spill(new_step.graph, costs, planned, stores)
        return new_step


def _is_valid_plan(captured: Captured, room: int, costs: Costs, planned: Planned) -> bool:
    """Return whether the plan of another process is valid for this step."""
    if len(captured.graph.ops) != len(costs.ops):
        return False
    try:
        validate(captured.graph, planned.program, room, costs)
    except (ValidationError, GraphError):
        return False
    return True


def _shorter_updates(captured: Captured, shards: Shards | None) -> list[int]:
    """Return the ids of optimizer ops with a shard that is shorter in this process than in rank 0."""
    short = (
        {id(shard.parameter) for shard in shards.entries if shard.count < shard.chunks.count(0)} if shards else set()
    )
    return [
        index
        for index, call in enumerate(captured.calls)
        if isinstance(call.func, OptimizerUpdate) and any(id(m.parameter) in short for m in call.func.members)
    ]


def _with_own_requests(profiles: Sequence[OpProfile], local: Mapping[int, OpProfile]) -> tuple[OpProfile, ...]:
    """Return another process's op profiles, with the memory requests in ``local`` in place of its own."""
    return tuple(
        replace(p, requests=local[op].requests, first_requests=local[op].first_requests) if op in local else p
        for op, p in enumerate(profiles)
    )


def _facts_of(traced: Captured, shards: Shards | None) -> dict[str, Any]:
    """Return the fields of ``StepFacts`` that describe a captured step."""
    values = traced.values
    sharded = {} if shards is None else {shard.key: shard for shard in shards.entries}

    def describe(binding: StateBinding) -> str:
        value = sharded.get(binding.key) or values[binding.value]
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"

    states = tuple((b.key, describe(b)) for b in traced.states if b.kind in (StorageKind.PARAMETER, StorageKind.BUFFER))
    # Families are left out: the last range of a shard may be shorter, which does not affect the plan.
    graph = hashlib.sha256(repr(traced.graph.content(families=not sharded)).encode()).hexdigest()
    orders = tuple(end.order for end in traced.replicas)
    return {"states": states, "collectives": tuple(map(str, collectives_of(traced))), "orders": orders, "graph": graph}
