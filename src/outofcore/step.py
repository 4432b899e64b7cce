"""A compiled step: captured, profiled and planned at its first call, and run within its budget at each."""

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
from outofcore.follow.native import is_followed
from outofcore.options import MemoryOptions, P, PlanOptions, R, RunOptions, UserStep
from outofcore.peers import Ranks
from outofcore.planned_step import PlannedStep
from outofcore.planning import Planned
from outofcore.program import Timeline
from outofcore.progress import Tell
from outofcore.report import ReportPath, facts_html
from outofcore.runtime.homes import HomeStore
from outofcore.session import Outcome, Session, versions
from outofcore.step_state import StepState
from outofcore.units import format_bytes, format_seconds

REPORT_PATH = "outofcore-report.html"


class Step(Generic[P, R]):
    """A training step that runs within a byte budget: made by ``outofcore.compile``, called like the step given.

    Between calls the model, its gradients and the optimizers can be read, changed, saved and evaluated
    as in plain PyTorch. One step runs at a time; a step is not to be called from several threads at once.
    A context manager: it closes the step.

    Attributes:
        budget: device bytes.
        policy: how it is planned.
        home: where what is not on the device lives; for ``compile(…, home=step.home)`` of another step over the
            same model.
        on_progress: told how far capturing, profiling and planning are (a stage, how much is done, and of how much);
            None: a bar on a terminal tells.

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
        self.on_progress: Tell | None = None
        self._session = Session(user, memory, planning, running, ranks, self._vacate)
        self._state = StepState(user, self.home, self._session)
        self._access = _Access(self.home)

    def _repr_html_(self) -> str:
        state = ", closed" if self._access.closed else ", failed half way" if self._session.torn else ""
        facts = [("plans", f"{self._session.kinds}, policy {self.policy.name}")]
        with contextlib.suppress(StateError):  # not called yet
            facts += step_facts(self.stats)
        return facts_html(f"{self.__name__} within {format_bytes(self.budget)}{state}", facts)

    def __repr__(self) -> str:
        session, state = self._session, ""
        if self._access.closed:
            state = ", closed"
        elif session.torn:
            state = ", failed half way"
        elif session.followed is not None and session.followed.last is not None:
            state = (
                f", {session.followed.count} calls followed, last step {format_seconds(session.followed.last.seconds)}"
            )
        elif session.timeline is not None:
            state = f", last step {format_seconds(session.timeline.step_seconds)}"
        plans = f"{session.kinds} {'plan' if session.kinds == 1 else 'plans'}"
        budget = format_bytes(self.budget)
        return f"<outofcore step {self.__name__!r} within {budget}: {plans} by {self.policy.name}{state}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run one training step and return what the user's step returns, in memory of its own.

        The first call captures, profiles and plans the step. So do later ones with inputs of other shapes, or from the
        first of these on the step is run as it is, op by op: see ``dynamic`` of ``outofcore.compile``.

        Raises:
            CaptureError: the step cannot become one graph.
            BudgetError: the budget cannot hold it; or, where calls are followed, an op of it.
            SpillError: the home cannot hold what must leave.
            StateError: the step is closed, an earlier call failed half way, this is a fork of the process that
                compiled the step, a loop is followed (``outofcore.budget``), or something else moved the model while
                it ran.
            TransferError: a copy failed in mid-step, or what was read is not what was written.
            ValidationError: no plan keeps its promises: a fault of this library.
            CommunicationError: a collective failed, because another process has ended.

        Whatever is raised carries a note (``__notes__``) that says how the model is: as it was before the step, as
        long as nothing that lasts had been updated; as it is after the step, if that had ended; as plain PyTorch
        leaves it at an op that raises, where the call was followed, or at an optimizer that does; or else, where a
        copy, a check or an op failed after parameters had been updated, part old and part new, and then the step
        refuses to go on. Ctrl-C and SIGTERM take effect when the step has ended, or before it while it is profiled and
        planned; a second one at once.
        """
        self._access.check(self._session.torn)
        if is_followed():
            raise StateError(
                "a compiled step has a budget of its own and does not run inside of outofcore.budget(); leave that "
                "context first, or call the training function itself there"
            )
        with self._access.alone():
            self._session.outcome = Outcome.UNCHANGED
            try:
                return self._session.call(args, kwargs, self.on_progress)
            except BaseException as error:  # Ctrl-C as well
                error.add_note(self._session.outcome.value)
                raise

    def prepare(self, *args: P.args, **kwargs: P.kwargs) -> Captured:
        """Capture, profile and plan the step for such arguments, and run nothing; a call with them then runs at once.

        Returns:
            The capture.

        Raises:
            CaptureError, BudgetError, SpillError, ValidationError: as a call does. Nothing has been changed.
            StateError: the step is closed or failed half way, or its calls are followed and not captured.
        """
        self._access.check(self._session.torn)
        if self._session.why_followed:
            raise StateError("the calls of this step are followed, and nothing is planned; leave 'dynamic' out")
        with self._access.alone():
            return self._session.prepare(args, kwargs, self.on_progress).captured

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Other processes may not have come to where this one has an error, and would be waited for.
        self.close(whole=kind is None)

    def synchronize(self) -> None:
        """Return when everything of the last call is done. (On the CPU it is when the call returns.)"""
        self._access.check(self._session.torn)
        self._session.engine.synchronize()

    def close(self, *, whole: bool = True) -> None:
        """Give the model and the optimizers memory of their own again, as plain PyTorch has it, and free the rest.

        What is spread over processes (``shard=``) is gathered in each of them, so all have to close their steps.

        Args:
            whole: whether it is. If not, as where a context ends by an exception or where no process has room for a
                whole model, its parameters stay without contents, on the device ``meta``.

        Raises:
            CommunicationError: another process has ended; what was not gathered by then stays without contents.
        """
        if self._access.closed:
            return
        self._access.closed = True
        if self._access.is_own:  # else the threads and the files are those of another process
            self._session.close(whole=whole)

    # What it did

    @property
    def homes(self) -> tuple[HomeStore, ...]:
        """Where bytes are that are not on the device, nearest first."""
        return self.home.stores

    @property
    def planned(self) -> Planned:
        """The plan of the last call that had one, with its program and the simulated timeline.

        Raises:
            StateError: there was none.
        """
        return self._shown("planned").planned

    @property
    def captured(self) -> Captured:
        """The capture that the last call ran; that had one.

        Raises:
            StateError: there was none.
        """
        return self._shown("captured").captured

    @property
    def costs(self) -> Costs:
        """The costs that the last call was planned with; that had a plan.

        Raises:
            StateError: there was none.
        """
        return self._shown("profiled").costs

    def _shown(self, what: str) -> PlannedStep:
        if self._session.steps.shown is None:
            raise StateError(self._nothing_to_show(f"it is {what} at its first call"))
        return self._session.steps.shown

    @property
    def timeline(self) -> Timeline:
        """When each instruction of the last call that had a plan ran.

        Raises:
            StateError: there was none.
        """
        if self._session.timeline is None:
            raise StateError(self._nothing_to_show("its timeline is measured at its first call"))
        return self._session.timeline

    @property
    def stats(self) -> StepStats:
        """What the last call did.

        Raises:
            StateError: the step was not called yet.
        """
        session = self._session
        if session.followed is not None and session.followed.last is not None:
            last = session.followed.last
            return StepStats(
                last.seconds,
                last.seconds - last.waited_seconds,
                last.bytes_out,
                last.bytes_in,
                session.steps.off_plan,
                0.0,
                session.followed.count,
                session.why_followed,
                session.followed.stats.peak_bytes,
            )
        return measure_step(self.captured, self.planned, self.timeline, session.steps.off_plan)

    def _nothing_to_show(self, otherwise: str) -> str:
        followed = self._session.followed
        if followed is None or followed.last is None:
            return f"the step was not called yet: {otherwise}"
        return (
            "all calls of this step were followed, which have no plan: step.stats tells what they did; compile it with "
            "dynamic=False to have each shape captured and planned"
        )

    def report(
        self, path: str | os.PathLike[str] = REPORT_PATH, *, title: str = "", budgets: int | None = None
    ) -> Path:
        """Write what the last call did that had a plan, as one HTML page that needs nothing else.

        It shows memory over time and the queues, measured and predicted, why ops waited, what was decided about each
        storage, step time against budget, and what would help most.

        Args:
            path: the file; its folder is created. By default ``outofcore-report.html`` in the current folder.
            title: the heading; by default the name of the step.
            budgets: how many budgets to plan for besides this one, for the curve; each takes as long as planning
                took. 0: none.

        Returns:
            the file; a notebook that shows it shows the page.

        Raises:
            StateError: no call had a plan.
            InputError: the file cannot be written.
        """
        notes = [("versions", versions())]
        if self._session.followed is not None:
            notes.append(("calls followed since", f"{self._session.followed.count}, as {self._session.why_followed}"))
        report_step(Path(path), self._ran(), title or self.__name__, count=budgets, notes=notes)
        return ReportPath(path)

    def trace(self, path: str | os.PathLike[str], *, beside: str | os.PathLike[str] | None = None) -> None:
        """Write the last call that had a plan, measured and predicted, as a trace for Perfetto and chrome://tracing.

        Args:
            path: the file, compressed if its name ends in ``.gz``; its folder is created.
            beside: a trace that ``torch.profiler`` exported of the last call: both are then in the file, on one axis
                of time (to about a millisecond).

        Raises:
            StateError: no call had a plan.
            InputError: a file cannot be read or written.
        """
        other = None if beside is None else Path(beside)
        trace_step(Path(path), self._ran(), began_ns=self._session.began_ns, beside=other)

    def _ran(self) -> ReportedStep:
        return ReportedStep(self.captured.graph, self.costs, self.planned, self.budget, self.policy, self.timeline)

    # What lasts

    def save(self, folder: str | os.PathLike[str], extra: Any = None, *, frozen: bool = True) -> None:
        """Save models, optimizers, gradients and random generators, streamed through a buffer of some MiB.

        A checkpoint that is in the folder counts until this one is whole on the disk: however a save ends,
        one of the two can be loaded. Between, the disk holds both.

        What is spread over processes (``shard=``) is saved whole, by the first of them; all call this at once. Any
        number of processes can load it, and so can plain PyTorch.

        Args:
            folder: made if it does not exist. It gets safetensors files and ``checkpoint.json``, which names them.
            extra: plain data of yours (numbers, text, lists, dicts), such as an epoch or a scheduler's state dict.
            frozen: False leaves out parameters of the models that do not require gradients, such as the base of
                adapters; ``load`` then leaves those as they are, and refuses a model that has others by name, shape or
                dtype. Their values are not compared. Buffers are always saved; so are frozen parameters that have a
                gradient or optimizer state, or that share memory with buffers or with parameters that are saved.

        Raises:
            StateError: the step is closed or failed half way, or something cannot be saved.
            TransferError: the system refuses; the message says where and why.
        """
        with self._access.alone():
            self._access.check(self._session.torn)
            self._state.save(Path(folder), extra, frozen=frozen)

    def load(self, folder: str | os.PathLike[str]) -> Any:
        """Load a checkpoint; training then goes on, bit for bit, as it did after it was saved.

        A step that failed half way can be used again. Frozen parameters that were left out stay as they are.

        Returns:
            what was saved as ``extra``; tuples come back as lists.

        Raises:
            InputError: there is no such checkpoint, or not of these models and optimizers, or it was saved without a
                parameter that requires gradients now; nothing has been changed.
            TransferError: a file cannot be read or is not as it was saved; the step refuses to go on.
            StateError: the step is closed.
        """
        with self._access.alone():
            self._access.check()
            return self._state.load(Path(folder))

    def state_dict(self) -> dict[str, Any]:
        """The state dicts of models and optimizers, and the state of PyTorch's generator, as they are now.

        As in plain PyTorch their tensors are those of the model: clone what is to stay as it is. What lives on a disk
        is read from there as it is looked at; ``save`` needs less memory.

        Raises:
            StateError: the step is closed or failed half way.
        """
        with self._access.alone():
            self._access.check(self._session.torn)
            return self._state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave; a step that failed half way can be used again.

        Raises:
            InputError: it is of other models or optimizers.
            StateError: the step is closed.
        """
        self._state.check_counts(state)
        with self._access.alone():
            self._access.check()
            self._state.load_state_dict(state)

    def _vacate(self) -> None:
        """Another step that shares the home is to run."""
        self._access.check(self._session.torn)
        with self._access.alone():
            self._session.vacate()


class _Access:
    """Says who may use a step: one thread at a time, of the process that compiled it, until it is closed."""

    def __init__(self, home: OpenHome) -> None:
        self._home = home
        self._process = os.getpid()
        self._running = threading.Lock()
        self.closed = False

    @property
    def is_own(self) -> bool:
        """Whether this is the process that compiled the step."""
        return os.getpid() == self._process

    @contextlib.contextmanager
    def alone(self) -> Generator[None]:
        """Refuse other threads."""
        if not self._running.acquire(blocking=False):
            raise StateError("this step is running already; call it from one thread at a time")
        try:
            # What was written there may have been changed by the user since.
            self._home.start()
            yield
        finally:
            self._running.release()

    def check(self, torn: str = "") -> None:
        """Refuse a step that is closed or forked, or that is ``torn``, for the reason given."""
        if not self.is_own:
            raise StateError(
                f"this step belongs to process {self._process}, of which this one ({os.getpid()}) is a fork: its copy "
                "threads are not here; call it there, or compile a step in this process"
            )
        if self.closed:
            raise StateError("this step is closed; compile it again to go on")
        if torn:
            raise StateError(
                "an earlier call of this step failed half way, so that the model is part old and part new "
                f"({torn}); load a checkpoint with step.load(), or into the model and compile the step again"
            )
