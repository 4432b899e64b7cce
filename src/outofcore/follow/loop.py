"""The context in which a loop runs, which ``outofcore.budget`` opens: ``Loop``.

``StepEnds`` says when a step of the loop ends, ``LoopPlanner`` plans it. What is evicted and when copies start is
decided in C++: by ``make_room``, ``follow_plan`` and, without a plan, ``copy_ahead``.
"""

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
from outofcore.follow.failures import explained
from outofcore.follow.loop_planner import LoopPlanner
from outofcore.follow.loop_plans import LoopPlans
from outofcore.follow.measuring import LoopMeasurer, Measurement, Needs
from outofcore.follow.native import call, is_followed, open_paging
from outofcore.follow.observed import (
    LINKS,
    Known,
    Observed,
    PlanMade,
    departure_marks,
    observed_notes,
    read_observed,
)
from outofcore.follow.running import patches, sources, started
from outofcore.follow.space import Excess, Space
from outofcore.follow.stats import LoopStats, loop_facts
from outofcore.follow.step_ends import Sign, StepEnds
from outofcore.follow.user_tensors import (
    Optimizers,
    alive,
    names_of_storages,
    others_optimizers,
    parameters_of,
    parts_of,
    state_of,
    tensors_of,
)
from outofcore.planning import PolicyLike
from outofcore.progress import Tell, following, silent
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

# Models from so many bytes on take long to move to the home, so that progress is shown.
_LONG = 256 * MIB


@dataclass(frozen=True)
class LoopOptions:
    """How a loop is followed.

    Attributes:
        policy: plans steps; None: they are not planned.
        plans: the folder in which plans are kept for later processes; None: they are not.
        excess: what happens where an op needs more than the budget.
        beside: the loop is that of a compiled step, and does not run while another one does.
    """

    device: LoopDevice
    home: LoopHome
    policy: PolicyLike | None = "auto"
    plans: Path | None = None
    check: Check = Check.SAMPLED
    excess: Excess = Excess.REFUSED
    beside: bool = False


class Loop:
    """A loop of the user's own that runs within a budget: made by ``outofcore.budget``; a context manager.

    A loop without references ends by itself, as soon as no op uses its memory.

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
        self._where = ""  # the user's line that has started it
        # Held while something is done with the space: another thread may end the loop.
        self._lock = threading.RLock()
        self._undo = contextlib.ExitStack()
        self._ends = StepEnds()
        self._planner: LoopPlanner | None = None
        self._measurer: LoopMeasurer | None = None
        self._needs: Needs | None = None  # once the loop is stopped
        self._made: Sequence[PlanMade] = ()  # by the planner
        self._last = LoopStats()
        # What a report is made of, once the loop is stopped.
        self._happened: tuple[Sequence[int], Sequence[str], Known] | None = None
        self.on_progress: Tell | None = None
        self._optimizers: Optimizers = weakref.WeakValueDictionary()  # that have stepped in the thread that is followed

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        told = None if error is None else explained(error, self._happened[2] if self._happened else {})
        try:
            if told is not None:
                raise told from error
        finally:
            del told  # it would keep this frame, and the frame it

    def __del__(self, _ends: Callable[[], bool] = sys.is_finalizing) -> None:
        # As Python ends, what this needs is not there any more; a fork has copies of its parent's loops.
        if _ends() or getattr(self, "_space", None) is None or self._process != os.getpid():
            return
        _log.warning(
            "the loop within %s that was started%s has ended, since nothing refers to it any more: keep what start() "
            "returns, or use outofcore.budget() in a with-statement",
            format_bytes(self._limit),
            self._started_at(),
        )
        self.end(remembered=False)

    def start(self) -> Self:
        """Begin to follow this thread.

        The models' parameters, buffers and gradients move to the home at once, other tensors when an op uses them.

        Raises:
            StateError: a loop is followed already, or a compiled step is open, or the native code cannot be built.
            SpillError: the home cannot be used.
        """
        if self._space is not None:
            raise StateError(f"this loop is followed already; stop() it first: it was started{self._started_at()}")
        device, options = self._device, self._options
        library = device.library
        self._paused, self._ends, self._planner, self._made = False, StepEnds(), None, ()
        self._process, self._where = os.getpid(), user_line()
        device.prepare()
        with contextlib.ExitStack() as failing:
            is_planned = options.policy is not None
            space = Space(device, self._limit, options.check, options.excess, is_planned=is_planned)
            failing.callback(space.close)
            device.add_homes(options.home, partial(space.call, "follow_add_home"))
            room = 0 if device.reserves_late else space.reserve(self._limit)
            try:
                self._take_turn(space)
            except StateError:  # perhaps because of a loop or a compiled step that nobody refers to any more
                gc.collect()
                self._take_turn(space)
            self._space, self._thread = space, threading.get_ident()
            started[id(self)] = self
            failing.pop_all()
            failing.callback(self.end)
            self._undo.enter_context(patches)
            self._watch_calls()
            self._adopt_models()
            if device.reserves_late:
                room = space.reserve(self._limit)
            self._undo.enter_context(device.following())
            trim_heap()
            library.follow_ask_source(sources.ask)
            library.follow_thread(1)
            if options.excess is Excess.MEASURED:
                self._measurer = LoopMeasurer(space)
            elif options.policy is not None:
                self._planner = LoopPlanner(space, options.policy, LoopPlans(options.plans), room)
                self._made = self._planner.made
                self._undo.callback(self._planner.background.close)
            failing.pop_all()
        return self

    def stop(self) -> None:
        """Stop following. Tensors stay valid; those at home are fetched as far as the budget holds them.

        May be called again.

        Raises:
            StateError: another thread than the followed one calls it; there use ``outofcore.stop()``.
        """
        if self._space is None:
            return
        if not self._paused and threading.get_ident() != self._thread:
            raise StateError(
                "a loop is stopped by the thread that started it; call stop() there, or outofcore.stop() from anywhere"
            )
        self.end()
        if self._needs is not None:
            print(f"outofcore: {self.measurement()}", file=sys.stderr, flush=True)

    def end(self, *, remembered: bool = True) -> None:
        """Stop following, in any thread; while an op uses the memory of the loop, when that has ended.

        Args:
            remembered: whether ``stats`` and ``report`` will be read afterwards.
        """
        with self._lock, contextlib.ExitStack() as ending:
            space, self._undo, undo = self._space, contextlib.ExitStack(), self._undo
            if space is None:
                return
            ending.callback(space.close)
            ending.callback(setattr, self, "_space", None)
            if remembered:
                ending.callback(self._remember, space)
            if not self._paused and threading.get_ident() == self._thread:
                ending.callback(space.library.follow_thread, 0)
            ending.enter_context(undo)

    def pause(self) -> None:
        """Follow nothing until ``resume``. Tensors stay where they are, and ops elsewhere see the right bytes."""
        with self._lock:
            if self._space is not None and not self._paused:
                self._space.library.follow_thread(0)
                self._space.call("follow_pause")
                self._paused = True

    def resume(self) -> None:
        """Follow the calling thread again.

        Raises:
            StateError: another loop is followed.
        """
        with self._lock:
            if self._space is not None and self._paused:
                self._paused, self._thread = False, threading.get_ident()  # so that it can be paused however this ends
                self._take_turn(self._space)
                self._space.library.follow_thread(1)

    def vacate(self) -> None:
        """Bring everything home, and give the arena's memory to the system until it is used again."""
        with self._lock:
            if self._space is not None:
                self._space.call("follow_vacate")

    def release(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Give tensors, by default all of them, memory of their own, as plain PyTorch has it."""
        with self._lock:
            if self._space is not None and tensors is None:
                self._space.call("follow_release_all")
            for tensor in tensors or ():
                if self._space is not None and self._device.has(tensor):
                    call(self._space.library, "follow_release", storage_address(tensor.untyped_storage()))

    def strangers(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return those tensors of 64 KiB and more that are not in this loop's arena or homes."""
        return [] if self._space is None else self._space.strangers(tensors)

    @property
    def stats(self) -> LoopStats:
        """What has happened so far."""
        with self._lock:
            if self._space is not None:
                self._last = self._read_stats(self._space)
            return self._last

    def report(self, path: str | os.PathLike[str] = REPORT_PATH, *, title: str = "") -> Path:
        """Write what the last complete step did as one self-contained HTML page.

        It shows memory over time, measured ops and copies, which ops ran by plan and which on demand, why ops waited,
        what was evicted, and where and why the loop left its plans. A step lasts from one step of an optimizer to the
        next; where nothing is trained, it is a call of the model without gradients, and where there is none either,
        everything since the loop was started. Of a very long step, the first quarter of a million events are shown:
        ops, their storages, copies.

        Args:
            path: the file; its folder is created. By default ``outofcore-report.html`` in the current folder.
            title: the heading; by default "loop".

        Returns:
            the file; a notebook that shows it shows the page.

        Raises:
            StateError: nothing has happened yet.
            InputError: the file cannot be written.
        """
        seen, machine = self._what_happened(), this_machine()
        notes = [
            *observed_notes(seen, self._made),
            (
                "machine",
                f"{machine.cpu}, {machine.cores} cores, {format_bytes(machine.memory_bytes)} of memory, "
                f"{machine.kernel}",
            ),
            ("versions", f"PyTorch {torch.__version__} with {torch.get_num_threads()} threads"),
        ]
        content = page_content(
            seen.graph,
            seen.plan,
            seen.program,
            [("measured", seen.timeline)],
            Page(title or "loop", self._limit, homes=LINKS, notes=notes),
            LoopMeasurements(LINKS, seen.memory, seen.on_demand, departure_marks(seen)),
        )
        write_report(Path(path), content)
        return ReportPath(path)

    def trace(self, path: str | os.PathLike[str], *, beside: str | os.PathLike[str] | None = None) -> None:
        """Write the last complete step, as for ``report``, as a trace that Perfetto and chrome://tracing open.

        Ops are of the category "planned" or "on demand"; where the loop left its plan, there is a mark.

        Args:
            path: the file, compressed if its name ends in ``.gz``; its folder is created.
            beside: a trace that ``torch.profiler`` exported of that step: both are then in the file, on one axis of
                time (to about a millisecond).

        Raises:
            StateError: nothing has happened yet.
            InputError: a file cannot be read or written.
        """
        seen = self._what_happened()
        write_trace(
            Path(path),
            seen.graph,
            seen.program,
            [("measured", seen.timeline)],
            began_ns=seen.began_ns,
            beside=None if beside is None else Path(beside),
            measured=LoopMeasurements(LINKS, seen.memory, seen.on_demand, departure_marks(seen)),
        )

    def _repr_html_(self) -> str:
        state = "stopped" if self._space is None else "followed"
        return facts_html(f"loop within {format_bytes(self._limit)}, {state}", loop_facts(self.stats))

    def __repr__(self) -> str:
        state = "stopped" if self._space is None else "followed"
        return f"<loop within {format_bytes(self._limit)}, {state}: {self.stats!r}>"

    def _take_turn(self, space: Space) -> None:
        """Follow a space; raises ``StateError`` if another loop is followed, or a compiled step is open."""
        if is_followed():
            raise StateError(
                f"a loop is followed already{self._where_other()}, and there is one at a time: end that one with "
                "outofcore.stop(), or by leaving its with-statement"
            )
        open_paging(space.library, space, self._options.beside)

    def _where_other(self) -> str:
        # In a frame of its own: those of an error would keep the other loop.
        return next((one._started_at() for one in alive(started) if one is not self and one.is_running()), "")

    def _started_at(self) -> str:
        return f" at {self._where}" if self._where else ""

    def is_open(self) -> bool:
        """Return whether the loop was started by a user, in this process, and has not ended."""
        return self._space is not None and not self._options.beside and self._process == os.getpid()

    def is_running(self) -> bool:
        """Return whether the ops of some thread of this process are followed now."""
        return self._space is not None and not self._paused and self._process == os.getpid()

    def _is_here(self) -> bool:
        return self.is_running() and threading.get_ident() == self._thread

    def measurement(self) -> Measurement:
        """Return what the loop needs, as far as it has run: the peak in core, and the smallest budget.

        Times are predicted of steps that came at least twice, which takes seconds.

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
            needs = self._needs if self._measurer is None else self._measurer.needs(self._ends.count)
        if needs is None:
            raise StateError("nothing was measured: open the loop by outofcore.budget(..., measure=True), and start it")
        return needs.measurement(self._options.policy or "auto")

    def _remember(self, space: Space) -> None:
        self._last = self._read_stats(space)
        if self._measurer is not None:
            self._needs, self._measurer = self._measurer.needs(self._ends.count), None
        elif self._last.exceedances and (need := space.need()) is not None:
            _log.warning(
                "the budget of %s was exceeded %d times, up to %s, by ops that cannot do with less. The largest need: "
                "%s, %s",
                format_bytes(self._limit),
                self._last.exceedances,
                format_bytes(self._last.peak_bytes),
                need[1],
                format_bytes(need[0]),
            )
        try:
            self._happened = self._observe(space)
        except MemoryError as error:
            self._happened = None
            _log.warning("there is no report of the loop: %s", error)

    def _what_happened(self) -> Observed:
        with self._lock:
            happened = self._happened if self._space is None else self._observe(self._space)
        seen = None
        if happened is not None:
            policy = self._made[-1].policy if self._made else "on demand"
            seen = read_observed(*happened, self._limit, policy)
        if seen is None or not seen.graph.ops:
            raise StateError(
                "there is nothing to tell yet: no step of the loop is complete, and none of its ops has used a tensor "
                "of 64 KiB or more; call this when a step is done"
            )
        return seen

    def _observe(self, space: Space) -> tuple[Sequence[int], Sequence[str], Known]:
        numbers = space.numbers("follow_observed")
        names = names_of_storages(space, self.named_models(), alive(self._optimizers))
        return numbers, space.names("follow_observed_names"), names

    def named_models(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the models, with the prefix of their modules' names."""
        for place, model in enumerate(self._models):
            yield f"models[{place}]." if len(self._models) > 1 else "", model

    def _read_stats(self, space: Space) -> LoopStats:
        plans = 0 if self._planner is None else self._planner.count
        stats = space.stats(steps=self._ends.count, plans=plans)
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
        is_long = sum(tensor.nbytes for tensor in tensors if self._device.has(tensor)) >= _LONG
        with following(self.on_progress, show=None if is_long else False) as tell:
            self.adopt(tensors, tell, len(tensors))

    def adopt(self, tensors: Iterable[torch.Tensor], tell: Tell = silent, count: int = 0) -> None:
        """Move tensors to the home, whoever owns their memory."""
        with self._lock:
            if self._space is not None:
                self._space.adopt(tensors, tell, count)

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Handle an optimizer that is about to step, in some thread."""
        if not self._device.library.follow_tracked():
            others_optimizers[id(optimizer)] = optimizer
            return
        others_optimizers.pop(id(optimizer), None)
        if id(optimizer) in self._optimizers:
            return
        self._optimizers[id(optimizer)] = optimizer
        parameters = (part for tensor in parameters_of(optimizer) for part in parts_of(tensor))
        self.adopt([*state_of(optimizer), *parameters])

    def after_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Handle an optimizer that has stepped, in some thread."""
        if self._device.library.follow_tracked():
            self._note_end(Sign.OPTIMIZER, weakref.ref(optimizer))

    def after_backward(self) -> None:
        """Handle the end of a complete backward pass."""
        if self._ends.sign is Sign.OPTIMIZER or self._options.beside or not self._is_here():
            return
        if self._ends.note_backward():
            self._note_end(Sign.BACKWARD, user_line())

    def after_call(self, model: nn.Module) -> None:
        """Handle the end of a call of a model."""
        if self._ends.sign is Sign.CALL and self._is_here() and not torch.is_grad_enabled():
            self._note_end(Sign.CALL, weakref.ref(model))

    def _note_end(self, sign: Sign, source: Hashable) -> None:
        """Count a step, and end it if this source does."""
        self._ends.note(sign)
        # A step of a compiled one's is a call.
        if not self._options.beside and self._is_here() and self._ends.ends_step(source):
            self.end_of_step()

    def _watch_calls(self) -> None:
        for model in self._models:
            if not self._options.beside and not isinstance(model, torch.jit.ScriptModule):
                hook = model.register_forward_hook(_CallHook(self))
                _handles.add(hook)
                self._undo.callback(_remove, hook)

    def end_of_step(self) -> None:
        """End a step of the loop, and begin to plan it or to follow its plan."""
        with self._lock:
            if self._space is None:
                return
            try:
                is_proposed = bool(self._space.call("follow_end_of_step"))
                if self._measurer is not None and is_proposed:
                    self._measurer.step_ended()
                if self._planner is not None:
                    self._planner.step_ended(self._ends.count, is_proposed=is_proposed)
            except MemoryError as error:  # the optimizer has stepped: to plan is not worth an error
                _log.warning("the step that has ended is not planned: %s", error)


class _CallHook:
    """Reports each call of a model to a loop while that exists. Copies of it, also pickled ones, do nothing."""

    def __init__(self, loop: Loop | None = None) -> None:
        self._loop = None if loop is None else weakref.ref(loop)

    def __call__(self, model: nn.Module, *_: object) -> None:
        # What is traced, such as the branches of torch.cond, must not break there; it is no call that ends a step.
        if torch.compiler.is_compiling():
            return
        loop = None if self._loop is None else self._loop()
        if loop is not None:
            loop.after_call(model)

    def __reduce__(self) -> tuple[type[_CallHook], tuple[()]]:
        return _CallHook, ()


# The hooks of loops in models. Before a lost loop's ``__del__`` runs, garbage collection clears the weak references of
# what it collects, also the one by which a handle finds what to remove.
_handles: set[RemovableHandle] = set()


def _remove(hook: RemovableHandle) -> None:
    hook.remove()
    _handles.discard(hook)
