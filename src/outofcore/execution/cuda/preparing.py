"""Prepare a bound program for its streams: the waits, copies and calls of each instruction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from outofcore import _torch_internals as internals
from outofcore.errors import GraphError
from outofcore.execution.arena import ScopeTable, as_arena_error
from outofcore.execution.binding import BoundCopy, BoundProgram, BoundRun, GeneratorUse
from outofcore.execution.cuda.interface import Driver, Mark, Stream
from outofcore.execution.cuda.staging import StagedChunk, Staging, reads_after_writes
from outofcore.execution.engines import GeneratorStates, place_results
from outofcore.program import Timeline
from outofcore.runtime.homes import HomeStore
from outofcore.runtime.slots import SlotPiece

# The compute stream continues after these streams, which wait for all others.
_END_STREAMS = (Stream.COPY_OUT, Stream.COPY_IN)
# Collectives have their own stream. (Never run: this needs a GPU for each process.)
COLLECTIVE_STREAMS = (Stream.COMMUNICATE,)
_DISK_END_STREAMS = (Stream.WRITE, Stream.DISK_IN)


@dataclass(frozen=True, slots=True)
class PreparedInstruction:
    """An instruction with its stream, its waits and marks, and the op or the bytes that it copies."""

    index: int
    stream: Stream
    waits: tuple[Mark, ...]
    mark: Mark | None  # set if another queue waits for this instruction
    run: BoundRun | None = None
    scope: int = -1  # scope of ``run``
    pieces: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()  # of a copy: the bytes in the arena, and in host memory
    arena_bytes: torch.Tensor | None = None  # of a copy to or from the caller's memory: its bytes in the arena
    storage: int = -1  # of a copy to or from the caller's memory
    chunks: tuple[StagedChunk, ...] = ()  # of a copy to or from a disk
    written_mark: Mark | None = None  # of a copy from a disk: reached when the file has the bytes to read
    stored_mark: Mark | None = None  # of a copy to a disk, if a later copy reads the bytes


@dataclass
class PreparedProgram:
    """A program that is ready to be issued again and again."""

    issues: list[PreparedInstruction]
    host_marks: list[Mark]  # after the last copies, out and in, of bytes that the user may read in host memory
    uses_disk: bool  # whether it copies to or from a disk
    begin: Mark
    ends: dict[Stream, Mark]
    stamps: list[Mark]  # two for each instruction; empty until a step is measured
    started: Mark
    stopped: Mark
    generators: GeneratorStates
    table: ScopeTable | None = None  # the table of ``calls``
    calls: dict[int, Callable[[], None]] = field(default_factory=dict[int, Callable[[], None]])  # ops, by instruction
    batches: list[Batch] | None = None  # set by the first step that is not measured
    replayed_batches: list[Batch] | None = None  # the same with recorded ops, set when they are recorded
    runs: int = 0
    timeline: Timeline | None = None


class Batch(NamedTuple):
    """A part of a step that is issued by one call from Python."""

    issued_count: int  # number of instructions that have begun after it
    play: Callable[[], object] | None  # None for a copy of the caller's memory
    instruction: PreparedInstruction | None = None  # that copy, or the single op that ``play`` calls


class Preparation:
    """Prepares one program; raises ``GraphError`` if an instruction waits for a later one."""

    def __init__(
        self,
        driver: Driver,
        home: HomeStore,
        staging: Staging | None,
        bound: BoundProgram,
        slots: Mapping[int, tuple[SlotPiece, ...]],
    ) -> None:
        self._driver, self._home, self._staging = driver, home, staging
        self._bound, self._slots = bound, slots
        self._scopes = {run.index: scope for scope, run in enumerate(bound.runs)}
        self._marks: dict[tuple[int, int], Mark] = {}  # by stream and number of the instruction in it

    def prepare(self) -> PreparedProgram:
        """Return the program with the stream, waits, tensors and marks of each instruction."""
        driver, bound, slots = self._driver, self._bound, self._slots
        issues: list[PreparedInstruction] = []
        runs = {run.index: run for run in bound.runs}
        collectives = {run.index: run for run in bound.collectives}
        copies = {copy.index: (Stream(queue), copy) for queue, items in enumerate(bound.copies, 1) for copy in items}
        disk = any(copy.home for _, copy in copies.values())
        staged = sorted((index, stream is Stream.DISK_OUT) for index, (stream, copy) in copies.items() if copy.home)
        sources = reads_after_writes(staged, slots)
        stored_marks = {index: driver.create_mark() for index in sorted(set(sources.values()))}
        for index in range(len(bound.program.instructions)):
            if index in collectives:
                stream, bound_item = Stream.COMMUNICATE, collectives[index]
            else:
                stream, bound_item = (Stream.COMPUTE, runs[index]) if index in runs else copies[index]
            mark = None
            if bound_item.awaited:
                mark = self._marks[stream, bound_item.number] = driver.create_mark()
            issue = self._prepare_instruction(index, stream, bound_item, mark)
            after = stored_marks[sources[index]] if index in sources else None
            issues.append(replace(issue, written_mark=after, stored_mark=stored_marks.get(index)))
        shown = self._mark_host_copies(issues)
        started, stopped = driver.create_mark(timed=True), driver.create_mark(timed=True)
        collective_streams = COLLECTIVE_STREAMS if collectives else ()
        ends = {
            stream: driver.create_mark()
            for stream in (*_END_STREAMS, *(_DISK_END_STREAMS if disk else ()), *collective_streams)
        }
        generators = GeneratorStates(driver.generators())
        return PreparedProgram(issues, shown, disk, driver.create_mark(), ends, [], started, stopped, generators)

    def _mark_host_copies(self, issues: list[PreparedInstruction]) -> list[Mark]:
        """Mark the copies that must end before the user accesses results in host memory; return the marks."""
        bound, slots = self._bound, self._slots
        # The user may read these bytes as soon as the call has returned, or overwrite the source of a copy in.
        shown = set(bound.program.results)
        marks: list[Mark] = []
        for queue in bound.copies:
            last = max((c.index for c in queue if c.storage in shown and c.index in slots and not c.home), default=None)
            if last is not None:
                mark = issues[last].mark or self._driver.create_mark()
                issues[last] = replace(issues[last], mark=mark)
                marks.append(mark)
        return marks

    def _prepare_instruction(
        self, index: int, stream: Stream, bound_item: BoundRun | BoundCopy, mark: Mark | None
    ) -> PreparedInstruction:
        """Return an instruction with its waits and tensors; raise ``GraphError`` if it waits for a later one."""
        marks, arena, slots = self._marks, self._bound.arena, self._slots
        missing = [wait for wait in bound_item.waits if wait not in marks]
        if missing:
            raise GraphError(
                f"instruction {index} waits for instruction {missing[0][1]} of {Stream(missing[0][0]).name}, which "
                "comes later in the program; this is a bug in the plan: please report it"
            )
        waits = tuple(marks[wait] for wait in bound_item.waits)
        if isinstance(bound_item, BoundRun):
            return PreparedInstruction(index, stream, waits, mark, run=bound_item, scope=self._scopes.get(index, -1))
        if index not in slots:
            device = arena.view(bound_item.offset, bound_item.bytes)
            return PreparedInstruction(index, stream, waits, mark, arena_bytes=device, storage=bound_item.storage)
        offset = bound_item.offset
        if bound_item.home and self._staging is not None:
            chunks: list[StagedChunk] = []
            for piece in slots[index]:
                chunks += self._staging.cut_chunks(arena.view, offset, piece.offset, piece.bytes)
                offset += piece.bytes
            return PreparedInstruction(index, stream, waits, mark, chunks=tuple(chunks))
        pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
        for piece in slots[index]:
            pieces.append((arena.view(offset, piece.bytes), self._home.tensor_of(piece.offset, piece.bytes)))
            offset += piece.bytes
        return PreparedInstruction(index, stream, waits, mark, pieces=tuple(pieces))


def make_collective_call(run: BoundRun) -> Callable[[], None]:
    def call() -> None:
        run.func(*run.args, **run.kwargs)

    return call


def make_op_call(run: BoundRun, scope: int, table: ScopeTable, generators: GeneratorStates) -> Callable[[], None]:
    """Return a function that issues an op; a repeated run in a step draws the random numbers of the first run."""
    call = _make_planned_call(run, scope, table)

    def draw() -> None:
        """Issue a random op that runs again in the step, with the same random numbers in each run."""
        generators.save_or_restore(run)
        try:
            call()
        finally:
            if run.generator_use is GeneratorUse.RESTORE:
                generators.reset()

    return call if run.generator_use is GeneratorUse.UNTOUCHED else draw


def _make_planned_call(run: BoundRun, scope: int, table: ScopeTable) -> Callable[[], None]:
    """Return a fast function that issues an op with its planned memory."""
    issue, results = internals.bind_op(run.func, run.args, run.kwargs), run.results
    begin, end, returned = table.begin, table.end, internals.count_returned_tensors(run.func)

    def call() -> None:
        """Issue an op with any kind of result."""
        begin(scope)
        try:
            out = issue()
            if results:
                place_results(run, (out,) if isinstance(out, torch.Tensor) else internals.result_leaves(out))
        except RuntimeError as error:
            raise as_arena_error(error) or error from error
        finally:
            end()

    def call_for_several() -> None:
        """Issue an op that returns several tensors."""
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
        return call_for_several
    [(_, address, _, stride)] = results

    def call_for_one() -> None:
        """Issue an op that returns one tensor."""
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
