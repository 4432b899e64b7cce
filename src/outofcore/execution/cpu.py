"""Runs a bound program on the CPU: ops in the caller's thread, copies on one thread out and one in."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from time import perf_counter

import torch

from outofcore import _torch_internals as internals
from outofcore.errors import OutOfCoreError, StateError, TransferError
from outofcore.execution.arena import Arena, ScopeTable, as_arena_error
from outofcore.execution.binding import Bound, BoundCopy, BoundRun, Draws
from outofcore.execution.homes import HomeStore
from outofcore.program import Program, Timeline

_COMPUTE, _OUT, _IN = 0, 1, 2


class _Progress:
    """How many instructions of each queue are done; who waits sleeps on one condition."""

    def __init__(self) -> None:
        self.done = [0, 0, 0]
        self.condition = threading.Condition()
        self.failure: BaseException | None = None

    def reset(self) -> None:
        self.done[:] = [0, 0, 0]
        self.failure = None

    def publish(self, queue: int, number: int) -> None:
        with self.condition:
            self.done[queue] = number
            self.condition.notify_all()

    def fail(self, error: BaseException) -> None:
        with self.condition:
            if self.failure is None:
                self.failure = error
            self.condition.notify_all()

    def wait(self, waits: Sequence[tuple[int, int]]) -> None:
        done = self.done
        for queue, count in waits:
            if done[queue] >= count:
                continue
            with self.condition:
                while done[queue] < count and self.failure is None:
                    self.condition.wait()
            if self.failure is not None:
                raise StateError("another queue of the step failed") from self.failure


class _Copier(threading.Thread):
    """Runs one copy queue, step after step, until it is closed."""

    def __init__(self, queue: int, progress: _Progress, copy: Callable[[BoundCopy], None]) -> None:
        super().__init__(name=f"outofcore-copy-{'out' if queue == _OUT else 'in'}", daemon=True)
        self._queue = queue
        self._progress = progress
        self._copy = copy
        self._condition = threading.Condition()
        self._work: Sequence[BoundCopy] | None = None
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._closed = False

    def begin(self, copies: Sequence[BoundCopy], starts: list[float], ends: list[float]) -> None:
        with self._condition:
            self._starts, self._ends = starts, ends
            self._work = copies
            self._condition.notify_all()

    def finish(self) -> None:
        """Return when the work of this step is done or given up."""
        with self._condition:
            while self._work is not None:
                self._condition.wait()

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()
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
            except BaseException as error:
                self._progress.fail(error)
            with self._condition:
                self._work = None
                self._condition.notify_all()

    def _run_all(self, work: Sequence[BoundCopy]) -> None:
        progress, queue, starts, ends = self._progress, self._queue, self._starts, self._ends
        for copy in work:
            if copy.waits:
                progress.wait(copy.waits)
            elif progress.failure is not None:
                return
            starts[copy.index] = perf_counter()
            self._copy(copy)
            ends[copy.index] = perf_counter()
            if copy.awaited:
                progress.publish(queue, copy.number)
            else:
                progress.done[queue] = copy.number


class CpuEngine:
    """The two copy threads and the loop that runs ops; one at a time per process is sensible.

    Args:
        home: where blocks with a slot go to and come from.
    """

    def __init__(self, home: HomeStore) -> None:
        self._home = home
        self._progress = _Progress()
        self._slots: dict[int, int] = {}
        self._ports: dict[int, tuple[int, int]] = {}
        self._arena: Arena | None = None
        self._copiers: tuple[_Copier, _Copier] | None = None

    def close(self) -> None:
        """End the copy threads."""
        if self._copiers is not None:
            for copier in self._copiers:
                copier.close()
            self._copiers = None

    def _started(self) -> tuple[_Copier, _Copier]:
        if self._copiers is None:
            self._copiers = (
                _Copier(_OUT, self._progress, self._copy_out),
                _Copier(_IN, self._progress, self._copy_in),
            )
            for copier in self._copiers:
                copier.start()
        return self._copiers

    def _copy_out(self, copy: BoundCopy) -> None:
        arena = self._arena
        if arena is None:
            raise StateError("a copy was asked for while no step was running")
        port = self._ports.get(copy.storage)
        if port is not None:
            ctypes.memmove(port[0], arena.address + copy.offset, port[1])
        else:
            self._home.write(self._slots[copy.storage], arena.memory(copy.offset, copy.bytes))

    def _copy_in(self, copy: BoundCopy) -> None:
        arena = self._arena
        if arena is None:
            raise StateError("a copy was asked for while no step was running")
        port = self._ports.get(copy.storage)
        if port is not None:
            ctypes.memmove(arena.address + copy.offset, port[0], port[1])
        else:
            self._home.read(self._slots[copy.storage], arena.memory(copy.offset, copy.bytes))

    def run(
        self,
        program: Program,
        bound: Bound,
        arena: Arena,
        table: ScopeTable,
        slots: dict[int, int],
        ports: dict[int, tuple[int, int]],
    ) -> Timeline:
        """Run one step and return when all queues are empty.

        Args:
            program: what ``bound`` was made from.
            bound: the instructions.
            arena: the device.
            table: the planned requests of each run.
            slots: for each storage that moves, the offset of its slot at the home.
            ports: for each input and output the address and bytes of the caller's memory.

        Raises:
            TransferError: a copy failed.
            ArenaError: an op asked for more memory than was planned and reserved.
        """
        count = len(program.instructions)
        starts, ends = [0.0] * count, [0.0] * count
        progress = self._progress
        progress.reset()
        self._arena, self._slots, self._ports = arena, slots, ports
        copiers = [
            (copier, work)
            for copier, work in zip(self._started(), (bound.copies_out, bound.copies_in), strict=True)
            if work
        ]
        begin = perf_counter()
        for copier, work in copiers:
            copier.begin(work, starts, ends)
        try:
            with internals.below_autograd():
                self._compute(bound, table, starts, ends)
        except BaseException as error:
            progress.fail(error)
            raise
        finally:
            table.end()
            for copier, _ in copiers:
                copier.finish()
        if progress.failure is not None:
            raise _explained(progress.failure)
        end = perf_counter()
        return Timeline(
            tuple(max(s - begin, 0.0) for s in starts), tuple(max(e - begin, 0.0) for e in ends), end - begin
        )

    def _compute(self, bound: Bound, table: ScopeTable, starts: list[float], ends: list[float]) -> None:
        progress = self._progress
        done = progress.done
        enter = table.begin
        generators = _Generators()
        for scope, run in enumerate(bound.runs):
            if run.waits:
                try:
                    progress.wait(run.waits)
                except StateError as error:
                    raise _explained(progress.failure or error) from error
            starts[run.index] = perf_counter()
            if run.draws is not Draws.FREELY:
                generators.before(run)
            enter(scope)
            try:
                out = run.func(*run.args, **run.kwargs)
            except RuntimeError as error:
                raise as_arena_error(error) or error from error
            finally:
                if run.draws is Draws.AGAIN:
                    generators.after()
            if run.results:
                leaves = (out,) if isinstance(out, torch.Tensor) else internals.tensor_leaves(out)
                for leaf, address, target in run.results:
                    result = leaves[leaf]
                    if result.data_ptr() != address or result.stride() != target.stride():
                        target.copy_(result.clone() if result.data_ptr() == address else result)
                leaves = None
            out = None
            ends[run.index] = perf_counter()
            if run.awaited:
                progress.publish(_COMPUTE, run.number)
            else:
                done[_COMPUTE] = run.number


class _Generators:
    """The states of the default generator that one step needs to draw the same numbers again.

    A state takes 5 KB of ordinary memory. Whoever else draws from the default generator while an op runs
    again, from another thread, draws the numbers of that op.
    """

    def __init__(self) -> None:
        self._generator = torch.default_generator
        self._saved: dict[int, torch.Tensor] = {}  # by op
        self._current: torch.Tensor | None = None

    def before(self, run: BoundRun) -> None:
        """Save the state before an op's first run, or set it for another."""
        state = self._generator.get_state()
        if run.draws is Draws.FIRST:
            self._saved[run.op] = state
        else:
            self._current = state
            self._generator.set_state(self._saved[run.op])

    def after(self) -> None:
        """Let the generator go on from where it was before the op ran again."""
        if self._current is not None:
            self._generator.set_state(self._current)


def _explained(failure: BaseException) -> BaseException:
    if isinstance(failure, OutOfCoreError):
        return failure
    if isinstance(failure, OSError):
        return TransferError(f"a copy to or from the home failed: {failure}")
    return failure
