"""A home in host memory. On the CPU backend that is a second piece of the machine's own memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import torch

from outofcore.errors import SpillError, StateError
from outofcore.execution.memory import Region, address_of, map_anonymous, tensor_over, unmap
from outofcore.execution.store import check_slot
from outofcore.units import KIB, PAGE_BYTES, format_bytes, round_up


class HostHome:
    """Slots in one slab of host memory.

    Its addresses are reserved at once and for good, so that slots never move; memory is taken up only as ``ensure``
    makes room and slots are written.

    Args:
        limit: bytes that slots may take, of which whole pages count; by default all physical memory.
        release: gives address and bytes back to the system when nothing refers to them any more.

    Raises:
        SpillError: the system will not reserve the addresses.
    """

    def __init__(self, limit: int | None = None, release: Callable[[int, int], object] = unmap) -> None:
        given = limit if limit is not None else _physical_bytes()
        self._limit = max(given // PAGE_BYTES, 1) * PAGE_BYTES
        self._bytes = 0
        try:
            address = map_anonymous(self._limit, accessible=False)
        except OSError as error:
            raise SpillError(
                f"no addresses for {format_bytes(self._limit)} of host memory can be reserved ({error.strerror}); "
                "give a smaller limit or lift that on address space (ulimit -v)"
            ) from error
        self._region: Region | None = Region(address, self._limit, release)

    @property
    def name(self) -> str:
        """The name in costs and reports."""
        return "host"

    @property
    def identity(self) -> str:
        """All host memory is alike."""
        return "host"

    @property
    def in_memory(self) -> bool:
        """It is what it is."""
        return True

    @property
    def bytes(self) -> int:
        """Bytes that slots may occupy now."""
        return self._bytes

    @property
    def capacity(self) -> int:
        """Bytes that slots could occupy at most: the limit, or what they have and the memory available."""
        return min(self._limit, self._bytes + _available_bytes())

    def check(self, count: int) -> None:
        """See ``HomeStore.check``."""
        if count > self._limit:
            raise SpillError(
                f"the step needs {format_bytes(count)} of host memory, and its limit is {format_bytes(self._limit)}; "
                "raise the limit or the budget, or use a disk home"
            )
        available = _available_bytes()
        if count - self._bytes > available:
            raise SpillError(
                f"the step needs {format_bytes(count - self._bytes)} more of host memory, and the system has "
                f"{format_bytes(available)} available; raise the budget or use a disk home"
            )

    def ensure(self, count: int) -> None:
        """See ``HomeStore.ensure``."""
        region = self._opened()
        wanted = round_up(count, PAGE_BYTES)
        if wanted <= self._bytes:
            return
        self.check(wanted)
        try:
            region.make_accessible(self._bytes, wanted - self._bytes)
        except OSError as error:
            raise SpillError(
                f"the system does not give {format_bytes(wanted - self._bytes)} more of host memory "
                f"({error.strerror}); raise the budget or use a disk home"
            ) from error
        self._bytes = wanted

    def reserve(self, count: int) -> int:
        """See ``HomeStore.reserve``."""
        offset = self.bytes
        self.ensure(offset + count)
        return offset

    def write(self, offset: int, source: memoryview) -> None:
        """See ``HomeStore.write``."""
        region = self._opened()
        check_slot(offset, len(source), self._bytes)
        if len(source):
            # Unlike an assignment to a slice of a memoryview, this releases the GIL.
            ctypes.memmove(region.address + offset, address_of(source), len(source))

    def read(self, offset: int, target: memoryview) -> None:
        """See ``HomeStore.read``."""
        region = self._opened()
        check_slot(offset, len(target), self._bytes)
        if len(target):
            ctypes.memmove(address_of(target), region.address + offset, len(target))

    def face(self, offset: int, count: int) -> torch.Tensor:
        """See ``HomeStore.face``: the slot itself."""
        region = self._opened()
        check_slot(offset, count, self._bytes)
        return tensor_over(region.memory(offset, count))

    def drop_cache(self, face: torch.Tensor) -> None:
        """See ``HomeStore.drop_cache``: there is nothing to drop, the slot being the face."""

    def start(self) -> None:
        """See ``HomeStore.start``: memory does not go away."""

    def sibling(self, count: int) -> HostHome:
        """See ``HomeStore.sibling``: another slab."""
        return HostHome(count)

    def close(self) -> None:
        """See ``HomeStore.close``."""
        self._region = None

    def _opened(self) -> Region:
        if self._region is None:
            raise StateError("the host home is closed; compile the step again to go on")
        return self._region


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _available_bytes() -> int:
    """Bytes of memory that can be taken without swapping, as the kernel estimates; all there are if it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return _physical_bytes()
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * KIB
    return _physical_bytes()
