"""The processes that run one step together, as one of them sees them: one captures and plans for all.

``distributed.agreement`` implements ``Ranks``, says in what they must agree, and what happens where they do not.
"""

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
from outofcore.execution.interrupts import Deferred
from outofcore.graph import StorageKind
from outofcore.planned_step import PlannedStep, check_spill, is_wrong, with_requests, with_times
from outofcore.planning import Planned
from outofcore.planning.placement.requests import Requests
from outofcore.profiling.groups import GroupCost, collectives_of
from outofcore.profiling.ops import OpProfile, profile_some
from outofcore.program import Timeline
from outofcore.step_planner import Recapture, StepPlanner
from outofcore.validator import validate
from outofcore.variant import Variant

_log = logging.getLogger("outofcore")


@dataclass(frozen=True)
class StepFacts:
    """What a process reports about its step to its peers.

    Attributes:
        versions: of this library and of PyTorch.
        budget: in words.
        policy: its name.
        states: the key of each parameter and buffer, with its dtype and shape in words.
        collectives: those of the step, in order, in words.
        orders: for each ``DistributedDataParallel``, the numbers of its parameters in the order of their gradients.
        graph: a digest of the captured step.
        is_new: whether it has no plan for this call yet.
        error: why it cannot go on; empty: it can.
    """

    versions: str
    budget: str
    policy: str
    states: tuple[tuple[str, str], ...] = ()
    collectives: tuple[str, ...] = ()
    orders: tuple[tuple[int, ...], ...] = ()
    graph: str = ""
    is_new: bool = False
    error: str = ""


class Ranks(Protocol):
    """How the processes of a step talk to each other: see ``distributed.agreement.Agreement``."""

    @property
    def joined(self) -> bool: ...
    def join(self, collectives: Sequence[Collective]) -> None: ...
    def meet(self, facts: StepFacts | None, device: torch.device) -> bool: ...
    def compare(self, facts: StepFacts) -> tuple[StepFacts, ...]: ...
    def costs(self, collectives: Sequence[Collective], device: torch.device) -> dict[int, GroupCost]: ...
    def from_leader(self, leader: int, make: Callable[[], Any]) -> Any: ...
    def agreeing(self) -> AbstractContextManager[None]: ...


class Peers:
    """The processes that run a step together, as one of them sees them.

    Args:
        ranks: how they talk to each other.
        shards: what is spread over them of the models they share; None: each has its own models.
        planner: captures and plans the step in this process.

    Attributes:
        failure: why this process is out of step with the others; empty: it is not.
    """

    def __init__(self, ranks: Ranks, shards: Shards | None, planner: StepPlanner) -> None:
        self._ranks, self._shards, self._planner = ranks, shards, planner
        self.failure = ""

    @property
    def joined(self) -> bool:
        """Whether there are others, as far as is known."""
        return self._ranks.joined

    @property
    def follow_one_plan(self) -> bool:
        """Whether all have to follow one plan, since they share a model."""
        return self._shards is not None

    def check(self) -> None:
        """Raise ``StateError`` if this process is out of step with the others."""
        if self.failure:
            raise StateError(
                f"an earlier call of this step failed while others ran it as well ({self.failure}), so that this "
                "process is out of step with them; end it, and let torchrun start all of them again"
            )

    # The model they share

    def spread(self) -> None:
        """Spread the models over the processes, or see what has become of them since they were."""
        shards = self._shards
        if shards is None:
            return
        if shards.is_spread:
            shards.check()
            return
        with Deferred("the spreading of the model over the processes"):
            shards.spread()

    def show_gradients(self) -> None:
        """Show the user the gradients of what is spread."""
        if self._shards is not None:
            self._shards.show_gradients()

    def gather(self) -> None:
        """Gather what is spread; all processes do so at once."""
        shards = self._shards
        if shards is None or not shards.is_spread:
            return
        if self.failure:
            _log.warning("the model stays spread over the processes, of which one has ended; load a checkpoint")
            return
        with Deferred("the gathering of the model from the processes"):
            shards.gather()

    # Plans

    def meet(self, facts: StepFacts | None) -> bool:
        """Return whether all have a plan for the call that begins now; ``facts`` is None without one here."""
        return self._ranks.meet(facts, self._planner.backend.device)

    def confirm(self, step: PlannedStep, facts: StepFacts) -> None:
        """Go on with a step that is planned here, while others learn it."""
        _, leader, _ = self._compare(replace(facts, is_new=False), step.captured)
        self._ranks.from_leader(leader, lambda: None)
        with self._ranks.agreeing():
            pass  # the others plan within such a block

    def learn(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], facts: StepFacts, others: Sequence[PlannedStep]
    ) -> tuple[PlannedStep, StepFacts]:
        """Capture and plan a step together with those that run it as well, if there are any; add to its facts.

        ``others`` are as for ``StepPlanner.plan_alone``.
        """
        ranks = self._ranks
        try:
            traced, recapture = self._planner.capture(args, kwargs)
            ranks.join(collectives_of(traced))
            facts = replace(facts, is_new=True, **_facts_of(traced, self._shards))
        except BaseException as error:
            if ranks.joined:
                with contextlib.suppress(BaseException):
                    ranks.compare(replace(facts, error=f"{type(error).__name__}: {error}"))
            raise
        if not ranks.joined:
            return self._planner.plan_alone(traced, recapture, others), facts
        everyone, leader, groups = self._compare(facts, traced)
        is_alike = everyone[leader].graph == facts.graph
        return self._planned_by(leader, traced, recapture, groups, is_alike), facts

    def _compare(
        self, facts: StepFacts, captured: Captured
    ) -> tuple[tuple[StepFacts, ...], int, Mapping[int, GroupCost]]:
        """Return the facts of all by rank, who plans for all, and the costs of groups."""
        everyone = self._ranks.compare(facts)
        groups = self._ranks.costs(collectives_of(captured), self._planner.backend.device)
        return everyone, next(rank for rank, other in enumerate(everyone) if other.is_new), groups

    def _planned_by(
        self, leader: int, traced: Captured, recapture: Recapture, groups: Mapping[int, GroupCost], is_alike: bool
    ) -> PlannedStep:
        """Return the step as one process plans it for all; this one plans it itself unless the graphs are alike."""
        made: list[PlannedStep] = []

        def make() -> Any:
            found = self._planner.plan(traced, recapture, groups)
            made.append(found)
            return found.costs, found.planned, found.profiles, found.budget, found.variant

        told = self._ranks.from_leader(leader, make)
        with self._ranks.agreeing():
            if not made:
                mine = self._adopted(traced, *told) if is_alike else None
                if mine is None and self.follow_one_plan:
                    raise StateError(
                        "the plan of another process does not hold here, and processes that share a model follow one "
                        "plan: run them on machines that are alike, with the same versions and budget"
                    )
                made.append(mine or self._planner.plan(traced, recapture, groups))
        return made[0]

    def _adopted(
        self,
        traced: Captured,
        costs: Costs,
        planned: Planned,
        profiles: tuple[OpProfile, ...],
        room: int,
        variant: Variant,
    ) -> PlannedStep | None:
        """Return the step with the plan of another process; None if it does not hold here."""
        planner = self._planner
        if planner.make_room(traced) != room:
            return None
        captured = planner.variants_of(traced).captured(variant)
        if captured is not None and _holds(captured, room, costs, planned):
            check_spill(captured.graph, costs, planned, planner.stores)
            planner.links = costs.homes
            shorter = _shorter_updates(captured, self._shards)
            own = profile_some(captured, shorter, measure_time=False, cache=planner.cache, backend=planner.backend)
            if all(own[op].cost.workspace_bytes <= costs.ops[op].workspace_bytes for op in own):
                profiles = _with_own_requests(profiles, own)
                return PlannedStep(captured, room, costs, planned, profiles, variant=variant)
        _log.warning("the plan of another process does not hold in this one, which plans by itself")
        return None

    def replan(
        self,
        step: PlannedStep,
        measured: Sequence[Timeline],
        surprises: Mapping[int, Requests],
        keep: Callable[[PlannedStep, bool], None],
    ) -> PlannedStep | None:
        """Replan a step for all with what rank 0 has measured; return None if its plan stays.

        Args:
            step: planned.
            measured: steps by its plan.
            surprises: the requests of ops beyond it.
            keep: called in rank 0 with the step planned again, and whether times have been wrong.
        """
        policy, stores = self._planner.policy, self._planner.stores

        def decide() -> Any:
            again, wrong = step, is_wrong(step, measured)
            if surprises:
                again = with_requests(again, surprises, policy, stores) or again
            if wrong:
                again = with_times(again, measured, policy, stores) or again
            if again is step:
                return None
            keep(again, wrong)
            return again.costs, again.planned, again.profiles

        found = self._ranks.from_leader(0, decide)
        if found is None:
            return None
        costs, planned, profiles = found
        own = {op: step.profiles[op] for op in _shorter_updates(step.captured, self._shards)}
        again = replace(step, costs=costs, planned=planned, profiles=_with_own_requests(profiles, own))
        with self._ranks.agreeing():
            validate(again.graph, planned.program, again.budget, costs)
            check_spill(again.graph, costs, planned, stores)
        return again


def _holds(captured: Captured, room: int, costs: Costs, planned: Planned) -> bool:
    """Return whether the plan of another process is one of this step."""
    if len(captured.graph.ops) != len(costs.ops):
        return False
    try:
        validate(captured.graph, planned.program, room, costs)
    except (ValidationError, GraphError):
        return False
    return True


def _shorter_updates(captured: Captured, shards: Shards | None) -> list[int]:
    """Return the updates of ranges that are shorter here than in rank 0, so that they ask for less memory."""
    short = {id(shard.parameter) for shard in shards.all if shard.count < shard.chunks.count(0)} if shards else set()
    return [
        index
        for index, call in enumerate(captured.calls)
        if isinstance(call.func, OptimizerUpdate) and any(id(m.parameter) in short for m in call.func.members)
    ]


def _with_own_requests(profiles: Sequence[OpProfile], own: Mapping[int, OpProfile]) -> tuple[OpProfile, ...]:
    """Return the profiles of another process, with what some ops ask for in this one."""
    return tuple(
        replace(p, requests=own[op].requests, first_requests=own[op].first_requests) if op in own else p
        for op, p in enumerate(profiles)
    )


def _facts_of(traced: Captured, shards: Shards | None) -> dict[str, Any]:
    """Return the facts of a captured step."""
    values = traced.values
    spread = {} if shards is None else {shard.key: shard for shard in shards.all}

    def told(binding: StateBinding) -> str:
        value = spread.get(binding.key) or values[binding.value]
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"

    states = tuple((b.key, told(b)) for b in traced.states if b.kind in (StorageKind.PARAMETER, StorageKind.BUFFER))
    # The last ranges of what is spread may be shorter than others, which is no matter to a plan.
    graph = hashlib.sha256(repr(traced.graph.content(families=not spread)).encode()).hexdigest()
    orders = tuple(end.order for end in traced.replicas)
    return {"states": states, "collectives": tuple(map(str, collectives_of(traced))), "orders": orders, "graph": graph}
