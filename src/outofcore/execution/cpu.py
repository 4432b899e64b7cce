"""Run a bound program on the CPU: ops in the caller's thread, copies in native ones (``execution.copying``).

Collectives have a thread of their own, which blocks in each until the other processes have joined.
"""

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
from outofcore.capture.optimizers import UpdateOn
from outofcore.errors import CommunicationError, OutOfCoreError, StateError, TransferError
from outofcore.execution.arena import Arena, Lender, ScopeTable, as_arena_error
from outofcore.execution.binding import Bound, BoundRun, Draws, Lane
from outofcore.execution.copying import Copies, Copying, copies_of
from outofcore.execution.engines import GeneratorStates, Port, place_results
from outofcore.execution.interrupts import SIGNALS_SECONDS
from outofcore.execution.replay import Replay, is_worth_it, spans
from outofcore.execution.undo import Reached
from outofcore.finalization import end_when_threads_rest
from outofcore.program import Timeline
from outofcore.runtime.homes import HomeStore
from outofcore.runtime.native import load_native
from outofcore.runtime.slots import Piece
from outofcore.tensor_data import is_in_host_memory, move_onto

_log = logging.getLogger("outofcore")


class _Reporting:
    """A context that tells the other queues what is raised in it; it may be entered again."""

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
    """Runs the collectives of a step, one after the other, step after step, until it is closed."""

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
        """Let no collective begin; other processes may come to the end of one later than we can wait."""
        self._gate.clear()

    def resume(self) -> None:
        self._gate.set()

    def finish(self) -> None:
        """Return when the work of this step is done or given up."""
        with self._condition:
            while self._work is not None:
                self._condition.wait(SIGNALS_SECONDS)

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        # The collector of garbage may run in any thread.
        if threading.current_thread() is not self:
            self.join()

    def run(self) -> None:
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
        for one in work:
            if one.waits:
                self._copying.wait(one.waits)
            elif self._copying.failure is not None:
                return
            self._gate.wait()
            self._starts[one.index] = perf_counter()
            _communicate(one)
            self._ends[one.index] = perf_counter()
            if one.awaited:
                self._copying.publish(Lane.COMMUNICATE, one.number)


@dataclass
class _Replayed:
    """The calls of a program that native code makes.

    ``taken`` tells by op whether its call was recorded. ``until`` is by op the end of the stretch that begins with it
    (see ``spans``), None until all ops have run once.
    """

    replay: Replay
    taken: list[bool]
    until: list[int] | None = None


class _Calls:
    """Calls the ops of one step from Python.

    ``starts`` and ``ends`` receive the times of each instruction. ``taken`` is set while calls are to be recorded.
    ``failure`` is what an optimizer's code raised: later updates are skipped, and everything else goes on.
    """

    def __init__(
        self,
        table: ScopeTable,
        starts: array[float],
        ends: array[float],
        taken: _Replayed | None,
        lender: Lender | None,
    ) -> None:
        self._table, self._lender = table, lender
        self._starts, self._ends = starts, ends
        self._taken = taken
        self._generators = GeneratorStates((torch.default_generator,))
        self._elsewhere: list[torch.Tensor] = []  # lives until the next scope begins
        self.failure: Exception | None = None

    def __call__(self, scope: int, run: BoundRun) -> None:
        """Call an op, and put its results where the plan has them."""
        update = run.func if isinstance(run.func, UpdateOn) else None
        if update is not None and self.failure is not None:
            return
        self._starts[run.index] = perf_counter()
        if run.draws is not Draws.FREELY:
            self._generators.before(run)
        self._table.begin(scope)
        self._elsewhere.clear()
        try:
            self._run(scope, run)
        except Exception as error:
            if update is None:
                raise
            self.failure = error
        finally:
            if run.draws is Draws.AGAIN:
                self._generators.after()
        if update is not None:
            _keep_what_stays(self._table, update, self._lender)
        if self._lender is not None and self._lender.is_active:
            self.settle(self._lender)
        self._ends[run.index] = perf_counter()

    def run_all(self, runs: Sequence[BoundRun], copying: Copying, replayed: _Replayed | None) -> None:
        """Call all ops in their order; with ``replayed``, native code calls those that were recorded."""
        until = None if replayed is None else replayed.until
        lender = self._lender
        stops = None if lender is None else lender.flag
        index = 0
        while index < len(runs):
            run = runs[index]
            try:
                end = index if until is None else until[index]
                if replayed is not None and end > index:
                    given = (self._table, self._starts, self._ends)
                    index = replayed.replay.run(index, end, *given, queues=copying, stops=stops)
                    if lender is None or not lender.is_active:
                        continue
                    self._table.end()
                    replayed.replay.let_go()
                    self.settle(lender)
                    run = runs[index - 1]
                else:
                    if run.waits:
                        copying.wait(run.waits)
                    self(index, run)
                    index += 1
            except StateError as error:
                raise _explained(copying.failure or error) from error
            except RuntimeError as error:
                raise as_arena_error(error) or error from error
            if run.awaited:
                copying.publish(Lane.COMPUTE, run.number)
        if replayed is not None:
            replayed.replay.let_go()

    def settle(self, lender: Lender) -> None:
        """Restore the planned state of the arena after an op that was lent memory."""
        self._table.end()
        self._elsewhere.clear()
        lender.settle()

    def _run(self, scope: int, run: BoundRun) -> None:
        expected = self._taken is not None and self._taken.replay.expect(run)
        out = run.func(*run.args, **run.kwargs)
        if expected and self._taken is not None:
            self._taken.taken[scope] = self._taken.replay.take(scope, run, scope)
        if run.results:
            leaves = (out,) if isinstance(out, torch.Tensor) else internals.result_leaves(out)
            self._elsewhere = place_results(run, leaves)


def _keep_what_stays(table: ScopeTable, update: UpdateOn, lender: Lender | None) -> None:
    """Move unplanned tensors that an optimizer has made and keeps to memory of their own."""
    moved: dict[int, list[torch.Tensor]] = {}
    for tensor in update.kept_by_optimizer():
        if is_in_host_memory(tensor) and table.passes(tensor):
            moved.setdefault(internals.storage_key(tensor), []).append(tensor)
    if moved:
        _log.info("%s keeps what the plan has no place for; it lies beside the arena until the next call", update.name)
    for tensors in moved.values():
        with table.unbounded():
            before = internals.storage_bytes(tensors[0])
            there = None if lender is None else lender.keep(before.numel())
            own = before.clone() if there is None else there.copy_(before)
        for tensor in tensors:
            move_onto(tensor, own)


class CpuEngine:
    """The copy threads, the thread of collectives, and the loop that runs ops.

    Use one at a time per process. ``homes`` are nearest first; ``replay`` lets native code call ops.
    """

    def __init__(self, homes: Sequence[HomeStore], *, replay: bool = True) -> None:
        self._replays = replay
        self._homes = tuple(homes)
        self._queues = 2 + 2 * len(self._homes)  # ops, two for each home, collectives
        self._copying = Copying(load_native(), self._queues)
        self._copies: WeakKeyDictionary[Bound, Copies] = WeakKeyDictionary()
        self._slots: Mapping[int, tuple[Piece, ...]] = {}
        self._ports: dict[int, Port] = {}
        self._communicator: _Communicator | None = None
        self._replayed: WeakKeyDictionary[Bound, _Replayed] = WeakKeyDictionary()
        self.update_failure: Exception | None = None
        self._seconds = 0.0  # that the last step took
        self._steps = 0
        self._starts: array[float] = array("d")
        self._ends: array[float] = array("d")

    def reached(self) -> Reached:
        """Return how far the last step came."""
        return Reached.at(self._starts, self._ends)

    def close(self) -> None:
        if self._communicator is not None:
            self._communicator.close()
            self._communicator = None
        self._copying.close()

    def synchronize(self) -> None:
        """Do nothing: nothing is under way between two steps."""

    def forget(self) -> None:
        self._slots, self._ports = {}, {}

    def run(
        self, bound: Bound, table: ScopeTable, slots: Mapping[int, tuple[Piece, ...]], ports: dict[int, Port]
    ) -> Timeline:
        """Run one step and return when all queues are empty."""
        count, arena = len(bound.program.instructions), bound.arena
        starts, ends = self._starts, self._ends = array("d", bytes(8 * count)), array("d", bytes(8 * count))
        if not isinstance(arena, Arena):
            raise StateError("a step on the CPU was given an arena elsewhere")
        self._slots, self._ports = slots, ports
        begin = perf_counter()
        # No local variable may hold a failure: its traceback refers to this frame, and with it to program and arena.
        try:
            self._run_queues(bound, arena, table)
            if self._copying.failure is not None:
                raise _explained(self._copying.failure)
        finally:
            self._copying.let_go()
        end = perf_counter()
        self._seconds = end - begin
        self._steps += 1
        return Timeline(
            tuple(max(s - begin, 0.0) for s in starts), tuple(max(e - begin, 0.0) for e in ends), end - begin
        )

    def _run_queues(self, bound: Bound, arena: Arena, table: ScopeTable) -> None:
        """Run all queues to their ends; what failed in another one than that of ops is ``Copying.failure``."""
        copying, starts, ends = self._copying, self._starts, self._ends
        # Whose end is waited for is known before it begins: a signal may come in between.
        resting: list[Callable[[], None]] = []
        lender: Lender | None = None
        self.update_failure = None
        reporting = _Reporting(copying)
        try:
            with reporting:
                copies = self._copies_of(bound, arena)
                resting.append(copying.finish)
                copying.begin(copies, self._ports, starts, ends)
                if bound.collectives:
                    communicator = self._talking()
                    resting.append(communicator.finish)
                    communicator.begin(bound.collectives, starts, ends)
                lender = self._lender_of(arena)
                with internals.below_autograd():
                    self.update_failure = self._compute(bound, table, lender)
        finally:
            table.end()
            try:
                if lender is not None:
                    with reporting:
                        lender.end()
            finally:
                _finish(resting, copying)

    def _lender_of(self, arena: Arena) -> Lender | None:
        """Return the arena's lender, after telling it how to stop the other queues."""
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

    def _talking(self) -> _Communicator:
        """Return the started thread of collectives."""
        if self._communicator is None:
            end_when_threads_rest()
            self._communicator = _Communicator(self._copying)
            self._communicator.start()
        return self._communicator

    def _copies_of(self, bound: Bound, arena: Arena) -> Copies:
        found = self._copies.get(bound)
        if found is None or found.slots != self._slots:
            found = self._copies[bound] = copies_of(bound, arena, self._slots, self._homes, self._queues)
        return found

    def _replay(self, bound: Bound) -> _Replayed | None:
        """Return the recorded calls of a program; None if Python calls its ops in this step."""
        if not self._replays or not internals.replayable():
            return None
        if (found := self._replayed.get(bound)) is not None:
            return found
        if not self._steps or not is_worth_it(len(bound.runs), self._seconds):
            return None
        count = len(bound.runs)
        made = self._replayed[bound] = _Replayed(Replay(load_native(), count), [False] * count)
        return made

    def _compute(self, bound: Bound, table: ScopeTable, lender: Lender | None) -> Exception | None:
        """Run all ops; returns what an optimizer's code has raised."""
        replayed = self._replay(bound)
        is_new = replayed is not None and replayed.until is None
        calls = _Calls(table, self._starts, self._ends, replayed if is_new else None, lender)
        if replayed is None or not is_new:
            calls.run_all(bound.runs, self._copying, replayed)
            return calls.failure
        with replayed.replay.watching():
            calls.run_all(bound.runs, self._copying, None)
        for number, run in enumerate(bound.runs):
            if replayed.taken[number]:
                waits = [(queue % self._queues, count) for queue, count in run.waits]
                replayed.replay.order(number, waits, run.number if run.awaited else None)
        replayed.until = spans(replayed.taken)
        return calls.failure


def _finish(resting: Sequence[Callable[[], None]], copying: Copying) -> None:
    """Return when no copy and no collective is under way, whatever is raised meanwhile."""
    interrupted: BaseException | None = None
    for rests in resting:
        while True:
            try:
                rests()
                break
            except BaseException as error:  # the handler of a signal
                copying.fail(error)
                interrupted = error
    if interrupted is not None:
        try:
            raise interrupted
        finally:
            del interrupted  # its traceback refers to this frame


def _communicate(run: BoundRun) -> None:
    try:
        with internals.below_autograd():
            run.func(*run.args, **run.kwargs)
    except Exception as error:
        raise CommunicationError(
            f"{run.func} failed: {error}. Another process has ended, or did not come to it within the timeout of the "
            "process group; end this one as well, and let torchrun start all of them again"
        ) from error


def _explained(failure: BaseException) -> BaseException:
    if isinstance(failure, OutOfCoreError):
        return failure
    if isinstance(failure, OSError):
        return TransferError(f"a copy to or from the home failed: {failure}")
    return failure
