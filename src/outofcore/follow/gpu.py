"""Prepare PyTorch for following a loop on a GPU: allocate what libraries keep beforehand, and refuse CUDA graphs.

The budget is what PyTorch's allocator may take from the device for the loop. The arena is the rest after cuBLAS'
workspaces, the segments of tensors below 64 KiB, and some for small tensors of the loop. Larger tensors that are on the
device beforehand, and not the models', do not count.

A CUDA graph is refused because it keeps the addresses of its capture, and its kernels run without visible ops: its
tensors may have moved, and its memory may have been given to others.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from outofcore._torch_internals import cublas_workspaces
from outofcore.analysis import LARGE_BYTES
from outofcore.errors import BudgetError, StateError
from outofcore.execution.cuda.driver import ALLOCATOR
from outofcore.follow.addresses import replace_attribute
from outofcore.units import format_bytes, round_up

# By name, what a graph does that cannot be followed.
_REFUSED = {"capture_begin": "captured", "replay": "replayed"}
# PyTorch's allocator takes multiples of a segment from the device for requests of this size and more.
_LARGE = ALLOCATOR.middle_segment // 2
# Of the budget, a part for small tensors of the loop; this at the least.
_SMALL_SHARE, _LEAST_SMALL = 64, 4 * ALLOCATOR.segment
# Of the arena, a part stays free: tensors that an op uses part what is free, and its results need holes.
_SPARE_SHARE = 32


@dataclass(frozen=True)
class Shares:
    """How a budget is divided: the arena, of which ``spare`` bytes are left free, and segments for small tensors.

    The rest, ``beside``, is what libraries keep.
    """

    arena: int
    spare: int
    segments: int
    beside: int = 0

    @property
    def room(self) -> int:
        """Bytes of tensors that can be in the arena."""
        return self.arena - self.spare


def shares_of(budget: int, device: torch.device) -> Shares:
    """Divide a budget, once the models have left the device and the workspaces are made.

    Raises ``BudgetError`` if it leaves no arena.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    beside = _bytes_beside(device)
    shares = divide(budget, beside)
    if shares.arena < _LARGE:
        least = beside + _LEAST_SMALL + _LARGE
        raise BudgetError(
            f"a budget of {format_bytes(budget)} leaves no room for a loop on {device}: libraries keep "
            f"{format_bytes(beside)} there, with tensors of less than {format_bytes(LARGE_BYTES)}. Give a budget of at "
            f"least {format_bytes(least)}",
            least,
        )
    return shares


def divide(budget: int, beside: int) -> Shares:
    """Divide a budget of which libraries keep so many bytes."""
    segments = max(round_up(budget // _SMALL_SHARE, ALLOCATOR.segment), _LEAST_SMALL)
    arena = (budget - beside - segments) // ALLOCATOR.segment * ALLOCATOR.segment
    return Shares(arena, arena // _SPARE_SHARE, segments, beside)


def budget_for(room: int, beside: int) -> int:
    """Return the smallest budget, in whole segments, whose arena has room for so many bytes of tensors."""
    segment = ALLOCATOR.segment
    enough = 2 * (room + beside + _LEAST_SMALL) // segment + 1
    return segment * bisect_left(range(enough), room, key=lambda count: divide(count * segment, beside).room)


def _bytes_beside(device: torch.device) -> int:
    """Return the bytes that PyTorch has from the device, without tensors of 64 KiB and more."""
    used = Counter(
        block["size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device.index
        for block in segment["blocks"]
        if block["state"] != "inactive" and block["size"] >= LARGE_BYTES
    )
    # Among those, workspaces are, for this thread and for autograd's. Not all are kept by each version of PyTorch.
    large = used - Counter(2 * cublas_workspaces())
    return torch.cuda.memory_reserved(device) - sum(large.elements())


def make_workspaces(device: torch.device) -> None:
    """Let cuBLAS allocate its workspaces for this thread and autograd's: they would stay in the arena otherwise."""
    with torch.cuda.device(device), torch.inference_mode(False), torch.enable_grad():
        for dtype in (torch.float32, torch.bfloat16):
            square = torch.ones(64, 64, dtype=dtype, device=device, requires_grad=True)
            # Backward itself asks cuBLASLt for nothing; what is computed again in it does.
            square.register_hook(lambda grad: torch.addmm(grad[0], grad, grad))
            with torch.autocast("cuda", enabled=False):
                torch.addmm(square[0], square, square @ square).sum().backward()
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def graphs_refused() -> Iterator[None]:
    """Raise ``StateError`` if a CUDA graph is captured or replayed within this context."""

    def refusing(done: str) -> Callable[..., Any]:
        def refuse(*_: object, **__: object) -> None:
            raise StateError(
                f"a CUDA graph cannot be {done} while a loop is followed, since tensors move; stop() the loop first, "
                "or run without graphs (with torch.compile: mode='default')"
            )

        return refuse

    with contextlib.ExitStack() as undo:
        for name, done in _REFUSED.items():
            replace_attribute(undo, torch.cuda.CUDAGraph, name, refusing(done))
        yield
