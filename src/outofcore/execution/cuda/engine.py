"""Run bound programs on a CUDA device.

The host issues instructions in program order and never waits within a step; marks order the streams. Copy streams begin
after the current work of the compute stream, which continues after the last copy. So the user's own stream can use
tensors on the device as usual. The user may read states in host memory at once, so a step returns after their copies.

Copies to and from a disk pass through host memory (``staging``). The engine ensures that a read from a file follows the
write of the same bytes: the program's waits for a copy out concern only the room on the device. A step with disk copies
returns when they are done, so that a failed transfer is reported at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from outofcore import _torch_internals as internals
from outofcore.errors import DeviceError, StateError, TransferError
from outofcore.execution.arena import ScopeTable, as_arena_error
from outofcore.execution.binding import BoundProgram
from outofcore.execution.cuda.interface import ActionList, Driver, Issuer, Mark, Stream, Tape
from outofcore.execution.cuda.preparing import (
    COLLECTIVE_STREAMS,
    Batch,
    Preparation,
    PreparedInstruction,
    PreparedProgram,
    make_collective_call,
    make_op_call,
)
from outofcore.execution.cuda.staging import BUFFER_BYTES, BUFFERS, Staging, first_stream, last_stream
from outofcore.execution.engines import Port, ReplayMode
from outofcore.execution.replay import NotIssuedError, Replay
from outofcore.execution.undo import StepProgress
from outofcore.program import Timeline
from outofcore.runtime.homes import DiskHome, HomeStore
from outofcore.runtime.native import load_native
from outofcore.runtime.slots import SlotPiece

# These streams begin after the compute stream at the start of a step; all others wait for them.
_BEGIN_STREAMS = (Stream.COPY_OUT, Stream.COPY_IN)
_DISK_BEGIN_STREAMS = (Stream.DISK_OUT, Stream.READ)
_LATE_NOTE = (
    "CUDA reports a failure late, possibly in a later op, and the device cannot be used any more in this process. "
    "Start it again, with CUDA_LAUNCH_BLOCKING=1 in the environment to find the op that failed."
)
# A graph of fewer ops is no faster than the ops one by one.
_GRAPH_OPS = 4


@dataclass(frozen=True, slots=True)
class _MeasuredSteps:
    first: int = 6  # used to compare plans
    every: int = 32  # then one step in this many


_MEASURED_STEPS = _MeasuredSteps()


class _GraphedCalls:
    """A callable that issues ops one by one in its first call, and as one CUDA graph in later calls if possible."""

    def __init__(self, driver: Driver, call: Callable[[], object]) -> None:
        self._driver, self._call = driver, call
        self._graph: Callable[[], object] | None = None
        self._calls = 0

    def __call__(self) -> None:
        self._calls += 1
        if self._calls == 2:  # libraries have initialized themselves in the first call
            self._graph = self._driver.capture_graph(self._call)
        (self._graph or self._call)()


class CudaEngine:
    """Issues the instructions of a step to the streams of one CUDA device."""

    def __init__(
        self,
        driver: Driver,
        homes: Sequence[HomeStore],
        buffer_bytes: int = BUFFER_BYTES,
        buffers: int = BUFFERS,
        *,
        replay: ReplayMode = True,
    ) -> None:
        self.update_failure: Exception | None = None  # failures of updates count as failures of ops
        self._can_replay = bool(replay)
        self._makes_graphs = replay == "graphs"
        memory, *behind = homes
        if not memory.in_memory or len(behind) > 1 or not all(isinstance(home, DiskHome) for home in behind):
            raise StateError(
                "a step on a GPU has a home in host memory and at most a disk behind it, and was given "
                f"{', '.join(home.name for home in homes)}; please report it"
            )
        self._driver = driver
        self._home = memory
        self._disk = next((home for home in behind if isinstance(home, DiskHome)), None)
        self._buffers = (buffer_bytes, buffers)
        self._staging: Staging | None = None  # made when a program first needs it
        self._issued = 0  # instructions of the last step
        self._is_complete = False  # whether all of the last step was issued
        self._has_failed = False  # whether the device failed in the last step
        self._bound: BoundProgram | None = None
        self._prepared: PreparedProgram | None = None

    def close(self) -> None:
        try:
            self._driver.synchronize()
        finally:
            self.release_step()

    def synchronize(self) -> None:
        self._driver.synchronize()

    def release_step(self) -> None:
        self._bound = self._prepared = None

    def read_progress(self) -> StepProgress | None:
        """Return the progress of the last step; None if it is unknown because the device failed."""
        if self._has_failed:
            return None
        count = 0 if self._prepared is None else len(self._prepared.issues)
        started = count if self._is_complete else self._issued
        ended = started if self._is_complete else started - 1
        return StepProgress([i < started for i in range(count)], [i < ended for i in range(count)])

    def run(
        self, bound: BoundProgram, table: ScopeTable, slots: Mapping[int, tuple[SlotPiece, ...]], ports: dict[int, Port]
    ) -> Timeline:
        """Issue one step to the device; return the timeline of the last measured step, perhaps an earlier one."""
        prepared, driver = self._prepared, self._driver
        if prepared is None or self._bound is not bound:
            disk = any(copy.home for queue in bound.copies for copy in queue)
            if disk and self._staging is None and self._disk is not None:
                self._staging = Staging(driver, self._disk, *self._buffers)
            preparation = Preparation(driver, self._home, self._staging, bound, slots)
            prepared = self._prepared = preparation.prepare()
            self._bound = bound
        measured = prepared.runs < _MEASURED_STEPS.first or prepared.runs % _MEASURED_STEPS.every == 0
        prepared.runs += 1
        if prepared.table is not table:
            prepared.table, prepared.batches, prepared.replayed_batches = table, None, None
            prepared.calls = {
                issue.index: make_collective_call(issue.run)
                if issue.stream is Stream.COMMUNICATE
                else make_op_call(issue.run, issue.scope, table, prepared.generators)
                for issue in prepared.issues
                if issue.run is not None
            }
        caller_marks: list[Mark] = []
        self._issued, self._is_complete, self._has_failed = 0, False, False
        try:
            with driver.step(bound), internals.below_autograd():
                self._begin(prepared, measured)
                if measured:
                    for issue in prepared.issues:
                        self._issued += 1
                        self._issue(issue, prepared.stamps, prepared.calls, ports, caller_marks)
                else:
                    self._play(prepared, ports, caller_marks)
                self._end(prepared, measured)
            self._is_complete = True
            prepared.generators.clear()
        except BaseException as error:  # any exception gets notes about unfinished work
            self._has_failed = isinstance(error, DeviceError | torch.AcceleratorError)
            self._finish_after_error(error)
            raise
        try:
            driver.finish(host=prepared.uses_disk or measured)
            for mark in (*prepared.host_marks, *caller_marks):
                driver.await_mark(mark)
            if measured or prepared.timeline is None:
                prepared.timeline = self._read_timeline(prepared)
        except DeviceError as error:
            self._has_failed = True
            error.add_note(_LATE_NOTE)
            raise
        return prepared.timeline

    def _finish_after_error(self, error: BaseException) -> None:
        """Wait for the issued work after an error; add further errors to ``error`` as notes."""
        try:
            self._driver.synchronize()
        except DeviceError as failure:
            self._has_failed = True
            error.add_note(_LATE_NOTE if str(failure) in str(error) else f"{failure}\n{_LATE_NOTE}")
        except TransferError as failure:
            error.add_note(f"A transfer failed as well: {failure}")

    def _begin(self, prepared: PreparedProgram, measured: bool) -> None:
        """Make the streams of a step wait for the work that the user has issued before."""
        driver = self._driver
        if measured and not prepared.stamps:
            prepared.stamps = [driver.create_mark(timed=True) for _ in range(2 * len(prepared.issues))]
        if measured:
            driver.record(Stream.COMPUTE, prepared.started)
        driver.record(Stream.COMPUTE, prepared.begin)
        collective_streams = COLLECTIVE_STREAMS if Stream.COMMUNICATE in prepared.ends else ()
        for stream in (*_BEGIN_STREAMS, *(_DISK_BEGIN_STREAMS if prepared.uses_disk else ()), *collective_streams):
            driver.wait(stream, prepared.begin)
        if self._staging is not None:
            self._staging.begin()

    def _end(self, prepared: PreparedProgram, measured: bool) -> None:
        """Make the compute stream wait until the other streams have finished the step."""
        driver = self._driver
        for stream, mark in prepared.ends.items():
            driver.record(stream, mark)
            driver.wait(Stream.COMPUTE, mark)
        if measured:
            driver.record(Stream.COMPUTE, prepared.stopped)

    def _issue(
        self,
        issue: PreparedInstruction,
        stamps: list[Mark],
        calls: Mapping[int, Callable[[], None]],
        ports: dict[int, Port],
        caller_marks: list[Mark],
    ) -> None:
        """Issue one instruction of a measured step, between two marks that record its times."""
        driver, stream = self._driver, issue.stream
        self._issue_waits(issue, driver)
        driver.record(first_stream(stream), stamps[2 * issue.index])
        if issue.run is not None:
            driver.launch(issue.run, calls[issue.index], stream)
        elif issue.arena_bytes is not None:
            self._copy_user_memory(issue, ports, caller_marks)
        else:
            self._copy_arena_and_home(issue, driver)
        driver.record(last_stream(stream), stamps[2 * issue.index + 1])
        self._issue_marks(issue, driver)

    def _play(self, prepared: PreparedProgram, ports: dict[int, Port], caller_marks: list[Mark]) -> None:
        """Issue a step without measuring it, from recorded op calls if possible."""
        if prepared.batches is None:
            prepared.batches = self._make_batches(prepared)
        native = self._can_replay and internals.has_no_dispatch_modes()
        if native and prepared.replayed_batches is None and prepared.table is not None:
            prepared.replayed_batches = self._record_step(
                prepared.batches, load_native(), prepared.table, ports, caller_marks
            )
            return
        for self._issued, play, issue in (
            prepared.replayed_batches if native and prepared.replayed_batches else prepared.batches
        ):
            if play is not None:
                play()
            elif issue is not None:
                self._copy_user_memory(issue, ports, caller_marks)

    def _record_step(
        self,
        batches: Sequence[Batch],
        library: ctypes.PyDLL,
        table: ScopeTable,
        ports: dict[int, Port],
        caller_marks: list[Mark],
    ) -> list[Batch]:
        """Issue a step and record its op calls; return batches that replay the recorded calls."""
        replay = Replay(library, len(batches))
        recorded: list[bool] = []
        with replay.watch_calls():
            for number, (self._issued, play, issue) in enumerate(batches):
                is_recorded = False
                if isinstance(play, Tape) and play.native is not None:
                    replay.add_actions(number, play.native)
                    is_recorded = True
                if play is not None:
                    run = None if issue is None else issue.run
                    expected = run is not None and replay.expect_call(run)
                    play()
                    if expected and run is not None and issue is not None:
                        is_recorded = replay.record_call(number, run, issue.scope)
                elif issue is not None:
                    self._copy_user_memory(issue, ports, caller_marks)
                recorded.append(is_recorded)
        merged: list[Batch] = []
        merged_end = 0
        for first, end in self._find_replayable(batches, recorded):
            merged += [*batches[merged_end:first], self._combine(batches, replay, first, end, table)]
            merged_end = end
        return [*merged, *batches[merged_end:]]

    def _find_replayable(self, batches: Sequence[Batch], recorded: list[bool]) -> list[tuple[int, int]]:
        """Return (first, end) of each span of recorded batches that can be combined into one batch."""
        kinds = [
            0 if not is_recorded else 1 + self._can_be_graphed(batch)
            for batch, is_recorded in zip(batches, recorded, strict=True)
        ]
        cuts = [number for number in range(1, len(kinds)) if kinds[number] != kinds[number - 1]]
        return [(first, end) for first, end in pairwise([0, *cuts, len(kinds)]) if kinds[first]]

    def _can_be_graphed(self, batch: Batch) -> bool:
        """Return whether a batch may be part of a CUDA graph; only ops on this device without randomness may be."""
        run = None if batch.instruction is None else batch.instruction.run
        if not self._makes_graphs or run is None or self._bound is None or self._bound.graph.ops[run.op].random:
            return False
        arguments = internals.tensor_leaves([*run.args, *run.kwargs.values()])
        return all(
            tensor.device == self._driver.device for tensor in (*arguments, *(result[2] for result in run.results))
        )

    def _combine(self, batches: Sequence[Batch], replay: Replay, first: int, end: int, table: ScopeTable) -> Batch:
        """Combine the batches from ``first`` to before ``end`` into one native call or CUDA graph."""
        tapes = [(number, batch.play) for number, batch in enumerate(batches) if isinstance(batch.play, Tape)]
        issued = [
            (number, tape.after_native)
            for number, tape in tapes
            if first <= number < end and tape.after_native is not None
        ]

        def call() -> None:
            """Replay the batches; after an error, record how many instructions were issued."""
            next_batch = first
            try:
                next_batch = replay.run(first, end, table, None, None, ends_scopes=True)
            except Exception as error:
                next_batch = replay.failed_entry
                self._issued, tape = batches[next_batch].issued_count, batches[next_batch].play
                if isinstance(error, NotIssuedError) and isinstance(tape, Tape) and tape.check is not None:
                    tape.check(error.status)
                if isinstance(error, RuntimeError):
                    raise as_arena_error(error) or error from error
                raise
            finally:
                for number, note in issued:
                    if number < next_batch:
                        note()

        if end - first >= _GRAPH_OPS and self._can_be_graphed(batches[first]):
            return Batch(batches[end - 1].issued_count, _GraphedCalls(self._driver, call))
        return Batch(batches[end - 1].issued_count, call)

    def _make_batches(self, prepared: PreparedProgram) -> list[Batch]:
        """Divide a program into batches, each issued by one call from Python."""
        batches: list[Batch] = []
        between = ActionList()

        def close(issued_count: int) -> None:
            """Append a tape of the actions collected since the last batch."""
            nonlocal between
            if between.items:
                batches.append(Batch(issued_count, self._driver.make_tape(between.items)))
                between = ActionList()

        for issue in prepared.issues:
            self._issue_waits(issue, between)
            if issue.run is not None:
                close(issue.index)
                launch = self._driver.make_launcher(issue.run, prepared.calls[issue.index], issue.stream)
                # A batch that only calls the op can be combined with others.
                batches.append(Batch(issue.index + 1, launch, issue if launch is prepared.calls[issue.index] else None))
            elif issue.arena_bytes is not None:
                close(issue.index)
                batches.append(Batch(issue.index + 1, None, issue))
            else:
                self._copy_arena_and_home(issue, between)
            self._issue_marks(issue, between)
        close(len(prepared.issues))
        return batches

    def _issue_waits(self, issue: PreparedInstruction, issuer: Issuer) -> None:
        """Issue the waits of an instruction, unless ``Staging.copy_in`` issues them."""
        if issue.written_mark is not None:
            issuer.wait(Stream.READ, issue.written_mark)
        if issue.stream is not Stream.DISK_IN or not issue.chunks:
            for mark in issue.waits:
                issuer.wait(issue.stream, mark)

    def _issue_marks(self, issue: PreparedInstruction, issuer: Issuer) -> None:
        """Record the marks that later instructions wait for."""
        if issue.mark is not None:
            issuer.record(issue.stream, issue.mark)
        if issue.stored_mark is not None:
            issuer.record(Stream.WRITE, issue.stored_mark)

    def _copy_arena_and_home(self, issue: PreparedInstruction, issuer: Issuer) -> None:
        """Issue a copy between the arena and a home, through staging buffers if the home is on a disk."""
        stream, index = issue.stream, issue.index
        if issue.chunks and self._staging is not None:
            if stream is Stream.DISK_OUT:
                self._staging.copy_out(index, issue.chunks, issuer)
            else:
                self._staging.copy_in(index, issue.chunks, issue.waits, issuer)
        for device, host in issue.pieces:
            inwards = stream is Stream.COPY_IN
            issuer.copy(stream, index, device if inwards else host, host if inwards else device)

    def _copy_user_memory(self, issue: PreparedInstruction, ports: dict[int, Port], caller_marks: list[Mark]) -> None:
        """Issue a copy between the arena and the caller's memory; append a mark if the call must wait for the copy."""
        driver, stream, index = self._driver, issue.stream, issue.index
        if issue.arena_bytes is None:
            return
        inwards = stream is Stream.COPY_IN
        port = ports[issue.storage]
        host, device = _bytes_of(port), issue.arena_bytes[: port.bytes]
        if not inwards:
            driver.copy_user_memory(stream, index, host, device)
        elif host.device.type != "cpu":
            driver.copy_user_memory(stream, index, device, host)
        else:
            staged = driver.to_pinned(host)
            driver.copy_user_memory(stream, index, device, staged)
            if staged is host:
                # The caller may change this memory as soon as the call returns.
                mark = driver.create_mark()
                driver.record(stream, mark)
                caller_marks.append(mark)

    def _read_timeline(self, prepared: PreparedProgram) -> Timeline:
        """Wait until the device is idle, and return the times of a measured step's instructions."""
        driver, stamps = self._driver, prepared.stamps
        driver.synchronize()
        since = [max(driver.seconds(prepared.started, stamp), 0.0) for stamp in stamps]
        return Timeline(
            tuple(since[::2]), tuple(since[1::2]), max(driver.seconds(prepared.started, prepared.stopped), 0.0)
        )


def _bytes_of(port: Port) -> torch.Tensor:
    tensor = port.tensor
    start = tensor.storage_offset() * tensor.element_size()
    return internals.view_storage_bytes(tensor)[start : start + port.bytes]
