"""Runs bound programs on a CUDA device: the host issues instructions in program order, and marks order the streams.

Nothing in a step makes the host wait. Between two queues stand the waits of the program and no others: a copy in
waits for whoever held its room before, and a copy out for whoever wrote its bytes. Around a step, the copy streams
begin after what is on the compute stream by then, and the compute stream goes on after the last copy; so tensors on
the device can be used in the user's own stream as ever. Where a step leaves states in host memory, which the user may
read at once, the call returns when they are there.

Copies to and from a disk pass through host memory (``staging``). A queue of such copies is done with a block when the
stream on the device's side is. That a file holds what is read from it is for the engine to see to: of an instruction
that waits for a copy out, the program does not say whether it needs the room on the device or the bytes in the file.
A step that has copied to or from a disk returns when that is done, so that a transfer that failed is told at once.

Has run on the double of the tests; not on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from outofcore import _torch_internals as internals
from outofcore.errors import GraphError, StateError
from outofcore.execution.arena import Memory, ScopeTable, as_arena_error
from outofcore.execution.binding import Bound, BoundCopy, BoundRun, Draws
from outofcore.execution.cuda.interface import Driver, Mark, Stream
from outofcore.execution.cuda.staging import (
    BUFFER_BYTES,
    BUFFERS,
    Part,
    Staging,
    first_stream,
    last_stream,
    reads_after_writes,
)
from outofcore.execution.engines import GeneratorStates, Port, place_results
from outofcore.execution.homes import DiskHome, HomeStore, PinnedHome
from outofcore.execution.slots import Piece
from outofcore.execution.undo import Reached
from outofcore.program import Program, Timeline

# The streams that begin after the compute stream at the start of a step, and those after which it goes on; the others
# follow from these.
_BEGIN = (Stream.COPY_OUT, Stream.COPY_IN)
_BEGIN_DISK = (Stream.DISK_OUT, Stream.READ)
_END = (Stream.COPY_OUT, Stream.COPY_IN)
_END_DISK = (Stream.WRITE, Stream.DISK_IN)
# Steps of a program that are measured: the first ones, by which plans are judged, and then one in so many.
_FIRST_MEASURED = 6
_MEASURED_EVERY = 32


@dataclass(frozen=True, slots=True)
class _Issue:
    """One instruction, ready to be issued."""

    index: int
    stream: Stream
    waits: tuple[Mark, ...]
    mark: Mark | None  # where another queue waits for this instruction
    run: BoundRun | None = None
    scope: int = -1  # of the run
    pieces: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()  # of a copy: bytes in the arena, and in host memory
    device: torch.Tensor | None = None  # of a copy to or from the caller's memory: its bytes in the arena
    storage: int = -1  # likewise: what it is
    parts: tuple[Part, ...] = ()  # of a copy to or from a disk
    after: Mark | None = None  # of a copy from a disk: when the file holds what is to be read
    stored: Mark | None = None  # of a copy to a disk, where one from there reads it


@dataclass
class _Prepared:
    """A bound program with its marks."""

    issues: list[_Issue]
    shown: bool  # whether it leaves in host memory what the user may look at
    disk: bool  # whether it copies to or from a disk
    begin: Mark
    ends: dict[Stream, Mark]
    stamps: list[Mark]  # two for each instruction; empty until a step is measured
    started: Mark
    stopped: Mark
    runs: int = 0
    timeline: Timeline | None = None


class CudaEngine:
    """Issues steps to one device.

    Args:
        driver: the device.
        homes: in host memory, pinned at best; and behind it one on a disk, if there is one.
        buffer_bytes: of each of the buffers between the device and a disk.
        buffers: of them, for each direction.

    Raises:
        StateError: there are other homes.
    """

    def __init__(
        self, driver: Driver, homes: Sequence[HomeStore], buffer_bytes: int = BUFFER_BYTES, buffers: int = BUFFERS
    ) -> None:
        memory, *behind = homes
        if not memory.in_memory or len(behind) > 1 or not all(isinstance(home, DiskHome) for home in behind):
            raise StateError(
                "a step on a GPU has a home in host memory and at most a disk behind it, and was given "
                f"{', '.join(home.name for home in homes)}"
            )
        self._driver = driver
        self._home = memory
        self._disk = next((home for home in behind if isinstance(home, DiskHome)), None)
        self._buffers = (buffer_bytes, buffers)
        self._staging: Staging | None = None  # made when a program first needs it
        self._issued = 0  # of the last step
        self._whole = False  # whether the last step was issued to its end
        self._bound: Bound | None = None
        self._prepared: _Prepared | None = None

    def close(self) -> None:
        """Wait for what is under way."""
        self._driver.synchronize()
        self._bound = self._prepared = None

    def synchronize(self) -> None:
        """Return when everything issued is done."""
        self._driver.synchronize()

    def reached(self) -> Reached:
        """How far the last step came: all instructions before the one that could not be issued are done.

        A failure of the device itself shows later, when it is not known any more where.
        """
        count = 0 if self._prepared is None else len(self._prepared.issues)
        started = count if self._whole else self._issued
        done = started if self._whole else started - 1
        return Reached([i < started for i in range(count)], [i < done for i in range(count)])

    def run(
        self,
        program: Program,
        bound: Bound,
        arena: Memory,
        table: ScopeTable,
        slots: Mapping[int, tuple[Piece, ...]],
        ports: dict[int, Port],
    ) -> Timeline:
        """Issue one step; see ``Engine.run``. Every 32nd step is measured, and each of the first six."""
        prepared = self._prepared
        if prepared is None or self._bound is not bound:
            prepared = self._prepared = self._prepare(bound, arena, slots)
            self._bound = bound
        measured = prepared.runs < _FIRST_MEASURED or prepared.runs % _MEASURED_EVERY == 0
        prepared.runs += 1
        driver = self._driver
        generators = GeneratorStates(driver.generators())
        held: list[Mark] = []
        self._issued, self._whole = 0, False
        try:
            with driver.step(bound), internals.below_autograd():
                self._begin(prepared, measured)
                for issue in prepared.issues:
                    self._issued += 1
                    self._issue(issue, prepared.stamps if measured else None, table, generators, ports, held)
                self._end(prepared, measured)
            self._whole = True
        except BaseException:
            # What was issued uses memory that the caller is about to let go of.
            driver.synchronize()
            raise
        driver.finish(host=prepared.shown or prepared.disk or measured)
        for mark in held:
            driver.await_mark(mark)
        if measured or prepared.timeline is None:
            prepared.timeline = self._timeline(prepared)
        return prepared.timeline

    def _begin(self, prepared: _Prepared, measured: bool) -> None:
        driver = self._driver
        if measured and not prepared.stamps:
            prepared.stamps = [driver.mark(timed=True) for _ in range(2 * len(prepared.issues))]
        if measured:
            driver.record(Stream.COMPUTE, prepared.started)
        driver.record(Stream.COMPUTE, prepared.begin)
        for stream in (*_BEGIN, *(_BEGIN_DISK if prepared.disk else ())):
            driver.wait(stream, prepared.begin)
        if self._staging is not None:
            self._staging.begin()

    def _end(self, prepared: _Prepared, measured: bool) -> None:
        driver = self._driver
        for stream, mark in prepared.ends.items():
            driver.record(stream, mark)
            driver.wait(Stream.COMPUTE, mark)
        if measured:
            driver.record(Stream.COMPUTE, prepared.stopped)

    def _issue(
        self,
        issue: _Issue,
        stamps: list[Mark] | None,
        table: ScopeTable,
        generators: GeneratorStates,
        ports: dict[int, Port],
        held: list[Mark],
    ) -> None:
        driver, stream = self._driver, issue.stream
        if issue.after is not None:
            driver.wait(Stream.READ, issue.after)
        if stream is not Stream.DISK_IN or not issue.parts:
            for mark in issue.waits:
                driver.wait(stream, mark)
        if stamps is not None:
            driver.record(first_stream(stream), stamps[2 * issue.index])
        if issue.run is not None:
            driver.launch(issue.run, _call(issue.run, issue.scope, table, generators))
        elif issue.parts and self._staging is not None:
            if stream is Stream.DISK_OUT:
                self._staging.out(issue.index, issue.parts)
            else:
                self._staging.into(issue.index, issue.parts, issue.waits)
        else:
            self._copy(issue, ports, held)
        if stamps is not None:
            driver.record(last_stream(stream), stamps[2 * issue.index + 1])
        if issue.mark is not None:
            driver.record(stream, issue.mark)
        if issue.stored is not None:
            driver.record(Stream.WRITE, issue.stored)

    def _copy(self, issue: _Issue, ports: dict[int, Port], held: list[Mark]) -> None:
        driver, stream, index = self._driver, issue.stream, issue.index
        inwards = stream is Stream.COPY_IN
        for device, host in issue.pieces:
            driver.copy(stream, index, device if inwards else host, host if inwards else device)
        if issue.device is None:
            return
        port = ports[issue.storage]
        host, device = _bytes_of(port), issue.device[: port.bytes]
        if not inwards:
            driver.copy(stream, index, host, device)
        elif host.device.type != "cpu":
            driver.copy(stream, index, device, host)
        else:
            staged = driver.pinned(host)
            driver.copy(stream, index, device, staged)
            if staged is host:
                # The caller may change this memory as soon as the call has returned.
                mark = driver.mark()
                driver.record(stream, mark)
                held.append(mark)

    def _prepare(self, bound: Bound, arena: Memory, slots: Mapping[int, tuple[Piece, ...]]) -> _Prepared:
        driver = self._driver
        marks: dict[tuple[int, int], Mark] = {}
        issues: list[_Issue] = []
        runs = {run.index: (scope, run) for scope, run in enumerate(bound.runs)}
        copies = {copy.index: (Stream(queue), copy) for queue, found in enumerate(bound.copies, 1) for copy in found}
        disk = any(copy.home for _, copy in copies.values())
        if disk and self._staging is None and self._disk is not None:
            self._staging = Staging(driver, self._disk, *self._buffers)
        staged = sorted((index, stream is Stream.DISK_OUT) for index, (stream, copy) in copies.items() if copy.home)
        sources = reads_after_writes(staged, slots)
        stored = {index: driver.mark() for index in sorted(set(sources.values()))}
        for index in range(len(bound.program.instructions)):
            stream, item = (Stream.COMPUTE, runs[index][1]) if index in runs else copies[index]
            mark = None
            if item.awaited:
                mark = marks[stream, item.number] = driver.mark()
            issue = self._prepare_one(index, stream, item, mark, marks, runs, arena, slots)
            after = stored[sources[index]] if index in sources else None
            issues.append(replace(issue, after=after, stored=stored.get(index)))
        left = set(bound.program.results)
        # What is only read there counts as well: the user may write to it as soon as the call has returned.
        shown = any(copy.storage in left and copy.index in slots for queue in bound.copies for copy in queue)
        started, stopped = driver.mark(timed=True), driver.mark(timed=True)
        ends = {stream: driver.mark() for stream in (*_END, *(_END_DISK if disk else ()))}
        return _Prepared(issues, shown, disk, driver.mark(), ends, [], started, stopped)

    def _prepare_one(
        self,
        index: int,
        stream: Stream,
        item: BoundRun | BoundCopy,
        mark: Mark | None,
        marks: dict[tuple[int, int], Mark],
        runs: dict[int, tuple[int, BoundRun]],
        arena: Memory,
        slots: Mapping[int, tuple[Piece, ...]],
    ) -> _Issue:
        missing = [wait for wait in item.waits if wait not in marks]
        if missing:
            raise GraphError(
                f"instruction {index} waits for instruction {missing[0][1]} of {Stream(missing[0][0]).name}, which "
                "comes later in the program; this is a fault of the plan: please report it"
            )
        waits = tuple(marks[wait] for wait in item.waits)
        if isinstance(item, BoundRun):
            return _Issue(index, stream, waits, mark, run=item, scope=runs[index][0])
        if index not in slots:
            device = arena.view(item.offset, item.bytes)
            return _Issue(index, stream, waits, mark, device=device, storage=item.storage)
        at = item.offset
        if item.home and self._staging is not None:
            parts: list[Part] = []
            for piece in slots[index]:
                parts += self._staging.parts(arena.view, at, piece.offset, piece.bytes)
                at += piece.bytes
            return _Issue(index, stream, waits, mark, parts=tuple(parts))
        pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
        for piece in slots[index]:
            for offset, count in self._unbroken(piece.offset, piece.bytes):
                pieces.append((arena.view(at, count), self._home.face(offset, count)))
                at += count
        return _Issue(index, stream, waits, mark, pieces=tuple(pieces))

    def _unbroken(self, offset: int, count: int) -> list[tuple[int, int]]:
        return self._home.unbroken(offset, count) if isinstance(self._home, PinnedHome) else [(offset, count)]

    def _timeline(self, prepared: _Prepared) -> Timeline:
        driver, stamps = self._driver, prepared.stamps
        driver.synchronize()
        since = [max(driver.seconds(prepared.started, stamp), 0.0) for stamp in stamps]
        return Timeline(
            tuple(since[::2]), tuple(since[1::2]), max(driver.seconds(prepared.started, prepared.stopped), 0.0)
        )


def _call(run: BoundRun, scope: int, table: ScopeTable, generators: GeneratorStates) -> Callable[[], None]:
    """What issues an op, its requests for memory served at their planned addresses."""

    def call() -> None:
        if run.draws is not Draws.FREELY:
            generators.before(run)
        table.begin(scope)
        try:
            out = run.func(*run.args, **run.kwargs)
            if run.results:
                place_results(run, internals.result_leaves(out))
        except RuntimeError as error:
            raise as_arena_error(error) or error from error
        finally:
            table.end()
            if run.draws is Draws.AGAIN:
                generators.after()

    return call


def _bytes_of(port: Port) -> torch.Tensor:
    """The caller's memory as a uint8 tensor."""
    tensor = port.tensor
    start = tensor.storage_offset() * tensor.element_size()
    return internals.storage_bytes(tensor)[start : start + port.bytes]


__all__ = ["CudaEngine"]
