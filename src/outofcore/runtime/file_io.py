"""Copy bytes between memory and a store in native code (``file_io.h``), past the page cache or through it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum

from outofcore.errors import TransferError
from outofcore.runtime.memory import Region, address_of, map_anonymous
from outofcore.runtime.native import Flavor, load_unlocked
from outofcore.units import MIB, PAGE_BYTES, format_bytes

# Limit of one native call. A copy can stop only between calls; each call costs ops processor time.
CHUNK_BYTES = 64 * MIB
BUFFER_BYTES = 2 * MIB  # ``kBounce`` in file_io.h: fits the processor's cache

MEMORY = -1  # in place of a descriptor; ``kMemory`` in file_io.h

_buffers = threading.local()


class Cache(IntEnum):
    """The fate of a file's pages in the page cache; mirrors ``Cache`` in file_io.h."""

    PAST = 0  # direct I/O bypasses the cache
    DROPPED = 1  # dropped after the copy
    KEPT = 2


class Transfer(ctypes.Structure):
    """Mirrors ``Transfer`` in file_io.h; must be kept alive until it has run."""

    _fields_ = (
        ("address", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("descriptor", ctypes.c_int32),
        ("writes", ctypes.c_int32),
        ("cache", ctypes.c_int32),
        ("failure", ctypes.c_int32),
        ("done", ctypes.c_int64),
        ("bounce", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class Location:
    descriptor: int  # of an open file, or ``MEMORY``
    start: int  # the offset in the file, or the address
    bytes: int  # at the end of a range of a file, up to a page less than requested
    owner: object  # keeps the memory or the file alive
    cache: Cache = Cache.KEPT


class ByteStore(ABC):
    """Memory or a file with reads of any bytes and writes of whole pages, from several threads at once."""

    @abstractmethod
    def locate(self, offset: int, count: int) -> Location:
        """Return the location of bytes; raises ``TransferError`` if they do not exist, ``StateError`` if closed."""

    @abstractmethod
    def transfer_error(self, offset: int, count: int, failure: int, *, writes: bool) -> TransferError:
        """Build the error for a failed transfer; ``failure`` is an errno, or negative at the end of the file."""

    def write(self, offset: int, source: memoryview) -> None:
        """Write ``source`` at a page boundary; the rest of the last page is lost. Raises ``TransferError``."""
        self._transfer(offset, source, writes=True)

    def read(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` from byte ``offset`` on, as far as bytes exist; raises ``TransferError``."""
        self._transfer(offset, target, writes=False)

    def _transfer(self, offset: int, memory: memoryview, *, writes: bool) -> None:
        location = self.locate(offset, len(memory))
        moved, failure = transfer(location, memory[: location.bytes], writes=writes)
        if failure:
            raise self.transfer_error(offset + moved, location.bytes - moved, failure, writes=writes)


def transfer(location: Location, memory: memoryview, *, writes: bool) -> tuple[int, int]:
    """Copy between memory and a file location; return the number of copied bytes, and an error code or 0."""
    count, address = memory.nbytes, address_of(memory)
    needs_no_buffer = location.cache is not Cache.PAST or (address | location.start | count) % PAGE_BYTES == 0
    bounce = None if needs_no_buffer else address_of(_thread_buffer())
    for start in range(0, count, CHUNK_BYTES):
        piece, position = min(CHUNK_BYTES, count - start), location.start + start
        work = Transfer(address + start, piece, position, location.descriptor, writes, location.cache, bounce=bounce)
        load_unlocked(Flavor.CPU).outofcore_transfer(ctypes.byref(work))
        if work.failure:
            return start + work.done, work.failure
    return count, 0


def new_copy_buffer() -> memoryview:
    """Allocate ``BUFFER_BYTES`` of page-aligned memory; raises ``TransferError`` if the system gives none."""
    try:
        return Region(map_anonymous(BUFFER_BYTES), BUFFER_BYTES).memory(0, BUFFER_BYTES)
    except OSError as error:
        transfer_error = TransferError(
            f"the system does not give {format_bytes(BUFFER_BYTES)} for a buffer of copies ({error.strerror}); end "
            "other programs, or lift the limit on address space (ulimit -v)"
        )
        transfer_error.errno = error.errno
        raise transfer_error from error


def _thread_buffer() -> memoryview:
    memory: memoryview | None = getattr(_buffers, "memory", None)
    if memory is None:
        memory = _buffers.memory = new_copy_buffer()
    return memory


def open_direct(descriptor: int, *, writes: bool = False) -> int | None:
    """Reopen a file for direct I/O; None if the system refuses. ``writes=True`` overwrites the first page."""
    try:
        # /proc can reopen a file without a name.
        flags = (os.O_RDWR if writes else os.O_RDONLY) | os.O_DIRECT | os.O_CLOEXEC
        direct = os.open(f"/proc/self/fd/{descriptor}", flags)
    except OSError:
        return None
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, direct)
        page = _thread_buffer()[:PAGE_BYTES]
        # Some file systems accept the flag and refuse the I/O. A test of writes overwrites the first page.
        for writing in (True, False) if writes else (False,):
            _, failure = transfer(Location(direct, 0, PAGE_BYTES, None, Cache.PAST), page, writes=writing)
            if failure > 0 and (failure == errno.EINVAL or not writes):
                return None
            if failure > 0:
                raise OSError(failure, os.strerror(failure))
        undo.pop_all()
    return direct


def close_files(*descriptors: int | None) -> None:
    for descriptor in descriptors:
        if descriptor is not None:
            os.close(descriptor)
