"""The engine's interface to CUDA: streams, marks in them, copies, and an arena; tests have a double on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch

from outofcore.execution.arena import DeviceArena
from outofcore.execution.binding import BoundProgram, BoundRun
from outofcore.runtime.homes import HomeStore


class Stream(IntEnum):
    """A queue of device work in order; only marks order work across streams."""

    COMPUTE = 0  # ops, on the user's current stream
    COPY_OUT = 1  # device to host
    COPY_IN = 2  # host to device
    DISK_OUT = 3  # device to a staging buffer
    DISK_IN = 4  # a staging buffer to the device
    WRITE = 5  # a staging buffer to disk
    READ = 6  # disk to a staging buffer
    COMMUNICATE = -1  # collectives, with the number of their queue; last in this list


class Mark(Protocol):
    """A point in a stream, where it was last recorded: a CUDA event. It may be recorded again."""


@dataclass(frozen=True, slots=True)
class WaitForMark:
    stream: Stream
    mark: Mark


@dataclass(frozen=True, slots=True)
class RecordMark:
    stream: Stream
    mark: Mark


@dataclass(frozen=True, slots=True)
class DeviceCopy:
    """A copy between device and host memory, which belongs to instruction ``index``."""

    stream: Stream
    index: int
    target: torch.Tensor
    source: torch.Tensor


@dataclass(frozen=True, slots=True)
class FileTransfer:
    """A transfer of whole pages between a file and host memory, which belongs to instruction ``index``."""

    stream: Stream
    index: int
    home: HomeStore
    offset: int
    memory: torch.Tensor


# Work other than ops that is the same at every step.
Action = WaitForMark | RecordMark | DeviceCopy | FileTransfer


class Issuer(Protocol):
    """Issues copies, transfers, marks and waits at once (``Driver``), or collects them (``ActionList``)."""

    def copy(self, stream: Stream, index: int, target: torch.Tensor, source: torch.Tensor) -> None: ...

    def transfer(self, stream: Stream, index: int, home: HomeStore, offset: int, memory: torch.Tensor) -> None: ...

    def record(self, stream: Stream, mark: Mark) -> None: ...

    def wait(self, stream: Stream, mark: Mark) -> None: ...


class ActionList:
    """Collects actions, for a tape to issue them at every step."""

    def __init__(self) -> None:
        self.items: list[Action] = []

    def copy(self, stream: Stream, index: int, target: torch.Tensor, source: torch.Tensor) -> None:
        self.items.append(DeviceCopy(stream, index, target, source))

    def transfer(self, stream: Stream, index: int, home: HomeStore, offset: int, memory: torch.Tensor) -> None:
        self.items.append(FileTransfer(stream, index, home, offset, memory))

    def record(self, stream: Stream, mark: Mark) -> None:
        self.items.append(RecordMark(stream, mark))

    def wait(self, stream: Stream, mark: Mark) -> None:
        self.items.append(WaitForMark(stream, mark))


@dataclass(frozen=True, eq=False)
class Tape:
    """Issues the same actions in order at each call within a step."""

    play: Callable[[], object]
    # The address of a native function that does the same and returns a status, and its three arguments.
    native: tuple[int, int, int, int] | None = None
    after_native: Callable[[], object] | None = None  # must be called after the native function
    check: Callable[[int], object] | None = None  # raises the error of a status

    def __call__(self) -> None:
        self.play()


class Driver(Protocol):
    """A device with its streams. Methods return at once unless their documentation states that they block."""

    @property
    def device(self) -> torch.device: ...

    def open_arena(self, count: int, reserve: int) -> DeviceArena: ...

    def step(self, bound: BoundProgram | None) -> AbstractContextManager[object]:
        """Return a context in which a step is issued; ``bound`` is None for measurements."""
        ...

    def launch(self, run: BoundRun | None, call: Callable[[], object], stream: Stream = Stream.COMPUTE) -> None:
        """Issue an op on the compute stream, or a collective on its own stream; ``call`` launches it."""
        ...

    def make_launcher(self, run: BoundRun, call: Callable[[], object], stream: Stream) -> Callable[[], object]:
        """Return a function that launches an op or a collective at every step; it may be ``call`` itself."""
        ...

    def copy(self, stream: Stream, index: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """Issue the copy of instruction ``index``; both sides are contiguous uint8 tensors of the same size."""
        ...

    def copy_user_memory(self, stream: Stream, index: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """Issue a copy to or from PyTorch's memory, which must not be reused before the copy is done."""
        ...

    def allocate_staging(self, count: int) -> torch.Tensor:
        """Return page-aligned host memory as a uint8 tensor, pinned if the system allows it."""
        ...

    def transfer(self, stream: Stream, index: int, home: HomeStore, offset: int, memory: torch.Tensor) -> None:
        """Issue a transfer of whole pages on ``WRITE`` or ``READ``; ``finish`` reports its failure."""
        ...

    def make_tape(self, actions: Sequence[Action]) -> Tape: ...

    def capture_graph(self, call: Callable[[], object]) -> Callable[[], object] | None:
        """Capture ``call`` as a graph without running it; return a function that runs the graph, or None."""
        ...

    def create_mark(self, *, timed: bool = False) -> Mark:
        """Return a new mark, not yet recorded. A timed one supports ``seconds``."""
        ...

    def record(self, stream: Stream, mark: Mark) -> None:
        """Record a mark after the work issued to a stream so far."""
        ...

    def wait(self, stream: Stream, mark: Mark) -> None:
        """Delay later work on a stream until the last recording of a mark is reached."""
        ...

    def seconds(self, start: Mark, end: Mark) -> float: ...

    def finish(self, *, host: bool) -> None:
        """End a step; with ``host``, block until the host can read its results, and raise the error of a transfer."""
        ...

    def await_mark(self, mark: Mark) -> None:
        """Block until a mark is reached; raise ``DeviceError`` if the device failed."""
        ...

    def synchronize(self) -> None:
        """Block until all issued work is done; raise ``DeviceError`` or ``TransferError`` if it failed."""
        ...

    def to_pinned(self, source: torch.Tensor) -> torch.Tensor:
        """Return ``source``, or a copy of it in pinned memory, so that copying it to the device does not block."""
        ...

    def generators(self) -> Sequence[torch.Generator]: ...
