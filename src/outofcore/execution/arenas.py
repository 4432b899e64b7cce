"""What runs a step needs of an arena, on whichever device it lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from outofcore.execution.homes import HomeStore
from outofcore.execution.native import Native


@dataclass(frozen=True, slots=True)
class ArenaCounters:
    """What the scopes of an arena have been asked for since it was opened. All 0 without the native allocator."""

    served: int = 0  # requests served at their planned address
    small: int = 0  # off-plan requests below 64 KiB
    large: int = 0  # off-plan requests of 64 KiB and more that the reserve could hold
    large_bytes: int = 0  # their bytes, all added up
    live_bytes: int = 0  # their bytes in use now
    peak_live_bytes: int = 0  # the most bytes of theirs in use at once
    refused: int = 0  # off-plan requests that the reserve could not hold
    unclaimed: int = 0  # planned requests that had not come when their scope ended
    last_scope: int = -1  # the scope of the last off-plan request of 64 KiB and more


class Memory(Protocol):
    """What runs a step needs of an arena, on whichever device it lies."""

    native: Native
    bytes: int
    address: int

    @property
    def region(self) -> object:
        """Keeps the memory alive while it is referred to.

        Raises:
            StateError: the arena is closed.
        """
        ...

    @property
    def handle(self) -> int | None:
        """How the native allocator knows the arena; None without it."""
        ...

    def view(self, offset: int, count: int) -> torch.Tensor:
        """The bytes [offset, offset + count) as a uint8 tensor with a storage of its own of ``count`` bytes."""
        ...

    def save(self, offset: int, count: int, home: HomeStore, slot: int) -> None:
        """Copy the bytes [offset, offset + count) to a slot; returns when they are there."""
        ...

    def load(self, offset: int, count: int, home: HomeStore, slot: int) -> None:
        """Fill the bytes [offset, offset + count) from a slot; returns when they are there."""
        ...

    def move(self, start: int, to: int, count: int) -> bool:
        """Move bytes within the arena; False: nothing was done, since the device cannot move to bytes that overlap."""
        ...

    def discard(self, offset: int, count: int) -> None:
        """Let go of what the bytes [offset, offset + count) hold."""
        ...

    def counters(self) -> ArenaCounters:
        """What has been asked for so far."""
        ...

    def close(self) -> None:
        """Let go of the memory. May be called again."""
        ...
