"""What the executor needs of a home: a place for bytes that are not on the device.

A home is one stretch of bytes; each storage has a slot of whole pages in it at a planned offset. Between
steps a slot has a face: a tensor over its bytes, through which the user sees and changes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from outofcore.errors import TransferError
from outofcore.units import PAGE_BYTES, round_up


class HomeStore(Protocol):
    """What the executor needs of a home. Offsets of slots are multiples of the page size.

    ``write`` and ``read`` block with the GIL released and may be called from several threads. They own a
    slot's last page whole. Transfers of one slot, and the use of its face, are put in order by the caller.
    """

    @property
    def name(self) -> str:
        """The name in costs and reports: "host", "disk"."""
        ...

    @property
    def identity(self) -> str:
        """Names the link: homes of one identity are equally fast."""
        ...

    @property
    def in_memory(self) -> bool:
        """Whether slots are memory, so that bytes move within the home without any I/O."""
        ...

    @property
    def bytes(self) -> int:
        """Bytes that slots may occupy now."""
        ...

    @property
    def capacity(self) -> int:
        """Bytes that slots could occupy at most, as far as can be told."""
        ...

    def check(self, count: int) -> None:
        """Refuse a total of ``count`` bytes that the home cannot hold, before anything is allocated.

        Raises:
            SpillError: it cannot.
        """
        ...

    def ensure(self, count: int) -> None:
        """Make room for a total of ``count`` bytes. Slots and faces that exist stay as they are.

        Raises:
            SpillError: there is not so much room.
        """
        ...

    def reserve(self, count: int) -> int:
        """Make room for one more slot of ``count`` bytes, and give its offset.

        Raises: as ``ensure``.
        """
        ...

    def write(self, offset: int, source: memoryview) -> None:
        """Copy ``source`` into the slot at ``offset``.

        Raises:
            TransferError: the copy failed.
        """
        ...

    def read(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` from the slot at ``offset``.

        Raises:
            TransferError: the copy failed.
        """
        ...

    def face(self, offset: int, count: int) -> torch.Tensor:
        """The slot's bytes as a uint8 tensor with a storage of its own of ``count`` bytes.

        It shows what was last written, and what is stored through it is what is next read. It stays valid
        when the home is closed.
        """
        ...

    def drop_cache(self, face: torch.Tensor) -> None:
        """Give back physical memory that a face occupies for caching alone; its contents stay."""
        ...

    def start(self) -> None:
        """Called when a step starts: between steps the user may have changed what lies here.

        Raises:
            TransferError: not all of it is there any more.
        """
        ...

    def sibling(self, count: int) -> HomeStore:
        """An empty home of its own on the same link, with room for ``count`` bytes or more: to measure on.

        Raises:
            SpillError: there is no such room.
        """
        ...

    def close(self) -> None:
        """Give everything back to the system, apart from faces in use. May be called again."""
        ...


def slot_layout(sizes: Sequence[int], start: int = 0) -> tuple[tuple[int, ...], int]:
    """Offsets for slots of the given sizes, one after the other in whole pages from ``start`` on, and their end."""
    offsets: list[int] = []
    end = round_up(start, PAGE_BYTES)
    for size in sizes:
        offsets.append(end)
        end += round_up(size, PAGE_BYTES)
    return tuple(offsets), end


def check_slot(offset: int, count: int, total: int) -> None:
    """Refuse what does not lie in a home of ``total`` bytes as a slot does.

    Raises:
        TransferError: it does not.
    """
    if offset < 0 or offset % PAGE_BYTES or offset + count > total:
        raise TransferError(
            f"bytes [{offset}, {offset + count}) are not a slot in a home of {total} bytes: slots lie within it and "
            f"start on a multiple of {PAGE_BYTES}; this is a fault of the plan: please report it"
        )
