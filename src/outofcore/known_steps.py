"""The planned steps of a session, and the arena that has the program of one of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from outofcore.capture.signature import Signature
from outofcore.errors import BudgetError
from outofcore.execution.aliases import State, fits
from outofcore.execution.arena import Memory
from outofcore.execution.backend import Backend
from outofcore.execution.engines import Engine
from outofcore.execution.interrupts import Deferred
from outofcore.execution.model_state import StateKeeper
from outofcore.execution.runner import Runner
from outofcore.peers import StepFacts
from outofcore.planned_step import PlannedStep
from outofcore.program import Timeline
from outofcore.replanning import Watch
from outofcore.runtime.memory import trim_heap


@dataclass
class KnownStep:
    """A planned step, and what has come of its runs.

    Attributes:
        step: replaced as a whole when it is planned again.
        runner: of it, as long as the states that it knows are those of the keeper.
        runs: of this plan, since its program came into the arena.
        measured: the timelines by which its prediction is to be judged, where others run the step as well.
        watch: what its steps tell of the plan; None: not begun.
        facts: for other processes, where there are any.
        is_judged: whether its prediction has been judged, where others run the step as well.
        surges: how many of those that the session knows its plan has taken up.
        wanted: the step with what its ops have asked for, for which no plan has been found yet; None: it is ``step``.
        too_small: why no plan has room for what an op has asked for; None: there is one, or nothing is known.
        has_overflowed: whether a home has served an op that the budget cannot hold, and no other plan was made since.
    """

    step: PlannedStep
    facts: StepFacts | None = None
    runner: Runner | None = None
    runs: int = 0
    measured: list[Timeline] = field(default_factory=list[Timeline])
    watch: Watch | None = None
    surges: int = 0
    wanted: PlannedStep | None = None
    too_small: BudgetError | None = None
    has_overflowed: bool = False
    is_judged: bool = False

    @property
    def arena_bytes(self) -> int:
        """What its plan needs, and one that may take its place: another arena would have to be filled anew."""
        return self.step.budget if self.step.is_quick else self.step.planned.program.arena_bytes

    def fits(self) -> bool:
        """Return whether the user's tensors are what the step was captured with, but for those the keeper knows."""
        return (self.runner is not None and self.runner.is_current()) or fits(self.step.captured)

    def leave(self) -> None:
        """Have the runner leave the arena."""
        if self.runner is not None:
            self.runner.leave()


class KnownSteps:
    """The planned steps of a session, and the arena that has the program of one of them.

    Attributes:
        known: the steps.
        active: the one whose states are in the arena.
        shown: what the last call ran; None: there was none.
        arena: where the active program's blocks are.
    """

    def __init__(self, engine: Engine, keeper: StateKeeper, backend: Backend, budget: int) -> None:
        self._engine, self._keeper, self._backend, self._budget = engine, keeper, backend, budget
        self.known: dict[Signature, KnownStep] = {}
        self.active: KnownStep | None = None
        self.shown: PlannedStep | None = None
        self.arena: Memory | None = None
        self._off_plan = 0  # requests counted in arenas that are gone

    @property
    def runner(self) -> Runner | None:
        """The runner of the program in the arena."""
        return None if self.active is None else self.active.runner

    @property
    def off_plan(self) -> int:
        """Requests of 64 KiB and more that no address was planned for, so far."""
        return self._off_plan + (self.arena.counters().large if self.arena is not None else 0)

    def written(self) -> list[torch.Tensor]:
        """Return the user's persistent tensors that a planned step writes."""
        found: list[torch.Tensor] = []
        for captured in (known.step.captured for known in self.known.values()):
            storages = {storage for op in captured.graph.ops for storage in op.mutates}
            found += [
                binding.tensor
                for binding in captured.states
                if binding.tensor is not None and captured.values[binding.value].storage in storages
            ]
        return found

    def activate(self, known: KnownStep) -> None:
        """Bring a program into the arena; planned steps get their runners here."""
        if known is self.active:
            return
        with Deferred("the move of the model to its place"):
            self._engine.synchronize()
            if known.runner is None or not known.runner.is_current():
                known.leave()
                known.runner = runner_of(known.step, self._keeper)
            needed = known.arena_bytes
            self.make_way()
            if self.arena is None or self.arena.bytes < needed:
                self.leave_arena()
                trim_heap()
                self._keeper.evacuate()
                self.arena = self._backend.arena(needed, self._backend.reserve(self._budget), known.step.budget)
            known.runner.enter(self.arena)
            self.active = known

    def exchange(self, known: KnownStep, again: PlannedStep) -> None:
        """Go on with another plan of a step."""
        if known is self.active:
            self.make_way()
        states = None
        if known.runner is not None:
            known.runner.leave()
            states = known.runner.states
        known.step, known.runs, known.measured, known.watch = again, 0, [], None
        known.runner = runner_of(again, self._keeper, states)

    def forget(self, signature: Signature) -> None:
        """Forget a step."""
        known = self.known.pop(signature, None)
        if known is not None:
            if known is self.active:
                self.leave_program()
            known.leave()

    def forget_all(self) -> None:
        """Forget all steps."""
        for known in self.known.values():
            known.leave()
        self.known.clear()

    def leave_arena(self) -> None:
        """Bring every state home, and give the arena back."""
        self.leave_program()
        self.release_arena()

    def leave_program(self) -> None:
        """Bring every state home."""
        self._engine.synchronize()
        with Deferred("the move of the model out of the arena"):
            self.make_way()
            if self.arena is not None:
                self._keeper.moves.leave(self.arena)

    def make_way(self) -> None:
        """Leave the states in the arena to the next program; the one that was active is so no more."""
        runner, self.active = self.runner, None
        if runner is not None:
            runner.make_way()
        self._engine.forget()

    def release_arena(self) -> None:
        """Give the arena back, whatever is in it."""
        for known in self.known.values():
            known.leave()
        if self.arena is not None:
            self._off_plan += self.arena.counters().large
            self.arena.close()
            self.arena = None


def runner_of(step: PlannedStep, keeper: StateKeeper, states: dict[int, State] | None = None) -> Runner:
    """Return what runs a planned step; ``states`` are the user's tensors, if its runner before has noted them."""
    requests = [profile.requests for profile in step.profiles]
    first = {i: p.first_requests for i, p in enumerate(step.profiles) if p.first_requests is not None}
    return Runner(step.captured, step.planned.program, step.costs, requests, first, keeper, states, step.budget)
