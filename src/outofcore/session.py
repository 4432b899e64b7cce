"""The calls of a compiled step: each runs by a plan, or op by op as an eager loop."""

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
from outofcore.capture.signature import Signature, Signer, differs_only_in_sizes
from outofcore.capture.snapshot import Snapshot
from outofcore.errors import ArenaError, BudgetError, CaptureError, StateError, TransferError
from outofcore.execution.engines import Engine
from outofcore.execution.interrupts import DeferredSignals
from outofcore.execution.model_state import StateKeeper
from outofcore.execution.runner import UpdateError
from outofcore.follow.calls import BudgetedCalls
from outofcore.known_steps import KnownStep, KnownSteps
from outofcore.options import MemoryOptions, PlanOptions, RunOptions, UserStep
from outofcore.peers import Peers, Ranks, StepFacts
from outofcore.plan_store import library_version
from outofcore.plan_updates import PlanUpdater, TooSmallError
from outofcore.planned_step import PlannedStep
from outofcore.program import Timeline
from outofcore.progress import ProgressCallback, show_progress
from outofcore.runtime.memory import collect_new_garbage
from outofcore.step_planner import StepPlanner
from outofcore.units import format_bytes

_log = logging.getLogger("outofcore")

# The number of input signatures at which a warning reports their cost.
_MANY_SIGNATURES = 4


class _NoEagerLoopError(Exception):
    """Calls cannot run as an eager loop on this system; ``__cause__`` has the reason."""


class CallOutcome(Enum):
    """The state in which a failed call leaves the model; the value becomes a note of the exception."""

    # Raised before the step ran.
    UNCHANGED = "The model and its optimizers are as they were before this step, which can be called again."
    # Raised during the step, and all changes were undone.
    UNDONE = "The model and its optimizers are as they were before this step, which was undone and can be called again."
    # Raised after the step, for example by Ctrl-C, which waits for its end.
    COMPLETED = (
        "The step has been made: the model and its optimizers are as they are after it; its return value is lost."
    )
    # Raised during the step and undone here, but other processes run it as well.
    UNDONE_ALONE = (
        "The model and its optimizers are as they were before this step, which was undone. Other processes may have "
        "gone on with it: end this one, and let torchrun start all of them again."
    )
    # Raised in an eager loop, or too late to undo but before any update that plain PyTorch would not have run yet.
    STOPPED = (
        "The step stopped at an op, as it would in plain PyTorch: the ops before it have run, those after it have not. "
        "The model is whole, and the step can be called again."
    )
    # The code of an optimizer raised; all other instructions of the step have run.
    UPDATE_STOPPED = (
        "The optimizer stopped in the middle of its step, as it would in plain PyTorch: the updates before that have "
        "run, the others have not. The model is whole, and the step can be called again."
    )
    # The device or a home failed after persistent state had been updated.
    TORN = "The step failed half way, so that the model is part old and part new: load a checkpoint into it."


class Session:
    """The state of one compiled step from call to call, with all its plans."""

    def __init__(
        self,
        user: UserStep[..., Any],
        memory: MemoryOptions,
        planning: PlanOptions,
        running: RunOptions,
        ranks: Ranks | None,
        on_release: Callable[[], None],
    ) -> None:
        self._user = user
        self._budget, self.home, self._policy = memory.budget, memory.home, planning.policy
        self._on_release = on_release  # called when another step over the home needs the model
        self.keeper = StateKeeper(self.home.home_tensors)
        self.engine = running.backend.engine(self.home.stores)
        # Threads hold the arena: end them when the step is garbage-collected without a close.
        weakref.finalize(self, self.engine.close).atexit = False
        self._signer = Signer(user.models, user.optimizers, running.backend.device)
        self._captures = CapturesByReads()
        self.steps = KnownSteps(self.engine, self.keeper, running.backend, memory.budget)
        self._signature: Signature | None = None  # of the last call
        self.timeline: Timeline | None = None  # of the last call
        self.began_ns = 0  # start of the last call, in nanoseconds since 1970
        self.planner = StepPlanner(user, memory, planning, running, self.steps.leave_arena)
        self._peers = None if ranks is None else Peers(ranks, user.shards, self.planner)
        self.updates = PlanUpdater(self.steps, self.planner, self._peers)
        self._dynamic, self._loop = running.dynamic, running.loop
        self._repeats = planning.repeats
        self.eager_calls: BudgetedCalls | None = None
        # Why calls run as an eager loop; empty: they do not.
        self.eager_reason = "it was asked for" if running.dynamic else ""
        self._planning_seconds: list[float] = []  # by input signature
        self.torn = ""  # why the model is part old and part new; empty: it is not
        self.outcome = CallOutcome.UNCHANGED

    @property
    def signature_count(self) -> int:
        """The number of input signatures that have a plan."""
        return len({signature._replace(capture=0) for signature in self.steps.by_signature})

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], on_progress: ProgressCallback | None) -> Any:
        """Run one call of the step, by a plan or as an eager loop; after an error, ``outcome`` describes the model."""
        self.outcome = CallOutcome.UNCHANGED
        if self._peers is not None:
            self._peers.check()
        if self.eager_reason:
            return self._call_eagerly(args, kwargs)
        self.spread()
        signature, change = self._captures.find(self._signer(args, kwargs))
        if signature not in self.steps.by_signature and self._should_switch_to_eager(signature, change):
            reason = change or self._signer.describe_change(self._signature or signature, signature, args, kwargs)
            with contextlib.suppress(_NoEagerLoopError):
                return self._call_eagerly(args, kwargs, reason)
        try:
            entry = self._find_or_plan(signature, args, kwargs, on_progress, change)
        except BudgetError as error:
            if self.timeline is None:  # a step that has run may fail later, when optimizer state takes more memory
                raise
            return self._call_without_plan(error, args, kwargs)
        except CaptureError as error:
            # The first call is refused. A later one can run as an eager loop, since the step itself works.
            if not change or not self._may_run_eagerly:
                raise
            with contextlib.suppress(_NoEagerLoopError):
                return self._call_eagerly(args, kwargs, f"{change}, and the step cannot be captured so: {error}")
            raise
        leaves = tree_flatten((args, kwargs))[0]
        if entry.runs and self._repeats and entry is not self.steps.active and self._signature not in (None, signature):
            _log.info("known plan: %s", self._signer.describe_change(self._signature, signature, args, kwargs))
        try:
            with torch.inference_mode(mode=False):
                return self._run_planned(entry, signature, leaves)
        except TooSmallError as error:
            return self._call_without_plan(error.refusal, args, kwargs)

    def prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], on_progress: ProgressCallback | None
    ) -> PlannedStep:
        """Capture and plan a call without running it; return the planned step."""
        self.outcome = CallOutcome.UNCHANGED
        self.spread()
        signature, change = self._captures.find(self._signer(args, kwargs))
        self.planner.is_ahead = True
        try:
            return self._find_or_plan(signature, args, kwargs, on_progress, change).step
        finally:
            self.planner.is_ahead = False

    def spread(self) -> None:
        """Shard the models over the processes that share them; only check models that are sharded already."""
        if self._peers is not None:
            self._peers.spread()

    def _find_or_plan(
        self,
        signature: Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        on_progress: ProgressCallback | None,
        change: str,
    ) -> KnownStep:
        """Return the planned step for a call; plan the step if any process lacks a current plan.

        ``change`` names a changed Python value that the step reads; empty: only inputs may have changed.
        """
        # Tensors that the user sees later must not be inference tensors.
        with torch.inference_mode(mode=False), DeferredSignals("the check for changes between steps"):
            self._adopt_changes(signature)
        entry = self.steps.by_signature.get(signature)
        if entry is not None and not entry.is_current():
            _log.info("a plan is forgotten: the memory layout or sharing of tensors has changed")
            entry.leave_arena()
            entry = None
            del self.steps.by_signature[signature]
            self._captures.forget(signature)
        is_agreed = entry is not None
        if self._peers is not None:
            is_agreed = self._peers.rendezvous(None if entry is None else entry.facts)
        if entry is not None and is_agreed:
            return entry
        if self._joined_peers is None and self._signature is not None:
            description = change or self._signer.describe_change(self._signature, signature, args, kwargs)
            _log.info("capturing again: %s", description)
        begin = time.perf_counter()
        steps = self.steps.by_signature
        alternatives = [steps[similar].step for similar in self._captures.alternatives(signature) if similar in steps]
        # Memory used by capture and planning would otherwise stay allocated outside the budget.
        with collect_new_garbage(), show_progress(on_progress) as self.planner.on_progress:
            entry = steps[signature] = self._plan_call(entry, args, kwargs, alternatives)
            self._record_reads(signature, entry)
        if not change:
            self._warn_of_many_signatures(time.perf_counter() - begin)
        return entry

    def _record_reads(self, signature: Signature, entry: KnownStep) -> None:
        """Remember the Python values that a capture has read, so that later calls detect changes."""
        reads = entry.step.captured.reads
        user = self._user
        roots = [("step", user.function)]
        roots += [(type(owner).__name__, owner) for owner in (*user.models, *user.optimizers, *function_modes())]
        parameters = [parameter for model in user.models for parameter in model.named_parameters()]
        for forgotten in self._captures.add(signature, Snapshot(reads, roots, parameters)):
            self.steps.forget(forgotten)
        reads.clear()

    def _run_planned(self, entry: KnownStep, signature: Signature, leaves: Sequence[Any]) -> Any:
        """Run a call by its plan; if an op needs more memory than planned, plan again and retry."""
        must_grow = entry.has_overflowed
        while True:
            self.updates.plan_for_surges(entry, must_grow=must_grow)
            self.steps.activate(entry)
            self._signature = signature
            self.began_ns = time.time_ns()
            try:
                with DeferredSignals("the step that runs", may_stop=partial(self._may_stop, entry)):
                    result = self._run(entry, leaves)
                    if self._peers is not None:
                        self._peers.show_gradients()
                    for effect in entry.step.captured.effects:
                        effect()
            except ArenaError as error:
                if self.outcome is not CallOutcome.UNDONE or not self.updates.record_surges(entry):
                    raise self.updates.explain_refusal(entry, error) from error
                must_grow = True
                continue  # with a plan that has room for the request
            self.updates.record_run(entry, self.timeline)
            return result

    def _call_without_plan(self, refusal: BudgetError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call as an eager loop because no plan fits the budget; raise ``refusal`` if no loop is possible."""
        alone = not self.home.shared and self._joined_peers is None
        if self._loop is None or not alone or self._dynamic is False:
            raise refusal
        _log.warning("the step runs as an eager loop from now on: %s", refusal)
        try:
            return self._call_eagerly(args, kwargs, "an op asks for more memory than any plan has room for")
        except _NoEagerLoopError as error:
            raise refusal from error

    # Eager loop

    @property
    def _joined_peers(self) -> Peers | None:
        """The processes that run the step together; None if no other process is known."""
        return self._peers if self._peers is not None and self._peers.joined else None

    @property
    def _may_run_eagerly(self) -> bool:
        """Whether calls may switch to an eager loop that the user has not asked for."""
        return (
            self._dynamic is None
            and self._loop is not None
            and not self.home.shared  # other steps expect the model there
            and self._joined_peers is None  # all processes would have to switch at once
        )

    def _should_switch_to_eager(self, signature: Signature, change: str) -> bool:
        """Return whether to run eagerly: Python values change too often, or only the sizes of inputs differ."""
        if not self._may_run_eagerly:
            return False
        return (
            self._captures.changes_too_often(signature)
            if change
            else differs_only_in_sizes(signature, self.steps.by_signature)
        )

    def _call_eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str = "") -> Any:
        """Run this call and all later ones as an eager loop; raise ``_NoEagerLoopError`` if that is impossible."""
        self.eager_reason = reason or self.eager_reason
        try:
            eager_calls = self._switch_to_eager()
        except _NoEagerLoopError as error:
            _log.warning("each input signature is captured and planned: %s", error.__cause__)
            self.eager_reason, self._loop = "", None
            raise
        self.home.occupy(self, self._on_release)
        self.outcome = CallOutcome.STOPPED
        with DeferredSignals("the step that runs"):
            result = eager_calls(self._user.function, args, kwargs)
            self.outcome = CallOutcome.COMPLETED
        return result

    def _switch_to_eager(self) -> BudgetedCalls:
        """Move the model from the planned steps to an eager loop, and return the loop."""
        if self.eager_calls is None:
            if self._loop is None:
                raise RuntimeError("a step without an eager loop switched to it; please report it")
            try:
                self.eager_calls = BudgetedCalls(self._loop(), self._user.models, self._user.optimizers)
            except StateError as error:
                if self._dynamic:
                    raise
                raise _NoEagerLoopError from error
            self.home.home_tensors.drop_loop_cache = self.eager_calls.drop_cache
            _log.info("running as an eager loop from now on: %s", self.eager_reason)
        if self.steps.by_signature:
            with DeferredSignals("the move of the model to the loop"):
                self.engine.synchronize()
                self.refresh(leaving=True)
                self.steps.leave_arena()
                self.eager_calls.adopt_from(self.keeper.move_out_and_forget_all)
                self._forget_steps()
                self._signature = None
        return self.eager_calls

    # Between steps

    def _adopt_changes(self, signature: Signature) -> None:
        """Adopt tensors that the user or other steps have replaced since the last call; forget outdated plans."""
        if self.home.occupy(self, self._on_release) and not self.keeper.reclaim():
            self._discard_captures()
        is_other_structure = self._signature is not None and signature.structure != self._signature.structure
        self.refresh(leaving=is_other_structure)
        if is_other_structure:
            # With another structure, keys may name other tensors; the old ones may come back later.
            self.steps.leave_program()
            self.keeper.forget_all()
        if any(entry.runner is not None and entry.runner.is_outdated() for entry in self.steps.by_signature.values()):
            _log.info("all plans are forgotten: an optimizer has lost state, or its state has another memory layout")
            self.forget_plans()

    def refresh(self, *, leaving: bool = False) -> None:
        """Adopt memory that the user has assigned to tensors; forget all plans if its layout does not fit."""
        changed = self.keeper.adopt_replacements(leaving=leaving)
        if changed is None:
            self._discard_captures()
        elif changed:
            _log.info("new tensors adopted for %s", ", ".join(changed))

    def _discard_captures(self) -> None:
        _log.info("all plans are forgotten: the memory layout or sharing of tensors has changed")
        self.forget_plans()

    def forget_plans(self) -> None:
        """Forget all plans and all records of tensors; the next call captures and plans again."""
        self.keeper.release_replacements()
        self.steps.leave_program()
        self.keeper.forget_all()
        self._forget_steps()
        self._signature = None

    def _forget_steps(self) -> None:
        self.steps.forget_all()
        self._captures.forget()

    def release_model(self) -> None:
        """Move all tensors home, since another step that shares the home is about to run."""
        with DeferredSignals("the move of the model out of the arena"):
            if self.eager_calls is not None:
                self.eager_calls.evict_all()
            self.engine.synchronize()
            self.refresh(leaving=True)
            self.steps.leave_arena()
            self.keeper.release_slots()

    def close(self, *, whole: bool = True) -> None:
        """Move the model to ordinary memory or a shared home; if ``whole``, also gather a sharded model."""
        self._close()
        if whole and self._peers is not None:
            self._peers.gather()

    def _close(self) -> None:
        """Move this process's tensors out of the arena, and free all resources even if that fails."""
        self.updates.background.close()
        self.engine.close()
        try:
            with DeferredSignals("the move of the model to where it stays"):
                if self.eager_calls is not None:
                    self.home.home_tensors.drop_loop_cache = None
                    self.eager_calls.close(keep_memory=self.home.shared)
                self.keeper.release_replacements()
                if not self.home.shared:
                    self.steps.deactivate()
                    self.keeper.move_to_cpu()
                else:
                    self.steps.leave_program()
                    self.keeper.release_slots()
        finally:
            self._forget_steps()
            self.steps.release_arena()
            self.keeper.return_to_device()
            self.home.leave(self)
            self.home.release()

    # Plans

    def _plan_call(
        self,
        entry: KnownStep | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        alternatives: Sequence[PlannedStep],
    ) -> KnownStep:
        """Capture, measure and plan a call, together with other processes if there are any.

        ``entry``: the planned step, returned if only other processes lack a plan. ``alternatives``: similar steps.
        """
        peers = self._peers
        if peers is None:
            return KnownStep(self.planner.plan_alone(*self.planner.capture(args, kwargs), alternatives))
        if entry is not None and entry.facts is not None:
            peers.join_planning(entry.step, entry.facts)
            return entry
        facts = StepFacts(versions(), format_bytes(self._budget), self._policy.name)
        return KnownStep(*peers.plan_together(args, kwargs, facts, alternatives))

    def _warn_of_many_signatures(self, seconds: float) -> None:
        """Record the planning time of an input signature; warn when the fourth has been planned."""
        self._planning_seconds.append(seconds)
        if len(self._planning_seconds) == _MANY_SIGNATURES:
            _log.warning(
                "%d input signatures have been captured and planned, in %.1f s in total and %.1f s for the last; if "
                "only sizes differ, compile the step with dynamic=True, or pad inputs to a few lengths",
                _MANY_SIGNATURES,
                sum(self._planning_seconds),
                seconds,
            )

    def _run(self, entry: KnownStep, leaves: Sequence[Any]) -> Any:
        """Run a planned step; if it fails, restore a usable model, or mark the session torn (half changed)."""
        runner = entry.runner
        if runner is None:
            raise RuntimeError("a step without a runner was activated; please report it")
        self.outcome = CallOutcome.TORN
        try:
            result, self.timeline = runner.run(self.engine, leaves, may_refuse=self._joined_peers is None)
            self.steps.last_step, self.outcome = entry.step, CallOutcome.COMPLETED
        except UpdateError as error:
            self.outcome = CallOutcome.UPDATE_STOPPED
            raise (error.__cause__ or error) from None
        except BaseException as error:  # Ctrl-C as well: the model must not stay half changed
            self.torn, self.outcome = f"{type(error).__name__}: {error}", CallOutcome.TORN
            peers = self._joined_peers
            if peers is not None:
                peers.failure = self.torn
            if self._recover("undone", runner.undo, error):
                self.torn, self.outcome = "", CallOutcome.UNDONE if peers is None else CallOutcome.UNDONE_ALONE
            elif peers is None and self._recover(
                "stopped", runner.finish_like_pytorch, error
            ):  # peers would be a step ahead
                self.torn, self.outcome = "", CallOutcome.STOPPED
            raise
        return result

    def _may_stop(self, entry: KnownStep) -> bool:
        """Return whether an interrupt may stop the running step: no optimizer update has begun."""
        return entry.runner is None or entry.runner.may_stop(self.engine)

    def _recover(self, action: str, recover: Callable[[Engine], bool], error: BaseException) -> bool:
        """Call ``recover`` to restore the model after ``error``; return whether the model was restored."""
        try:
            return recover(self.engine)
        except TransferError as another:
            error.add_note(f"It could not be {action}: {another}")
            return False


def versions() -> str:
    """Return the versions and the thread count that measurements depend on, as text."""
    library = library_version() or "(not installed)"
    return f"outofcore {library}, PyTorch {torch.__version__} with {torch.get_num_threads()} threads"
