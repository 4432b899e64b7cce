"""A compiled step: captured, profiled and planned at its first call, and run within its budget at each."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from outofcore._torch_internals import tree_flatten
from outofcore.analysis import live_bytes
from outofcore.capture import Captured, capture_step
from outofcore.capture.passes import fastest, leanest
from outofcore.capture.signature import Signature, Signer
from outofcore.costs import Costs, Home
from outofcore.errors import BudgetError, SpillError, StateError, TransferError
from outofcore.execution.arenas import Memory
from outofcore.execution.backend import Backend, CpuBackend, in_terms_of_the_budget, room_for_arena
from outofcore.execution.interrupts import Deferred
from outofcore.execution.memory import trim_heap
from outofcore.execution.opened import OpenHome
from outofcore.execution.state import StateKeeper
from outofcore.execution.stats import StepStats, measure_step
from outofcore.execution.store import HomeStore
from outofcore.lasting import Lasting
from outofcore.planning import Planned, Policy
from outofcore.policies import OffloadAll, ProfileGuided
from outofcore.profiling.algorithms import Algorithm, choose_algorithms
from outofcore.profiling.cache import Cache
from outofcore.profiling.links import links_to
from outofcore.profiling.ops import OpProfile, profile_ops
from outofcore.program import Timeline
from outofcore.progress import Tell, following, silent
from outofcore.replan import Entry, Planner, check_spill, describer
from outofcore.settled import added_bytes, known_families, settled_step, shortfall
from outofcore.shown import Shown
from outofcore.units import MIB, format_bytes

_log = logging.getLogger("outofcore")


class Step(Shown, Lasting):
    """A training step that runs within a byte budget: made by ``outofcore.compile``, called like the step given.

    Between calls the model, its gradients and the optimizers can be read, changed, saved and evaluated
    as in plain PyTorch. One step runs at a time; a step is not to be called from several threads at once.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        budget: int,
        home: OpenHome,
        policy: Policy,
        cache: Cache | None = None,
        backend: Backend | None = None,
        algorithms: str = "eager",
    ) -> None:
        self._step = step
        self._models = list(models)
        self._optimizers = list(optimizers)
        self.budget = budget
        self.policy = policy
        home.hold()
        self.home = home
        self._keeper = StateKeeper(home.faces)
        self._cache = cache
        self._backend = backend = backend or CpuBackend()
        self._planner = Planner(budget, policy, self._keeper, home.stores, cache, backend)
        self._engine = backend.engine(home.stores)
        # A step that nobody closes ends its threads, which hold its arena, once it is garbage.
        weakref.finalize(self, self._engine.close).atexit = False
        self._signer = Signer(step, self._models, self._optimizers, backend.device)
        self._entries: dict[Signature, Entry] = {}
        self._active: Entry | None = None  # whose states are in the arena
        self._shown: Entry | None = None  # of the last call
        self._signature: Signature | None = None
        self._arena: Memory | None = None
        self._links: tuple[Home, ...] = ()
        self._algorithms: dict[str, Algorithm | None] | None = None if algorithms == "eager" else {}
        self._off_plan = 0  # requests counted in arenas that are gone
        self._torn = ""
        self._closed = False
        self._stats: StepStats | None = None
        self._timeline: Timeline | None = None
        self._running = threading.Lock()
        self._process = os.getpid()
        self._began_ns = 0  # of the last run, since 1970
        self.on_progress: Tell | None = None
        self._tell: Tell = silent

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one training step and return what the user's step returns, in memory of its own.

        The first call with inputs of given shapes captures, profiles and plans the step.

        Raises:
            CaptureError: the step cannot become one graph.
            BudgetError: the budget cannot hold it.
            SpillError: the home cannot hold what must leave.
            StateError: the step is closed, an earlier call failed half way, this is a fork of the process that
                compiled the step, or something else moved the model while it ran.
            TransferError: a copy failed in mid-step, or what was read is not what was written.

        Whatever is raised carries a note (``__notes__``) that says how the model is: as it was before the step, as
        long as nothing that lasts had been updated, or else part old and part new; then the step refuses to go on.
        Ctrl-C and SIGTERM take effect when the step has ended; a second one at once.
        """
        self._check_usable()
        with self._alone():
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        signature = self._signer(args, kwargs)
        with torch.inference_mode(mode=False):  # what is shown outlives the mode in which the step is called
            self._catch_up(signature)
        leaves = tree_flatten((args, kwargs))[0]
        entry = self._entries.get(signature)
        if entry is None:
            if self._signature is not None:
                _log.info("capturing again: %s", self._signer.describe_change(self._signature, signature, args, kwargs))
            with following(self.on_progress) as self._tell:
                entry = self._build(args, kwargs)
            self._entries[signature] = entry
        elif entry is not self._active and self._signature not in (None, signature):
            _log.info("known plan: %s", self._signer.describe_change(self._signature, signature, args, kwargs))
        try:
            with torch.inference_mode(mode=False):
                return self._go(entry, signature, leaves)
        except BaseException:
            if entry.captured.lazy is not None:
                self._forget_plans()
                entry.captured.lazy.undo()
            raise

    def _catch_up(self, signature: Signature) -> None:
        """See what others and the user have done since the last call, before anything moves: it would be lost."""
        if self.home.occupy(self, self._vacate) and not self._keeper.take_back():
            self._start_anew()
        self._refresh()
        if self._signature is not None and signature.structure != self._signature.structure:
            self._leave_program()  # what now has the name of something else must not take its place: it may come back
            self._keeper.forget_all()
        if any(entry.runner.is_outdated() for entry in self._entries.values()):
            _log.info("all that was captured is forgotten: an optimizer has lost state")
            self._forget_plans()

    def _go(self, entry: Entry, signature: Signature, leaves: Sequence[Any]) -> Any:
        if entry is not self._active:
            with Deferred("the move of the model to its place"):
                entry.runner = entry.runner.current()
                self._activate(entry)
        self._signature = signature
        self._began_ns = time.time_ns()
        with Deferred("the step that runs"):
            result, timeline = self._run(entry, leaves)
        self._timeline = timeline
        self._stats = None
        again = self._planner.after(entry, timeline, self._leave_arena)
        if again is not None:
            try:
                check_spill(again, self.home.stores)
            except SpillError as error:
                # The plan that ran goes on running.
                _log.warning("the new plan is not taken: %s", error)
            else:
                self._entries[signature] = again
        return result

    def _run(self, entry: Entry, leaves: Sequence[Any]) -> tuple[Any, Timeline]:
        """Run, or leave the model as it was before, or else torn."""
        try:
            return entry.runner.run(self._engine, leaves)
        except BaseException as error:
            self._torn = f"{type(error).__name__}: {error}"
            if self._undone(entry, error):
                self._torn = ""
                error.add_note(
                    "The model and its optimizers are as they were before this step, which can be called again."
                )
            else:
                error.add_note(
                    "The step failed half way, so that the model is part old and part new: load a checkpoint into it."
                )
            raise

    def _undone(self, entry: Entry, error: BaseException) -> bool:
        try:
            return entry.runner.undo(self._engine)
        except TransferError as another:
            error.add_note(f"It could not be undone: {another}")
            return False

    def _build(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        """Capture, profile and plan; nothing of the user's is changed."""
        self._tell("capture", 0, 1)
        capture = partial(capture_step, self._step, self._models, self._optimizers, args, kwargs, self._backend.device)
        traced = capture()
        if traced.lazy is not None:
            traced.lazy.apply()
        try:
            return self._planned(traced, capture)
        except BaseException:
            if traced.lazy is not None:
                self._keeper.forget_all()
                traced.lazy.undo()
            raise

    def _planned(self, traced: Captured, capture: Callable[..., Captured]) -> Entry:
        self._tell("capture", 1, 1)
        # The device is to be profiled on alone.
        self._leave_arena()
        self._backend.prepare()
        alignment = self._backend.alignment
        self._planner = replace(self._planner, budget=room_for_arena(traced, self._backend, self.budget))
        room = self._planner.budget
        settled = partial(settled_step, traced, capture, self._cache, self._backend)
        try:
            entry = self._in_core(fastest(traced).aligned(alignment))
            entry = entry or self._out_of_core(leanest(traced).aligned(alignment))
        except BudgetError as error:
            refused = shortfall(settled(), room, error) or error
            raise in_terms_of_the_budget(refused, self.budget, room) from None
        if entry.planned.program.arena_bytes + added_bytes(traced) > room:
            refused = shortfall(settled(known_families(entry.captured, entry.profiles)), room)
            if refused is not None:
                raise in_terms_of_the_budget(refused, self.budget, room)
        check_spill(entry, self.home.stores)
        self._tell("plan", 1, 1)
        _log.info(
            "planned %d ops in %s of %s by %s: %s predicted, %s of them ops",
            len(entry.captured.graph.ops),
            format_bytes(entry.planned.program.arena_bytes),
            format_bytes(self.budget),
            entry.planned.plan.policy,
            f"{entry.planned.timeline.step_seconds:.3f} s",
            f"{entry.costs.compute_seconds:.3f} s",
        )
        return entry

    def _in_core(self, captured: Captured) -> Entry | None:
        """Planned so that nothing moves, if the budget holds that."""
        if isinstance(self.policy, OffloadAll | ProfileGuided) or live_bytes(captured.graph) > self._planner.budget:
            return None
        return self._planner.plan_in_core(*self._measured(captured))

    def _out_of_core(self, captured: Captured) -> Entry:
        return self._planner.plan(*self._measured(captured), describer(captured))

    def _measured(self, captured: Captured) -> tuple[Captured, Costs, tuple[OpProfile, ...]]:
        cache, backend, fixed = self._cache, self._backend, self._algorithms
        profiles = profile_ops(captured, advance=partial(self._tell, "profile"), cache=cache, backend=backend)
        if fixed is not None:
            captured, profiles = choose_algorithms(captured, profiles, self._planner.budget, fixed, cache, backend)
        if not self._links:
            self._tell("measure the home", 0, 1)
            self._links = links_to(self.home.stores, cache, backend, min(64 * MIB, max(self.budget // 8, MIB)))
        self._tell("plan", 0, 1)
        return captured, Costs(tuple(profile.cost for profile in profiles), self._links), profiles

    def _activate(self, entry: Entry) -> None:
        self._engine.synchronize()
        if self._active is not None:
            self._active.runner.leave()
            self._active = None
        needed = entry.planned.program.arena_bytes
        if self._arena is None or self._arena.bytes < needed:
            self._release_arena()
            # What capturing and planning have used would otherwise stay with the process beside its budget.
            gc.collect()
            trim_heap()
            self._keeper.evacuate()
            self._arena = self._backend.arena(needed, self._backend.reserve(self.budget))
        entry.runner.enter(self._arena)
        self._active = self._shown = entry

    def _vacate(self) -> None:
        """Bring everything home, because another step that shares the home is to run."""
        self._check_usable()
        with self._alone(), Deferred("the move of the model out of the arena"):
            self._engine.synchronize()
            self._refresh()
            self._leave_arena()
            self._keeper.hand_over()

    def _leave_arena(self) -> None:
        """Bring every state home, and give the arena back."""
        self._leave_program()
        self._release_arena()

    def _leave_program(self) -> None:
        self._engine.synchronize()
        with Deferred("the move of the model out of the arena"):
            if self._active is not None:
                self._active.runner.leave()
                self._active = None

    def _release_arena(self) -> None:
        if self._arena is not None:
            self._off_plan += self._arena.counters().large
            self._arena.close()
            self._arena = None

    def synchronize(self) -> None:
        """Return when everything of the last call is done. (On the CPU it is when the call returns.)"""
        self._check_usable()
        self._engine.synchronize()

    def _forget_plans(self) -> None:
        self._keeper.let_go()
        self._leave_program()
        self._keeper.forget_all()
        self._entries.clear()
        self._signature = None

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._running.acquire(blocking=False):
            raise StateError("this step is running already; call it from one thread at a time")
        try:
            # What was written there may have been changed by the user since.
            self.home.start()
            yield
        finally:
            self._running.release()

    def close(self) -> None:
        """Give the model and the optimizers memory of their own again, as plain PyTorch has it, and free the rest."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._process:
            return  # the threads and the files are those of another process
        self._engine.close()
        active, self._active = self._active, None
        try:
            with Deferred("the move of the model to where it stays"):
                self._keeper.let_go()
                if not self.home.shared:
                    self._keeper.give_back()
                else:
                    if active is not None:
                        active.runner.leave()
                    self._keeper.hand_over()
        finally:
            self._entries.clear()
            self._release_arena()
            self._keeper.go_back()
            self.home.leave(self)
            self.home.release()

    @property
    def homes(self) -> tuple[HomeStore, ...]:
        """Where bytes are that are not on the device, nearest first."""
        return self.home.stores

    @property
    def planned(self) -> Planned:
        """The plan of the last call, with its program and the simulated timeline.

        Raises:
            StateError: the step was not called yet.
        """
        if self._shown is None:
            raise StateError("the step was not called yet: it is planned at its first call")
        return self._shown.planned

    @property
    def captured(self) -> Captured:
        """The capture that the last call ran.

        Raises:
            StateError: the step was not called yet.
        """
        if self._shown is None:
            raise StateError("the step was not called yet: it is captured at its first call")
        return self._shown.captured

    @property
    def costs(self) -> Costs:
        """The costs that the last call was planned with.

        Raises:
            StateError: the step was not called yet.
        """
        if self._shown is None:
            raise StateError("the step was not called yet: it is profiled at its first call")
        return self._shown.costs

    @property
    def timeline(self) -> Timeline:
        """When each instruction of the last call ran.

        Raises:
            StateError: the step was not called yet.
        """
        if self._timeline is None:
            raise StateError("the step was not called yet")
        return self._timeline

    @property
    def stats(self) -> StepStats:
        """What the last call did.

        Raises:
            StateError: the step was not called yet.
        """
        if self._stats is None:
            off_plan = self._off_plan + (self._arena.counters().large if self._arena is not None else 0)
            self._stats = measure_step(self.captured, self.planned, self.timeline, off_plan)
        return self._stats
