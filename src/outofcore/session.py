"""The calls of a compiled step: which are captured, which are followed, and what one that raises has made of the model.

A call with inputs of a kind that is not known is captured, measured and planned by ``step_planner``, beside ``peers``.
``known_steps`` has the planned steps and the arena, ``plan_updates`` replaces plans that were wrong.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch

from outofcore._torch_internals import function_modes, tree_flatten
from outofcore.capture.captures_by_reads import CapturesByReads
from outofcore.capture.signature import Signature, Signer, has_other_sizes
from outofcore.capture.snapshot import Snapshot
from outofcore.errors import ArenaError, BudgetError, CaptureError, StateError, TransferError
from outofcore.execution.engines import Engine
from outofcore.execution.interrupts import Deferred
from outofcore.execution.model_state import StateKeeper
from outofcore.execution.runner import UpdateError
from outofcore.follow.calls import FollowedCalls
from outofcore.known_steps import KnownStep, KnownSteps
from outofcore.options import MemoryOptions, PlanOptions, RunOptions, UserStep
from outofcore.peers import Peers, Ranks, StepFacts
from outofcore.plan_store import library_version
from outofcore.plan_updates import PlanKeeper, TooSmallError
from outofcore.planned_step import PlannedStep
from outofcore.program import Timeline
from outofcore.progress import Tell, following
from outofcore.runtime.memory import new_garbage_collected
from outofcore.step_planner import StepPlanner
from outofcore.units import format_bytes

_log = logging.getLogger("outofcore")

# With so many kinds of inputs it is said once what they cost.
_MANY_KINDS = 4


class _NotFollowedError(Exception):
    """This system cannot follow a loop; the cause says why."""


class Outcome(Enum):
    """What a call that raises has made of the model: the note that the exception gets."""

    # It raised before the step ran.
    UNCHANGED = "The model and its optimizers are as they were before this step, which can be called again."
    # It raised while the step ran, and all that had changed was brought back.
    UNDONE = "The model and its optimizers are as they were before this step, which was undone and can be called again."
    # The step had ended, as where Ctrl-C waits for its end.
    MADE = "The step has been made: the model and its optimizers are as they are after it; what it returned is lost."
    # It raised while the step ran, and others run it as well.
    APART = (
        "The model and its optimizers are as they were before this step, which was undone. Other processes may have "
        "gone on with it: end this one, and let torchrun start all of them again."
    )
    # It raised in a call that runs op by op; or too late to be undone, and no update has come before its turn.
    STOPPED = (
        "The step stopped at an op, as it would in plain PyTorch: what came before that is done, and the rest is not. "
        "The model is whole, and the step can be called again."
    )
    # The code of an optimizer raised; all other instructions of the step were run to their end.
    UPDATE_STOPPED = (
        "The optimizer stopped in the middle of its step, as it would in plain PyTorch: updates before that are done, "
        "the rest is not. The model is whole, and the step can be called again."
    )
    # The device failed, or a home, after something that lasts had been updated.
    TORN = "The step failed half way, so that the model is part old and part new: load a checkpoint into it."


class Session:
    """Runs each call of one user's step: captured and planned at the first call of its kind, or else followed."""

    def __init__(
        self,
        user: UserStep[..., Any],
        memory: MemoryOptions,
        planning: PlanOptions,
        running: RunOptions,
        ranks: Ranks | None,
        vacate: Callable[[], None],
    ) -> None:
        self._user = user
        self._budget, self.home, self._policy = memory.budget, memory.home, planning.policy
        self._on_vacate = vacate  # another step over the home is to have the model; it calls ``vacate``
        self.keeper = StateKeeper(self.home.faces)
        self.engine = running.backend.engine(self.home.stores)
        # A step that nobody closes ends its threads, which hold its arena, once it is garbage.
        weakref.finalize(self, self.engine.close).atexit = False
        self._signer = Signer(user.models, user.optimizers, running.backend.device)
        self._captures = CapturesByReads()
        self.steps = KnownSteps(self.engine, self.keeper, running.backend, memory.budget)
        self._signature: Signature | None = None  # of the last call
        self.timeline: Timeline | None = None  # of the last call
        self.began_ns = 0  # when it began, since 1970
        self.planner = StepPlanner(user, memory, planning, running, self.steps.leave_arena)
        self._peers = None if ranks is None else Peers(ranks, user.shards, self.planner)
        self.updates = PlanKeeper(self.steps, self.planner, self._peers)
        self._dynamic, self._loop = running.dynamic, running.loop
        self._repeats = planning.repeats
        self.followed: FollowedCalls | None = None
        self.why_followed = "it was asked for" if running.dynamic else ""  # why calls are followed; empty: they are not
        self._planning_seconds: list[float] = []  # of each kind of inputs
        self.torn = ""  # why the model is part old and part new; empty: it is not
        self.outcome = Outcome.UNCHANGED  # of the call that runs, if it raised now

    @property
    def kinds(self) -> int:
        """Kinds of inputs that there are plans for."""
        return len({signature._replace(capture=0) for signature in self.steps.known})

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], on_progress: Tell | None) -> Any:
        """Run one step; ``outcome`` tells at any time what an exception would mean."""
        self.outcome = Outcome.UNCHANGED
        if self._peers is not None:
            self._peers.check()
        if self.why_followed:
            return self._call_followed(args, kwargs)
        self.spread()
        signature, change = self._captures.find(self._signer(args, kwargs))
        if signature not in self.steps.known and self._passes_over(signature, change):
            why = change or self._signer.describe_change(self._signature or signature, signature, args, kwargs)
            with contextlib.suppress(_NotFollowedError):
                return self._call_followed(args, kwargs, why)
        try:
            known = self._known_or_built(signature, args, kwargs, on_progress, change)
        except BudgetError as error:
            if self.timeline is None:  # else it has run within the budget, and an optimizer may keep more by now
                raise
            return self._call_beyond(error, args, kwargs)
        except CaptureError as error:
            # The first call is refused; a later one can go on, since the step has been right so far.
            if not change or not self._may_follow:
                raise
            with contextlib.suppress(_NotFollowedError):
                return self._call_followed(args, kwargs, f"{change}, and the step cannot be captured so: {error}")
            raise
        leaves = tree_flatten((args, kwargs))[0]
        if known.runs and self._repeats and known is not self.steps.active and self._signature not in (None, signature):
            _log.info("known plan: %s", self._signer.describe_change(self._signature, signature, args, kwargs))
        try:
            with torch.inference_mode(mode=False):
                return self._go(known, signature, leaves)
        except TooSmallError as error:
            return self._call_beyond(error.refusal, args, kwargs)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], on_progress: Tell | None) -> PlannedStep:
        """Capture and plan what a call with such arguments would run, and run nothing."""
        self.outcome = Outcome.UNCHANGED
        self.spread()
        signature, change = self._captures.find(self._signer(args, kwargs))
        self.planner.is_ahead = True
        try:
            return self._known_or_built(signature, args, kwargs, on_progress, change).step
        finally:
            self.planner.is_ahead = False

    def spread(self) -> None:
        """Spread the models over the processes that share them, or see what has become of them since they were."""
        if self._peers is not None:
            self._peers.spread()

    def _known_or_built(
        self,
        signature: Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        on_progress: Tell | None,
        change: str,
    ) -> KnownStep:
        """The planned step for a call; a new one is one on which the processes agree that run it together.

        ``change`` says which value has changed that the step had read.
        """
        # What is shown outlives the mode in which the step is called.
        with torch.inference_mode(mode=False), Deferred("what happened between two steps"):
            self._catch_up(signature)
        known = self.steps.known.get(signature)
        if known is not None and not known.fits():
            _log.info("a plan is forgotten: tensors share memory, or lie in it, otherwise than before")
            known.leave()
            known = None
            del self.steps.known[signature]
            self._captures.forget(signature)
        agreed = known is not None
        if self._peers is not None:
            agreed = self._peers.meet(None if known is None else known.facts)
        if known is not None and agreed:
            return known
        if self._joined is None and self._signature is not None:
            what = change or self._signer.describe_change(self._signature, signature, args, kwargs)
            _log.info("capturing again: %s", what)
        begin = time.perf_counter()
        steps = self.steps.known
        others = [steps[other].step for other in self._captures.others(signature) if other in steps]
        # What capturing and planning use would otherwise stay with the process beside its budget.
        with new_garbage_collected(), following(on_progress) as self.planner.tell:
            known = steps[signature] = self._learn(known, args, kwargs, others)
            self._note_reads(signature, known)
        if not change:
            self._count_kinds(time.perf_counter() - begin)
        return known

    def _note_reads(self, signature: Signature, known: KnownStep) -> None:
        """Take down the values that a capture has read; what it needs for that is not kept."""
        reads = known.step.captured.reads
        user = self._user
        roots = [("step", user.function)]
        roots += [(type(one).__name__, one) for one in (*user.models, *user.optimizers, *function_modes())]
        parameters = [named for model in user.models for named in model.named_parameters()]
        for forgotten in self._captures.add(signature, Snapshot(reads, roots, parameters)):
            self.steps.forget(forgotten)
        reads.clear()

    def _go(self, known: KnownStep, signature: Signature, leaves: Sequence[Any]) -> Any:
        must_grow = known.has_overflowed
        while True:
            self.updates.plan_for_surges(known, must_grow=must_grow)
            self.steps.activate(known)
            self._signature = signature
            self.began_ns = time.time_ns()
            try:
                with Deferred("the step that runs", may_stop=partial(self._may_stop, known)):
                    result = self._run(known, leaves)
                    if self._peers is not None:
                        self._peers.show_gradients()
                    for effect in known.step.captured.effects:
                        effect()
            except ArenaError as error:
                if self.outcome is not Outcome.UNDONE or not self.updates.note_surges(known):
                    raise self.updates.explain(known, error) from error
                must_grow = True
                continue  # by a plan that has room for what was asked for
            self.updates.judge(known, self.timeline)
            return result

    def _call_beyond(self, refusal: BudgetError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a step that no plan has room for any more: as an eager loop, op by op, if that is possible."""
        alone = not self.home.shared and self._joined is None
        if self._loop is None or not alone or self._dynamic is False:
            raise refusal
        _log.warning("the step runs as an eager loop from now on: %s", refusal)
        try:
            return self._call_followed(args, kwargs, "an op asks for more memory than any plan has room for")
        except _NotFollowedError as error:
            raise refusal from error

    # Calls that are followed

    @property
    def _joined(self) -> Peers | None:
        """The processes that run the step as well, as far as is known; None: there are none."""
        return self._peers if self._peers is not None and self._peers.joined else None

    @property
    def _may_follow(self) -> bool:
        return (
            self._dynamic is None
            and self._loop is not None
            and not self.home.shared  # others find the model there
            and self._joined is None  # all would have to do so at once
        )

    def _passes_over(self, signature: Signature, change: str) -> bool:
        """Whether calls are to be followed from one on that is not known.

        It is the first of another shape, or what it reads changes again and again.
        """
        if not self._may_follow:
            return False
        return self._captures.changes_too_often(signature) if change else has_other_sizes(signature, self.steps.known)

    def _call_followed(self, args: tuple[Any, ...], kwargs: dict[str, Any], why: str = "") -> Any:
        """Run a call as it is; ``why`` that is so from now on.

        Raises:
            _NotFollowedError: it cannot be, and nothing has been done.
        """
        self.why_followed = why or self.why_followed
        try:
            followed = self._pass_over()
        except _NotFollowedError as error:
            _log.warning("each kind of inputs is captured and planned: %s", error.__cause__)
            self.why_followed, self._loop = "", None
            raise
        self.home.occupy(self, self._on_vacate)
        self.outcome = Outcome.STOPPED
        with Deferred("the step that runs"):
            result = followed(self._user.function, args, kwargs)
            self.outcome = Outcome.MADE
        return result

    def _pass_over(self) -> FollowedCalls:
        """Leave what was planned for the loop, one tensor after the other, so that memory stays within the budget."""
        if self.followed is None:
            if self._loop is None:
                raise RuntimeError("a step that cannot be followed was to be; please report it")
            try:
                self.followed = FollowedCalls(self._loop(), self._user.models, self._user.optimizers)
            except StateError as error:
                if self._dynamic:
                    raise
                raise _NotFollowedError from error
            self.home.faces.drop_elsewhere = self.followed.drop_cache
            _log.info("followed from now on: %s", self.why_followed)
        if self.steps.known:
            with Deferred("the move of the model to the loop"):
                self.engine.synchronize()
                self.refresh(leaving=True)
                self.steps.leave_arena()
                self.followed.take(self.keeper.give_to_allocator)
                self._forget_steps()
                self._signature = None
        return self.followed

    # Between steps

    def _catch_up(self, signature: Signature) -> None:
        """See what others and the user have done since the last call, before anything moves: it would be lost."""
        if self.home.occupy(self, self._on_vacate) and not self.keeper.take_back():
            self._start_anew()
        others = self._signature is not None and signature.structure != self._signature.structure
        self.refresh(leaving=others)
        if others:
            # What now has the name of something else must not take its place: it may come back.
            self.steps.leave_program()
            self.keeper.forget_all()
        if any(known.runner is not None and known.runner.is_outdated() for known in self.steps.known.values()):
            _log.info("all that was captured is forgotten: an optimizer has lost state, or it lies otherwise in memory")
            self.forget_plans()

    def refresh(self, *, leaving: bool = False) -> None:
        """See what the user has put in place of what was shown; ``leaving``: and leave it where it is."""
        changed = self.keeper.refresh(leaving=leaving)
        if changed is None:
            self._start_anew()
        elif changed:
            _log.info("taken over what was put in place of %s", ", ".join(changed))

    def _start_anew(self) -> None:
        _log.info("all that was captured is forgotten: tensors share memory, or lie in it, otherwise than before")
        self.forget_plans()

    def forget_plans(self) -> None:
        """Capture and plan anew at the next call."""
        self.keeper.let_go()
        self.steps.leave_program()
        self.keeper.forget_all()
        self._forget_steps()
        self._signature = None

    def _forget_steps(self) -> None:
        self.steps.forget_all()
        self._captures.forget()

    def vacate(self) -> None:
        """Bring everything home, because another step that shares the home is to run."""
        with Deferred("the move of the model out of the arena"):
            if self.followed is not None:
                self.followed.vacate()
            self.engine.synchronize()
            self.refresh(leaving=True)
            self.steps.leave_arena()
            self.keeper.hand_over()

    def close(self, *, whole: bool = True) -> None:
        """Give the model memory of its own again, or leave it at a home that others share; free the rest.

        Args:
            whole: whether to gather what is spread over processes; all of them do so at once, or none.
        """
        self._close()
        if whole and self._peers is not None:
            self._peers.gather()

    def _close(self) -> None:
        self.updates.background.close()
        self.engine.close()
        try:
            with Deferred("the move of the model to where it stays"):
                if self.followed is not None:
                    self.home.faces.drop_elsewhere = None
                    self.followed.close(stays=self.home.shared)
                self.keeper.let_go()
                if not self.home.shared:
                    self.steps.make_way()
                    self.keeper.give_back()
                else:
                    self.steps.leave_program()
                    self.keeper.hand_over()
        finally:
            self._forget_steps()
            self.steps.release_arena()
            self.keeper.go_back()
            self.home.leave(self)
            self.home.release()

    # Plans

    def _learn(
        self, known: KnownStep | None, args: tuple[Any, ...], kwargs: dict[str, Any], others: Sequence[PlannedStep]
    ) -> KnownStep:
        """Capture, measure and plan, together with other processes if there are any.

        Args:
            known: where others have no plan for the call, and this process has one.
            others: as it was planned where it had read other values.
        """
        peers = self._peers
        if peers is None:
            return KnownStep(self.planner.plan_alone(*self.planner.capture(args, kwargs), others))
        if known is not None and known.facts is not None:
            peers.confirm(known.step, known.facts)
            return known
        facts = StepFacts(versions(), format_bytes(self._budget), self._policy.name)
        return KnownStep(*peers.learn(args, kwargs, facts, others))

    def _count_kinds(self, seconds: float) -> None:
        """Say once what it costs that inputs come in many shapes."""
        self._planning_seconds.append(seconds)
        if len(self._planning_seconds) == _MANY_KINDS:
            _log.warning(
                "inputs of %d kinds have been captured and planned, each anew, in %.1f s altogether and %.1f s for the "
                "last; where only sizes differ, compile the step with dynamic=True, or pad inputs to a few lengths",
                _MANY_KINDS,
                sum(self._planning_seconds),
                seconds,
            )

    def _run(self, known: KnownStep, leaves: Sequence[Any]) -> Any:
        """Run, or leave the model as it was before, or else torn."""
        runner = known.runner
        if runner is None:
            raise RuntimeError("a step without a runner was activated; please report it")
        self.outcome = Outcome.TORN
        try:
            result, self.timeline = runner.run(self.engine, leaves, may_refuse=self._joined is None)
            self.steps.shown, self.outcome = known.step, Outcome.MADE
        except UpdateError as error:
            self.outcome = Outcome.UPDATE_STOPPED
            raise (error.__cause__ or error) from None
        except BaseException as error:  # Ctrl-C as well: whatever ends a step, the model must not stay half changed
            self.torn, self.outcome = f"{type(error).__name__}: {error}", Outcome.TORN
            peers = self._joined
            if peers is not None:
                peers.failure = self.torn
            if self._recovers("undone", runner.undo, error):
                self.torn, self.outcome = "", Outcome.UNDONE if peers is None else Outcome.APART
            elif peers is None and self._recovers("stopped", runner.stop, error):  # peers have gone on
                self.torn, self.outcome = "", Outcome.STOPPED
            raise
        return result

    def _may_stop(self, known: KnownStep) -> bool:
        return known.runner is None or known.runner.may_stop(self.engine)

    def _recovers(self, way: str, recover: Callable[[Engine], bool], error: BaseException) -> bool:
        try:
            return recover(self.engine)
        except TransferError as another:
            error.add_note(f"It could not be {way}: {another}")
            return False


def versions() -> str:
    """Return what a measurement was taken with, and a step runs with."""
    own = library_version() or "(not installed)"
    return f"outofcore {own}, PyTorch {torch.__version__} with {torch.get_num_threads()} threads"
