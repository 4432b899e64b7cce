"""Prepare PyTorch for an eager loop on a GPU: create workspaces, divide the budget, and refuse CUDA graphs.

The budget limits the memory that PyTorch's allocator takes from the device: cuBLAS' workspaces, segments of tensors
below 64 KiB, and the arena. It excludes other large tensors that were on the device before the loop.
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

# Refused methods of a CUDA graph, with the participle for the message.
_REFUSED_METHODS = {"capture_begin": "captured", "replay": "replayed"}
# For requests from this size on, PyTorch's allocator takes multiples of a segment from the device.
_LARGE_REQUEST = ALLOCATOR.middle_segment // 2
# The part of the budget for the loop's small tensors, and its minimum in bytes.
_SMALL_SHARE, _MIN_SMALL = 64, 4 * ALLOCATOR.segment
# This part of the arena stays free: an op's operands fragment the free space, and its results need holes.
_SPARE_SHARE = 32


@dataclass(frozen=True)
class BudgetShares:
    """A division of a budget, in bytes."""

    arena: int
    spare: int  # part of the arena that is left free
    segments: int  # for small tensors
    library_bytes: int = 0  # kept by libraries

    @property
    def room(self) -> int:
        """Bytes of tensors that the arena can hold."""
        return self.arena - self.spare


def measure_shares(budget: int, device: torch.device) -> BudgetShares:
    """Divide the budget between libraries and the loop's tensors; raises ``BudgetError`` if it is too small."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    libraries = _measure_library_bytes(device)
    shares = divide_budget(budget, libraries)
    if shares.arena < _LARGE_REQUEST:
        minimum = libraries + _MIN_SMALL + _LARGE_REQUEST
        raise BudgetError(
            f"a budget of {format_bytes(budget)} leaves no room for a loop on {device}: libraries, and "
            f"tensors of less than {format_bytes(LARGE_BYTES)}, take {format_bytes(libraries)} of it. Use a budget of "
            f"at least {format_bytes(minimum)}",
            minimum,
        )
    return shares


def divide_budget(budget: int, library_bytes: int) -> BudgetShares:
    """Divide a budget into library bytes, segments for small tensors, and an arena (negative if too small)."""
    segments = max(round_up(budget // _SMALL_SHARE, ALLOCATOR.segment), _MIN_SMALL)
    arena = (budget - library_bytes - segments) // ALLOCATOR.segment * ALLOCATOR.segment
    return BudgetShares(arena, arena // _SPARE_SHARE, segments, library_bytes)


def budget_for(room: int, library_bytes: int) -> int:
    """Return the smallest budget, in whole segments, that leaves ``room`` bytes for tensors."""
    segment = ALLOCATOR.segment
    max_segments = 2 * (room + library_bytes + _MIN_SMALL) // segment + 1
    return segment * bisect_left(
        range(max_segments), room, key=lambda count: divide_budget(count * segment, library_bytes).room
    )


def _measure_library_bytes(device: torch.device) -> int:
    """Return the GPU bytes reserved for cuBLAS workspaces, small tensors and PyTorch's caches."""
    used = Counter(
        block["size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device.index
        for block in segment["blocks"]
        if block["state"] != "inactive" and block["size"] >= LARGE_BYTES
    )
    # The large blocks include the workspaces of two threads. Some versions of PyTorch do not keep all of them.
    large = used - Counter(2 * cublas_workspaces())
    return torch.cuda.memory_reserved(device) - sum(large.elements())


def make_workspaces(device: torch.device) -> None:
    """Make cuBLAS allocate its workspaces now, for this thread and for autograd's thread."""
    with torch.cuda.device(device), torch.inference_mode(False), torch.enable_grad():
        for dtype in (torch.float32, torch.bfloat16):
            square = torch.ones(64, 64, dtype=dtype, device=device, requires_grad=True)
            # The backward pass itself does not use cuBLASLt, but recomputed ops in it do.
            square.register_hook(lambda grad: torch.addmm(grad[0], grad, grad))
            with torch.autocast("cuda", enabled=False):
                torch.addmm(square[0], square, square @ square).sum().backward()
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def refuse_graphs() -> Iterator[None]:
    """Make captures and replays of CUDA graphs raise ``StateError`` while this context is open."""

    def make_refusal(action: str) -> Callable[..., Any]:
        """Return a function that raises ``StateError``; ``action`` is a participle, such as "captured"."""

        def refuse(*_: object, **__: object) -> None:
            raise StateError(
                f"a CUDA graph cannot be {action} while a loop is running, because tensors move; stop() the loop "
                "first, or run without graphs (with torch.compile: mode='default')"
            )

        return refuse

    with contextlib.ExitStack() as undo:
        for name, action in _REFUSED_METHODS.items():
            replace_attribute(undo, torch.cuda.CUDAGraph, name, make_refusal(action))
        yield
