"""All that the engine needs of CUDA, and no more: three streams, marks in them, copies, and one stretch of memory.

Two classes speak it: ``cuda.driver.CudaDriver`` on a GPU, and a double in the tests that runs the same programs on
the CPU under a virtual clock and finds every wait that is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import Protocol

import torch

from outofcore.execution.arenas import Memory
from outofcore.execution.binding import Bound, BoundRun


class Stream(IntEnum):
    """Work on a stream is done in order; streams know of each other only through marks. As in ``binding.QUEUES``."""

    COMPUTE = 0  # the ops: the stream that is the user's current one
    COPY_OUT = 1  # device to host
    COPY_IN = 2  # host to device


class Mark(Protocol):
    """A point in a stream, once it has been recorded there: a CUDA event. It may be recorded anew."""


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

    def launch(self, run: BoundRun | None, call: Callable[[], object]) -> None:
        """Issue an op on the compute stream: ``call`` hands its kernels to the device."""
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
        """
        ...

    def await_mark(self, mark: Mark) -> None:
        """Block until a mark is reached."""
        ...

    def synchronize(self) -> None:
        """Block until everything issued is done.

        Raises:
            TransferError: the device failed.
        """
        ...

    def pinned(self, source: torch.Tensor) -> torch.Tensor:
        """The bytes of a uint8 tensor where a copy to the device need not block: itself, or a copy in pinned memory."""
        ...

    def generators(self) -> Sequence[torch.Generator]:
        """The random generators that ops on the device may draw from."""
        ...
