"""A compiled step: captured, measured and planned at its first call, and run within its budget."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any, Generic, Self

from outofcore.capture import Captured
from outofcore.costs import Costs
from outofcore.errors import StateError
from outofcore.estimation.reports import ReportedStep, report_step, trace_step
from outofcore.execution.opening import OpenHome
from outofcore.execution.stats import StepStats, measure_step, step_facts
from outofcore.follow.native import is_any_loop_running
from outofcore.options import MemoryOptions, P, PlanOptions, R, RunOptions, UserStep
from outofcore.peers import Ranks
from outofcore.planned_step import PlannedStep
from outofcore.planning import Planned
from outofcore.program import Timeline
from outofcore.progress import ProgressCallback
from outofcore.report import ReportPath, facts_html
from outofcore.runtime.homes import HomeStore
from outofcore.session import CallOutcome, Session, versions
from outofcore.step_state import StepState
from outofcore.units import format_bytes, format_seconds

REPORT_PATH = "outofcore-report.html"


class Step(Generic[P, R]):
    """A training step that runs within a byte budget, made by ``outofcore.compile``.

    Call it like the function it was made from. Between calls you can read, change, save and evaluate the model, its
    gradients and the optimizers as in plain PyTorch. Do not call steps from several threads at once. Use it as a
    context manager to close it.

    Attributes:
        budget: device bytes.
        policy: how the step is planned.
        home: where tensors are stored while they are not on the device; pass it to ``compile(…, home=step.home)`` for
            another step over the same model.
        on_progress: progress callback ``(stage, done, total)``; None: a bar on a terminal.

    >>> import torch
    >>> import outofcore
    >>> model = torch.nn.Linear(256, 256)
    >>> def train_step(x):
    ...     loss = model(x).square().mean()
    ...     loss.backward()
    ...     return loss
    >>> with outofcore.compile(train_step, model, budget="4MiB") as step:
    ...     loss = step(torch.ones(64, 256))
    ...     step.budget
    4194304
    """

    def __init__(
        self,
        user: UserStep[P, R],
        memory: MemoryOptions,
        planning: PlanOptions,
        running: RunOptions,
        ranks: Ranks | None = None,
    ) -> None:
        self.__wrapped__ = user.function
        self.__name__: str = getattr(user.function, "__name__", type(user.function).__name__)
        self.budget = memory.budget
        self.policy = planning.policy
        memory.home.hold()
        self.home = memory.home
        self.on_progress: ProgressCallback | None = None
        self._session = Session(user, memory, planning, running, ranks, self._release_model)
        self._state = StepState(user, self.home, self._session)
        self._access = _Access(self.home)

    def _repr_html_(self) -> str:
        state = ", closed" if self._access.closed else ", failed half way" if self._session.torn else ""
        facts = [("plans", f"{self._session.signature_count}, policy {self.policy.name}")]
        with contextlib.suppress(StateError):  # not called yet
            facts += step_facts(self.stats)
        return facts_html(f"{self.__name__} within {format_bytes(self.budget)}{state}", facts)

    def __repr__(self) -> str:
        session, state = self._session, ""
        if self._access.closed:
            state = ", closed"
        elif session.torn:
            state = ", failed half way"
        elif session.eager_calls is not None and session.eager_calls.last is not None:
            seconds = format_seconds(session.eager_calls.last.seconds)
            state = f", {session.eager_calls.count} eager calls, last step {seconds}"
        elif session.timeline is not None:
            state = f", last step {format_seconds(session.timeline.step_seconds)}"
        plans = f"{session.signature_count} {'plan' if session.signature_count == 1 else 'plans'}"
        budget = format_bytes(self.budget)
        return f"<outofcore step {self.__name__!r} within {budget}: {plans} by {self.policy.name}{state}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run one training step and return the result of the user's function, outside the arena.

        The first call captures, measures and plans the step. So does each call with inputs of a new shape, unless the
        step switches to an eager loop: see ``dynamic`` of ``outofcore.compile``.

        Raises:
            CaptureError: the step cannot be captured as one graph.
            BudgetError: the budget is too small for the step, or for one op of an eager loop.
            SpillError: the home is too small for the offloaded tensors.
            StateError: the step is closed, an earlier call failed half way, this process is a fork of the one that
                compiled the step, ``outofcore.budget`` is running a loop, or other code moved the model meanwhile.
            TransferError: a copy failed during the step, or the bytes read differ from those written.
            ValidationError: no plan passed validation: a bug in outofcore.
            CommunicationError: a collective failed, because another process has ended.

        Each exception has a note (``__notes__``) that reports the state of the model: as before the step, as after the
        step, stopped at an op as in plain PyTorch, or part old and part new. In the last case the step raises
        ``StateError`` until a checkpoint is loaded. Ctrl-C and SIGTERM take effect when the step has ended, or between
        ops while it is measured and planned; a second one takes effect at once.
        """
        self._access.check(self._session.torn)
        if is_any_loop_running():
            raise StateError(
                "a compiled step has its own budget and cannot run inside outofcore.budget(); leave that context "
                "first, or call the training function itself there"
            )
        with self._access.exclusive():
            self._session.outcome = CallOutcome.UNCHANGED
            try:
                return self._session.call(args, kwargs, self.on_progress)
            except BaseException as error:  # Ctrl-C as well
                error.add_note(self._session.outcome.value)
                raise

    def prepare(self, *args: P.args, **kwargs: P.kwargs) -> Captured:
        """Capture, measure and plan the step for these arguments without running it; return the capture.

        Raises the errors of a call, or ``StateError`` if calls run as an eager loop; the state is unchanged then.
        """
        self._access.check(self._session.torn)
        if self._session.eager_reason:
            raise StateError(
                "the calls of this step run as an eager loop, without a plan; compile it with dynamic=False to "
                "plan them"
            )
        with self._access.exclusive():
            return self._session.prepare(args, kwargs, self.on_progress).captured

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error, a gather would wait for processes that may never reach it.
        self.close(whole=kind is None)

    def synchronize(self) -> None:
        """Wait until the last call has ended on the device. On the CPU, a call returns after that."""
        self._access.check(self._session.torn)
        self._session.engine.synchronize()

    def close(self, *, whole: bool = True) -> None:
        """Move the model and the optimizers back to ordinary memory, and free all other memory of the step.

        A model that is sharded (``shard=``) is gathered in each process, so all processes must close their steps. Pass
        ``whole=False`` in processes without memory for a whole model: its parameters then stay on the device ``meta``,
        without contents, as after an exception in the context. Raises ``CommunicationError`` if another process has
        ended; parameters not yet gathered stay without contents.
        """
        if self._access.closed:
            return
        self._access.closed = True
        if self._access.is_compiling_process:  # a fork must not close threads and files of its parent
            self._session.close(whole=whole)

    # Results of calls

    @property
    def homes(self) -> tuple[HomeStore, ...]:
        """The homes of the step, fastest first."""
        return self.home.stores

    @property
    def planned(self) -> Planned:
        """The plan of the last planned call, with program and timeline; ``StateError`` before the first one."""
        return self._last_planned_step("planned").planned

    @property
    def captured(self) -> Captured:
        """The capture of the last planned call; ``StateError`` before the first one."""
        return self._last_planned_step("captured").captured

    @property
    def costs(self) -> Costs:
        """The costs that the last planned call was planned with; ``StateError`` before the first one."""
        return self._last_planned_step("profiled").costs

    def _last_planned_step(self, stage: str) -> PlannedStep:
        """Return the step of the last planned call; raise ``StateError`` before the first one."""
        if self._session.steps.last_step is None:
            raise StateError(self._no_plan_message(f"it is {stage} at its first call"))
        return self._session.steps.last_step

    @property
    def timeline(self) -> Timeline:
        """The measured timeline of the last planned call; ``StateError`` before the first one."""
        if self._session.timeline is None:
            raise StateError(self._no_plan_message("its timeline is measured at its first call"))
        return self._session.timeline

    @property
    def stats(self) -> StepStats:
        """Statistics of the last call; raises ``StateError`` before the first call."""
        session = self._session
        if session.eager_calls is not None and session.eager_calls.last is not None:
            last = session.eager_calls.last
            return StepStats(
                last.seconds,
                last.seconds - last.waited_seconds,
                last.bytes_out,
                last.bytes_in,
                session.steps.off_plan,
                0.0,
                session.eager_calls.count,
                session.eager_reason,
                session.eager_calls.stats.peak_bytes,
            )
        return measure_step(self.captured, self.planned, self.timeline, session.steps.off_plan)

    def _no_plan_message(self, advice: str) -> str:
        """Return the error message for a step without a plan; ``advice`` ends the message if there was no call yet."""
        eager = self._session.eager_calls
        if eager is None or eager.last is None:
            return f"the step was not called yet: {advice}"
        return (
            "all calls of this step ran as an eager loop, which has no plan: see step.stats; compile the step with "
            "dynamic=False to capture and plan each shape"
        )

    def report(
        self, path: str | os.PathLike[str] = REPORT_PATH, *, title: str = "", budgets: int | None = None
    ) -> Path:
        """Write a self-contained HTML report on the last planned call; return its path.

        It shows memory over time, the queues (measured and predicted), why ops waited, the decision for each storage,
        step time against budget, and the most useful changes. A notebook displays the returned path as the page.

        Args:
            path: the file; its folder is created.
            title: the heading. Default: the name of the step.
            budgets: the number of additional budgets to plan for the curve; each takes as long as the first plan.

        Raises:
            StateError: no call has been planned.
            InputError: the file cannot be written.
        """
        notes = [("versions", versions())]
        if self._session.eager_calls is not None:
            notes.append(("eager calls", f"{self._session.eager_calls.count}, because {self._session.eager_reason}"))
        report_step(Path(path), self._reported_step(), title or self.__name__, count=budgets, notes=notes)
        return ReportPath(path)

    def trace(self, path: str | os.PathLike[str], *, profiler_trace: str | os.PathLike[str] | None = None) -> None:
        """Write the last planned call, measured and predicted, as a trace for Perfetto and chrome://tracing.

        Args:
            path: the file, compressed if its name ends in ``.gz``; its folder is created.
            profiler_trace: a ``torch.profiler`` trace of the last call to merge in, on the same time axis (to about a
                millisecond).

        Raises:
            StateError: no call has been planned.
            InputError: a file cannot be read or written.
        """
        profile = None if profiler_trace is None else Path(profiler_trace)
        trace_step(Path(path), self._reported_step(), began_ns=self._session.began_ns, profiler_trace=profile)

    def _reported_step(self) -> ReportedStep:
        return ReportedStep(self.captured.graph, self.costs, self.planned, self.budget, self.policy, self.timeline)

    # Persistent state

    def save(self, folder: str | os.PathLike[str], extra: Any = None, *, frozen: bool = True) -> None:
        """Save models, optimizers, gradients and random generators, streamed through a buffer of some MiB.

        An existing checkpoint in the folder stays valid until the new one is complete on disk, which needs space for
        both. A sharded model (``shard=``) is saved whole by the first process; all processes must call this.

        Args:
            folder: created if it does not exist. It gets safetensors files and ``checkpoint.json``, which lists them.
            extra: plain data of yours (numbers, text, lists, dicts), such as an epoch or a scheduler's state dict.
            frozen: False leaves out parameters that do not require gradients, such as the base of adapters. Parameters
                with a gradient or optimizer state, or in the memory of a saved tensor, are still saved. ``load`` keeps
                the values of omitted parameters, and checks that they have the same names, shapes and dtypes.

        Raises:
            StateError: the step is closed or failed half way, or has contents that cannot be saved.
            TransferError: a file could not be written; the message has the path and the reason.
        """
        with self._access.exclusive():
            self._access.check(self._session.torn)
            self._state.save(Path(folder), extra, frozen=frozen)

    def load(self, folder: str | os.PathLike[str]) -> Any:
        """Load a checkpoint, so that training continues bit for bit, and return its ``extra`` data.

        A step that failed half way can be used again. Frozen parameters that were left out keep their values. In
        ``extra``, tuples come back as lists.

        Raises:
            InputError: there is no checkpoint, it belongs to other models or optimizers, or it lacks a parameter that
                requires gradients; no state has changed.
            TransferError: a file cannot be read or is corrupt; the step refuses further calls.
            StateError: the step is closed.
        """
        with self._access.exclusive():
            self._access.check()
            return self._state.load(Path(folder))

    def state_dict(self) -> dict[str, Any]:
        """Return the current state dicts of models and optimizers, and the state of PyTorch's generator.

        The tensors are the model's own, as in plain PyTorch; clone them to keep values. ``save`` needs less memory.
        Raises ``StateError`` if the step is closed or failed half way, or the model is sharded.
        """
        with self._access.exclusive():
            self._access.check(self._session.torn)
            return self._state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of ``state_dict``, also into a step that failed half way.

        Raises ``InputError`` for other models or optimizers, ``StateError`` if the step is closed or the model sharded.
        """
        self._state.check_counts(state)
        with self._access.exclusive():
            self._access.check()
            self._state.load_state_dict(state)

    def _release_model(self) -> None:
        """Move the model to its home, because another step with the same model is about to run."""
        self._access.check(self._session.torn)
        with self._access.exclusive():
            self._session.release_model()


class _Access:
    """A lock that lets one thread at a time use a step, in the process that compiled it, until it is closed."""

    def __init__(self, home: OpenHome) -> None:
        self._home = home
        self._process = os.getpid()
        self._running = threading.Lock()
        self.closed = False

    @property
    def is_compiling_process(self) -> bool:
        return os.getpid() == self._process

    @contextlib.contextmanager
    def exclusive(self) -> Generator[None]:
        """Lock the step for this thread; raise ``StateError`` if another call holds the lock."""
        if not self._running.acquire(blocking=False):
            raise StateError("this step is running already; call it from one thread at a time")
        try:
            # The user may have changed tensors at the home since the last call.
            self._home.start()
            yield
        finally:
            self._running.release()

    def check(self, torn: str = "") -> None:
        """Raise ``StateError`` if the step is closed, in a forked process, or half changed by the error ``torn``."""
        if not self.is_compiling_process:
            raise StateError(
                f"this step belongs to process {self._process}, and this process ({os.getpid()}) is a fork of it, "
                "without its copy threads; call the step there, or compile one in this process"
            )
        if self.closed:
            raise StateError("this step is closed; compile it again to go on")
        if torn:
            raise StateError(
                "an earlier call of this step failed half way, so that the model is part old and part new "
                f"({torn}); load a checkpoint with step.load(), or load one into the model and compile the step again"
            )
