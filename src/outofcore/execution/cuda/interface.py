"""All that the engine needs of CUDA: streams, marks in them, copies, and one stretch of memory.

Two classes implement it: ``cuda.driver.CudaDriver`` on a GPU, and a double in the tests that runs the same programs on
the CPU under a virtual clock and finds every missing wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch

from outofcore.execution.arena import Memory
from outofcore.execution.binding import Bound, BoundRun
from outofcore.runtime.homes import HomeStore


class Stream(IntEnum):
    """Work on a stream is done in order; only marks order work across streams.

    The first five are numbered as the queues of a program are (``binding.queue_number``), home 1 being a disk.
    """

    COMPUTE = 0  # the ops: the stream that is the user's current one
    COPY_OUT = 1  # device to host
    COPY_IN = 2  # host to device
    DISK_OUT = 3  # device to a staging buffer
    DISK_IN = 4  # a staging buffer to the device
    WRITE = 5  # a staging buffer to disk
    READ = 6  # disk to a staging buffer
    COMMUNICATE = -1  # the collectives: last in this list, and numbered as their queue is


class Mark(Protocol):
    """A point in a stream where it was last recorded: a CUDA event. It may be recorded again."""


@dataclass(frozen=True, slots=True)
class Wait:
    stream: Stream
    mark: Mark


@dataclass(frozen=True, slots=True)
class Record:
    stream: Stream
    mark: Mark


@dataclass(frozen=True, slots=True)
class Copy:
    stream: Stream
    index: int
    target: torch.Tensor
    source: torch.Tensor


@dataclass(frozen=True, slots=True)
class Move:
    """See ``Driver.transfer``."""

    stream: Stream
    index: int
    home: HomeStore
    offset: int
    memory: torch.Tensor


# What is issued alike at every step, beside ops.
Action = Wait | Record | Copy | Move


class Issuer(Protocol):
    """Takes copies, transfers, marks and waits: a device at once, a list for later (``Actions``)."""

    def copy(self, stream: Stream, index: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """See ``Driver.copy``."""
        ...

    def transfer(self, stream: Stream, index: int, home: HomeStore, offset: int, memory: torch.Tensor) -> None:
        """See ``Driver.transfer``."""
        ...

    def record(self, stream: Stream, mark: Mark) -> None:
        """See ``Driver.record``."""
        ...

    def wait(self, stream: Stream, mark: Mark) -> None:
        """See ``Driver.wait``."""
        ...


class Actions:
    """A list of actions to be issued later."""

    def __init__(self) -> None:
        self.list: list[Action] = []

    def copy(self, stream: Stream, index: int, target: torch.Tensor, source: torch.Tensor) -> None:
        self.list.append(Copy(stream, index, target, source))

    def transfer(self, stream: Stream, index: int, home: HomeStore, offset: int, memory: torch.Tensor) -> None:
        self.list.append(Move(stream, index, home, offset, memory))

    def record(self, stream: Stream, mark: Mark) -> None:
        self.list.append(Record(stream, mark))

    def wait(self, stream: Stream, mark: Mark) -> None:
        self.list.append(Wait(stream, mark))


@dataclass(frozen=True, eq=False)
class Tape:
    """Issues some actions in order each time that it is called within a step.

    ``native``, if any, is the address of a native function that does so and returns a status, and its three arguments;
    ``issued`` is to be called after it, and ``check`` raises the error of a status.
    """

    play: Callable[[], object]
    native: tuple[int, int, int, int] | None = None
    issued: Callable[[], object] | None = None
    check: Callable[[int], object] | None = None

    def __call__(self) -> None:
        self.play()


class Driver(Protocol):
    """A device with its streams. All methods return at once unless they say otherwise."""

    @property
    def device(self) -> torch.device: ...

    def open_arena(self, count: int, reserve: int) -> Memory:
        """Open an arena of ``count`` bytes, with ``reserve`` bytes for off-plan requests."""
        ...

    def step(self, bound: Bound | None) -> AbstractContextManager[object]:
        """Context in which a step is issued; None for measurements."""
        ...

    def launch(self, run: BoundRun | None, call: Callable[[], object], stream: Stream = Stream.COMPUTE) -> None:
        """Issue an op on the compute stream, or a collective on its own: ``call`` hands it to the device."""
        ...

    def launching(self, run: BoundRun, call: Callable[[], object], stream: Stream) -> Callable[[], object]:
        """Return a function that does what ``launch`` does, at each call within a step; perhaps ``call`` itself."""
        ...

    def copy(self, stream: Stream, index: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """Issue the copy of instruction ``index``; both sides are contiguous uint8 tensors of the same size."""
        ...

    def copy_callers(self, stream: Stream, index: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """Issue a copy where one side is PyTorch's memory, which must not be reused before the copy is done."""
        ...

    def staging(self, count: int) -> torch.Tensor:
        """Return page-aligned host memory as a uint8 tensor, pinned if the system allows it."""
        ...

    def transfer(self, stream: Stream, index: int, home: HomeStore, offset: int, memory: torch.Tensor) -> None:
        """Issue a transfer between a file and host memory; ``finish`` reports its failure.

        ``stream`` is ``WRITE`` or ``READ`` and gives the direction. ``offset`` and ``memory`` (uint8) are whole pages.
        Raises ``TransferError`` if it could not be issued.
        """
        ...

    def tape(self, actions: Sequence[Action]) -> Tape:
        """Prepare actions to be issued at less cost than one by one."""
        ...

    def graph(self, call: Callable[[], object]) -> Callable[[], object] | None:
        """Return a function that issues at once all that ``call`` issues to the compute stream, without issuing it now.

        ``call`` issues ops whose tensors never move, and is called once. None: the device or an op does not support it.
        """
        ...

    def mark(self, *, timed: bool = False) -> Mark:
        """Return a new mark, not yet recorded. A timed one supports ``seconds``."""
        ...

    def record(self, stream: Stream, mark: Mark) -> None:
        """Put a mark behind all that was issued to a stream so far."""
        ...

    def wait(self, stream: Stream, mark: Mark) -> None:
        """Let later work on a stream start after the mark, where it was recorded last, is reached."""
        ...

    def seconds(self, start: Mark, end: Mark) -> float:
        """Return the seconds between two timed marks that have been reached."""
        ...

    def finish(self, *, host: bool) -> None:
        """End a step; with ``host``, block until the host can read what the step has written.

        Raises ``DeviceError`` if the device failed, and, where this blocks, ``TransferError`` for a failed transfer.
        """
        ...

    def await_mark(self, mark: Mark) -> None:
        """Block until a mark is reached; raises ``DeviceError``."""
        ...

    def synchronize(self) -> None:
        """Block until everything issued is done; raises ``DeviceError`` or ``TransferError``."""
        ...

    def pinned(self, source: torch.Tensor) -> torch.Tensor:
        """Return a uint8 tensor from which a copy to the device need not block: itself, or a copy in pinned memory."""
        ...

    def generators(self) -> Sequence[torch.Generator]:
        """Return the random generators that ops on the device may draw from."""
        ...
