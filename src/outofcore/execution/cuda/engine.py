"""Run bound programs on a CUDA device: the host issues instructions in program order, and marks order the streams.

The host waits for nothing within a step. The program's waits are the only ones between queues: a copy in waits for the
last user of its room, a copy out for the writer of its bytes. Copy streams begin after the current work of the compute
stream, which goes on after the last copy, so tensors on the device can be used in the user's own stream as ever. The
user may read states in host memory at once, so the call returns when the last copy of one of them is done.

Copies to and from a disk pass through host memory (``staging``). Such a queue is done with a block when the stream on
the device's side is. The engine ensures that a file holds what is read from it: the program does not say whether an
instruction that waits for a copy out needs the room on the device or the bytes in the file. A step with disk copies
returns when they are done, so that a failed transfer is reported at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import torch

from outofcore import _torch_internals as internals
from outofcore.errors import DeviceError, GraphError, StateError, TransferError
from outofcore.execution.arena import Memory, ScopeTable, as_arena_error
from outofcore.execution.binding import Bound, BoundCopy, BoundRun, Draws
from outofcore.execution.cuda.interface import Actions, Driver, Issuer, Mark, Stream, Tape
from outofcore.execution.cuda.staging import (
    BUFFER_BYTES,
    BUFFERS,
    Part,
    Staging,
    first_stream,
    last_stream,
    reads_after_writes,
)
from outofcore.execution.engines import GeneratorStates, Port, Replaying, place_results
from outofcore.execution.homes import DiskHome, HomeStore
from outofcore.execution.replay import NotIssuedError, Replay, replay_if_there
from outofcore.execution.slots import Piece
from outofcore.execution.undo import Reached
from outofcore.program import Program, Timeline

# The streams that begin after the compute stream at the start of a step, and those after which it goes on; the others
# follow from these.
_BEGIN = (Stream.COPY_OUT, Stream.COPY_IN)
_BEGIN_DISK = (Stream.DISK_OUT, Stream.READ)
_END = (Stream.COPY_OUT, Stream.COPY_IN)
# Collectives have a stream of their own, where a step has any. (Never run: it takes a GPU for each process.)
_BESIDE = (Stream.COMMUNICATE,)
_END_DISK = (Stream.WRITE, Stream.DISK_IN)
# Steps of a program that are measured: the first ones, by which plans are judged, and then one in so many.
_FIRST_MEASURED = 6
_LATE = (
    "A device tells of a failure late, at any op after the one that failed, and does nothing more in this process: "
    "start it again, with CUDA_LAUNCH_BLOCKING=1 in the environment to be told which op it was."
)
_MEASURED_EVERY = 32
# A program that has run so often goes on until a library is built.
_LONG_RUN = 20
# Fewer ops than that are issued one by one as quickly as a graph of them.
_GRAPH_OPS = 4


@dataclass(frozen=True, slots=True)
class _Issue:
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
    issues: list[_Issue]
    shown: list[Mark]  # behind the last copies, out and in, of what the user may look at in host memory
    disk: bool  # whether it copies to or from a disk
    begin: Mark
    ends: dict[Stream, Mark]
    stamps: list[Mark]  # two for each instruction; empty until a step is measured
    started: Mark
    stopped: Mark
    generators: GeneratorStates
    table: ScopeTable | None = None  # that the calls are made for
    calls: dict[int, Callable[[], None]] = field(default_factory=dict[int, Callable[[], None]])  # ops, by instruction
    parts: list[_Part] | None = None  # as soon as a step is not measured
    replayed: list[_Part] | None = None  # the same with ops that native code calls, as soon as they were taken down
    runs: int = 0
    timeline: Timeline | None = None


class _Graphed:
    """Issues ops one by one with ``call``, and from the second time on as one graph if possible."""

    def __init__(self, driver: Driver, call: Callable[[], object]) -> None:
        self._driver, self._call = driver, call
        self._graph: Callable[[], object] | None = None
        self._calls = 0

    def __call__(self) -> None:
        self._calls += 1
        if self._calls == 2:  # by then libraries have made what they make once
            self._graph = self._driver.graph(self._call)
        (self._graph or self._call)()


class _Part(NamedTuple):
    """A row of instructions that a step issues at once when it is not measured.

    ``reached`` is how many instructions have then begun. ``play`` issues what is the same in every step, None for a
    copy of the caller's memory; ``issue`` is that copy, or the single op that ``play`` calls.
    """

    reached: int
    play: Callable[[], object] | None
    issue: _Issue | None = None


class CudaEngine:
    """Issues steps to one device.

    Args:
        homes: in pinned host memory, and optionally a disk behind it; others raise ``StateError``.
        buffer_bytes: of each of the buffers between the device and a disk.
        buffers: for each direction.
        replay: whether native code may call ops; "graphs": and makes CUDA graphs of consecutive ones.
    """

    def __init__(
        self,
        driver: Driver,
        homes: Sequence[HomeStore],
        buffer_bytes: int = BUFFER_BYTES,
        buffers: int = BUFFERS,
        *,
        replay: Replaying = True,
    ) -> None:
        self.update_failure: Exception | None = None  # they are not told apart from those of ops
        self._replays = bool(replay)
        self._graphs = replay == "graphs"
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
        self._failed = False  # whether the device itself failed in it
        self._bound: Bound | None = None
        self._prepared: _Prepared | None = None

    def close(self) -> None:
        """Wait for what is under way."""
        try:
            self._driver.synchronize()
        finally:
            self.forget()

    def synchronize(self) -> None:
        self._driver.synchronize()

    def forget(self) -> None:
        self._bound = self._prepared = None

    def reached(self) -> Reached | None:
        """Return how far the last step came: all instructions before the one that could not be issued are done.

        A failure of the device itself shows later, when the place is unknown.
        """
        if self._failed:
            return None
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
        """Issue one step. The first six are measured, and every 32nd."""
        prepared = self._prepared
        if prepared is None or self._bound is not bound:
            prepared = self._prepared = self._prepare(bound, arena, slots)
            self._bound = bound
        measured = prepared.runs < _FIRST_MEASURED or prepared.runs % _MEASURED_EVERY == 0
        prepared.runs += 1
        driver = self._driver
        if prepared.table is not table:
            prepared.table, prepared.parts, prepared.replayed = table, None, None
            prepared.calls = {
                issue.index: _collective(issue.run)
                if issue.stream is Stream.COMMUNICATE
                else _call(issue.run, issue.scope, table, prepared.generators)
                for issue in prepared.issues
                if issue.run is not None
            }
        held: list[Mark] = []
        self._issued, self._whole, self._failed = 0, False, False
        try:
            with driver.step(bound), internals.below_autograd():
                self._begin(prepared, measured)
                if measured:
                    for issue in prepared.issues:
                        self._issued += 1
                        self._issue(issue, prepared.stamps, prepared.calls, ports, held)
                else:
                    self._play(prepared, ports, held)
                self._end(prepared, measured)
            self._whole = True
            prepared.generators.forget()
        except BaseException as error:
            self._failed = isinstance(error, DeviceError | torch.AcceleratorError)
            self._end_early(error)
            raise
        try:
            driver.finish(host=prepared.disk or measured)
            for mark in (*prepared.shown, *held):
                driver.await_mark(mark)
            if measured or prepared.timeline is None:
                prepared.timeline = self._timeline(prepared)
        except DeviceError as error:
            self._failed = True
            error.add_note(_LATE)
            raise
        return prepared.timeline

    def _end_early(self, error: BaseException) -> None:
        """Wait for what was issued, since the caller is about to release its memory; the first error stays."""
        try:
            self._driver.synchronize()
        except DeviceError as other:
            self._failed = True
            error.add_note(_LATE if str(other) in str(error) else f"{other}\n{_LATE}")
        except TransferError as other:
            error.add_note(f"Besides, a transfer failed: {other}")

    def _begin(self, prepared: _Prepared, measured: bool) -> None:
        driver = self._driver
        if measured and not prepared.stamps:
            prepared.stamps = [driver.mark(timed=True) for _ in range(2 * len(prepared.issues))]
        if measured:
            driver.record(Stream.COMPUTE, prepared.started)
        driver.record(Stream.COMPUTE, prepared.begin)
        beside = _BESIDE if Stream.COMMUNICATE in prepared.ends else ()
        for stream in (*_BEGIN, *(_BEGIN_DISK if prepared.disk else ()), *beside):
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
        stamps: list[Mark],
        calls: Mapping[int, Callable[[], None]],
        ports: dict[int, Port],
        held: list[Mark],
    ) -> None:
        driver, stream = self._driver, issue.stream
        self._ask_to_wait(issue, driver)
        driver.record(first_stream(stream), stamps[2 * issue.index])
        if issue.run is not None:
            driver.launch(issue.run, calls[issue.index], stream)
        elif issue.device is not None:
            self._copy(issue, ports, held)
        else:
            self._move(issue, driver)
        driver.record(last_stream(stream), stamps[2 * issue.index + 1])
        self._ask_to_mark(issue, driver)

    def _play(self, prepared: _Prepared, ports: dict[int, Port], held: list[Mark]) -> None:
        """Issue a step that is not measured: consecutive ops, and the actions between them, at once."""
        if prepared.parts is None:
            prepared.parts = self._parts(prepared)
        native = self._replays and internals.replayable()
        library = None
        if native and prepared.replayed is None:
            library = replay_if_there(build=prepared.runs >= _LONG_RUN)
        if library is not None and prepared.table is not None:
            prepared.replayed = self._taken_down(prepared.parts, library, prepared.table, ports, held)
            return
        for self._issued, play, issue in prepared.replayed if native and prepared.replayed else prepared.parts:
            if play is not None:
                play()
            elif issue is not None:
                self._copy(issue, ports, held)

    def _taken_down(
        self,
        parts: Sequence[_Part],
        library: ctypes.PyDLL,
        table: ScopeTable,
        ports: dict[int, Port],
        held: list[Mark],
    ) -> list[_Part]:
        """Issue a step and record its ops; returns the parts for later steps."""
        replay = Replay(library, len(parts))
        taken: list[bool] = []
        with replay.watching():
            for number, (self._issued, play, issue) in enumerate(parts):
                found = False
                if isinstance(play, Tape) and play.native is not None:
                    replay.issue(number, play.native)
                    found = True
                if play is not None:
                    run = None if issue is None else issue.run
                    expected = run is not None and replay.expect(run)
                    play()
                    if expected and run is not None and issue is not None:
                        found = replay.take(number, run, issue.scope)
                elif issue is not None:
                    self._copy(issue, ports, held)
                taken.append(found)
        merged: list[_Part] = []
        done = 0
        for first, end in self._cut(parts, taken):
            merged += [*parts[done:first], self._stretch(parts, replay, first, end, table)]
            done = end
        return [*merged, *parts[done:]]

    def _cut(self, parts: Sequence[_Part], taken: list[bool]) -> list[tuple[int, int]]:
        """Return begin and end of each row of ops and actions that can be issued at once."""
        kinds = [
            0 if not found else 1 + self._goes_into_a_graph(part) for part, found in zip(parts, taken, strict=True)
        ]
        cuts = [number for number in range(1, len(kinds)) if kinds[number] != kinds[number - 1]]
        return [(first, end) for first, end in pairwise([0, *cuts, len(kinds)]) if kinds[first]]

    def _goes_into_a_graph(self, part: _Part) -> bool:
        """Return whether an op draws no random numbers, and reads nothing on the host."""
        run = None if part.issue is None else part.issue.run
        if not self._graphs or run is None or self._bound is None or self._bound.graph.ops[run.op].random:
            return False
        given = internals.tensor_leaves([*run.args, *run.kwargs.values()])
        return all(tensor.device == self._driver.device for tensor in (*given, *(result[2] for result in run.results)))

    def _stretch(self, parts: Sequence[_Part], replay: Replay, first: int, end: int, table: ScopeTable) -> _Part:
        """Combine consecutive ops, each in its scope, and the actions between them into one native call."""
        tapes = [(number, part.play) for number, part in enumerate(parts) if isinstance(part.play, Tape)]
        issued = [(number, tape.issued) for number, tape in tapes if first <= number < end and tape.issued is not None]

        def call() -> None:
            reached = first
            try:
                reached = replay.run(first, end, table, None, None, ends_scopes=True)
            except Exception as error:
                reached = replay.at
                self._issued, tape = parts[reached].reached, parts[reached].play
                if isinstance(error, NotIssuedError) and isinstance(tape, Tape) and tape.check is not None:
                    tape.check(error.status)
                if isinstance(error, RuntimeError):
                    raise as_arena_error(error) or error from error
                raise
            finally:
                for number, note in issued:
                    if number < reached:
                        note()

        if end - first >= _GRAPH_OPS and self._goes_into_a_graph(parts[first]):
            return _Part(parts[end - 1].reached, _Graphed(self._driver, call))
        return _Part(parts[end - 1].reached, call)

    def _parts(self, prepared: _Prepared) -> list[_Part]:
        found: list[_Part] = []
        between = Actions()

        def close(reached: int) -> None:
            nonlocal between
            if between.list:
                found.append(_Part(reached, self._driver.tape(between.list)))
                between = Actions()

        for issue in prepared.issues:
            self._ask_to_wait(issue, between)
            if issue.run is not None:
                close(issue.index)
                launch = self._driver.launching(issue.run, prepared.calls[issue.index], issue.stream)
                # What only calls the op can be played together with others.
                found.append(_Part(issue.index + 1, launch, issue if launch is prepared.calls[issue.index] else None))
            elif issue.device is not None:
                close(issue.index)
                found.append(_Part(issue.index + 1, None, issue))
            else:
                self._move(issue, between)
            self._ask_to_mark(issue, between)
        close(len(prepared.issues))
        return found

    def _ask_to_wait(self, issue: _Issue, issuer: Issuer) -> None:
        if issue.after is not None:
            issuer.wait(Stream.READ, issue.after)
        if issue.stream is not Stream.DISK_IN or not issue.parts:
            for mark in issue.waits:
                issuer.wait(issue.stream, mark)

    def _ask_to_mark(self, issue: _Issue, issuer: Issuer) -> None:
        if issue.mark is not None:
            issuer.record(issue.stream, issue.mark)
        if issue.stored is not None:
            issuer.record(Stream.WRITE, issue.stored)

    def _move(self, issue: _Issue, issuer: Issuer) -> None:
        """Issue a copy between the arena and a home."""
        stream, index = issue.stream, issue.index
        if issue.parts and self._staging is not None:
            if stream is Stream.DISK_OUT:
                self._staging.out(index, issue.parts, issuer)
            else:
                self._staging.into(index, issue.parts, issue.waits, issuer)
        for device, host in issue.pieces:
            inwards = stream is Stream.COPY_IN
            issuer.copy(stream, index, device if inwards else host, host if inwards else device)

    def _copy(self, issue: _Issue, ports: dict[int, Port], held: list[Mark]) -> None:
        """Issue a copy between the arena and the caller's memory."""
        driver, stream, index = self._driver, issue.stream, issue.index
        if issue.device is None:
            return
        inwards = stream is Stream.COPY_IN
        port = ports[issue.storage]
        host, device = _bytes_of(port), issue.device[: port.bytes]
        if not inwards:
            driver.copy_callers(stream, index, host, device)
        elif host.device.type != "cpu":
            driver.copy_callers(stream, index, device, host)
        else:
            staged = driver.pinned(host)
            driver.copy_callers(stream, index, device, staged)
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
        collectives = {run.index: run for run in bound.collectives}
        copies = {copy.index: (Stream(queue), copy) for queue, found in enumerate(bound.copies, 1) for copy in found}
        disk = any(copy.home for _, copy in copies.values())
        if disk and self._staging is None and self._disk is not None:
            self._staging = Staging(driver, self._disk, *self._buffers)
        staged = sorted((index, stream is Stream.DISK_OUT) for index, (stream, copy) in copies.items() if copy.home)
        sources = reads_after_writes(staged, slots)
        stored = {index: driver.mark() for index in sorted(set(sources.values()))}
        for index in range(len(bound.program.instructions)):
            if index in collectives:
                stream, item = Stream.COMMUNICATE, collectives[index]
            else:
                stream, item = (Stream.COMPUTE, runs[index][1]) if index in runs else copies[index]
            mark = None
            if item.awaited:
                mark = marks[stream, item.number] = driver.mark()
            issue = self._prepare_one(index, stream, item, mark, marks, runs, arena, slots)
            after = stored[sources[index]] if index in sources else None
            issues.append(replace(issue, after=after, stored=stored.get(index)))
        shown = self._mark_shown(bound, issues, slots)
        started, stopped = driver.mark(timed=True), driver.mark(timed=True)
        beside = _BESIDE if collectives else ()
        ends = {stream: driver.mark() for stream in (*_END, *(_END_DISK if disk else ()), *beside)}
        generators = GeneratorStates(driver.generators())
        return _Prepared(issues, shown, disk, driver.mark(), ends, [], started, stopped, generators)

    def _mark_shown(self, bound: Bound, issues: list[_Issue], slots: Mapping[int, tuple[Piece, ...]]) -> list[Mark]:
        """Return marks behind the last copies, out and in, of what the user may read in host memory."""
        left = set(bound.program.results)
        found: list[Mark] = []
        for queue in bound.copies:
            # What is only read there counts as well: the user may write to it as soon as the call has returned.
            last = max((c.index for c in queue if c.storage in left and c.index in slots and not c.home), default=None)
            if last is not None:
                mark = issues[last].mark or self._driver.mark()
                issues[last] = replace(issues[last], mark=mark)
                found.append(mark)
        return found

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
            scope = runs[index][0] if index in runs else -1
            return _Issue(index, stream, waits, mark, run=item, scope=scope)
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
            pieces.append((arena.view(at, piece.bytes), self._home.face(piece.offset, piece.bytes)))
            at += piece.bytes
        return _Issue(index, stream, waits, mark, pieces=tuple(pieces))

    def _timeline(self, prepared: _Prepared) -> Timeline:
        driver, stamps = self._driver, prepared.stamps
        driver.synchronize()
        since = [max(driver.seconds(prepared.started, stamp), 0.0) for stamp in stamps]
        return Timeline(
            tuple(since[::2]), tuple(since[1::2]), max(driver.seconds(prepared.started, prepared.stopped), 0.0)
        )


def _collective(run: BoundRun) -> Callable[[], None]:
    """Return a function that issues a collective, whose memory the communication library manages."""

    def call() -> None:
        run.func(*run.args, **run.kwargs)

    return call


def _call(run: BoundRun, scope: int, table: ScopeTable, generators: GeneratorStates) -> Callable[[], None]:
    """Return a function that issues an op, its requests for memory served at their planned addresses."""
    call = _served(run, scope, table)

    def draw() -> None:
        generators.before(run)
        try:
            call()
        finally:
            if run.draws is Draws.AGAIN:
                generators.after()

    return call if run.draws is Draws.FREELY else draw


def _served(run: BoundRun, scope: int, table: ScopeTable) -> Callable[[], None]:
    """Return ``_call`` for an op without random state: a fast path, since the host's time goes here."""
    issue, results = internals.issuing(run.func, run.args, run.kwargs), run.results
    begin, end, returned = table.begin, table.end, internals.tensors_returned(run.func)

    def call() -> None:
        begin(scope)
        try:
            out = issue()
            if results:
                place_results(run, (out,) if isinstance(out, torch.Tensor) else internals.result_leaves(out))
        except RuntimeError as error:
            raise as_arena_error(error) or error from error
        finally:
            end()

    def call_for_some() -> None:
        begin(scope)
        try:
            out = issue()
            for leaf, address, _, stride in results:
                result = out[leaf]
                if result.data_ptr() != address or result.stride() != stride:
                    place_results(run, out)
                    break
        except RuntimeError as error:
            raise as_arena_error(error) or error from error
        finally:
            end()

    if not results or not returned:
        return call
    if returned > 1:
        return call_for_some
    [(_, address, _, stride)] = results

    def call_for_one() -> None:
        begin(scope)
        try:
            out = issue()
            if out.data_ptr() != address or out.stride() != stride:
                place_results(run, (out,))
        except RuntimeError as error:
            raise as_arena_error(error) or error from error
        finally:
            end()

    return call_for_one


def _bytes_of(port: Port) -> torch.Tensor:
    """Return the caller's memory as a uint8 tensor."""
    tensor = port.tensor
    start = tensor.storage_offset() * tensor.element_size()
    return internals.storage_bytes(tensor)[start : start + port.bytes]


__all__ = ["CudaEngine"]
