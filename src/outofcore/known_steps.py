"""The planned steps of a session, and the arena that holds the program of one of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from outofcore.capture.signature import Signature
from outofcore.errors import BudgetError
from outofcore.execution.aliases import PersistentState, matches_capture
from outofcore.execution.arena import DeviceArena
from outofcore.execution.backend import Backend
from outofcore.execution.engines import Engine
from outofcore.execution.interrupts import DeferredSignals
from outofcore.execution.model_state import StateKeeper
from outofcore.execution.runner import Runner
from outofcore.peers import StepFacts
from outofcore.planned_step import PlannedStep
from outofcore.program import Timeline
from outofcore.replanning import PlanWatch
from outofcore.runtime.memory import trim_heap


@dataclass
class KnownStep:
    """A planned step with the record of its runs."""

    step: PlannedStep
    facts: StepFacts | None = None
    runner: Runner | None = None
    runs: int = 0  # of this plan
    # Timelines to compare with the prediction, if all processes follow one plan.
    measured: list[Timeline] = field(default_factory=list[Timeline])
    watch: PlanWatch | None = None
    covered_surges: int = 0  # how many of the session's surges (see ``plan_updates``) the plan covers; -1: not its own
    unplanned_step: PlannedStep | None = None  # ``step`` with surges in its costs, until it has a plan
    refusal: BudgetError | None = None  # why ``unplanned_step`` could not be planned
    has_overflowed: bool = False  # a home has served an allocation beyond the budget under this plan
    is_judged: bool = False  # ``measured`` was compared with the prediction

    @property
    def arena_bytes(self) -> int:
        """The arena size for this plan; for a quick plan, large enough for the plan that replaces it."""
        return self.step.budget if self.step.is_quick else self.step.planned.program.arena_bytes

    def is_current(self) -> bool:
        """Return whether the plan still fits the memory layout of the user's tensors."""
        return (self.runner is not None and self.runner.is_current()) or matches_capture(self.step.captured)

    def leave_arena(self) -> None:
        if self.runner is not None:
            self.runner.release_arena()


class KnownSteps:
    """The planned steps of a session, and the arena in which one of them at a time can run.

    Attributes:
        active: the step that has its program in the arena.
        last_step: the last planned step that ran.
    """

    def __init__(self, engine: Engine, keeper: StateKeeper, backend: Backend, budget: int) -> None:
        self._engine, self._keeper, self._backend, self._budget = engine, keeper, backend, budget
        self.by_signature: dict[Signature, KnownStep] = {}
        self.active: KnownStep | None = None
        self.last_step: PlannedStep | None = None
        self.arena: DeviceArena | None = None
        self._off_plan = 0  # requests counted in former arenas

    @property
    def runner(self) -> Runner | None:
        return None if self.active is None else self.active.runner

    @property
    def off_plan(self) -> int:
        """The number of requests of 64 KiB and more without a planned address."""
        return self._off_plan + (self.arena.counters().large if self.arena is not None else 0)

    def written_tensors(self) -> list[torch.Tensor]:
        """Return all persistent tensors of the user that any planned step writes."""
        tensors: list[torch.Tensor] = []
        for captured in (entry.step.captured for entry in self.by_signature.values()):
            storages = {storage for op in captured.graph.ops for storage in op.mutates}
            tensors += [
                binding.tensor
                for binding in captured.states
                if binding.tensor is not None and captured.values[binding.value].storage in storages
            ]
        return tensors

    def activate(self, entry: KnownStep) -> None:
        """Give a step the arena, so that it can run; create a larger arena and the step's runner if needed."""
        if entry is self.active:
            return
        with DeferredSignals("the move of the model to its place"):
            self._engine.synchronize()
            if entry.runner is None or not entry.runner.is_current():
                entry.leave_arena()
                entry.runner = make_runner(entry.step, self._keeper)
            needed = entry.arena_bytes
            self.deactivate()
            if self.arena is None or self.arena.bytes < needed:
                self.leave_arena()
                trim_heap()
                self._keeper.evacuate()
                self.arena = self._backend.arena(needed, self._backend.reserve(self._budget), entry.step.budget)
            entry.runner.enter(self.arena)
            self.active = entry

    def replace_plan(self, entry: KnownStep, new_step: PlannedStep) -> None:
        """Give a step a new plan; the step leaves the arena until it is activated again."""
        if entry is self.active:
            self.deactivate()
        states = None
        if entry.runner is not None:
            entry.runner.release_arena()
            states = entry.runner.states
        entry.step, entry.runs, entry.measured, entry.watch = new_step, 0, [], None
        entry.runner = make_runner(new_step, self._keeper, states)

    def forget(self, signature: Signature) -> None:
        """Forget the plan for an input signature, if there is one; its step leaves the arena."""
        entry = self.by_signature.pop(signature, None)
        if entry is not None:
            if entry is self.active:
                self.leave_program()
            entry.leave_arena()

    def forget_all(self) -> None:
        for entry in self.by_signature.values():
            entry.leave_arena()
        self.by_signature.clear()

    def leave_arena(self) -> None:
        """Evict all tensors from the arena, and free its memory."""
        self.leave_program()
        self.release_arena()

    def leave_program(self) -> None:
        """Evict all tensors from the arena, and keep its memory."""
        self._engine.synchronize()
        with DeferredSignals("the move of the model out of the arena"):
            self.deactivate()
            if self.arena is not None:
                self._keeper.moves.leave_arena(self.arena)

    def deactivate(self) -> None:
        """Deactivate the active step; its tensors stay in the arena for the program of the next step."""
        runner, self.active = self.runner, None
        if runner is not None:
            runner.yield_arena()
        self._engine.release_step()

    def release_arena(self) -> None:
        """Remove all steps from the arena, and free its memory."""
        for entry in self.by_signature.values():
            entry.leave_arena()
        if self.arena is not None:
            self._off_plan += self.arena.counters().large
            self.arena.close()
            self.arena = None


def make_runner(step: PlannedStep, keeper: StateKeeper, states: dict[int, PersistentState] | None = None) -> Runner:
    """Make the runner of a planned step; ``states`` are the persistent states of its previous runner, if any."""
    requests = [profile.requests for profile in step.profiles]
    first = {i: p.first_requests for i, p in enumerate(step.profiles) if p.first_requests is not None}
    return Runner(step.captured, step.planned.program, step.costs, requests, first, keeper, states, step.budget)
