"""Prepare a bound program for its streams: the waits, copies and calls of each instruction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from outofcore import _torch_internals as internals
from outofcore.errors import GraphError
from outofcore.execution.arena import ScopeTable, as_arena_error
from outofcore.execution.binding import Bound, BoundCopy, BoundRun, Draws
from outofcore.execution.cuda.interface import Driver, Mark, Stream
from outofcore.execution.cuda.staging import Part, Staging, reads_after_writes
from outofcore.execution.engines import GeneratorStates, place_results
from outofcore.program import Timeline
from outofcore.runtime.homes import HomeStore
from outofcore.runtime.slots import Piece

# The compute stream continues after these streams, which wait for all others.
_END = (Stream.COPY_OUT, Stream.COPY_IN)
# Collectives have their own stream. (Never run: this needs a GPU for each process.)
BESIDE = (Stream.COMMUNICATE,)
_END_DISK = (Stream.WRITE, Stream.DISK_IN)


@dataclass(frozen=True, slots=True)
class Issue:
    index: int
    stream: Stream
    waits: tuple[Mark, ...]
    mark: Mark | None  # set if another queue waits for this instruction
    run: BoundRun | None = None
    scope: int = -1  # scope of ``run``
    pieces: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()  # of a copy: the bytes in the arena, and in host memory
    device: torch.Tensor | None = None  # of a copy to or from the caller's memory: its bytes in the arena
    storage: int = -1  # of a copy to or from the caller's memory
    parts: tuple[Part, ...] = ()  # of a copy to or from a disk
    after: Mark | None = None  # of a copy from a disk: reached when the file has the bytes to read
    stored: Mark | None = None  # of a copy to a disk, if a later copy reads the bytes


@dataclass
class Prepared:
    issues: list[Issue]
    shown: list[Mark]  # after the last copies, out and in, of bytes that the user may read in host memory
    disk: bool  # whether it copies to or from a disk
    begin: Mark
    ends: dict[Stream, Mark]
    stamps: list[Mark]  # two for each instruction; empty until a step is measured
    started: Mark
    stopped: Mark
    generators: GeneratorStates
    table: ScopeTable | None = None  # the table of ``calls``
    calls: dict[int, Callable[[], None]] = field(default_factory=dict[int, Callable[[], None]])  # ops, by instruction
    parts: list[Batch] | None = None  # set by the first step that is not measured
    replayed: list[Batch] | None = None  # the same with recorded ops, set when they are recorded
    runs: int = 0
    timeline: Timeline | None = None


class Batch(NamedTuple):
    reached: int  # number of instructions that have begun after it
    play: Callable[[], object] | None  # None for a copy of the caller's memory
    issue: Issue | None = None  # that copy, or the single op that ``play`` calls


class Preparation:
    """Prepares one program; raises ``GraphError`` if an instruction waits for a later one."""

    def __init__(
        self,
        driver: Driver,
        home: HomeStore,
        staging: Staging | None,
        bound: Bound,
        slots: Mapping[int, tuple[Piece, ...]],
    ) -> None:
        self._driver, self._home, self._staging = driver, home, staging
        self._bound, self._slots = bound, slots
        self._scopes = {run.index: scope for scope, run in enumerate(bound.runs)}
        self._marks: dict[tuple[int, int], Mark] = {}  # by stream and number of the instruction in it

    def prepare(self) -> Prepared:
        driver, bound, slots = self._driver, self._bound, self._slots
        issues: list[Issue] = []
        runs = {run.index: run for run in bound.runs}
        collectives = {run.index: run for run in bound.collectives}
        copies = {copy.index: (Stream(queue), copy) for queue, items in enumerate(bound.copies, 1) for copy in items}
        disk = any(copy.home for _, copy in copies.values())
        staged = sorted((index, stream is Stream.DISK_OUT) for index, (stream, copy) in copies.items() if copy.home)
        sources = reads_after_writes(staged, slots)
        stored = {index: driver.mark() for index in sorted(set(sources.values()))}
        for index in range(len(bound.program.instructions)):
            if index in collectives:
                stream, bound_item = Stream.COMMUNICATE, collectives[index]
            else:
                stream, bound_item = (Stream.COMPUTE, runs[index]) if index in runs else copies[index]
            mark = None
            if bound_item.awaited:
                mark = self._marks[stream, bound_item.number] = driver.mark()
            issue = self._issue(index, stream, bound_item, mark)
            after = stored[sources[index]] if index in sources else None
            issues.append(replace(issue, after=after, stored=stored.get(index)))
        shown = self._mark_shown(issues)
        started, stopped = driver.mark(timed=True), driver.mark(timed=True)
        collective_streams = BESIDE if collectives else ()
        ends = {stream: driver.mark() for stream in (*_END, *(_END_DISK if disk else ()), *collective_streams)}
        generators = GeneratorStates(driver.generators())
        return Prepared(issues, shown, disk, driver.mark(), ends, [], started, stopped, generators)

    def _mark_shown(self, issues: list[Issue]) -> list[Mark]:
        """Return marks after the last copies, out and in, of bytes that the user may read in host memory."""
        bound, slots = self._bound, self._slots
        shown = set(bound.program.results)
        marks: list[Mark] = []
        for queue in bound.copies:
            # Copies in count as well: the user may overwrite their source as soon as the call has returned.
            last = max((c.index for c in queue if c.storage in shown and c.index in slots and not c.home), default=None)
            if last is not None:
                mark = issues[last].mark or self._driver.mark()
                issues[last] = replace(issues[last], mark=mark)
                marks.append(mark)
        return marks

    def _issue(self, index: int, stream: Stream, bound_item: BoundRun | BoundCopy, mark: Mark | None) -> Issue:
        marks, arena, slots = self._marks, self._bound.arena, self._slots
        missing = [wait for wait in bound_item.waits if wait not in marks]
        if missing:
            raise GraphError(
                f"instruction {index} waits for instruction {missing[0][1]} of {Stream(missing[0][0]).name}, which "
                "comes later in the program; this is a bug in the plan: please report it"
            )
        waits = tuple(marks[wait] for wait in bound_item.waits)
        if isinstance(bound_item, BoundRun):
            return Issue(index, stream, waits, mark, run=bound_item, scope=self._scopes.get(index, -1))
        if index not in slots:
            device = arena.view(bound_item.offset, bound_item.bytes)
            return Issue(index, stream, waits, mark, device=device, storage=bound_item.storage)
        offset = bound_item.offset
        if bound_item.home and self._staging is not None:
            parts: list[Part] = []
            for piece in slots[index]:
                parts += self._staging.parts(arena.view, offset, piece.offset, piece.bytes)
                offset += piece.bytes
            return Issue(index, stream, waits, mark, parts=tuple(parts))
        pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
        for piece in slots[index]:
            pieces.append((arena.view(offset, piece.bytes), self._home.face(piece.offset, piece.bytes)))
            offset += piece.bytes
        return Issue(index, stream, waits, mark, pieces=tuple(pieces))


def collective(run: BoundRun) -> Callable[[], None]:
    def call() -> None:
        run.func(*run.args, **run.kwargs)

    return call


def op_call(run: BoundRun, scope: int, table: ScopeTable, generators: GeneratorStates) -> Callable[[], None]:
    """Return a function that issues an op and serves its memory requests at their planned addresses."""
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
    """Return the call of an op that draws no random numbers, specialized to reduce host time."""
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
