"""The spill file: a preallocated file without a name, accessed past the page cache."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import weakref
from pathlib import Path

from outofcore.errors import SpillError, StateError, TransferError
from outofcore.runtime.file_io import ByteStore, Cache, Location, close_files, open_direct
from outofcore.runtime.memory import Region, WeakRegion, map_file, map_over
from outofcore.units import PAGE_BYTES, format_bytes, round_up


def check_directory(directory: Path, count: int = 0) -> None:
    """Raise ``SpillError`` if a directory cannot hold a spill file of ``count`` bytes."""
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
    return shutil.disk_usage(directory).free


class SpillFile(ByteStore):
    """A spill file without a name in ``directory``; it vanishes with the process, even in a crash."""

    def __init__(self, directory: Path) -> None:
        check_directory(directory)
        self.directory = directory
        self.bytes = 0  # allocated
        self._closed = False
        try:
            self._descriptor = _open_unnamed(directory)
        except OSError as error:
            raise SpillError(
                f"no file can be created in the spill directory {directory} ({error.strerror}); name another one"
            ) from error
        self._direct_descriptor = self._open_direct()
        self.direct = (
            self._direct_descriptor is not None
        )  # else I/O is buffered, and the kernel drops the pages after it
        # A step that is not closed frees its file when it is garbage-collected.
        self._release = weakref.finalize(self, close_files, self._descriptor, self._direct_descriptor)
        self._release.atexit = False

    def locate(self, offset: int, count: int) -> Location:
        self._check_open()
        if self._direct_descriptor is None:
            return Location(self._descriptor, offset, count, self, Cache.DROPPED)
        return Location(self._direct_descriptor, offset, count, self, Cache.PAST)

    def duplicate(self) -> tuple[int, int]:
        """Return two new descriptors of the file, the second for direct I/O if possible; raises ``SpillError``."""
        descriptors: list[int] = []
        try:
            descriptors += [os.dup(self._descriptor)]
            descriptors += [os.dup(self.locate(0, 0).descriptor)]
        except OSError as error:
            close_files(*descriptors)
            raise SpillError(
                f"the spill file in {self.directory} cannot be opened again ({error.strerror}); lift the limit on open "
                "files (ulimit -n)"
            ) from error
        return descriptors[0], descriptors[1]

    def close(self) -> None:
        """Close the file; the system frees it after its last mapping is gone. May be called again."""
        self._closed = True
        self._release()

    def grow(self, count: int) -> None:
        """Allocate disk space, so that the file has at least ``count`` bytes; raises ``SpillError`` on failure."""
        self._check_open()
        total = round_up(count, PAGE_BYTES)
        if total <= self.bytes:
            return
        check_directory(self.directory, total - self.bytes)
        try:
            os.posix_fallocate(self._descriptor, self.bytes, total - self.bytes)
        except OSError as error:
            with contextlib.suppress(OSError):  # a file that remains too long does no harm
                os.ftruncate(self._descriptor, self.bytes)
            raise SpillError(
                f"{format_bytes(total - self.bytes)} could not be allocated in the spill directory {self.directory} "
                f"({error.strerror}); make room, lift the limit on file sizes (ulimit -f) or the quota, or name a "
                "directory on another disk"
            ) from error
        self.bytes = total

    def check_length(self) -> None:
        """Raise ``TransferError`` if the file was truncated."""
        self._check_open()
        # If the file grew again, the lost bytes would read as zeros.
        length = os.fstat(self._descriptor).st_size
        if length < self.bytes:
            raise TransferError(
                f"the spill file in {self.directory} was cut off: of its {format_bytes(self.bytes)} there are "
                f"{format_bytes(length)}; check that disk, or name another spill directory"
            )

    def map(self, offset: int, count: int) -> Region:
        """Map bytes of the file as shared memory, which remains usable after ``close``."""
        self._check_open()
        return map_file(self._descriptor, offset, count)

    def map_over(self, region: WeakRegion, offset: int) -> None:
        """Replace a region's pages by the file's pages from ``offset`` on; an ``OSError`` leaves them unchanged."""
        self._check_open()
        map_over(region, self._descriptor, offset)

    def forget(self, offset: int, count: int) -> None:
        """Let the kernel drop pages of the file from its cache, unless the file is closed."""
        if not self._closed:
            os.posix_fadvise(self._descriptor, offset, round_up(count, PAGE_BYTES), os.POSIX_FADV_DONTNEED)

    def transfer_error(self, offset: int, count: int, failure: int, *, writes: bool) -> TransferError:
        """Return the exception for a failed transfer; ``failure`` is an errno, negative at the file's end."""
        at_end = "the system wrote nothing" if writes else "the file ends there"
        reason = os.strerror(failure) if failure > 0 else at_end
        advice = {
            errno.ENOSPC: "make room on that disk",
            errno.EDQUOT: "raise the quota or name another spill directory",
            errno.EFBIG: "lift the file size limit (ulimit -f) or name another spill directory",
        }.get(failure, "check that disk, or name another spill directory")
        error = TransferError(
            f"could not {'write' if writes else 'read'} {format_bytes(count)} at byte {offset} of the spill file in "
            f"{self.directory}: {reason}; {advice}"
        )
        error.errno = failure if failure > 0 else errno.EIO
        return error

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("the spill file is closed; compile the step again to go on")

    def _open_direct(self) -> int | None:
        """Return a descriptor for direct I/O, or None if refused; raises ``SpillError`` if a test of the file fails."""
        try:
            return open_direct(self._descriptor, writes=True)
        except OSError as error:
            os.close(self._descriptor)
            if isinstance(error, TransferError):
                raise SpillError(str(error)) from error
            raise SpillError(
                f"the first write in the spill directory {self.directory} failed ({error.strerror}); name another one"
            ) from error


def _open_unnamed(directory: Path) -> int:
    """Create a private file without a name, and return its descriptor."""
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        # The errors of file systems and kernels without O_TMPFILE.
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
    descriptor, name = tempfile.mkstemp(dir=directory, prefix="outofcore-")
    Path(name).unlink()
    return descriptor
