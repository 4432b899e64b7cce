"""The spill file: one preallocated file without a name, written and read past the page cache.

Direct I/O goes straight between the disk and the caller's pages. It requires an address, a file offset and a length in
whole pages; anything else (a small tensor, the tail of a large one) goes through a page-aligned buffer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import threading
import weakref
from pathlib import Path

from outofcore.errors import SpillError, StateError, TransferError
from outofcore.runtime.memory import Region, address_of, map_anonymous, map_file
from outofcore.units import MIB, PAGE_BYTES, format_bytes, round_up

# One system call moves at most this much: a copy can then be stopped. Each call takes the processor from ops.
CHUNK_BYTES = 64 * MIB
BUFFER_BYTES = MIB  # of what direct I/O cannot move in place


def check_directory(directory: Path, count: int = 0) -> None:
    """Raise ``SpillError`` for a directory that cannot take a spill file of ``count`` bytes."""
    if not directory.exists():
        raise SpillError(f"the spill directory {directory} does not exist; create it or name another one")
    if not directory.is_dir():
        raise SpillError(f"the spill directory {directory} is not a directory; name a directory on a fast local disk")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise SpillError(
            f"the spill directory {directory} cannot be written to; change its permissions or name another one"
        )
    free = free_bytes(directory)
    if count > free:
        raise SpillError(
            f"the step needs {format_bytes(count)} in the spill directory {directory}, and {format_bytes(free)} are "
            "free there; make room, name a directory on a larger disk, or raise the budget"
        )


def free_bytes(directory: Path) -> int:
    """Return the bytes that an ordinary user may still write in a directory's file system."""
    return shutil.disk_usage(directory).free


class SpillFile:
    """A file without a name in ``directory``: when the process ends, however it ends, the file is gone.

    Reads and writes may be called from several threads at once; they block, with the GIL released. Offsets are page
    boundaries, and a transfer owns its last page whole: the page's bytes after its end are lost.

    ``direct`` tells whether the page cache is bypassed. If the file system refuses that, I/O is buffered and the kernel
    is told to drop the pages. ``bytes`` is what has been allocated so far.
    """

    def __init__(self, directory: Path) -> None:
        check_directory(directory)
        self.directory = directory
        self.bytes = 0
        self._buffers = threading.local()
        self._closed = False
        try:
            self._descriptor = _open_unnamed(directory)
        except OSError as error:
            raise SpillError(
                f"no file can be created in the spill directory {directory} ({error.strerror}); name another one"
            ) from error
        self._direct_descriptor = self._open_direct()
        self.direct = self._direct_descriptor is not None
        # A step that nobody closes gives its file back as well, once it is garbage.
        self._release = weakref.finalize(self, _close, self._descriptor, self._direct_descriptor)
        self._release.atexit = False

    @property
    def descriptor(self) -> int:
        """The open file, past the page cache where ``direct``."""
        self._check_open()
        return self._descriptor if self._direct_descriptor is None else self._direct_descriptor

    @property
    def descriptors(self) -> tuple[int, int | None]:
        """The open file, and the same past the page cache where that works."""
        self._check_open()
        return self._descriptor, self._direct_descriptor

    def duplicate(self) -> tuple[int, int]:
        """Return new descriptors of the file, the second past the page cache or the same; the caller closes them."""
        made: list[int] = []
        try:
            made += [os.dup(self._descriptor)]
            made += [os.dup(self.descriptor)]
        except OSError as error:
            _close(*made)
            raise SpillError(
                f"the spill file in {self.directory} cannot be opened again ({error.strerror}); lift the limit on open "
                "files (ulimit -n)"
            ) from error
        return made[0], made[1]

    def close(self) -> None:
        """Give the file back to the system, once nothing is mapped from it. May be called again."""
        self._closed = True
        self._release()

    def grow(self, count: int) -> None:
        """Allocate the file up to ``count`` bytes (never less than before), so that no later write lacks room.

        If it raises ``SpillError`` for lack of space, the file is as before.
        """
        self._check_open()
        wanted = round_up(count, PAGE_BYTES)
        if wanted <= self.bytes:
            return
        check_directory(self.directory, wanted - self.bytes)
        try:
            os.posix_fallocate(self._descriptor, self.bytes, wanted - self.bytes)
        except OSError as error:
            with contextlib.suppress(OSError):  # a file that stays too long does no harm
                os.ftruncate(self._descriptor, self.bytes)
            raise SpillError(
                f"{format_bytes(wanted - self.bytes)} could not be allocated in the spill directory {self.directory} "
                f"({error.strerror}); make room, lift the limit, or name a directory on another disk"
            ) from error
        self.bytes = wanted

    def check_length(self) -> None:
        """Raise ``TransferError`` for a truncated file: the missing bytes would read as zeros once it grows again."""
        self._check_open()
        length = os.fstat(self._descriptor).st_size
        if length < self.bytes:
            raise TransferError(
                f"the spill file in {self.directory} was cut off: of its {format_bytes(self.bytes)} there are "
                f"{format_bytes(length)}; check that disk, or name another spill directory"
            )

    def map(self, offset: int, count: int) -> Region:
        """Map bytes of the file as shared memory, which stays usable after ``close``."""
        self._check_open()
        return map_file(self._descriptor, offset, count)

    def forget(self, offset: int, count: int) -> None:
        """Tell the kernel that pages of the file need not stay in its cache."""
        self._check_open()
        os.posix_fadvise(self._descriptor, offset, round_up(count, PAGE_BYTES), os.POSIX_FADV_DONTNEED)

    def write(self, offset: int, source: memoryview) -> None:
        """Write all of ``source`` at ``offset``; raises ``TransferError``."""
        self._move(offset, source, writes=True)

    def read(self, offset: int, target: memoryview) -> None:
        """Fill all of ``target`` from ``offset`` on; raises ``TransferError``."""
        self._move(offset, target, writes=False)

    def _move(self, offset: int, memory: memoryview, *, writes: bool) -> None:
        """Transfer whole pages in place as far as they are aligned, and the rest through a buffer."""
        descriptor = self._check_transfer("write" if writes else "read", offset, memory)
        whole = _whole_pages(memory)
        for start in range(0, whole, CHUNK_BYTES):
            self._transfer(descriptor, memory[start : min(start + CHUNK_BYTES, whole)], offset + start, writes)
        for start in range(whole, len(memory), BUFFER_BYTES):
            piece = memory[start : start + BUFFER_BYTES]
            buffer = self._buffer()
            if writes:
                buffer[: len(piece)] = piece
            self._transfer(descriptor, buffer[: round_up(len(piece), PAGE_BYTES)], offset + start, writes)
            if not writes:
                piece[:] = buffer[: len(piece)]
        if not self.direct:
            self.forget(offset, len(memory))

    def _transfer(self, descriptor: int, memory: memoryview, offset: int, writes: bool) -> None:
        """Move all bytes by calls that may move fewer than they are asked to."""
        count, done, stuck = len(memory), 0, False
        while done < count:
            try:
                if writes:
                    moved = os.pwrite(descriptor, memory[done:], offset + done)
                else:
                    moved = os.preadv(descriptor, [memory[done:]], offset + done)
            except OSError as error:
                raise self.failed(offset + done, count - done, error.errno, writes=writes) from error
            kept = kept_bytes(moved, count - done)
            if moved == 0 or (kept == 0 and stuck):
                raise self.failed(offset + done, count - done, None, writes=writes)
            stuck = kept == 0
            done += kept

    def failed(self, offset: int, count: int, code: int | None, *, writes: bool) -> TransferError:
        """Build the error for ``count`` bytes that were not transferred; ``code`` is the system's, or None."""
        nothing = "the system wrote nothing" if writes else "the file ends there"
        why = nothing if code is None else os.strerror(code)
        advice = {
            errno.ENOSPC: "make room on that disk",
            errno.EDQUOT: "raise the quota or name another spill directory",
            errno.EFBIG: "lift the file size limit (ulimit -f) or name another spill directory",
        }.get(code or 0, "check that disk, or name another spill directory")
        error = TransferError(
            f"could not {'write' if writes else 'read'} {format_bytes(count)} at byte {offset} of the spill file in "
            f"{self.directory}: "
            f"{why}; {advice}"
        )
        error.errno = errno.EIO if code is None else code
        return error

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("the spill file is closed; compile the step again to go on")

    def _check_transfer(self, verb: str, offset: int, memory: memoryview) -> int:
        self._check_open()
        if offset < 0 or offset % PAGE_BYTES or offset + len(memory) > self.bytes:
            raise TransferError(
                f"cannot {verb} bytes [{offset}, {offset + len(memory)}) of a spill file of {self.bytes} bytes: they "
                f"must lie in the file and start on a multiple of {PAGE_BYTES}; this is a fault of the plan: "
                "please report it"
            )
        return self._descriptor if self._direct_descriptor is None else self._direct_descriptor

    def _buffer(self) -> memoryview:
        memory: memoryview | None = getattr(self._buffers, "memory", None)
        if memory is None:
            memory = self._buffers.memory = copy_buffer()
        return memory

    def _open_direct(self) -> int | None:
        """Open a second descriptor for direct I/O; None where the file system refuses."""
        try:
            buffer = self._buffer()
        except TransferError as error:
            os.close(self._descriptor)
            raise SpillError(str(error)) from error
        try:
            # A file without a name can still be opened again by way of /proc.
            flags = os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC
            descriptor = os.open(f"/proc/self/fd/{self._descriptor}", flags)
        except OSError:
            return None
        try:
            # Some file systems accept the flag and refuse the I/O.
            os.pwrite(descriptor, buffer[:PAGE_BYTES], 0)
            os.preadv(descriptor, [buffer[:PAGE_BYTES]], 0)
        except OSError as error:
            os.close(descriptor)
            if error.errno == errno.EINVAL:
                return None
            os.close(self._descriptor)
            raise SpillError(
                f"the spill directory {self.directory} cannot be written to ({error.strerror}); name another one"
            ) from error
        return descriptor


def copy_buffer(count: int = BUFFER_BYTES) -> memoryview:
    """Return ``count`` bytes of new page-aligned memory; raises ``TransferError`` if the system gives none."""
    try:
        return Region(map_anonymous(count), count).memory(0, count)
    except OSError as error:
        failed = TransferError(
            f"the system does not give {format_bytes(count)} for a buffer of copies ({error.strerror}); end other "
            "programs, or lift the limit on address space (ulimit -v)"
        )
        failed.errno = error.errno
        raise failed from error


def kept_bytes(moved: int, wanted: int) -> int:
    """Return how many bytes of a transfer count: after a short one, direct I/O can go on from a page boundary only.

    None may: the caller then tries once more.
    """
    return moved if moved >= wanted else moved // PAGE_BYTES * PAGE_BYTES


def _close(*descriptors: int | None) -> None:
    for descriptor in descriptors:
        if descriptor is not None:
            os.close(descriptor)


def _whole_pages(memory: memoryview) -> int:
    """Return the number of leading bytes of ``memory`` that direct I/O can use in place."""
    if len(memory) < PAGE_BYTES or address_of(memory) % PAGE_BYTES:
        return 0
    return len(memory) // PAGE_BYTES * PAGE_BYTES


def _open_unnamed(directory: Path) -> int:
    """Open a new file, readable by this user alone, that vanishes with its last descriptor."""
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        # What file systems and kernels without O_TMPFILE say.
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
    descriptor, name = tempfile.mkstemp(dir=directory, prefix="outofcore-")
    Path(name).unlink()
    return descriptor
