"""Mapped pages that live as long as an object refers to them.

The ``mmap`` module would keep a file descriptor for each, and can neither align to huge pages nor reserve addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum

import numpy as np
import torch

from outofcore.units import MIB, PAGE_BYTES, round_up


class _Linux(IntEnum):
    """Linux constants that the mmap module lacks, at least before Python 3.13."""

    MAP_FIXED = 0x10
    MAP_NORESERVE = 0x4000
    MADV_POPULATE_WRITE = 23


_NORESERVE = _Linux.MAP_NORESERVE if sys.platform == "linux" else 0
_HUGE_PAGE = 2 * MIB
# Bytes per call, and the maximum number of threads: more threads would wait for each other.
_RUN_BYTES, _MAX_THREADS = 128 * MIB, 8
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_longlong,
]
for _function in (_libc.munmap, _libc.madvise, _libc.mprotect, _libc.mincore):
    _function.restype = ctypes.c_int
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def trim_heap() -> None:
    """Return free memory of the C library to the system, if the library supports that."""
    trim = getattr(_libc, "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)


@contextlib.contextmanager
def collect_new_garbage() -> Iterator[None]:
    """At the end of this context, collect the garbage that was created in it."""
    is_outermost = not gc.get_freeze_count()  # do not unfreeze the user's frozen objects
    if is_outermost:
        gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        if is_outermost:
            gc.unfreeze()


def unmap(address: int, count: int) -> None:
    _libc.munmap(address, count)


def advise_pages(address: int, count: int, advice: int) -> None:
    """Call madvise on the whole pages within [address, address + count)."""
    first = round_up(address, mmap.PAGESIZE)
    last = (address + count) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        _check_status(_libc.madvise(first, last - first, advice), "madvise failed")


def _check_status(status: int, message: str) -> None:
    if status != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{message}: {os.strerror(code)}")


# The buffers of all live regions, by their first addresses.
_regions: weakref.WeakValueDictionary[int, ctypes.Array[ctypes.c_ubyte]] = weakref.WeakValueDictionary()


def is_in_region(address: int) -> bool:
    if address in _regions:
        return True
    return any(start <= address < start + ctypes.sizeof(buffer) for start, buffer in list(_regions.items()))


class Region:
    """A range of mapped pages; ``release`` frees it when no region, memoryview or tensor uses it."""

    def __init__(self, address: int, count: int, release: Callable[[int, int], object] = unmap) -> None:
        self.address = address
        self.bytes = count
        self._buffer = _regions[address] = (ctypes.c_ubyte * count).from_address(address)
        # Not at exit: tensors over the region may be used until the process ends.
        weakref.finalize(self._buffer, release, address, count).atexit = False

    def memory(self, offset: int, count: int) -> memoryview:
        """Return a writable view of bytes [offset, offset + count); raises ``ValueError`` if they are out of range."""
        if offset < 0 or count < 0 or offset + count > self.bytes:
            raise ValueError(
                f"bytes [{offset}, {offset + count}) are not in a region of {self.bytes} bytes; this is a bug in "
                "outofcore: please report it"
            )
        return memoryview(self._buffer).cast("B")[offset : offset + count]

    def weak_reference(self) -> WeakRegion:
        return WeakRegion(self.address, self.bytes, weakref.ref(self._buffer))

    def make_accessible(self, offset: int, count: int) -> None:
        status = _libc.mprotect(self.address + offset, count, mmap.PROT_READ | mmap.PROT_WRITE)
        _check_status(status, "mprotect failed")

    def resident_bytes(self) -> int:
        pages = round_up(self.bytes, mmap.PAGESIZE) // mmap.PAGESIZE
        flags = np.empty(pages, np.uint8)
        _check_status(_libc.mincore(self.address, self.bytes, flags.ctypes.data), "mincore failed")
        return int(np.count_nonzero(flags & 1)) * mmap.PAGESIZE


class WeakRegion:
    """A reference to a region that does not keep its pages alive."""

    def __init__(self, address: int, count: int, buffer: Callable[[], ctypes.Array[ctypes.c_ubyte] | None]) -> None:
        self.address, self.bytes, self._buffer = address, count, buffer

    @property
    def is_alive(self) -> bool:
        return self._buffer() is not None

    def memory(self, offset: int, count: int) -> memoryview | None:
        """Return a view like ``Region.memory``; it keeps the region alive. None if the region is gone."""
        buffer = self._buffer()
        return None if buffer is None else memoryview(buffer).cast("B")[offset : offset + count]


def populate(address: int, count: int) -> None:
    """Allocate physical memory for mapped pages, in several threads; raises ``OSError`` on failure."""
    runs = [(address + offset, min(_RUN_BYTES, count - offset)) for offset in range(0, count, _RUN_BYTES)]

    def populate_run(run: tuple[int, int]) -> int:
        # ctypes releases the GIL.
        return ctypes.get_errno() if _libc.madvise(*run, _Linux.MADV_POPULATE_WRITE) else 0

    workers = min(len(runs), os.cpu_count() or 1, _MAX_THREADS)
    codes: Iterable[int] = map(populate_run, runs)
    if workers > 1:
        # RuntimeError: no more threads are available, so the calling thread makes all pages.
        with (
            contextlib.suppress(RuntimeError),
            ThreadPoolExecutor(workers, thread_name_prefix="outofcore-pages") as pool,
        ):
            codes = list(pool.map(populate_run, runs))
    for code in codes:  # other codes, as before Linux 5.14: the first use allocates
        if code in (errno.ENOMEM, errno.EFAULT):
            raise OSError(code, os.strerror(code))


def map_anonymous(count: int, *, accessible: bool = True, shared: bool = False) -> int:
    """Map ``count`` bytes (whole pages) of zeroed memory, and return the address.

    ``accessible=False`` only reserves addresses, for ``Region.make_accessible``; forked children see ``shared`` memory.
    """
    slack = _HUGE_PAGE if count >= _HUGE_PAGE else 0
    protection = mmap.PROT_READ | mmap.PROT_WRITE if accessible else 0
    flags = (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE) | mmap.MAP_ANONYMOUS | _NORESERVE
    start = _map(count + slack, protection, flags, -1, 0)
    address = round_up(start, _HUGE_PAGE) if slack else start
    if address > start:
        unmap(start, address - start)
    if start + slack > address:
        unmap(address + count, start + slack - address)
    if slack and hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without huge pages refuses the advice; the memory is then only slower.
        _libc.madvise(address, count, mmap.MADV_HUGEPAGE)
    return address


def map_file(descriptor: int, offset: int, count: int, *, private: bool = False) -> Region:
    """Map bytes of a file from page boundary ``offset`` on; ``private`` writes stay in this process."""
    whole = round_up(count, PAGE_BYTES)
    flags = mmap.MAP_PRIVATE | _NORESERVE if private else mmap.MAP_SHARED
    return Region(_map(whole, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, offset), whole)


def map_over(region: WeakRegion, descriptor: int, offset: int) -> None:
    """Replace a region's pages by a shared mapping of a file; an ``OSError`` leaves the pages unchanged."""
    flags = mmap.MAP_SHARED | _Linux.MAP_FIXED
    _map(region.bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, offset, region.address)


def _map(count: int, protection: int, flags: int, descriptor: int, offset: int, at: int | None = None) -> int:
    address = _libc.mmap(at, count, protection, flags, descriptor, offset)
    if address is None or address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {count} bytes: {os.strerror(code)}")
    return int(address)


def address_of(memory: memoryview) -> int:
    """Return the address of a contiguous memoryview, writable or not; 0 if it is empty."""
    return 0 if not memory.nbytes else int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


def tensor_over(memory: memoryview) -> torch.Tensor:
    """Return a uint8 tensor over ``memory`` with a storage of exactly that size; it keeps the memory alive."""
    if not memory.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8)


def tensor_with_release(address: int, count: int, release: Callable[[], object]) -> torch.Tensor:
    """Return a uint8 tensor over memory; ``release`` is called when the last reference to its storage is gone."""
    buffer = (ctypes.c_ubyte * count).from_address(address)
    # Not at exit: tensors may be used until the process ends.
    weakref.finalize(buffer, release).atexit = False
    return torch.frombuffer(buffer, dtype=torch.uint8)
