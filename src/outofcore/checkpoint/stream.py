"""Files as streams of bytes: written past the page cache through one small buffer, and read in pieces."""

from __future__ import annotations

import errno
import fcntl
import os
import zlib
from pathlib import Path
from types import TracebackType
from typing import Self

from outofcore.errors import InputError, TransferError
from outofcore.execution.memory import Region, map_anonymous
from outofcore.units import MIB, PAGE_BYTES, format_bytes, round_up

BUFFER_BYTES = 4 * MIB
_O_DIRECT = getattr(os, "O_DIRECT", 0)


def new_buffer() -> memoryview:
    """``BUFFER_BYTES`` of memory that direct I/O can use."""
    return Region(map_anonymous(BUFFER_BYTES), BUFFER_BYTES).memory(0, BUFFER_BYTES)


class OutFile:
    """A new file that is written from its beginning to its end; a context manager.

    It is whole on disk once ``finish`` has returned.

    Attributes:
        bytes: written so far.
        crc32: of them.

    Raises:
        TransferError: the system refuses; the message says where and why.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = 0
        self.crc32 = 0
        self._buffer = new_buffer()
        self._filled = 0
        self._flushed = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            try:
                self._descriptor = os.open(path, flags | _O_DIRECT, 0o666)
            except OSError as error:
                # What file systems without direct I/O say.
                if error.errno != errno.EINVAL:
                    raise
                self._descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            raise self._error(error) from error
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._closed:
            self._closed = True
            os.close(self._descriptor)

    def write(self, source: memoryview | bytes) -> None:
        """Append bytes."""
        source = memoryview(source)
        self.crc32 = zlib.crc32(source, self.crc32)
        self.bytes += len(source)
        while source:
            count = min(len(source), BUFFER_BYTES - self._filled)
            self._buffer[self._filled : self._filled + count] = source[:count]
            self._filled += count
            source = source[count:]
            if self._filled == BUFFER_BYTES:
                self._flush(BUFFER_BYTES)

    def finish(self) -> None:
        """Write what is left, and return when the disk has it all."""
        try:
            if self._filled:
                # Direct I/O moves whole pages; what is too much is cut off.
                self._flush(round_up(self._filled, PAGE_BYTES))
                os.ftruncate(self._descriptor, self.bytes)
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._error(error) from error

    def _flush(self, count: int) -> None:
        source = self._buffer[:count]
        done = 0
        try:
            while done < count:
                try:
                    moved = os.pwrite(self._descriptor, source[done:], self._flushed + done)
                except OSError as error:
                    flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
                    if error.errno != errno.EINVAL or not flags & _O_DIRECT:
                        raise
                    # Some file systems take the flag and refuse the I/O.
                    fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_O_DIRECT)
                    continue
                if not moved:
                    raise OSError(errno.EIO, "the system wrote nothing")
                # After a short write direct I/O can only go on from a page boundary.
                done += moved if done + moved == count else moved // PAGE_BYTES * PAGE_BYTES or moved
        except OSError as error:
            raise self._error(error) from error
        self._flushed += count
        self._filled = 0

    def _error(self, error: OSError) -> TransferError:
        if isinstance(error, TransferError):
            return error
        advice = {
            errno.ENOSPC: "make room there, or save to another disk",
            errno.EDQUOT: "raise the quota, or save elsewhere",
            errno.EFBIG: "lift the file size limit (ulimit -f)",
        }.get(error.errno or 0, "check that disk, or save elsewhere")
        found = TransferError(
            f"could not write {self.path} after {format_bytes(self.bytes)}: {error.strerror}; {advice}. "
            "The checkpoint that was there before is still whole"
        )
        found.errno = error.errno
        return found


class InFile:
    """A file that is read in pieces, without its pages staying in the page cache; a context manager.

    Raises:
        InputError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def read(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` from byte ``offset`` on.

        Raises:
            TransferError: the file ends there, or cannot be read.
        """
        done = 0
        while done < len(target):
            try:
                moved = os.preadv(self._descriptor, [target[done:]], offset + done)
            except OSError as error:
                raise self._error(offset + done, error.strerror or "the read failed") from error
            if not moved:
                raise self._error(offset + done, "the file ends there")
            done += moved
        os.posix_fadvise(self._descriptor, offset, len(target), os.POSIX_FADV_DONTNEED)

    def _error(self, offset: int, why: str) -> TransferError:
        return TransferError(f"could not read {self.path} at byte {offset}: {why}; take another copy of the file")
