"""All that the engine needs of CUDA, and no more: streams, marks in them, copies, and one stretch of memory.

Two classes speak it: ``cuda.driver.CudaDriver`` on a GPU, and a double in the tests that runs the same programs on
the CPU under a virtual clock and finds every wait that is missing.
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
from outofcore.execution.homes import HomeStore


class Stream(IntEnum):
    """Work on a stream is done in order; streams know of each other only through marks.

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
    """A point in a stream, once it has been recorded there: a CUDA event. It may be recorded anew."""


class FileHome(HomeStore, Protocol):
    """A home that is a file."""

    @property
    def descriptor(self) -> int:
        """Of the open file, for transfers of whole pages at given offsets."""
        ...

    @property
    def direct(self) -> bool:
        """Whether the page cache is bypassed."""
        ...


@dataclass(frozen=True, slots=True)
class Wait:
    """See ``Driver.wait``."""

    stream: Stream
    mark: Mark


@dataclass(frozen=True, slots=True)
class Record:
    """See ``Driver.record``."""

    stream: Stream
    mark: Mark


@dataclass(frozen=True, slots=True)
class Copy:
    """See ``Driver.copy``."""

    stream: Stream
    index: int
    target: torch.Tensor
    source: torch.Tensor


@dataclass(frozen=True, slots=True)
class Move:
    """See ``Driver.transfer``."""

    stream: Stream
    index: int
    home: FileHome
    offset: int
    memory: torch.Tensor


# What is issued alike at every step, beside ops.
Action = Wait | Record | Copy | Move


class Issuer(Protocol):
    """Whoever takes copies, transfers, marks and waits: a device at once, a list for later (``Actions``)."""

    def copy(self, stream: Stream, index: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """See ``Driver.copy``."""
        ...

    def transfer(self, stream: Stream, index: int, home: FileHome, offset: int, memory: torch.Tensor) -> None:
        """See ``Driver.transfer``."""
        ...

    def record(self, stream: Stream, mark: Mark) -> None:
        """See ``Driver.record``."""
        ...

    def wait(self, stream: Stream, mark: Mark) -> None:
        """See ``Driver.wait``."""
        ...


class Actions:
    """Writes down what is to be issued."""

    def __init__(self, actions: Sequence[Action] = ()) -> None:
        self.list: list[Action] = list(actions)

    def copy(self, stream: Stream, index: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """See ``Driver.copy``."""
        self.list.append(Copy(stream, index, target, source))

    def transfer(self, stream: Stream, index: int, home: FileHome, offset: int, memory: torch.Tensor) -> None:
        """See ``Driver.transfer``."""
        self.list.append(Move(stream, index, home, offset, memory))

    def record(self, stream: Stream, mark: Mark) -> None:
        """See ``Driver.record``."""
        self.list.append(Record(stream, mark))

    def wait(self, stream: Stream, mark: Mark) -> None:
        """See ``Driver.wait``."""
        self.list.append(Wait(stream, mark))

    def played_on(self, issuer: Issuer) -> None:
        """Issue all of them, one after the other."""
        for action in self.list:
            match action:
                case Wait(stream, mark):
                    issuer.wait(stream, mark)
                case Record(stream, mark):
                    issuer.record(stream, mark)
                case Copy(stream, index, target, source):
                    issuer.copy(stream, index, target, source)
                case Move(stream, index, home, offset, memory):
                    issuer.transfer(stream, index, home, offset, memory)


@dataclass(frozen=True, eq=False)
class Tape:
    """What issues some actions in order, each time that it is called within a step.

    Attributes:
        play: does so.
        native: the address of a function of native code that does so, which gives a status, and its three arguments;
            None: there is none.
        issued: to be called after that function.
        check: raises what a status of it means.
    """

    play: Callable[[], object]
    native: tuple[int, int, int, int] | None = None
    issued: Callable[[], object] | None = None
    check: Callable[[int], object] | None = None

    def __call__(self) -> None:
        """Issue them; raises as the methods of the driver do."""
        self.play()


class Driver(Protocol):
    """A device with its streams. All methods return at once unless they say otherwise."""

    @property
    def device(self) -> torch.device:
        """Where the arena lies and ops run."""
        ...

    def open_arena(self, count: int, reserve: int) -> Memory:
        """Memory on the device, of ``count`` bytes, for planned addresses.

        Args:
            count: bytes.
            reserve: bytes beyond it that off-plan requests may take.

        Raises:
            ArenaError: the device does not give the memory.
        """
        ...

    def step(self, bound: Bound | None) -> AbstractContextManager[object]:
        """In this context a step is issued; None: something else is, for measurements."""
        ...

    def launch(self, run: BoundRun | None, call: Callable[[], object], stream: Stream = Stream.COMPUTE) -> None:
        """Issue an op on the compute stream, or a collective on that of those: ``call`` hands it to the device."""
        ...

    def launching(self, run: BoundRun, call: Callable[[], object], stream: Stream) -> Callable[[], object]:
        """What does ``launch`` with these, each time that it is called within a step; perhaps ``call`` itself."""
        ...

    def copy(self, stream: Stream, index: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """Issue a copy of bytes.

        Args:
            stream: where to.
            index: of the instruction in the program.
            target: uint8, contiguous, on the device or in host memory.
            source: likewise, as many bytes.
        """
        ...

    def copy_callers(self, stream: Stream, index: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """The same as ``copy`` where one side is memory of PyTorch's, which is not to be reused before it is done."""
        ...

    def staging(self, count: int) -> torch.Tensor:
        """Host memory of ``count`` bytes as a uint8 tensor, from a page boundary on, pinned if the system lets it be.

        Raises:
            SpillError: there is not so much.
        """
        ...

    def transfer(self, stream: Stream, index: int, home: FileHome, offset: int, memory: torch.Tensor) -> None:
        """Issue a transfer between a file and host memory; whether it failed is said by ``finish``.

        Args:
            stream: ``WRITE`` or ``READ``, which says the direction.
            index: of the instruction in the program.
            home: whose file it is.
            offset: in the file, a multiple of the page size.
            memory: uint8, in host memory, whole pages from a page boundary on.

        Raises:
            TransferError: it could not be issued.
        """
        ...

    def tape(self, actions: Sequence[Action]) -> Tape:
        """What issues these for less than one by one."""
        ...

    def graph(self, call: Callable[[], object]) -> Callable[[], object] | None:
        """What issues again, in one go, all that ``call`` issues to the compute stream; it is not issued now.

        Args:
            call: issues ops whose tensors never move; called once.

        Returns:
            None: the device cannot, or an op is of a kind that cannot be issued so.
        """
        ...

    def mark(self, *, timed: bool = False) -> Mark:
        """A new mark, not yet recorded. A timed one can tell when it was reached."""
        ...

    def record(self, stream: Stream, mark: Mark) -> None:
        """Put a mark behind all that was issued to a stream so far."""
        ...

    def wait(self, stream: Stream, mark: Mark) -> None:
        """Let what is issued to a stream from now on start after the mark, where it was recorded last, is reached."""
        ...

    def seconds(self, start: Mark, end: Mark) -> float:
        """Seconds between two timed marks that have been reached."""
        ...

    def finish(self, *, host: bool) -> None:
        """End of a step.

        Args:
            host: whether the host is to look at memory that the step has written: then this blocks until all is done.

        Raises:
            DeviceError: the device failed.
            TransferError: a transfer of this step failed; told only where this blocks.
        """
        ...

    def await_mark(self, mark: Mark) -> None:
        """Block until a mark is reached.

        Raises:
            DeviceError: the device failed.
        """
        ...

    def synchronize(self) -> None:
        """Block until everything issued is done.

        Raises:
            DeviceError: the device failed.
            TransferError: a transfer failed.
        """
        ...

    def pinned(self, source: torch.Tensor) -> torch.Tensor:
        """The bytes of a uint8 tensor where a copy to the device need not block: itself, or a copy in pinned memory."""
        ...

    def generators(self) -> Sequence[torch.Generator]:
        """The random generators that ops on the device may draw from."""
        ...
