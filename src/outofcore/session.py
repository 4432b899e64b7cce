"""What a compiled step keeps from call to call: its planned steps, the arena, and which of them is in it.

A call with inputs of a kind that is not known is captured, measured and planned; the planned step is frozen data. The
session makes the runner of a planned step when it first brings the step's program into the arena.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from importlib import metadata
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from outofcore._torch_internals import function_modes, tree_flatten
from outofcore.analysis import placed_bytes
from outofcore.background import Answer, BackgroundPlanner, plan_job
from outofcore.capture.kernels import Kernels
from outofcore.capture.shards import Shards
from outofcore.capture.signature import Signature, Signer, has_other_sizes
from outofcore.capture.snapshot import Snapshot
from outofcore.capture.variants import Variants
from outofcore.errors import (
    ArenaError,
    BudgetError,
    CaptureError,
    SpillError,
    StateError,
    TransferError,
    ValidationError,
)
from outofcore.execution.aliases import State, fits
from outofcore.execution.arena import Memory
from outofcore.execution.backend import Backend, in_terms_of_the_budget
from outofcore.execution.demand_eviction import describe
from outofcore.execution.interrupts import Deferred
from outofcore.execution.memory import new_garbage_collected, trim_heap
from outofcore.execution.model_state import StateKeeper
from outofcore.execution.opening import OpenHome
from outofcore.execution.runner import Runner, UpdateError
from outofcore.follow.calls import FollowedCalls
from outofcore.follow.loop import Loop
from outofcore.peers import Peers, Ranks, StepFacts
from outofcore.planned_step import (
    PlannedStep,
    grown_requests,
    job_of,
    plan,
    quick_policy,
    remember_requests,
    with_answer,
)
from outofcore.planning import Policy
from outofcore.planning.placement.requests import Requests
from outofcore.profiling.cache import Cache
from outofcore.profiling.links import keep_link
from outofcore.profiling.ops import keep_profiles
from outofcore.program import Timeline
from outofcore.progress import Tell, following
from outofcore.replanning import MEASURED_STEPS, Watch, calm_of
from outofcore.step_planner import StepPlanner
from outofcore.step_variants import Split
from outofcore.units import format_bytes

_log = logging.getLogger("outofcore")

# The lowest priority: a step takes what it can of the processor while another plan is made of it.
_NICENESS = 19
# With so many kinds of inputs it is said once what they cost.
_MANY_KINDS = 4


class _NotFollowedError(Exception):
    """This system cannot follow a loop; the cause says why."""


class _TooSmallError(Exception):
    """No plan of a step has room for what its ops ask for: nothing has been touched.

    Args:
        refusal: what the user is told.
    """

    def __init__(self, refusal: BudgetError) -> None:
        super().__init__(refusal)
        self.refusal = refusal


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


@dataclass
class _Known:
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
        """Whether the user's tensors are what the step was captured with; the keeper sees to those that it knows."""
        return (self.runner is not None and self.runner.is_current()) or fits(self.step.captured)


class Session:
    """Captures, plans and runs one user's step over one set of models.

    Args:
        step: the user's own.
        models: all that it uses.
        optimizers: likewise.
        budget: device bytes.
        home: where bytes live that are not on the device.
        policy: how to plan.
        cache: where measurements are kept, if anywhere.
        backend: where the step runs.
        vacate: called when another step over the home is to have the model; by it ``vacate`` here.
        dynamic: whether calls are followed and not captured: always, never, or (None) from the second shape on.
        loop: makes the loop that they are followed in; None: they cannot be.
        alternating: whether calls of one kind never find the gradients that another of that kind has left.
        ranks: the processes that run it together; None: this one alone.
        shards: what of the models is spread over them; None: nothing is.
        kernels: with which ops that become one are compiled; None: all run by PyTorch's own, one by one.
        split: whether ops that need more memory than there is may run in parts.

    Attributes:
        followed: the calls that are followed; None: there were none yet.
        why_followed: why that is so; empty: it is not.
        torn: why the model is part old and part new; empty: it is not.
        outcome: of the call that runs, if it raised now.
        shown: what the last call ran; None: there was none.
        timeline: of the last call.
        began_ns: when it began, since 1970.
        arena: where the active program's blocks are.
        planner: makes the first plans.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        budget: int,
        home: OpenHome,
        policy: Policy,
        cache: Cache | None,
        backend: Backend,
        vacate: Callable[[], None],
        dynamic: bool | None = False,
        loop: Callable[[], Loop] | None = None,
        alternating: bool = False,
        ranks: Ranks | None = None,
        shards: Shards | None = None,
        kernels: Kernels | None = None,
        split: Split = Split.EXACT,
    ) -> None:
        self._step, self._models, self._optimizers = step, list(models), list(optimizers)
        self.budget, self.home, self.policy = budget, home, policy
        self._cache, self.backend, self._on_vacate = cache, backend, vacate
        self.keeper = StateKeeper(home.faces)
        self.engine = backend.engine(home.stores)
        # A step that nobody closes ends its threads, which hold its arena, once it is garbage.
        weakref.finalize(self, self.engine.close).atexit = False
        self._signer = Signer(self._models, self._optimizers, backend.device)
        self._variants = Variants()
        self._known: dict[Signature, _Known] = {}
        self._active: _Known | None = None  # whose states are in the arena
        self._signature: Signature | None = None  # of the last call
        self.shown: PlannedStep | None = None
        self.timeline: Timeline | None = None
        self.began_ns = 0
        self.arena: Memory | None = None
        self.planner = StepPlanner(
            step,
            self._models,
            self._optimizers,
            budget,
            home.stores,
            policy,
            cache,
            backend,
            self._leave_arena,
            alternating,
            shards,
            kernels,
            split,
        )
        self._peers = None if ranks is None else Peers(ranks, shards, self.planner)
        self._dynamic, self._loop = dynamic, loop
        self._alternating = alternating
        self.followed: FollowedCalls | None = None
        self.why_followed = "it was asked for" if dynamic else ""
        self._off_plan = 0  # requests counted in arenas that are gone
        self._planning_seconds: list[float] = []  # of each kind of inputs
        self._planner: BackgroundPlanner[tuple[_Known, PlannedStep]] = BackgroundPlanner(_NICENESS)
        weakref.finalize(self, self._planner.close).atexit = False
        self._clock = time.perf_counter
        self._surges: dict[str, Requests] = {}  # by family: what ops have asked for beyond their plans
        self._surge_count = 0
        self.torn = ""
        self.outcome = Outcome.UNCHANGED

    @property
    def kinds(self) -> int:
        """Kinds of inputs that there are plans for."""
        return len({signature._replace(variant=0) for signature in self._known})

    @property
    def runner(self) -> Runner | None:
        """Of the program in the arena."""
        return None if self._active is None else self._active.runner

    @property
    def off_plan(self) -> int:
        """Requests of 64 KiB and more that no address was planned for, so far."""
        return self._off_plan + (self.arena.counters().large if self.arena is not None else 0)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], on_progress: Tell | None) -> Any:
        """Run one step; ``outcome`` tells at any time what an exception would mean."""
        self.outcome = Outcome.UNCHANGED
        if self._peers is not None:
            self._peers.check()
        if self.why_followed:
            return self._call_followed(args, kwargs)
        self.spread()
        signature, change = self._variants.find(self._signer(args, kwargs))
        if signature not in self._known and self._passes_over(signature, change):
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
        if (
            known.runs
            and not self._alternating
            and known is not self._active
            and self._signature not in (None, signature)
        ):
            _log.info("known plan: %s", self._signer.describe_change(self._signature, signature, args, kwargs))
        try:
            with torch.inference_mode(mode=False):
                return self._go(known, signature, leaves)
        except _TooSmallError as error:
            return self._call_beyond(error.refusal, args, kwargs)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], on_progress: Tell | None) -> PlannedStep:
        """Capture and plan what a call with such arguments would run, and run nothing."""
        self.outcome = Outcome.UNCHANGED
        self.spread()
        signature, change = self._variants.find(self._signer(args, kwargs))
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
    ) -> _Known:
        """The planned step for a call; a new one is one on which the processes agree that run it together.

        ``change`` says which value has changed that the step had read.
        """
        # What is shown outlives the mode in which the step is called.
        with torch.inference_mode(mode=False), Deferred("what happened between two steps"):
            self._catch_up(signature)
        known = self._known.get(signature)
        if known is not None and not known.fits():
            _log.info("a plan is forgotten: tensors share memory, or lie in it, otherwise than before")
            if known.runner is not None:
                known.runner.leave()
            known = None
            del self._known[signature]
            self._variants.forget(signature)
        agreed = known is not None
        if self._peers is not None:
            agreed = self._peers.meet(None if known is None else known.facts)
        if known is not None and agreed:
            return known
        if self._joined is None and self._signature is not None:
            what = change or self._signer.describe_change(self._signature, signature, args, kwargs)
            _log.info("capturing again: %s", what)
        begin = time.perf_counter()
        others = [self._known[other].step for other in self._variants.others(signature) if other in self._known]
        # What capturing and planning use would otherwise stay with the process beside its budget.
        with new_garbage_collected(), following(on_progress) as self.planner.tell:
            known = self._known[signature] = self._learn(known, args, kwargs, others)
            self._note_reads(signature, known)
        if not change:
            self._count_kinds(time.perf_counter() - begin)
        return known

    def _note_reads(self, signature: Signature, known: _Known) -> None:
        """Take down the values that a capture has read; what it needs for that is not kept."""
        reads = known.step.captured.reads
        roots = [("step", self._step)]
        roots += [(type(one).__name__, one) for one in (*self._models, *self._optimizers, *function_modes())]
        parameters = [named for model in self._models for named in model.named_parameters()]
        for forgotten in self._variants.add(signature, Snapshot(reads, roots, parameters)):
            self._forget(forgotten)
        reads.clear()

    def _forget(self, signature: Signature) -> None:
        known = self._known.pop(signature, None)
        if known is not None:
            if known is self._active:
                self._leave_program()
            if known.runner is not None:
                known.runner.leave()

    def _go(self, known: _Known, signature: Signature, leaves: Sequence[Any]) -> Any:
        must_grow = known.has_overflowed
        while True:
            self._plan_for_surges(known, must_grow=must_grow)
            if known is not self._active:
                with Deferred("the move of the model to its place"):
                    self._activate(known)
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
                if self.outcome is not Outcome.UNDONE or not self._note_surges(known):
                    raise self._explained(known, error) from error
                must_grow = True
                continue  # by a plan that has room for what was asked for
            self._judge(known)
            return result

    # Requests beyond the plan

    def _note_surges(self, known: _Known) -> bool:
        """Remember what ops have asked for in the last run beyond their plan; whether any has."""
        runner = known.runner
        if runner is None or self._follows_one_plan:
            return False
        seen = runner.surprises()
        step = known.wanted or known.step
        grown = grown_requests(step, seen)
        if runner.refused is not None and known.wanted is None and (op := runner.refused[0].id) not in grown:
            # It has room for them in another order; so that planning again ends, it gets more.
            requests = seen.get(op, step.profiles[op].requests)
            more = step.costs.ops[op].workspace_bytes + placed_bytes(runner.refused[1])
            grown[op] = replace(requests, workspace_bytes=more)
        if not grown:
            return False
        step = known.wanted = remember_requests(step, grown, runner.first_ops)
        for op, requests in grown.items():
            family, before = step.graph.ops[op].family, 0
            if family in self._surges:
                before = self._surges[family].workspace_bytes
            if family and op not in runner.first_ops and requests.workspace_bytes > before:
                self._surges[family] = requests
        if self._cache is not None:
            facts = self.backend.facts()
            keep_profiles(self._cache, step.graph, step.profiles, only=grown.keys(), device=facts)
        self._surge_count += 1
        known.surges = -1
        known.has_overflowed |= runner.has_overflowed
        return True

    def _plan_for_surges(self, known: _Known, *, must_grow: bool) -> None:
        """Plan a step again that has not taken up what ops have asked for, in it or with inputs of another kind.

        Args:
            known: the step.
            must_grow: whether it cannot go on with the plan that it has.

        Raises:
            _TooSmallError: it cannot, and no plan has room for what was asked for.
        """
        if known.surges != self._surge_count:
            is_own, known.surges = known.surges < 0, self._surge_count
            step = known.wanted or known.step
            wanted = {op.id: self._surges[op.family] for op in step.graph.ops if op.family in self._surges}
            grown = grown_requests(step, wanted)
            if grown or is_own:
                known.wanted = remember_requests(step, grown)
                self._plan_again(known, known.wanted)
        if must_grow and known.too_small is not None:
            raise _TooSmallError(known.too_small)

    def _plan_again(self, known: _Known, step: PlannedStep) -> None:
        before = known.step
        if before.leaves_device:  # planning takes memory, too, and not beside that of the step
            self._leave_arena()
        try:
            again = plan(
                step.captured, step.costs, step.profiles, step.budget, self.policy, self.home.stores, quickly=True
            )
        except (BudgetError, SpillError, ValidationError) as error:
            known.too_small = self._too_small(step, error)
            _log.info("no plan has room for what ops have asked for; it is evicted for on demand: %s", error)
            return
        _log.info(
            "planned again for memory that ops asked for: %.3f s predicted by %s",
            again.planned.timeline.step_seconds,
            again.planned.plan.policy,
        )
        known.wanted, known.too_small, known.has_overflowed = None, None, False
        self._exchange(known, replace(again, variant=before.variant))

    def _too_small(self, step: PlannedStep, error: Exception) -> BudgetError:
        if isinstance(error, BudgetError):
            return in_terms_of_the_budget(error, self.budget, step.budget)
        return BudgetError(f"no plan has room for what an op asks for beyond what it was measured with: {error}")

    def _explained(self, known: _Known, error: ArenaError) -> Exception:
        """The refusal of a request, for people."""
        runner = known.runner
        if runner is None or runner.refused is None:
            return error
        op, count = runner.refused
        if runner.refusal is not None:
            return runner.refusal
        if known.too_small is not None:
            return known.too_small
        return BudgetError(
            f"{describe(op)} asked for {format_bytes(count)} beyond its plan, which the budget of "
            f"{format_bytes(self.budget)} cannot hold beside what the op works on; raise the budget"
        )

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
    def _follows_one_plan(self) -> bool:
        return self._peers is not None and self._peers.follow_one_plan

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
        return self._variants.changes_too_often(signature) if change else has_other_sizes(signature, self._known)

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
            result = followed(self._step, args, kwargs)
            self.outcome = Outcome.MADE
        return result

    def _pass_over(self) -> FollowedCalls:
        """Leave what was planned for the loop, one tensor after the other, so that memory stays within the budget."""
        if self.followed is None:
            if self._loop is None:
                raise RuntimeError("a step that cannot be followed was to be; please report it")
            try:
                self.followed = FollowedCalls(self._loop(), self._models, self._optimizers)
            except StateError as error:
                if self._dynamic:
                    raise
                raise _NotFollowedError from error
            self.home.faces.drop_elsewhere = self.followed.drop_cache
            _log.info("followed from now on: %s", self.why_followed)
        if self._known:
            with Deferred("the move of the model to the loop"):
                self.engine.synchronize()
                self.refresh(leaving=True)
                self._leave_arena()
                self.followed.take(self.keeper.give_to_allocator)
                self._forget_known()
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
            self._leave_program()  # what now has the name of something else must not take its place: it may come back
            self.keeper.forget_all()
        if any(known.runner is not None and known.runner.is_outdated() for known in self._known.values()):
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
        self._leave_program()
        self.keeper.forget_all()
        self._forget_known()
        self._signature = None

    def vacate(self) -> None:
        """Bring everything home, because another step that shares the home is to run."""
        with Deferred("the move of the model out of the arena"):
            if self.followed is not None:
                self.followed.vacate()
            self.engine.synchronize()
            self.refresh(leaving=True)
            self._leave_arena()
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
        self._planner.close()
        self.engine.close()
        try:
            with Deferred("the move of the model to where it stays"):
                if self.followed is not None:
                    self.home.faces.drop_elsewhere = None
                    self.followed.close(stays=self.home.shared)
                self.keeper.let_go()
                if not self.home.shared:
                    self._make_way()
                    self.keeper.give_back()
                else:
                    self._leave_program()
                    self.keeper.hand_over()
        finally:
            self._forget_known()
            self._release_arena()
            self.keeper.go_back()
            self.home.leave(self)
            self.home.release()

    # Planning

    def _learn(
        self, known: _Known | None, args: tuple[Any, ...], kwargs: dict[str, Any], others: Sequence[PlannedStep]
    ) -> _Known:
        """Capture, measure and plan, together with other processes if there are any.

        Args:
            known: where others have no plan for the call, and this process has one.
            others: as it was planned where it had read other values.
        """
        peers = self._peers
        if peers is None:
            return _Known(self.planner.plan_alone(*self.planner.capture(args, kwargs), others))
        if known is not None and known.facts is not None:
            peers.confirm(known.step, known.facts)
            return known
        facts = StepFacts(versions(), format_bytes(self.budget), self.policy.name)
        return _Known(*peers.learn(args, kwargs, facts, others))

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

    def _judge(self, known: _Known) -> None:
        """Plan again where the runs of a plan have shown that it was wrong."""
        if known.runner is None or self.timeline is None:
            return
        if self._follows_one_plan:
            self._judge_together(known)
            return
        if self._note_surges(known):
            return  # the next call has a plan with it
        known.runs += 1
        # The first step of a program warms up: libraries fill their caches, and optimizer state may be made.
        warming = known.runs == 1
        if known.watch is None:
            planned = known.step.planned
            known.watch = Watch.of(planned.program, planned.timeline.step_seconds, is_quick=known.step.is_quick)
        if warming or not known.step.leaves_device:
            known.watch = known.watch.warmed()
        else:
            known.watch = known.watch.ran(known.step.planned.program, self.timeline)
        watch = known.watch
        if watch.has_settled and known.step.planning_seconds:
            self._keep_plan(known.step)
        if watch.asks and not self._planner.is_busy:
            self._plan_for_times(known, watch)
        self._take_plan()

    def _plan_for_times(self, known: _Known, watch: Watch) -> None:
        """Have a plan made with the times that ops and copies took; in another process, or else if that is quick."""
        if self._joined is not None:  # they would wait for this process, and each would search beside the steps
            known.watch = watch.kept()
            return
        step, begin = known.step, self._clock()
        job = job_of(step, self.policy, calm_of(watch.measured))
        if self._planner.start((known, step), job):
            known.watch = watch.asked(self._clock() - begin)
        elif step.planning_seconds and watch.affords(step.planning_seconds + watch.exchange):
            self._leave_arena()  # planning takes memory, too, and not beside that of the step
            answer = plan_job(replace(job, policy=quick_policy(self.policy)))
            known.watch = watch.asked(self._clock() - begin)
            self._take(known, known.watch, answer)
        else:
            known.watch = watch.kept()

    def _take_plan(self) -> None:
        """Go on with the plan that was made meanwhile, if one was."""
        made = self._planner.poll()
        if made is None:
            return
        (known, step), answer = made
        # It may have been planned for other reasons since, or be forgotten.
        if known.watch is not None and known.step is step and any(one is known for one in self._known.values()):
            self._take(known, known.watch, answer)

    def _take(self, known: _Known, watch: Watch, answer: Answer) -> None:
        before, begin = known.step, self._clock()
        again = with_answer(before, answer, watch.usual, self.home.stores)
        if again is None:
            known.watch = watch.kept()
            return
        self._keep(before, again, None)
        predicted = again.planned.timeline.step_seconds
        if not answer.is_new:
            known.step, known.watch = again, watch.kept(predicted)
            if known is self._active:
                self.shown = again
            return
        was_active = known is self._active
        self._exchange(known, again)
        if was_active:
            with Deferred("the move of the model to its place"):
                self._activate(known)
        known.watch = watch.exchanged(predicted, self._clock() - begin)

    def settle(self) -> None:
        """Go on with the best plans: wait for the one that is being made, and make the others now."""
        self._planner.wait()
        self._take_plan()
        for known in self._known.values():
            step = known.step
            if step.is_quick:
                self._leave_arena()
                best = plan(step.captured, step.costs, step.profiles, step.budget, self.policy, self.home.stores)
                self._exchange(known, replace(best, variant=step.variant))

    def _judge_together(self, known: _Known) -> None:
        """The same, once, where all processes have to follow one plan: what rank 0 has measured decides for all."""
        peers, runner, timeline = self._peers, known.runner, self.timeline
        if peers is None or runner is None or timeline is None or known.is_judged:
            return
        known.runs += 1
        if known.runs > 1:
            known.measured.append(timeline)
        before, measured = known.step, known.measured
        if len(measured) < MEASURED_STEPS:
            return
        known.is_judged, known.measured = True, []
        surprises = runner.surprises()
        if before.leaves_device:
            self._leave_arena()

        def keep(again: PlannedStep, times_were_wrong: bool) -> None:
            self._keep(before, again, None if times_were_wrong else surprises.keys())

        again = peers.replan(before, measured, surprises, keep)
        if again is not None:
            self._exchange(known, again)

    def _exchange(self, known: _Known, again: PlannedStep) -> None:
        """Go on with another plan of a step."""
        if known is self._active:
            self._make_way()
        states = None
        if known.runner is not None:
            known.runner.leave()
            states = known.runner.states
        known.step, known.runs, known.measured, known.watch = again, 0, [], None
        known.runner = runner_of(again, self.keeper, states)

    def _keep(self, before: PlannedStep, again: PlannedStep, ops: Any) -> None:
        """Have later processes know what steps have shown; of some ops alone, or of all and the links, and the plan."""
        if self._cache is None:
            return
        facts = self.backend.facts()
        keep_profiles(self._cache, again.graph, again.profiles, only=ops, device=facts)
        for store, old, new in zip(self.home.stores, before.costs.homes, again.costs.homes, strict=True):
            keep_link(store, self._cache, old, new, facts)
        if not again.is_quick:
            self._keep_plan(again)

    def _keep_plan(self, step: PlannedStep) -> None:
        self.planner.plans.keep(step.graph, step.costs, step.budget, self.policy, step.planned)

    # The arena

    def _activate(self, known: _Known) -> None:
        """Bring a program into the arena; planned steps get their runners here."""
        self.engine.synchronize()
        if known.runner is None or not known.runner.is_current():
            if known.runner is not None:
                known.runner.leave()
            known.runner = runner_of(known.step, self.keeper)
        needed = known.arena_bytes
        self._make_way()
        if self.arena is None or self.arena.bytes < needed:
            self._leave_arena()
            trim_heap()
            self.keeper.evacuate()
            self.arena = self.backend.arena(needed, self.backend.reserve(self.budget), known.step.budget)
        known.runner.enter(self.arena)
        self._active, self.shown = known, known.step

    def _run(self, known: _Known, leaves: Sequence[Any]) -> Any:
        """Run, or leave the model as it was before, or else torn."""
        runner = known.runner
        if runner is None:
            raise RuntimeError("a step without a runner was activated; please report it")
        self.outcome = Outcome.TORN
        try:
            result, self.timeline = runner.run(self.engine, leaves, may_refuse=self._joined is None)
            self.outcome = Outcome.MADE
        except UpdateError as error:
            self.outcome = Outcome.UPDATE_STOPPED
            raise (error.__cause__ or error) from None
        except BaseException as error:
            self.torn, self.outcome = f"{type(error).__name__}: {error}", Outcome.TORN
            peers = self._joined
            if peers is not None:
                peers.failure = self.torn
            if self._undone(runner, error):
                self.torn, self.outcome = "", Outcome.UNDONE if peers is None else Outcome.APART
            elif peers is None and self._stopped(runner, error):  # else others have gone on
                self.torn, self.outcome = "", Outcome.STOPPED
            raise
        return result

    def _may_stop(self, known: _Known) -> bool:
        return known.runner is None or known.runner.may_stop(self.engine)

    def _undone(self, runner: Runner, error: BaseException) -> bool:
        try:
            return runner.undo(self.engine)
        except TransferError as another:
            error.add_note(f"It could not be undone: {another}")
            return False

    def _stopped(self, runner: Runner, error: BaseException) -> bool:
        try:
            return runner.stop(self.engine)
        except TransferError as another:
            error.add_note(f"It could not be stopped: {another}")
            return False

    def _leave_arena(self) -> None:
        """Bring every state home, and give the arena back."""
        self._leave_program()
        self._release_arena()

    def _leave_program(self) -> None:
        self.engine.synchronize()
        with Deferred("the move of the model out of the arena"):
            self._make_way()
            if self.arena is not None:
                self.keeper.leave(self.arena)

    def _make_way(self) -> None:
        """Leave the states in the arena to the next program; the one that was active is so no more."""
        active, self._active = self._active, None
        if active is not None and active.runner is not None:
            active.runner.make_way()
        self.engine.forget()

    def _forget_known(self) -> None:
        for known in self._known.values():
            if known.runner is not None:
                known.runner.leave()
        self._known.clear()
        self._variants.forget()

    def _release_arena(self) -> None:
        for known in self._known.values():
            if known.runner is not None:
                known.runner.leave()
        if self.arena is not None:
            self._off_plan += self.arena.counters().large
            self.arena.close()
            self.arena = None


def runner_of(step: PlannedStep, keeper: StateKeeper, states: dict[int, State] | None = None) -> Runner:
    """What runs a planned step.

    Args:
        step: planned.
        keeper: which takes note of the user's tensors that the step works on.
        states: that it knows them by, where it has taken note of this capture's before.
    """
    requests = [profile.requests for profile in step.profiles]
    first = {i: p.first_requests for i, p in enumerate(step.profiles) if p.first_requests is not None}
    return Runner(step.captured, step.planned.program, step.costs, requests, first, keeper, states, step.budget)


def versions() -> str:
    """What a measurement was taken with, and a step runs with."""
    try:
        own = metadata.version("outofcore")
    except metadata.PackageNotFoundError:  # run from its source, without being installed
        own = "(not installed)"
    return f"outofcore {own}, PyTorch {torch.__version__} with {torch.get_num_threads()} threads"
