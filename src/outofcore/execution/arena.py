"""The arena: one region of memory in which every allocation of a step has a planned address.

The native allocator (``arena.cpp``, see ``runtime.native``) gives planned addresses to PyTorch, without a copy or page
fault. An unplanned request gets free room, or room that ``demand_eviction`` makes.

Forking: on kernels before 6.5, do not fork during direct I/O to or from an arena. Between steps there is no I/O.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, Protocol, Self

import numpy as np
import torch

from outofcore.analysis import LARGE_BYTES
from outofcore.errors import ArenaError, StateError
from outofcore.planning.placement.requests import AllocatorEvent, EventKind
from outofcore.runtime.homes import HomeStore
from outofcore.runtime.memory import Region, advise_pages, map_anonymous, tensor_over, unmap
from outofcore.runtime.native import Flavor, load_native
from outofcore.units import PAGE_BYTES, format_bytes, round_up

_REFUSAL = "outofcore arena: "  # prefix of arena.cpp's message about a refused request


class Answer(IntEnum):
    """A lender's answers to a memory request other than an address, as in ``arena.cpp``."""

    REFUSE = 0  # the request fails
    EXCEED = 1  # the stock allocator serves it, beyond the budget


class Installed(IntEnum):
    """The outcome of installing the native allocator under PyTorch, as ``Installed`` in ``allocator.h``."""

    DONE = 0
    NO_DELETER = 1  # the stock allocator cannot be wrapped
    ANOTHER = 2  # the allocator differs from the one installed before
    OUTRANKED = 3  # the allocator was installed with a higher priority
    FAILED = 4  # the installation raised an error


@dataclass(frozen=True, slots=True)
class ArenaCounters:
    """Counts of requests in the scopes of an arena since it was opened."""

    served: int = 0  # requests served at their planned address
    small: int = 0  # off-plan requests below 64 KiB
    large: int = 0  # off-plan requests of 64 KiB and more that were served
    large_bytes: int = 0  # total bytes of these
    live_bytes: int = 0  # bytes in use that the stock allocator served within scopes
    peak_live_bytes: int = 0  # maximum of ``live_bytes``
    refused: int = 0  # off-plan requests that failed
    unclaimed: int = 0  # planned requests that were missing when their scope ended
    last_scope: int = -1  # the scope of the last off-plan request of 64 KiB and more
    lent: int = 0  # large off-plan requests that the lender served
    lent_live_bytes: int = 0  # bytes of these in use
    beyond: int = 0  # large off-plan requests that exceeded the budget because no home had room
    beyond_bytes: int = 0  # total bytes of these


class Lender(Protocol):
    """Makes room for requests beyond the plan (see ``demand_eviction``)."""

    is_active: bool  # whether the running op has been lent memory, so ``restore`` must follow
    flag: int  # address of a number that is not 0 while ``is_active``

    def begin(
        self, starts: array[float], ends: array[float], pause: Callable[[], object], resume: Callable[[], object]
    ) -> None:
        """Start serving the requests of a step; ``pause`` must stop copies, and return once no copy is running."""
        ...

    def allocate_lasting(self, count: int) -> torch.Tensor | None:
        """Return memory of a home for new optimizer state; None if ordinary memory should be used."""
        ...

    def restore(self) -> None:
        """Fetch the bytes evicted for an op; call this after the op's scope and before the next instruction."""
        ...

    def end(self) -> None: ...


class DeviceArena(Protocol):
    """An arena on any device: a region of memory in which allocations have planned addresses."""

    library: ctypes.PyDLL  # the native allocator
    handle: int  # the native allocator's handle of the arena
    bytes: int
    address: int
    is_synchronous: bool  # whether an op has ended when the next one is called, so that ops can share a workspace

    @property
    def region(self) -> object:
        """An object that keeps the memory alive; raises ``StateError`` if the arena is closed."""
        ...

    def view(self, offset: int, count: int) -> torch.Tensor:
        """Return the bytes [offset, offset + count) as a uint8 tensor with its own storage of ``count`` bytes."""
        ...

    def save(self, offset: int, count: int, home: HomeStore, slot: int) -> None:
        """Copy ``count`` bytes at ``offset`` to a slot of a home; block until done."""
        ...

    def load(self, offset: int, count: int, home: HomeStore, slot: int) -> None:
        """Fill ``count`` bytes at ``offset`` from a slot of a home; block until done."""
        ...

    def move(self, start: int, to: int, count: int) -> bool:
        """Move bytes within the arena; return False if the device cannot move them because the ranges overlap."""
        ...

    def discard(self, offset: int, count: int) -> None:
        """Release the physical memory of a range where the device can; its contents are lost."""
        ...

    def counters(self) -> ArenaCounters: ...

    def close(self) -> None: ...


class Arena:
    """An arena of ``count`` bytes of host memory, rounded up to whole pages; a context manager.

    ``reserve`` more bytes are for off-plan requests of 64 KiB and more. A lender serves requests that exceed it, in
    ``annex`` bytes of further addresses; without a lender they fail. The memory lives until ``close``, then as long as
    a tensor in it.
    """

    is_synchronous = True

    def __init__(self, count: int, *, reserve: int = 0, annex: int = 0) -> None:
        library = self.library = load_native()
        self.bytes = round_up(max(count, 1), PAGE_BYTES)
        self.annex_bytes = round_up(annex, PAGE_BYTES)
        self._lender: Callable[[], Lender | None] = _no_lender
        self.reserve = reserve
        whole = self.bytes + self.annex_bytes
        try:
            self.address = map_anonymous(whole)
        except OSError as error:
            raise ArenaError(
                f"no address range of {format_bytes(count)} could be mapped for the arena ({error}); raise the "
                "limit on address space (ulimit -v), or lower the budget"
            ) from error
        try:
            install(library)
        except ArenaError:
            unmap(self.address, whole)
            raise
        if self.annex_bytes and hasattr(mmap, "MADV_NOHUGEPAGE"):  # huge pages would count unused ones
            with contextlib.suppress(OSError):
                advise_pages(self.address + self.bytes, self.annex_bytes, mmap.MADV_NOHUGEPAGE)
        handle = library.outofcore_arena_open(self.address, whole, LARGE_BYTES, reserve)
        if handle is None:
            library.outofcore_uninstall()
            unmap(self.address, whole)
            raise ArenaError(
                "too many arenas are open or used by tensors; close other steps and drop their tensors first"
            )
        self.handle: int = handle
        # The library unmaps the pages itself, since tensors in them may outlive the arena.
        self._region: Region | None = Region(self.address, whole, functools.partial(_drop, library, handle))
        self._uninstall = weakref.finalize(self, library.outofcore_uninstall)
        self._uninstall.atexit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the memory; the last arena also restores PyTorch's allocator. May be called again."""
        self._region, self._lender = None, _no_lender
        self._uninstall()

    @property
    def lender(self) -> Lender | None:
        return self._lender()

    @lender.setter
    def lender(self, lender: Lender) -> None:
        self._lender = weakref.ref(lender)

    @property
    def region(self) -> Region:
        if self._region is None:
            raise StateError("the arena is closed; compile the step again to go on")
        return self._region

    def memory(self, offset: int, count: int) -> memoryview:
        region = self.region
        self._check_range(offset, count)
        return region.memory(offset, count)

    def view(self, offset: int, count: int) -> torch.Tensor:
        return tensor_over(self.memory(offset, count))

    def save(self, offset: int, count: int, home: HomeStore, slot: int) -> None:
        home.write(slot, self.memory(offset, count))

    def load(self, offset: int, count: int, home: HomeStore, slot: int) -> None:
        home.read(slot, self.memory(offset, count))

    def move(self, start: int, to: int, count: int) -> bool:
        """Move bytes within the arena, also to an overlapping range; return True."""
        region = self.region
        self._check_range(start, count)
        self._check_range(to, count)
        ctypes.memmove(region.address + to, region.address + start, count)
        return True

    def discard(self, offset: int, count: int) -> None:
        """Release the physical memory of the whole pages in the range; they then read as zeros."""
        region = self.region
        self._check_range(offset, count)
        advise_pages(region.address + offset, count, mmap.MADV_DONTNEED)

    def resident_bytes(self) -> int:
        return self.region.resident_bytes()

    def set_reserve(self, reserve: int) -> None:
        self.reserve = reserve
        if self._region is not None:
            self.library.outofcore_arena_reserve(self.handle, reserve)

    def set_lender(self, lender: Any) -> None:
        """Set the native callback ``void (bytes, scope, answer)`` for requests beyond the reserve; None removes it."""
        # It answers with an ``Answer``, or an address that stays valid while it is in ``lent_addresses``. The caller
        # keeps the callback alive.
        if self._region is not None:
            pointer = None if lender is None else ctypes.cast(lender, ctypes.c_void_p)
            self.library.outofcore_arena_lender(self.handle, pointer)

    def lent_addresses(self) -> set[int]:
        """Return the addresses that the lender has given and that are still in use."""
        if self._region is None:
            return set()
        count = self.library.outofcore_arena_lent(self.handle, None, 0)
        addresses = (ctypes.c_int64 * count)()
        return set(addresses[: self.library.outofcore_arena_lent(self.handle, addresses, count)])

    def counters(self) -> ArenaCounters:
        _ = self.region
        return read_counters(self.library, self.handle)

    def _check_range(self, offset: int, count: int) -> None:
        if offset < 0 or count < 0 or offset + count > self.bytes:
            raise ArenaError(
                f"bytes [{offset}, {offset + count}) are outside of the arena of {self.bytes} bytes; "
                "this is a bug in the plan: please report it"
            )


class ScopeTable:
    """The planned memory requests of a program, listed for each run of an op (its scope).

    Between ``begin(scope)`` and ``end()``, the calling thread's k-th request gets the k-th planned address if its size
    is the planned one. Another request is served off the plan, and does not advance the list. So is a request that
    shares planned bytes with an earlier request of the scope that is not freed in time.

    ``scopes`` are (bytes, offset in the arena); an offset of None leaves a request to the stock allocator.
    ``workspaces`` are (bytes, offset) of each op's workspace, which serves off-plan requests, too.
    """

    begin: Callable[[int], object]
    end: Callable[[], object]
    # The functions behind ``begin`` and ``end``, and the first argument of the first.
    native: tuple[int | None, int | None, int]

    def __init__(
        self,
        arena: DeviceArena,
        scopes: Sequence[Sequence[tuple[int, int | None]]],
        workspaces: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._region = arena.region  # the arena's pages must outlive the table
        requests = np.zeros((sum(len(scope) for scope in scopes), 2), np.int64)
        row = 0
        for number, scope in enumerate(scopes):
            for count, offset in scope:
                if count <= 0 or (offset is not None and not 0 <= offset <= arena.bytes - count):
                    raise ArenaError(
                        f"scope {number} plans {count} bytes at {offset}, outside of the arena of "
                        f"{arena.bytes} bytes; this is a bug in the plan: please report it"
                    )
                requests[row] = count, 0 if offset is None else arena.address + offset
                row += 1
        library = self._library = arena.library
        first = np.cumsum([0, *(len(scope) for scope in scopes)], dtype=np.int64)
        table = library.outofcore_table_new(arena.handle, len(scopes), first.ctypes.data, requests.ctypes.data)
        if table is None:
            raise _out_of_memory_error()
        self._table: int = table
        if workspaces:
            places = np.array([(arena.address + at, size) if size else (0, 0) for size, at in workspaces], np.int64)
            library.outofcore_table_workspaces(table, np.ascontiguousarray(places).ctypes.data)
        weakref.finalize(self, _free_table, library, table, self._region).atexit = False
        self.begin = functools.partial(library.outofcore_begin, ctypes.c_void_p(table))
        self.end = library.outofcore_end
        self.native = (
            ctypes.cast(library.outofcore_begin, ctypes.c_void_p).value,
            ctypes.cast(library.outofcore_end, ctypes.c_void_p).value,
            table,
        )

    def is_scope_memory(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in memory that is reused when the scope of the running op ends."""
        return bool(self._library.outofcore_passes(tensor.untyped_storage().data_ptr()))

    @contextlib.contextmanager
    def use_process_memory(self) -> Iterator[None]:
        """Serve this block's requests from ordinary memory, and count these bytes as live while in use."""
        self._library.outofcore_unbounded(1)
        try:
            yield
        finally:
            self._library.outofcore_unbounded(0)

    def take_unplanned_events(self) -> dict[int, list[AllocatorEvent]]:
        """Remove and return the allocator events of op runs with large unplanned requests, by scope."""
        library, table = self._library, self._table
        count = library.outofcore_table_surprises(table, None, 0)
        if not count:
            return {}
        scopes = (ctypes.c_int64 * count)()
        library.outofcore_table_surprises(table, scopes, count)
        events = {s: _read_events(library, library.outofcore_table_surprise_log(table, s)) for s in scopes}
        library.outofcore_table_forget(table)
        return events


class AllocationRecorder:
    """Records the calling thread's allocations in ``with recorder:``; each ``with`` starts with no events."""

    def __init__(self, flavor: Flavor = Flavor.CPU) -> None:
        self._library = load_native(flavor)
        self._log: int | None = None
        self.events: list[AllocatorEvent] = []

    def __enter__(self) -> Self:
        self.events = []
        if self._log is not None:
            raise StateError("this recorder is recording already; leave its 'with' block first, or use another one")
        install(self._library)
        self._log = self._library.outofcore_record_begin()
        if self._log is None:
            self._library.outofcore_uninstall()
            raise _out_of_memory_error()
        return self

    def __exit__(self, *raised: object) -> None:
        library = self._library
        if self._log is None:
            return
        library.outofcore_record_end()
        library.outofcore_uninstall()
        log, self._log = self._log, None
        try:
            self.events = _read_events(library, log)
        finally:
            library.outofcore_record_free(log)


def as_arena_error(error: BaseException) -> ArenaError | None:
    """Convert PyTorch's error about refused memory to an ``ArenaError``; return None for other errors."""
    text = str(error)
    if not isinstance(error, RuntimeError) or _REFUSAL not in text:
        return None
    detail = text[text.index(_REFUSAL) + len(_REFUSAL) :].splitlines()[0]
    return ArenaError(
        f"the step asked for memory that its plan does not foresee: {detail}; the op behaved differently than when "
        "it was profiled; call the step again, with a larger budget if that does not help"
    )


def install(library: ctypes.PyDLL) -> None:
    """Install the native allocator in front of PyTorch's; raise ``ArenaError`` on failure."""
    status = Installed(library.outofcore_install())
    if status is not Installed.DONE:
        reason = {
            Installed.NO_DELETER: "it has no plain deleter",
            Installed.ANOTHER: "another one was installed since this process first used outofcore",
            Installed.OUTRANKED: "it was installed with a higher priority",
            Installed.FAILED: "it raised an error",
        }
        raise ArenaError(f"PyTorch's allocator cannot be wrapped: {reason[status]}; do not install another allocator")


def read_counters(library: ctypes.PyDLL, handle: int) -> ArenaCounters:
    """Read the counters of an arena; raise ``ArenaError`` if their number is unexpected."""
    expected = len(fields(ArenaCounters))
    counts = (ctypes.c_int64 * expected)()
    count = library.outofcore_arena_counters(handle, counts, expected)
    if count != expected:
        raise ArenaError(f"the native allocator has {count} counters, and {expected} are expected: please report it")
    return ArenaCounters(*counts)


def _drop(library: ctypes.PyDLL, handle: int, address: int, count: int) -> None:
    library.outofcore_arena_drop(handle)


def _read_events(library: ctypes.PyDLL, log: int) -> list[AllocatorEvent]:
    """Return the allocations and frees in a native log."""
    count = library.outofcore_record_size(log)
    if count < 0:
        raise _out_of_memory_error()
    if not count:
        return []
    numbers = list((ctypes.c_int64 * (3 * count)).from_address(library.outofcore_record_data(log)))
    return [
        AllocatorEvent(EventKind.FREE if freed else EventKind.ALLOCATE, size, pointer)
        for freed, size, pointer in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
    ]


def _out_of_memory_error() -> ArenaError:
    return ArenaError(
        "the host has no memory left for the log of an allocator; end other programs, or use smaller batches"
    )


def _free_table(library: ctypes.PyDLL, table: int, region: object) -> None:
    library.outofcore_table_free(table)


def _no_lender() -> None:
    """Return None: an arena starts without a lender."""
