"""Run a bound program on the CPU: ops in the caller's thread, copies in native ones (``copying``)."""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from weakref import WeakKeyDictionary

import torch

from outofcore import _torch_internals as internals
from outofcore.capture.optimizers import BoundUpdate
from outofcore.errors import CommunicationError, OutOfCoreError, StateError, TransferError
from outofcore.execution.arena import Arena, Lender, ScopeTable, as_arena_error
from outofcore.execution.binding import BoundProgram, BoundRun, GeneratorUse, Lane
from outofcore.execution.copying import Copies, Copying, prepare_copies
from outofcore.execution.engines import GeneratorStates, Port, place_results
from outofcore.execution.interrupts import SIGNAL_POLL_SECONDS
from outofcore.execution.replay import Replay, find_span_ends, is_worth_replaying
from outofcore.execution.undo import StepProgress
from outofcore.finalization import wait_for_threads_at_exit
from outofcore.program import Timeline
from outofcore.runtime.homes import HomeStore
from outofcore.runtime.native import load_native
from outofcore.runtime.slots import SlotPiece
from outofcore.tensor_data import is_in_host_memory, rebase_tensor

_log = logging.getLogger("outofcore")


class _FailureReporter:
    """A reusable context that cancels the step if an exception leaves it, so that the other queues stop."""

    def __init__(self, copying: Copying) -> None:
        self._copying = copying

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._copying.fail(error)


class _Communicator(threading.Thread):
    """The thread that runs the collectives of each step, in program order."""

    def __init__(self, copying: Copying) -> None:
        super().__init__(name="outofcore-collectives", daemon=True)
        self._copying = copying
        self._condition = threading.Condition()
        self._gate = threading.Event()
        self._gate.set()
        self._work: Sequence[BoundRun] | None = None
        self._starts: array[float] = array("d")
        self._ends: array[float] = array("d")
        self._closed = False

    def begin(self, work: Sequence[BoundRun], starts: array[float], ends: array[float]) -> None:
        with self._condition:
            self._work, self._starts, self._ends = work, starts, ends
            self._condition.notify_all()

    def pause(self) -> None:
        """Hold back further collectives, without waiting for a running one."""
        self._gate.clear()  # another process may join the running one late

    def resume(self) -> None:
        self._gate.set()

    def finish(self) -> None:
        with self._condition:
            while self._work is not None:
                self._condition.wait(SIGNAL_POLL_SECONDS)

    def close(self) -> None:
        """Wait for the collectives of the running step, then end the thread."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        # The garbage collector may run in any thread.
        if threading.current_thread() is not self:
            self.join()

    def run(self) -> None:
        """Run the collectives of each step until ``close``; an exception cancels the step."""
        while True:
            with self._condition:
                while self._work is None and not self._closed:
                    self._condition.wait()
                if self._work is None:
                    return
                work = self._work
            try:
                self._run_all(work)
            except BaseException as error:  # the thread of the ops raises it
                self._copying.fail(error)
            with self._condition:
                self._work = None
                self._condition.notify_all()

    def _run_all(self, work: Sequence[BoundRun]) -> None:
        """Run the collectives of one step in order, each after the instructions that it waits for."""
        for run in work:
            if run.waits:
                self._copying.wait(run.waits)
            elif self._copying.failure is not None:
                return
            self._gate.wait()
            self._starts[run.index] = perf_counter()
            _run_collective(run)
            self._ends[run.index] = perf_counter()
            if run.awaited:
                self._copying.publish(Lane.COMMUNICATE, run.number)


@dataclass
class _RecordedCalls:
    """The recorded op calls of a program; ``span_ends`` (see ``find_span_ends``) is None before the recording."""

    replay: Replay
    recorded: list[bool]
    span_ends: list[int] | None = None


class _OpCaller:
    """Calls the ops of one step; after a failed optimizer update it skips the other updates."""

    def __init__(
        self,
        table: ScopeTable,
        starts: array[float],
        ends: array[float],
        recording: _RecordedCalls | None,
        lender: Lender | None,
    ) -> None:
        self._table, self._lender = table, lender
        self._starts, self._ends = starts, ends
        self._recording = recording
        self._generators = GeneratorStates((torch.default_generator,))
        self._misplaced: list[torch.Tensor] = []  # kept alive until the next scope begins
        self.failure: Exception | None = None  # the exception of an optimizer's code

    def __call__(self, scope: int, run: BoundRun) -> None:
        """Call one op with its planned memory; keep an exception of optimizer code in ``failure``."""
        update = run.func if isinstance(run.func, BoundUpdate) else None
        if update is not None and self.failure is not None:
            return
        self._starts[run.index] = perf_counter()
        if run.generator_use is not GeneratorUse.UNTOUCHED:
            self._generators.save_or_restore(run)
        self._table.begin(scope)
        self._misplaced.clear()
        try:
            self._run(scope, run)
        except Exception as error:
            if update is None:
                raise
            self.failure = error
        finally:
            if run.generator_use is GeneratorUse.RESTORE:
                self._generators.reset()
        if update is not None:
            _move_unplanned_state(self._table, update, self._lender)
        if self._lender is not None and self._lender.is_active:
            self.restore_arena(self._lender)
        self._ends[run.index] = perf_counter()

    def run_all(self, runs: Sequence[BoundRun], copying: Copying, replayed: _RecordedCalls | None) -> None:
        """Run the ops in order, through native code where ``replayed`` has recorded their calls."""
        span_ends = None if replayed is None else replayed.span_ends
        lender = self._lender
        stops = None if lender is None else lender.flag
        index = 0
        while index < len(runs):
            run = runs[index]
            try:
                end = index if span_ends is None else span_ends[index]
                if replayed is not None and end > index:
                    times = (self._table, self._starts, self._ends)
                    index = replayed.replay.run(index, end, *times, queues=copying, stops=stops)
                    if lender is None or not lender.is_active:
                        continue
                    self._table.end()
                    replayed.replay.release_results()
                    self.restore_arena(lender)
                    run = runs[index - 1]
                else:
                    if run.waits:
                        copying.wait(run.waits)
                    self(index, run)
                    index += 1
            except StateError as error:
                raise _as_library_error(copying.failure or error) from error
            except RuntimeError as error:
                raise as_arena_error(error) or error from error
            if run.awaited:
                copying.publish(Lane.COMPUTE, run.number)
        if replayed is not None:
            replayed.replay.release_results()

    def restore_arena(self, lender: Lender) -> None:
        self._table.end()
        self._misplaced.clear()
        lender.restore()

    def _run(self, scope: int, run: BoundRun) -> None:
        """Call an op and put its results at their planned addresses; record the call if calls are being recorded."""
        will_record = self._recording is not None and self._recording.replay.expect_call(run)
        out = run.func(*run.args, **run.kwargs)
        if will_record and self._recording is not None:
            self._recording.recorded[scope] = self._recording.replay.record_call(scope, run, scope)
        if run.results:
            leaves = (out,) if isinstance(out, torch.Tensor) else internals.result_leaves(out)
            self._misplaced = place_results(run, leaves)


def _move_unplanned_state(table: ScopeTable, update: BoundUpdate, lender: Lender | None) -> None:
    """Move unplanned optimizer state out of memory that is reused after the op."""
    by_storage: dict[int, list[torch.Tensor]] = {}
    for tensor in update.optimizer_tensors():
        if is_in_host_memory(tensor) and table.is_scope_memory(tensor):
            by_storage.setdefault(internals.storage_key(tensor), []).append(tensor)
    if by_storage:
        _log.info("%s keeps tensors that are not in the plan, outside of the arena until the next call", update.name)
    for tensors in by_storage.values():
        with table.use_process_memory():
            old_bytes = internals.view_storage_bytes(tensors[0])
            home_bytes = None if lender is None else lender.allocate_lasting(old_bytes.numel())
            new_bytes = old_bytes.clone() if home_bytes is None else home_bytes.copy_(old_bytes)
        for tensor in tensors:
            rebase_tensor(tensor, new_bytes)


class CpuEngine:
    """Runs steps on the CPU, one at a time in a process."""

    def __init__(self, homes: Sequence[HomeStore], *, replay: bool = True) -> None:
        self._can_replay = replay
        self._homes = tuple(homes)  # nearest first
        self._queues = 2 + 2 * len(self._homes)  # ops, two for each home, collectives
        self._copying = Copying(load_native(), self._queues)
        self._copies: WeakKeyDictionary[BoundProgram, Copies] = WeakKeyDictionary()
        self._slots: Mapping[int, tuple[SlotPiece, ...]] = {}
        self._ports: dict[int, Port] = {}
        self._communicator: _Communicator | None = None
        self._replayed: WeakKeyDictionary[BoundProgram, _RecordedCalls] = WeakKeyDictionary()
        self.update_failure: Exception | None = None
        self._last_seconds = 0.0  # duration of the last step
        self._steps = 0
        self._starts: array[float] = array("d")
        self._ends: array[float] = array("d")

    def read_progress(self) -> StepProgress:
        return StepProgress.from_times(self._starts, self._ends)

    def close(self) -> None:
        if self._communicator is not None:
            self._communicator.close()
            self._communicator = None
        self._copying.close()

    def synchronize(self) -> None:
        """Return at once: between two steps all queues are idle."""

    def release_step(self) -> None:
        self._slots, self._ports = {}, {}

    def run(
        self, bound: BoundProgram, table: ScopeTable, slots: Mapping[int, tuple[SlotPiece, ...]], ports: dict[int, Port]
    ) -> Timeline:
        """Run one step and return its timeline; raise the error of a failed instruction, except an optimizer update."""
        count, arena = len(bound.program.instructions), bound.arena
        starts, ends = self._starts, self._ends = array("d", bytes(8 * count)), array("d", bytes(8 * count))
        if not isinstance(arena, Arena):
            raise StateError("the CPU engine was given an arena on another device; please report it")
        self._slots, self._ports = slots, ports
        begin = perf_counter()
        # Keep no failure in a local variable: its traceback refers to this frame, and so to the program and the arena.
        try:
            self._run_queues(bound, arena, table)
            if self._copying.failure is not None:
                raise _as_library_error(self._copying.failure)
        finally:
            self._copying.release_error()
        end = perf_counter()
        self._last_seconds = end - begin
        self._steps += 1
        return Timeline(
            tuple(max(s - begin, 0.0) for s in starts), tuple(max(e - begin, 0.0) for e in ends), end - begin
        )

    def _run_queues(self, bound: BoundProgram, arena: Arena, table: ScopeTable) -> None:
        """Run the ops, copies and collectives of a step at the same time; raise the error of a failed op.

        An optimizer's error is kept in ``update_failure``, a copy's or collective's in ``Copying.failure``.
        """
        copying, starts, ends = self._copying, self._starts, self._ends
        # Each queue is listed before it begins, since a signal may arrive in between.
        finishers: list[Callable[[], None]] = []
        lender: Lender | None = None
        self.update_failure = None
        reporting = _FailureReporter(copying)
        try:
            with reporting:
                copies = self._find_copies(bound, arena)
                finishers.append(copying.finish)
                copying.begin(copies, self._ports, starts, ends)
                if bound.collectives:
                    communicator = self._start_communicator()
                    finishers.append(communicator.finish)
                    communicator.begin(bound.collectives, starts, ends)
                lender = self._connect_lender(arena)
                with internals.below_autograd():
                    self.update_failure = self._run_ops(bound, table, lender)
        finally:
            table.end()
            try:
                if lender is not None:
                    with reporting:
                        lender.end()
            finally:
                _wait_for_all(finishers, copying)

    def _connect_lender(self, arena: Arena) -> Lender | None:
        """Start and return the arena's lender, which serves unplanned memory requests; None if there is no lender."""
        lender, copying, communicator = arena.lender, self._copying, self._communicator
        if lender is None:
            return None

        def pause() -> None:
            if communicator is not None:
                communicator.pause()
            copying.pause()

        def resume() -> None:
            copying.resume()
            if communicator is not None:
                communicator.resume()

        lender.begin(self._starts, self._ends, pause, resume)
        return lender

    def _start_communicator(self) -> _Communicator:
        """Return the thread for collectives, which is started once."""
        if self._communicator is None:
            wait_for_threads_at_exit()
            self._communicator = _Communicator(self._copying)
            self._communicator.start()
        return self._communicator

    def _find_copies(self, bound: BoundProgram, arena: Arena) -> Copies:
        """Return the native copies of a program, prepared again if its slots have changed."""
        copies = self._copies.get(bound)
        if copies is None or copies.slots != self._slots:
            copies = self._copies[bound] = prepare_copies(bound, arena, self._slots, self._homes, self._queues)
        return copies

    def _find_recording(self, bound: BoundProgram) -> _RecordedCalls | None:
        """Return the recording of a program's op calls, perhaps still empty; None if Python must call the ops."""
        if not self._can_replay or not internals.has_no_dispatch_modes():
            return None
        if (replayed := self._replayed.get(bound)) is not None:
            return replayed
        if not self._steps or not is_worth_replaying(len(bound.runs), self._last_seconds):
            return None
        count = len(bound.runs)
        recording = self._replayed[bound] = _RecordedCalls(Replay(load_native(), count), [False] * count)
        return recording

    def _run_ops(self, bound: BoundProgram, table: ScopeTable, lender: Lender | None) -> Exception | None:
        """Run the ops of a step; return the exception of a failed optimizer update, or None."""
        replayed = self._find_recording(bound)
        is_new = replayed is not None and replayed.span_ends is None
        calls = _OpCaller(table, self._starts, self._ends, replayed if is_new else None, lender)
        if replayed is None or not is_new:
            calls.run_all(bound.runs, self._copying, replayed)
            return calls.failure
        with replayed.replay.watch_calls():
            calls.run_all(bound.runs, self._copying, None)
        for number, run in enumerate(bound.runs):
            if replayed.recorded[number]:
                waits = [(queue % self._queues, count) for queue, count in run.waits]
                replayed.replay.set_waits(number, waits, run.number if run.awaited else None)
        replayed.span_ends = find_span_ends(replayed.recorded)
        return calls.failure


def _wait_for_all(finishers: Sequence[Callable[[], None]], copying: Copying) -> None:
    """Wait until all queues have finished, and only then raise the exception of a signal handler."""
    interrupted: BaseException | None = None
    for finish in finishers:
        while True:
            try:
                finish()
                break
            except BaseException as error:  # the handler of a signal
                copying.fail(error)
                interrupted = error
    if interrupted is not None:
        try:
            raise interrupted
        finally:
            del interrupted  # its traceback refers to this frame, which would be a cycle


def _run_collective(run: BoundRun) -> None:
    """Run a collective; convert its error to ``CommunicationError``."""
    try:
        with internals.below_autograd():
            run.func(*run.args, **run.kwargs)
    except Exception as error:
        raise CommunicationError(
            f"{run.func} failed: {error}. Another process has ended, or did not reach this collective within the "
            "timeout of the process group; end this process as well, and restart all of them with torchrun"
        ) from error


def _as_library_error(failure: BaseException) -> BaseException:
    """Convert an ``OSError`` of a copy to ``TransferError``; return other exceptions unchanged."""
    if isinstance(failure, OutOfCoreError):
        return failure
    if isinstance(failure, OSError):
        return TransferError(f"a copy to or from the home failed: {failure}; check that disk, or use another home")
    return failure
