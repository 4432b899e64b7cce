"""The context that ``outofcore.budget`` opens for a loop."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from outofcore._torch_internals import Feature, require, storage_address
from outofcore.capture.provenance import user_line
from outofcore.errors import StateError
from outofcore.follow.devices import LoopDevice, LoopHome
from outofcore.follow.failures import explain_error
from outofcore.follow.loop_planner import LoopPlanner
from outofcore.follow.loop_plans import LoopPlans
from outofcore.follow.measuring import LoopMeasurer, LoopNeeds, Measurement
from outofcore.follow.native import call, is_any_loop_running, open_space
from outofcore.follow.observed import (
    LINKS,
    KnownStorages,
    ObservedStep,
    PlanSummary,
    departure_marks,
    observed_notes,
    read_observed,
)
from outofcore.follow.running import patches, sources, started_loops
from outofcore.follow.space import Excess, Space
from outofcore.follow.stats import LoopStats, loop_facts
from outofcore.follow.step_ends import StepEnds, StepSign
from outofcore.follow.user_tensors import (
    Optimizers,
    inner_tensors_of,
    list_alive,
    names_of_storages,
    parameters_of,
    state_of,
    tensors_of,
    untracked_optimizers,
)
from outofcore.planning import PolicyLike
from outofcore.progress import ProgressCallback, ignore_progress, show_progress
from outofcore.report.content import Page, page_content
from outofcore.report.machine import process_memory, this_machine
from outofcore.report.notebook import ReportPath, facts_html
from outofcore.report.page import write_report
from outofcore.report.trace import LoopMeasurements, write_trace
from outofcore.runtime.checks import Check
from outofcore.runtime.memory import trim_heap
from outofcore.units import MIB, format_bytes

_log = logging.getLogger("outofcore")

REPORT_PATH = "outofcore-report.html"

# Moving models of this size to the home takes long enough to show progress.
_LARGE_MODEL_BYTES = 256 * MIB


@dataclass(frozen=True)
class LoopOptions:
    device: LoopDevice
    home: LoopHome
    policy: PolicyLike | None = "auto"  # None: steps run on demand
    plans: Path | None = None  # folder that keeps plans for later processes
    check: Check = Check.SAMPLED
    excess: Excess = Excess.REFUSED
    for_compiled_step: bool = False  # for a compiled step, which pauses the loop between calls


class Loop:
    """A training loop that runs within a byte budget; a context manager, created by ``outofcore.budget``.

    A loop ends when its last reference is gone and no op uses its memory.

    Attributes:
        on_progress: callback ``(stage, done, total)`` for the tensors that ``start()`` moves to the home; None: a bar
            on a terminal, if the models are large.

    >>> import torch
    >>> import outofcore
    >>> model = torch.nn.Linear(256, 256)
    >>> run = outofcore.budget("1MiB", model).start()
    >>> loss = model(torch.ones(64, 256)).square().mean()
    >>> loss.backward()
    >>> run.stop()
    >>> run.stats.fetches > 0
    True
    """

    def __init__(self, limit: int, models: Sequence[nn.Module], options: LoopOptions) -> None:
        require(Feature.BUDGET)
        self._limit = limit
        self._models = tuple(models)
        self._options = options
        self._device = options.device
        self._paused = False
        self._space: Space | None = None
        self._thread: int | None = None
        self._process = os.getpid()
        self._start_line = ""  # the user's line that called start()
        # Protects the space: another thread may end the loop.
        self._lock = threading.RLock()
        self._undo = contextlib.ExitStack()
        self._step_ends = StepEnds()
        self._planner: LoopPlanner | None = None
        self._measurer: LoopMeasurer | None = None
        self._needs: LoopNeeds | None = None  # after the loop has stopped
        self._recent_plans: Sequence[PlanSummary] = ()  # the planner's recent plans
        self._last_stats = LoopStats()
        # The data of a report, after the loop has stopped.
        self._last_log: tuple[Sequence[int], Sequence[str], KnownStorages] | None = None
        self.on_progress: ProgressCallback | None = None
        self._optimizers: Optimizers = weakref.WeakValueDictionary()  # that have stepped in the loop's thread

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        explained_error = None if error is None else explain_error(error, self._last_log[2] if self._last_log else {})
        try:
            if explained_error is not None:
                raise explained_error from error
        finally:
            del explained_error  # breaks a reference cycle with this frame

    def __del__(self, _ends: Callable[[], bool] = sys.is_finalizing) -> None:
        # At exit, modules are gone already; a forked process has copies of its parent's loops.
        if _ends() or getattr(self, "_space", None) is None or self._process != os.getpid():
            return
        _log.warning(
            "the loop within %s that was started%s has ended, because its last reference is gone: keep the result of "
            "start(), or use outofcore.budget() in a with-statement",
            format_bytes(self._limit),
            self._start_location(),
        )
        self.end(keep_results=False)

    def start(self) -> Self:
        """Start the loop: run the ops of this thread within the budget from now on.

        The models' parameters, buffers and gradients move to the home at once, other tensors when an op uses them.

        Raises:
            StateError: a loop is running already, a compiled step is open, or the native code cannot be built.
            SpillError: the home cannot be used.
        """
        if self._space is not None:
            raise StateError(f"this loop is running already; stop() it first: it was started{self._start_location()}")
        device, options = self._device, self._options
        library = device.library
        self._paused, self._step_ends, self._planner, self._recent_plans = False, StepEnds(), None, ()
        self._process, self._start_line = os.getpid(), user_line()
        device.prepare()
        with contextlib.ExitStack() as on_error:
            is_planned = options.policy is not None
            space = Space(device, self._limit, options.check, options.excess, is_planned=is_planned)
            on_error.callback(space.close)
            on_error.callback(self.end)
            device.add_homes(options.home, partial(space.call, "follow_add_home"))
            room = 0 if device.reserves_late else space.reserve(self._limit)
            try:
                self._open_space(space)
            except StateError:  # perhaps because of an unreferenced loop or compiled step
                gc.collect()
                self._open_space(space)
            self._space, self._thread = space, threading.get_ident()
            started_loops[id(self)] = self
            self._undo.enter_context(patches)
            self._watch_calls()
            self._adopt_models()
            if device.reserves_late:
                room = space.reserve(self._limit)
            self._undo.enter_context(device.running_context())
            trim_heap()
            library.follow_ask_source(sources.callback)
            library.follow_thread(1)
            if options.excess is Excess.MEASURED:
                self._measurer = LoopMeasurer(space)
            elif options.policy is not None:
                self._planner = LoopPlanner(space, options.policy, LoopPlans(options.plans), room)
                self._recent_plans = self._planner.recent_plans
                self._undo.callback(self._planner.background.close)
            on_error.pop_all()
        return self

    def stop(self) -> None:
        """End the loop; its tensors stay valid. A second call has no effect.

        Fetches evicted tensors as far as the budget holds them. With ``measure=True``, prints the results to stderr.

        Raises:
            StateError: another thread started the loop; ``outofcore.stop()`` ends it from any thread.
        """
        if self._space is None:
            return
        if not self._paused and threading.get_ident() != self._thread:
            raise StateError(
                "another thread started this loop, and only that thread may call its stop(); or call outofcore.stop()"
            )
        self.end()
        if self._needs is not None:
            print(f"outofcore: {self.measurement()}", file=sys.stderr, flush=True)

    def end(self, *, keep_results: bool = True) -> None:
        """End the loop from any thread, and by default keep the data for ``stats`` and ``report``."""
        with self._lock:
            space, cleanup = self._space, contextlib.ExitStack()
            if space is None:
                return
            cleanup.callback(space.close)
            cleanup.callback(setattr, self, "_space", None)
            if keep_results:
                cleanup.callback(self._store_results, space)
            if not self._paused and threading.get_ident() == self._thread:
                cleanup.callback(space.library.follow_thread, 0)
            cleanup.callback(self._undo.close)
            # If a signal handler raises before this line, the loop continues; if later, the rest is still cleaned up.
            cleanup.close()

    def pause(self) -> None:
        """Suspend the loop until ``resume``. Tensors stay where they are; ops outside of the loop can read them."""
        with self._lock:
            if self._space is not None and not self._paused:
                self._space.library.follow_thread(0)
                self._space.call("follow_pause")
                self._paused = True

    def resume(self) -> None:
        """Continue a paused loop in the calling thread; raises ``StateError`` if another loop is running."""
        with self._lock:
            if self._space is not None:
                self.pause()  # completes a pause() in which a signal handler raised
                self._paused, self._thread = False, threading.get_ident()  # first, so that pause() works after an error
                self._open_space(self._space)
                self._space.library.follow_thread(1)

    def evict_all(self) -> None:
        """Evict all tensors, and return the arena's memory to the system until it is used again."""
        with self._lock:
            if self._space is not None:
                self._space.call("follow_vacate")

    def release(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Move tensors, by default all of them, out of the loop's memory."""
        with self._lock:
            if self._space is not None and tensors is None:
                self._space.call("follow_release_all")
            for tensor in tensors or ():
                if self._space is not None and self._device.can_move(tensor):
                    call(self._space.library, "follow_release", storage_address(tensor.untyped_storage()))

    def find_untracked(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [] if self._space is None else self._space.find_untracked(tensors)

    @property
    def stats(self) -> LoopStats:
        """The counters since the loop was started."""
        with self._lock:
            if self._space is not None:
                self._last_stats = self._read_stats(self._space)
            return self._last_stats

    def report(self, path: str | os.PathLike[str] = REPORT_PATH, *, title: str = "") -> Path:
        """Write a report on the last complete step as one self-contained HTML page.

        It shows memory over time, measured ops and copies, which ops ran by plan or on demand, why ops waited, the
        evictions, and where and why the loop left its plans. An optimizer step ends a step; in loops without one, a
        backward pass does; in inference, a call of the model. Before the first complete step, the page shows the run so
        far. Of a very long step, it shows the first quarter of a million events.

        Args:
            path: the file; its folder is created. By default ``outofcore-report.html`` in the current folder.
            title: the heading; by default "loop".

        Returns:
            the path of the file; a notebook displays it as the page.

        Raises:
            StateError: no op was recorded yet.
            InputError: the file cannot be written.
        """
        observed, machine = self._last_step(), this_machine()
        notes = [
            *observed_notes(observed, self._recent_plans),
            (
                "machine",
                f"{machine.cpu}, {machine.cores} cores, {format_bytes(machine.memory_bytes)} of memory, "
                f"{machine.kernel}",
            ),
            ("versions", f"PyTorch {torch.__version__} with {torch.get_num_threads()} threads"),
        ]
        content = page_content(
            observed.graph,
            observed.plan,
            observed.program,
            [("measured", observed.timeline)],
            Page(title or "loop", self._limit, homes=LINKS, notes=notes),
            LoopMeasurements(LINKS, observed.memory, observed.on_demand, departure_marks(observed)),
        )
        write_report(Path(path), content)
        return ReportPath(path)

    def trace(self, path: str | os.PathLike[str], *, profiler_trace: str | os.PathLike[str] | None = None) -> None:
        """Write a trace of the last complete step for Perfetto or chrome://tracing.

        Ops have the category "planned" or "on demand"; a mark shows where the loop left its plan.

        Args:
            path: the file, compressed if its name ends in ``.gz``; its folder is created.
            profiler_trace: a ``torch.profiler`` trace of that step to merge in, on the same time axis (to about a
                millisecond).

        Raises:
            StateError: no op was recorded yet.
            InputError: a file cannot be read or written.
        """
        observed = self._last_step()
        write_trace(
            Path(path),
            observed.graph,
            observed.program,
            [("measured", observed.timeline)],
            began_ns=observed.began_ns,
            profiler_trace=None if profiler_trace is None else Path(profiler_trace),
            measured=LoopMeasurements(LINKS, observed.memory, observed.on_demand, departure_marks(observed)),
        )

    def _repr_html_(self) -> str:
        state = "stopped" if self._space is None else "running"
        return facts_html(f"loop within {format_bytes(self._limit)}, {state}", loop_facts(self.stats))

    def __repr__(self) -> str:
        state = "stopped" if self._space is None else "running"
        return f"<loop within {format_bytes(self._limit)}, {state}: {self.stats!r}>"

    def _open_space(self, space: Space) -> None:
        """Start the loop's native code; raises ``StateError`` if a loop or a compiled step is open."""
        if is_any_loop_running():
            raise StateError(
                f"a loop is running already{self._other_loop_location()}, and only one can run at a time: end it with "
                "outofcore.stop(), or by leaving its with-statement"
            )
        open_space(space.library, space, self._options.for_compiled_step)

    def _other_loop_location(self) -> str:
        # A separate function: the frames in an error's traceback would keep the other loop alive.
        return next(
            (loop._start_location() for loop in list_alive(started_loops) if loop is not self and loop.is_running()), ""
        )

    def _start_location(self) -> str:
        return f" at {self._start_line}" if self._start_line else ""

    def is_open(self) -> bool:
        """Return whether the user has started the loop, in this process, and not ended it."""
        return self._space is not None and not self._options.for_compiled_step and self._process == os.getpid()

    def is_running(self) -> bool:
        return self._space is not None and not self._paused and self._process == os.getpid()

    def _runs_in_this_thread(self) -> bool:
        return self.is_running() and threading.get_ident() == self._thread

    def measurement(self) -> Measurement:
        """Return the loop's needs so far: its peak without evictions, its smallest budget, and predicted step times.

        Predictions take seconds, and need a step that ran at least twice.

        Raises:
            StateError: the loop was not opened with ``measure=True``, or was never started.

        >>> import torch
        >>> import outofcore
        >>> model = torch.nn.Linear(256, 256)
        >>> with outofcore.budget(model=model, measure=True) as run:
        ...     loss = model(torch.ones(256, 256)).square().mean()
        ...     loss.backward()
        >>> run.measurement().smallest_budget < run.measurement().in_core_bytes
        True
        """
        with self._lock:
            needs = self._needs if self._measurer is None else self._measurer.collect_needs(self._step_ends.count)
        if needs is None:
            raise StateError("this loop was not measured: open it by outofcore.budget(..., measure=True), and start it")
        return needs.measurement(self._options.policy or "auto")

    def _store_results(self, space: Space) -> None:
        """Keep the counters, measurements and log of a loop that ends."""
        self._last_stats = self._read_stats(space)
        if self._measurer is not None:
            self._needs, self._measurer = self._measurer.collect_needs(self._step_ends.count), None
        elif self._last_stats.exceedances and (need := space.largest_need()) is not None:
            _log.warning(
                "the budget of %s was exceeded %d times, up to %s, because ops need more. The largest need: %s, %s",
                format_bytes(self._limit),
                self._last_stats.exceedances,
                format_bytes(self._last_stats.peak_bytes),
                need[1],
                format_bytes(need[0]),
            )
        try:
            self._last_log = self._read_log(space)
        except MemoryError as error:
            self._last_log = None
            _log.warning("there is no report of the loop: %s", error)

    def _last_step(self) -> ObservedStep:
        """Return the last complete step, or else the run so far; raises ``StateError`` if no op was recorded."""
        with self._lock:
            recorded = self._last_log if self._space is None else self._read_log(self._space)
        observed = None
        if recorded is not None:
            policy = self._recent_plans[-1].policy if self._recent_plans else "on demand"
            observed = read_observed(*recorded, self._limit, policy)
        if observed is None or not observed.graph.ops:
            raise StateError(
                "there is nothing to report yet: no step of the loop is complete, and no op has used a tensor of "
                "64 KiB or more; call this after a step"
            )
        return observed

    def _read_log(self, space: Space) -> tuple[Sequence[int], Sequence[str], KnownStorages]:
        """Return the native log: numbers, the operators' names, and the names and kinds of storages."""
        numbers = space.read_numbers("follow_observed")
        names = names_of_storages(space, self.named_models(), list_alive(self._optimizers))
        return numbers, space.read_names("follow_observed_names"), names

    def named_models(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the models with prefixes for their tensors' names; the prefix of a single model is empty."""
        for index, model in enumerate(self._models):
            yield f"models[{index}]." if len(self._models) > 1 else "", model

    def _read_stats(self, space: Space) -> LoopStats:
        """Return the loop's counters, including the budget and the memory of the process."""
        plans = 0 if self._planner is None else self._planner.plan_count
        stats = space.read_stats(steps=self._step_ends.count, plans=plans)
        memory = process_memory()
        counted = stats.arena_bytes + stats.small_bytes + stats.outside_bytes if self._device.is_host else 0
        return replace(
            stats,
            budget_bytes=self._limit,
            resident_bytes=memory.resident,
            file_pages_bytes=memory.of_files,
            other_bytes=max(memory.anonymous - counted, 0),
        )

    def _adopt_models(self) -> None:
        tensors = [tensor for model in self._models for tensor in tensors_of(model)]
        is_long = sum(tensor.nbytes for tensor in tensors if self._device.can_move(tensor)) >= _LARGE_MODEL_BYTES
        with show_progress(self.on_progress, show=None if is_long else False) as tell:
            self.adopt(tensors, tell, len(tensors))

    def adopt(
        self, tensors: Iterable[torch.Tensor], report_progress: ProgressCallback = ignore_progress, total: int = 0
    ) -> None:
        """Move tensors to the home where possible; ``total`` is the number of tensors for progress reports."""
        with self._lock:
            if self._space is not None:
                self._space.adopt(tensors, report_progress, total)

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Move a new optimizer's parameters and state to the home, if the loop runs in this thread."""
        if not self._device.library.follow_tracked():  # a thread without the loop
            untracked_optimizers[id(optimizer)] = optimizer
            return
        untracked_optimizers.pop(id(optimizer), None)
        if id(optimizer) in self._optimizers:
            return
        self._optimizers[id(optimizer)] = optimizer
        parameters = (part for tensor in parameters_of(optimizer) for part in inner_tensors_of(tensor))
        self.adopt([*state_of(optimizer), *parameters])

    def after_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._device.library.follow_tracked():
            self._record_end(StepSign.OPTIMIZER, weakref.ref(optimizer))

    def after_backward(self) -> None:
        """Record a complete backward pass, which ends a step in loops that call no optimizer."""
        if (
            self._step_ends.sign is StepSign.OPTIMIZER
            or self._options.for_compiled_step
            or not self._runs_in_this_thread()
        ):
            return
        if self._step_ends.record_backward():
            self._record_end(StepSign.BACKWARD, user_line())

    def after_call(self, model: nn.Module) -> None:
        """End a step after a call without gradients, unless backward passes or optimizers end the loop's steps."""
        if self._step_ends.sign is StepSign.CALL and self._runs_in_this_thread() and not torch.is_grad_enabled():
            self._record_end(StepSign.CALL, weakref.ref(model))

    def _record_end(self, sign: StepSign, source: Hashable) -> None:
        """Count an event that may end a step, and end the step if ``source`` ends this loop's steps."""
        self._step_ends.record_end(sign)
        # For a compiled step, each call is a step.
        if not self._options.for_compiled_step and self._runs_in_this_thread() and self._step_ends.ends_step(source):
            self.end_step()

    def _watch_calls(self) -> None:
        for model in self._models:
            if not self._options.for_compiled_step and not isinstance(model, torch.jit.ScriptModule):
                hook = model.register_forward_hook(_CallHook(self))
                _handles.add(hook)
                self._undo.callback(_remove_hook, hook)

    def end_step(self) -> None:
        """End the current step, and notify the planner or the measurer."""
        with self._lock:
            if self._space is None:
                return
            try:
                is_proposed = bool(self._space.call("follow_end_of_step"))
                if self._measurer is not None and is_proposed:
                    self._measurer.on_step_end()
                if self._planner is not None:
                    self._planner.on_step_end(self._step_ends.count, is_proposed=is_proposed)
            except MemoryError as error:  # an error here would hide that the optimizer has stepped
                _log.warning("the step that has ended is not planned: %s", error)


class _CallHook:
    """A forward hook that reports calls of a model to its loop. Copies of the hook have no loop."""

    def __init__(self, loop: Loop | None = None) -> None:
        self._loop = None if loop is None else weakref.ref(loop)

    def __call__(self, model: nn.Module, *_: object) -> None:
        # Tracing, such as of torch.cond's branches, must not break the graph here; it does not end a step.
        if torch.compiler.is_compiling():
            return
        loop = None if self._loop is None else self._loop()
        if loop is not None:
            loop.after_call(model)

    def __reduce__(self) -> tuple[type[_CallHook], tuple[()]]:
        return _CallHook, ()


# Keeps the handles of hooks in models alive: else garbage collection would clear a handle's weak reference to the hooks
# before the loop's ``__del__`` uses it.
_handles: set[RemovableHandle] = set()


def _remove_hook(hook: RemovableHandle) -> None:
    hook.remove()
    _handles.discard(hook)
