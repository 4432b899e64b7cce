"""Run a bound program on the CPU: ops in the caller's thread, copies on one thread out and one in for each home.

Collectives have a thread of their own, which blocks in each until the other processes have joined.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch

from outofcore import _torch_internals as internals
from outofcore.capture.optimizers import UpdateOn
from outofcore.errors import CommunicationError, OutOfCoreError, StateError, TransferError
from outofcore.execution.arena import Arena, Lender, ScopeTable, as_arena_error
from outofcore.execution.binding import Bound, BoundCopy, BoundRun, Draws, Lane
from outofcore.execution.copying import Copies, Copying, copies_of
from outofcore.execution.engines import GeneratorStates, Port, place_results
from outofcore.execution.interrupts import SIGNALS_SECONDS
from outofcore.execution.replay import Replay, is_worth_building, is_worth_it, replay_if_there, spans
from outofcore.execution.undo import Reached
from outofcore.finalization import end_when_threads_rest
from outofcore.program import Timeline
from outofcore.runtime.homes import HomeStore
from outofcore.runtime.native import load_native
from outofcore.runtime.slots import Piece
from outofcore.tensor_data import is_in_host_memory, move_onto

_log = logging.getLogger("outofcore")

_Item = TypeVar("_Item", BoundCopy, BoundRun)


class _Queues(Protocol):
    """The progress of a step's queues; methods as in ``copying.Copying``."""

    @property
    def failure(self) -> BaseException | None: ...

    def wait(self, waits: Sequence[tuple[int, int]]) -> None: ...

    def publish(self, queue: int, number: int) -> None: ...

    def passed(self, queue: int, number: int) -> None: ...

    def fail(self, error: BaseException) -> None: ...

    def let_go(self) -> None: ...


class _Progress:
    """Counts the finished instructions of each queue; waiting threads sleep on one condition."""

    def __init__(self, queues: int) -> None:
        self.done = [0] * queues
        self.condition = threading.Condition()
        self.failure: BaseException | None = None

    def reset(self) -> None:
        self.done[:] = [0] * len(self.done)
        self.failure = None

    def publish(self, queue: int, number: int) -> None:
        with self.condition:
            self.done[queue] = number
            self.condition.notify_all()

    def passed(self, queue: int, number: int) -> None:
        self.done[queue] = number

    def fail(self, error: BaseException) -> None:
        with self.condition:
            if self.failure is None:
                self.failure = error
            self.condition.notify_all()

    def let_go(self) -> None:
        self.failure = None

    def wait(self, waits: Sequence[tuple[int, int]]) -> None:
        done = self.done
        for queue, count in waits:
            if done[queue] >= count:
                continue
            with self.condition:
                while done[queue] < count and self.failure is None:
                    self.condition.wait(SIGNALS_SECONDS)
            if self.failure is not None:
                raise StateError("another queue of the step failed") from self.failure


class _Reporting:
    """A context that tells the other queues what is raised in it; it may be entered again."""

    def __init__(self, queues: _Queues) -> None:
        self._queues = queues

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._queues.fail(error)


class _Worker(threading.Thread, Generic[_Item]):
    """Runs one queue of copies, or that of collectives, step after step, until it is closed."""

    def __init__(self, queue: int, name: str, do: Callable[[_Item], None]) -> None:
        super().__init__(name=f"outofcore-{name}", daemon=True)
        self._queue = queue
        self._progress: _Queues = _Progress(0)
        self._do = do
        self._condition = threading.Condition()
        self._gate = threading.Condition()
        self._paused = self._moving = False
        self._work: Sequence[_Item] | None = None
        self._starts: array[float] = array("d")
        self._ends: array[float] = array("d")
        self._closed = False

    def begin(self, work: Sequence[_Item], queues: _Queues, starts: array[float], ends: array[float]) -> None:
        with self._condition:
            self._progress, self._starts, self._ends = queues, starts, ends
            self._work = work
            self._condition.notify_all()

    def pause(self, *, waits: bool = True) -> None:
        """Let nothing begin; with ``waits``, return when nothing is under way."""
        with self._gate:
            self._paused = True
            while waits and self._moving:
                self._gate.wait(SIGNALS_SECONDS)

    def resume(self) -> None:
        with self._gate:
            self._paused = False
            self._gate.notify_all()

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
                self._progress.fail(error)
            with self._condition:
                self._work = None
                self._condition.notify_all()

    def _run_all(self, work: Sequence[_Item]) -> None:
        progress, queue, starts, ends = self._progress, self._queue, self._starts, self._ends
        for one in work:
            if one.waits:
                progress.wait(one.waits)
            elif progress.failure is not None:
                return
            with self._gate:
                while self._paused:
                    self._gate.wait()
                self._moving = True
                starts[one.index] = perf_counter()
            try:
                self._do(one)
                ends[one.index] = perf_counter()
            finally:
                with self._gate:
                    self._moving = False
                    self._gate.notify_all()
            (progress.publish if one.awaited else progress.passed)(queue, one.number)


class _Inline:
    """Runs the copies between the arena and the caller's memory in the thread of the ops, when one waits for them.

    Where nothing else is copied, waking other threads would take longer than to copy a batch.
    """

    def __init__(
        self, progress: _Progress, queues: Sequence[tuple[Sequence[BoundCopy], Callable[[BoundCopy], None]]]
    ) -> None:
        self._done = progress.done
        self._queues = queues

    def wait(self, waits: Sequence[tuple[int, int]], starts: array[float], ends: array[float]) -> None:
        """Make the copies that are waited for, each after what it waits for; raises ``StateError`` for a later op."""
        done = self._done
        for queue, count in waits:
            if queue == Lane.COMPUTE and done[queue] < count:
                raise StateError("a copy that an op waits for waits for a later op; please report it")
            while done[queue] < count:
                work, run = self._queues[queue - 1]
                copy = work[done[queue]]
                self.wait(copy.waits, starts, ends)
                starts[copy.index] = perf_counter()
                run(copy)
                ends[copy.index] = perf_counter()
                done[queue] = copy.number

    def finish(self, starts: array[float], ends: array[float]) -> None:
        """Make the remaining copies."""
        self.wait([(number, len(work)) for number, (work, _) in enumerate(self._queues, 1)], starts, ends)


@dataclass
class _Replayed:
    """The calls of a program that native code makes.

    ``taken`` tells by op whether its call was recorded. ``until`` is by op the end of the stretch that begins with it
    (see ``spans``), None until all ops have run once; ``ordered`` is the same where native code waits and publishes.
    """

    replay: Replay
    taken: list[bool]
    until: list[int] | None = None
    ordered: list[int] | None = None


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

    def run_all(
        self, runs: Sequence[BoundRun], queues: _Queues, inline: _Inline | None, replayed: _Replayed | None
    ) -> None:
        """Call all ops in their order; with ``replayed``, native code calls those that were recorded."""
        natively = queues if isinstance(queues, Copying) else None
        until = None
        if replayed is not None:
            until = replayed.until if natively is None else replayed.ordered
        lender = self._lender
        stops = None if lender is None else lender.flag
        index = 0
        while index < len(runs):
            run = runs[index]
            is_told = False
            try:
                end = index if until is None else until[index]
                if run.waits and (end == index or natively is None):
                    if inline is not None:
                        inline.wait(run.waits, self._starts, self._ends)
                    else:
                        queues.wait(run.waits)
                if replayed is not None and end > index:
                    given = (self._table, self._starts, self._ends)
                    index = replayed.replay.run(index, end, *given, queues=natively, stops=stops)
                    is_told = natively is not None
                    if lender is not None and lender.is_active:
                        self._table.end()
                        replayed.replay.let_go()
                        self.settle(lender)
                        is_told = False
                    run = runs[index - 1]
                else:
                    self(index, run)
                    index += 1
            except StateError as error:
                raise _explained(queues.failure or error) from error
            except RuntimeError as error:
                raise as_arena_error(error) or error from error
            if not is_told:
                (queues.publish if run.awaited else queues.passed)(Lane.COMPUTE, run.number)
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
    """The copy threads, two for each home, the thread of collectives, and the loop that runs ops.

    Use one at a time per process. ``homes`` are nearest first; ``replay`` lets native code call ops.
    """

    def __init__(self, homes: Sequence[HomeStore], *, replay: bool = True) -> None:
        self._replays = replay
        self._copying: Copying | None = None
        self._copies: WeakKeyDictionary[Bound, Copies] = WeakKeyDictionary()
        self._homes = tuple(homes)
        self._queues = 2 + 2 * len(self._homes)  # ops, two for each home, collectives
        self._progress = _Progress(self._queues)
        self._slots: Mapping[int, tuple[Piece, ...]] = {}
        self._ports: dict[int, Port] = {}
        self._arena: Arena | None = None
        self._copiers: list[_Worker[BoundCopy]] = []
        self._communicator: _Worker[BoundRun] | None = None
        self._replayed: WeakKeyDictionary[Bound, _Replayed] = WeakKeyDictionary()
        self.update_failure: Exception | None = None
        self._seconds = self._all_seconds = 0.0  # that the last step took, and all together
        self._steps = 0
        self._starts: array[float] = array("d")
        self._ends: array[float] = array("d")

    def reached(self) -> Reached:
        """Return how far the last step came."""
        return Reached.at(self._starts, self._ends)

    def close(self) -> None:
        for worker in (*self._copiers, *([self._communicator] if self._communicator is not None else [])):
            worker.close()
        self._copiers.clear()
        self._communicator = None
        if self._copying is not None:
            self._copying.close()
            self._copying = None

    def synchronize(self) -> None:
        """Do nothing: nothing is under way between two steps."""

    def forget(self) -> None:
        self._arena, self._slots, self._ports = None, {}, {}

    def _started(self) -> list[_Worker[BoundCopy]]:
        if not self._copiers:
            for number, home in enumerate(self._homes):
                out, into = 2 * number + 1, 2 * number + 2
                self._copiers += [
                    _Worker(out, f"{home.name}-out", partial(self._copy, True)),
                    _Worker(into, f"{home.name}-in", partial(self._copy, False)),
                ]
            for copier in self._copiers:
                copier.start()
        return self._copiers

    def _copy(self, out: bool, copy: BoundCopy) -> None:
        arena = self._arena
        if arena is None:
            raise StateError("a copy was asked for while no step was running")
        pieces = self._slots.get(copy.index)
        if pieces is None:
            address, count, _ = self._ports[copy.storage]
            inside = arena.address + copy.offset
            ctypes.memmove(*((address, inside) if out else (inside, address)), count)
            return
        at, home = copy.offset, self._homes[copy.home]
        move = home.write if out else home.read
        for piece in pieces:
            move(piece.offset, arena.memory(at, piece.bytes))
            at += piece.bytes

    def run(
        self, bound: Bound, table: ScopeTable, slots: Mapping[int, tuple[Piece, ...]], ports: dict[int, Port]
    ) -> Timeline:
        """Run one step and return when all queues are empty."""
        count, arena = len(bound.program.instructions), bound.arena
        starts, ends = self._starts, self._ends = array("d", bytes(8 * count)), array("d", bytes(8 * count))
        if not isinstance(arena, Arena):
            raise StateError("a step on the CPU was given an arena elsewhere")
        self._arena, self._slots, self._ports = arena, slots, ports
        inline = None
        if not slots and not bound.collectives:
            turns = (partial(self._copy, True), partial(self._copy, False))
            inline = _Inline(self._progress, [(work, turns[number % 2]) for number, work in enumerate(bound.copies)])
        copying = self._native_copying() if inline is None else None
        queues: _Queues
        if copying is None:
            self._progress.reset()
            queues = self._progress
        else:
            queues = copying
        begin = perf_counter()
        # No local variable may hold a failure: its traceback refers to this frame, and with it to program and arena.
        try:
            self._run_queues(bound, arena, table, inline, copying, queues)
            if queues.failure is not None:
                raise _explained(queues.failure)
        finally:
            queues.let_go()
        end = perf_counter()
        self._seconds = end - begin
        self._all_seconds += self._seconds
        self._steps += 1
        return Timeline(
            tuple(max(s - begin, 0.0) for s in starts), tuple(max(e - begin, 0.0) for e in ends), end - begin
        )

    def _run_queues(
        self,
        bound: Bound,
        arena: Arena,
        table: ScopeTable,
        inline: _Inline | None,
        copying: Copying | None,
        queues: _Queues,
    ) -> None:
        """Run all queues to their ends; ``queues`` has what failed in another one than that of ops."""
        starts, ends = self._starts, self._ends
        # Whose end is waited for is known before it begins: a signal may come in between.
        resting: list[Callable[[], None]] = []
        lender: Lender | None = None
        self.update_failure = None
        reporting = _Reporting(queues)
        try:
            with reporting:
                if copying is not None:
                    copies = self._copies_of(bound, arena)
                    resting.append(copying.finish)
                    copying.begin(copies, self._ports, starts, ends)
                elif inline is None:
                    for copier, work in zip(self._started(), bound.copies, strict=True):
                        if work:
                            resting.append(copier.finish)
                            copier.begin(work, queues, starts, ends)
                if bound.collectives:
                    communicator = self._talking()
                    resting.append(communicator.finish)
                    communicator.begin(bound.collectives, queues, starts, ends)
                lender = self._lender_of(arena, copying, inline)
                with internals.below_autograd():
                    self.update_failure = self._compute(bound, queues, table, inline, lender)
                if inline is not None:
                    inline.finish(starts, ends)
        finally:
            table.end()
            try:
                if lender is not None:
                    with reporting:
                        lender.end()
            finally:
                _finish(resting, queues)

    def _lender_of(self, arena: Arena, copying: Copying | None, inline: _Inline | None) -> Lender | None:
        """Return the arena's lender, after telling it how to stop the other queues."""
        lender, communicator = arena.lender, self._communicator
        if lender is None:
            return None
        copiers = self._copiers if copying is None and inline is None else []

        def pause() -> None:
            if communicator is not None:  # other processes may come to the end of a collective later than we can wait
                communicator.pause(waits=False)
            for copier in copiers:
                copier.pause()
            if copying is not None:
                copying.pause()

        def resume() -> None:
            if copying is not None:
                copying.resume()
            for copier in (*copiers, *([communicator] if communicator is not None else [])):
                copier.resume()

        lender.begin(self._starts, self._ends, pause, resume)
        return lender

    def _talking(self) -> _Worker[BoundRun]:
        """Return the started thread of collectives."""
        if self._communicator is None:
            end_when_threads_rest()
            self._communicator = _Worker(Lane.COMMUNICATE, "collectives", _communicate)
            self._communicator.start()
        return self._communicator

    def _native_copying(self) -> Copying | None:
        """Return the native copying threads; None if Python copies."""
        if self._copying is None and (library := load_native().library) is not None:
            self._copying = Copying(library, self._queues)
        return self._copying

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
        library = replay_if_there(build=is_worth_building(self._steps, self._all_seconds))
        if library is None:
            return None
        count = len(bound.runs)
        made = self._replayed[bound] = _Replayed(Replay(library, count), [False] * count)
        return made

    def _compute(
        self,
        bound: Bound,
        queues: _Queues,
        table: ScopeTable,
        inline: _Inline | None,
        lender: Lender | None,
    ) -> Exception | None:
        """Run all ops; returns what an optimizer's code has raised."""
        replayed = self._replay(bound)
        is_new = replayed is not None and replayed.until is None
        calls = _Calls(table, self._starts, self._ends, replayed if is_new else None, lender)
        if replayed is None or not is_new:
            calls.run_all(bound.runs, queues, inline, replayed)
            return calls.failure
        with replayed.replay.watching():
            calls.run_all(bound.runs, queues, inline, None)
        for number, run in enumerate(bound.runs):
            if replayed.taken[number]:
                waits = [(queue % self._queues, count) for queue, count in run.waits]
                replayed.replay.order(number, waits, run.number if run.awaited else None)
        replayed.until = spans(bound.runs, replayed.taken)
        replayed.ordered = spans(bound.runs, replayed.taken, ordered=True)
        return calls.failure


def _finish(resting: Sequence[Callable[[], None]], queues: _Queues) -> None:
    """Return when no copy and no collective is under way, whatever is raised meanwhile."""
    interrupted: BaseException | None = None
    for rests in resting:
        while True:
            try:
                rests()
                break
            except BaseException as error:  # the handler of a signal
                queues.fail(error)
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
