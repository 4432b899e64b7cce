"""A test double of a CUDA device, with a virtual clock, poisoned memory and a race detector.

Work does not run when it is issued. When the step ends, the queues run in an order that a device might have chosen,
drawn from a seed. An op runs at its start; a copy poisons its target at its start and reads its source at its end. So a
read before arrival, or a write before departure, changes the numbers.

A single seed may miss such an error. The race detector does not: it keeps vector clocks (Lamport's happened-before) and
raises when marks do not order two accesses to the same bytes, one of them a write.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from outofcore import _torch_internals as internals
from outofcore.errors import TransferError
from outofcore.execution.arena import AllocationRecorder, Arena
from outofcore.execution.binding import BoundProgram, BoundRun
from outofcore.execution.cuda.engine import CudaEngine
from outofcore.execution.cuda.interface import Action, DeviceCopy, FileTransfer, RecordMark, Stream, Tape, WaitForMark
from outofcore.program import Run
from outofcore.runtime.homes import HomeStore
from outofcore.runtime.memory import Region, map_anonymous, tensor_over
from outofcore.runtime.native import Flavor

POISON = 0xFF  # NaN as a floating-point number
OP_SECONDS = 1e-4

_Span = tuple[int, int, bool]  # first byte, end, whether it is written
_Clock = tuple[int, ...]  # by stream
_ZERO: _Clock = (0,) * len(Stream)
# Bytes of a file have addresses beyond all memory.
_FILE = 1 << 60


class RaceError(Exception):
    pass


@dataclass
class FakeMark:
    item: _Item | None = None  # its last record
    clock: _Clock = _ZERO


@dataclass
class _Item:
    stream: Stream
    seconds: float = 0.0
    after: _Item | None = None  # of another queue
    begin: Callable[[], object] | None = None
    end: Callable[[], object] | None = None
    started: float | None = None
    ended: float | None = None


@dataclass(frozen=True)
class _Access:
    start: int
    end: int
    writes: bool
    number: int
    label: str


@dataclass
class FakeCuda:
    """The double, as an ``interface.Driver``.

    Attributes:
        shared: factor of a copy's time while one runs in the other direction.
        waits_on_host: whether the end of a step waits for the device if the host asks for it. If not, steps follow each
            other directly, as when all state stays on the device.
        drop: numbers of the calls of ``wait`` to ignore.
        buffers: bytes and number of staging buffers: small, so that they are reused often in a small step.
        news: by the number of a call of ``wait``, whether it advanced the clock of its stream.
    """

    seed: int = 0
    bytes_per_s: float = 1e9
    shared: float = 1.0
    witness: bool = True
    waits_on_host: bool = True
    drop: frozenset[int] = frozenset()
    failing: bool = False
    buffers: tuple[int, int] = (16 * 4096, 2)
    waits: int = 0
    tapes: int = 0
    advanced_clock: dict[int, bool] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _queues: dict[Stream, deque[_Item]] = field(default_factory=lambda: {s: deque() for s in Stream})
    _clocks: dict[Stream, _Clock] = field(default_factory=lambda: dict.fromkeys(Stream, _ZERO))
    _accesses: dict[Stream, list[_Access]] = field(default_factory=lambda: {s: [] for s in Stream})
    _free: dict[Stream, float] = field(default_factory=lambda: dict.fromkeys(Stream, 0.0))
    _bound: BoundProgram | None = None
    _base: int = 0
    _failures: list[OSError] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def open_arena(self, count: int, reserve: int) -> Arena:
        arena = Arena(count, reserve=reserve)
        arena.view(0, arena.bytes).fill_(POISON)
        self._base = arena.address
        return arena

    @contextlib.contextmanager
    def step(self, bound: BoundProgram | None) -> Iterator[None]:
        self._bound = bound
        try:
            yield
        except BaseException:
            for queue in self._queues.values():
                queue.clear()
            raise
        finally:
            self._bound = None  # a reference would keep the memory of the arena

    def launch(self, run: BoundRun | None, call: Callable[[], object], stream: Stream = Stream.COMPUTE) -> None:
        if run is not None and self._bound is not None:
            self._touch(stream, self._spans(run.index), f"op {run.op}")
        self._enqueue(_Item(stream, OP_SECONDS * self._random.uniform(0.2, 2), begin=call))

    def make_launcher(self, run: BoundRun, call: Callable[[], object], stream: Stream) -> Callable[[], object]:
        return functools.partial(self.launch, run, call, stream)

    def copy(self, stream: Stream, index: int, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.numel() == source.numel()
        reads = (source.data_ptr(), source.data_ptr() + source.numel(), False)
        writes = (target.data_ptr(), target.data_ptr() + target.numel(), True)
        self._touch(stream, [reads, writes], f"copy {index}")
        seconds = target.numel() / self.bytes_per_s
        self._enqueue(_Item(stream, seconds, begin=lambda: target.fill_(POISON), end=lambda: target.copy_(source)))

    def copy_user_memory(self, stream: Stream, index: int, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copy(stream, index, target, source)

    def make_tape(self, actions: Sequence[Action]) -> Tape:
        self.tapes += 1
        return Tape(functools.partial(self._play, actions))

    def _play(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case WaitForMark(stream, mark):
                    self.wait(stream, mark)
                case RecordMark(stream, mark):
                    self.record(stream, mark)
                case DeviceCopy(stream, index, target, source):
                    self.copy(stream, index, target, source)
                case FileTransfer(stream, index, home, offset, memory):
                    self.transfer(stream, index, home, offset, memory)

    def capture_graph(self, call: Callable[[], object]) -> None:
        return None

    def allocate_staging(self, count: int) -> torch.Tensor:
        region = Region(map_anonymous(count), count)
        return tensor_over(region.memory(0, count)).fill_(POISON)

    def transfer(self, stream: Stream, index: int, home: HomeStore, offset: int, memory: torch.Tensor) -> None:
        assert stream in (Stream.WRITE, Stream.READ)
        assert memory.data_ptr() % 4096 == memory.numel() % 4096 == offset % 4096 == 0
        writes, count = stream is Stream.WRITE, memory.numel()
        # The address of a byte in a file is its offset.
        spans = [(_FILE + offset, _FILE + offset + count, writes)]
        spans.append((memory.data_ptr(), memory.data_ptr() + count, not writes))
        self._touch(stream, spans, f"transfer {index}")
        view = internals.memory_of(memory)

        def end() -> None:
            try:
                if self.failing:
                    raise OSError(errno.ENOSPC, "no space left")
                home.write(offset, view) if writes else home.read(offset, view)
            except OSError as error:
                self._failures.append(error)

        begin = None if writes else functools.partial(memory.fill_, POISON)
        self._enqueue(_Item(stream, count / self.bytes_per_s * self._random.uniform(0.5, 3), begin=begin, end=end))

    def create_mark(self, *, timed: bool = False) -> FakeMark:
        return FakeMark()

    def record(self, stream: Stream, mark: FakeMark) -> None:
        mark.item = _Item(stream)
        mark.clock = self._clocks[stream]
        self._enqueue(mark.item)

    def wait(self, stream: Stream, mark: FakeMark) -> None:
        number = self.waits
        self.waits += 1
        self.advanced_clock[number] = _join(self._clocks[stream], mark.clock) != self._clocks[stream]
        if number in self.drop or mark.item is None:
            return
        self._clocks[stream] = _join(self._clocks[stream], mark.clock)
        self._enqueue(_Item(stream, after=mark.item))

    def seconds(self, start: FakeMark, end: FakeMark) -> float:
        self._drain()
        return end.item.ended - start.item.ended

    def finish(self, *, host: bool) -> None:
        if host and self.waits_on_host:
            self.synchronize()
        else:
            # The test reads the results at once; the streams stay ordered as if the host had gone on.
            self._drain()
        self._check()

    def await_mark(self, mark: FakeMark) -> None:
        self._drain()

    def synchronize(self) -> None:
        self._drain()
        self._check()
        if self.waits_on_host:
            reached = self._clocks[Stream.COMPUTE]
            for clock in self._clocks.values():
                reached = _join(reached, clock)
            self._clocks = dict.fromkeys(Stream, reached)
            for accesses in self._accesses.values():
                accesses.clear()

    def _check(self) -> None:
        failures, self._failures = self._failures, []
        if failures:
            raise TransferError(f"a transfer failed: {failures[0]}")

    def to_pinned(self, source: torch.Tensor) -> torch.Tensor:
        return source.clone()

    def generators(self) -> Sequence[torch.Generator]:
        return (torch.default_generator,)

    def _spans(self, index: int) -> list[_Span]:
        program, graph = self._bound.program, self._bound.graph
        instruction = program.instructions[index]
        assert isinstance(instruction, Run)
        op = graph.ops[instruction.op]
        written = {*op.mutates, *op.creates}
        spans = [(program.blocks[b], s in written) for b, s in zip(instruction.blocks, op.touched, strict=True)]
        if instruction.workspace is not None:
            spans.append((program.blocks[instruction.workspace], True))
        return [(self._base + b.offset, self._base + b.offset + b.bytes, writes) for b, writes in spans]

    def _touch(self, stream: Stream, spans: Sequence[_Span], label: str) -> None:
        if self._bound is None:
            return
        clock = self._clocks[stream]
        number = clock[stream] + 1
        for accessing_stream, accesses in self._accesses.items():
            # The accesses of a stream are in order: from the first known one on, all are known.
            for access in reversed(accesses if self.witness and accessing_stream is not stream else []):
                if access.number <= clock[accessing_stream]:
                    break
                for start, end, writes in spans:
                    if access.start < end and start < access.end and (writes or access.writes):
                        raise RaceError(
                            f"{label} on {stream.name} and {access.label} on {accessing_stream.name} are in no order"
                        )
        self._accesses[stream] += [_Access(start, end, writes, number, label) for start, end, writes in spans]

    def _enqueue(self, item: _Item) -> None:
        if item.begin is not None or item.end is not None:  # marks and waits are no work
            clock = list(self._clocks[item.stream])
            clock[item.stream] += 1
            self._clocks[item.stream] = tuple(clock)
        self._queues[item.stream].append(item)

    def _drain(self) -> None:
        running: dict[Stream, _Item] = {}
        with internals.below_autograd():
            while any(self._queues.values()) or running:
                starts = {
                    stream: max(self._free[stream], queue[0].after.ended if queue[0].after is not None else 0.0)
                    for stream, queue in self._queues.items()
                    if queue and stream not in running and (queue[0].after is None or queue[0].after.ended is not None)
                }
                ends = {stream: item.started + item.seconds for stream, item in running.items()}
                if not starts and not ends:
                    raise RaceError("the streams wait for each other for ever")
                first = min([*starts.values(), *ends.values()])
                # At equal times, ends come before starts.
                stream = next((s for s, at in ends.items() if at == first), None)
                if stream is not None:
                    self._end(running.pop(stream), first)
                    continue
                stream = self._random.choice([s for s, at in starts.items() if at == first])
                item = self._queues[stream].popleft()
                item.started = first
                if item.begin is not None:
                    item.begin()
                running_streams = [s for s in running if s is not stream]
                if stream is not Stream.COMPUTE and any(s is not Stream.COMPUTE for s in running_streams):
                    item.seconds *= self.shared
                running[stream] = item

    def _end(self, item: _Item, at: float) -> None:
        if item.end is not None:
            item.end()
        item.ended = self._free[item.stream] = at


def _join(a: _Clock, b: _Clock) -> _Clock:
    return tuple(map(max, a, b))


class FakeBackend:
    flavor = Flavor.CPU
    alignment = 512
    warms_up = False
    timer = None

    def __init__(self, driver: FakeCuda) -> None:
        self.driver = driver
        self.device = driver.device

    def arena(self, count: int, reserve: int, room: int = 0) -> Arena:
        return self.driver.open_arena(count, reserve)

    def engine(self, homes: Sequence[HomeStore]) -> CudaEngine:
        return CudaEngine(self.driver, homes, *self.driver.buffers)

    def reserve(self, budget: int) -> int:
        return max(budget // 64, 65536)

    def unavailable_bytes(self, budget: int, output_bytes: int, state_bytes: int) -> int:
        return 0

    def prepare(self) -> None:
        pass

    def recorder(self) -> AllocationRecorder:
        return AllocationRecorder()

    def generators(self) -> Sequence[torch.Generator]:
        return self.driver.generators()

    def facts(self) -> Mapping[str, Any]:
        return {"device": "double"}
