"""Slots in somebody else's file: a checkpoint's, which is read in place and never written.

A range is the bytes of one tensor in such a file. It counts as a slot of a home, at an offset that no page of the home
itself has. Between steps the user sees pages of the file, mapped privately (copy on write): they are read on demand,
and writes never reach the file. The kernel tells which pages were written (``/proc/self/pagemap``); a written range
moves, at the same addresses, to pages of the home's own before the next step reads it.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import tempfile
import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from outofcore.errors import InputError, TransferError
from outofcore.runtime.memory import (
    Watched,
    address_of,
    advise_pages,
    any_written,
    map_file,
    map_over,
    tensor_over,
)
from outofcore.runtime.spill import CHUNK_BYTES, SpillFile, copy_buffer, kept_bytes
from outofcore.units import MIB, PAGE_BYTES, round_up

# From here on offsets name ranges of files; no home has so many bytes of its own.
FIRST_RANGE = 1 << 50
_BOUNCE_BYTES = 2 * MIB


@dataclass(frozen=True, slots=True)
class Stamp:
    """The identity of a file's contents; ``changed_ns`` is when it was last written, since 1970."""

    device: int
    inode: int
    bytes: int
    changed_ns: int

    @staticmethod
    def of(descriptor: int) -> Stamp:
        found = os.fstat(descriptor)
        return Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


class ReadFile:
    """A file that is read past the page cache, at any byte; it is closed once nothing refers to it.

    It stays the same file if it is renamed. Raises ``InputError`` if it cannot be opened, or does not match ``stamp``.
    """

    def __init__(self, path: Path, stamp: Stamp) -> None:
        self.path, self.stamp = path, stamp
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error
        self._direct = _open_direct(self.descriptor)
        weakref.finalize(self, _close, self.descriptor, self._direct).atexit = False
        if Stamp.of(self.descriptor) != stamp:
            raise InputError(f"{path} was changed while it was being read; wait until it is complete, and try again")

    def check(self) -> None:
        """Raise ``TransferError`` if the file was changed since its header was read."""
        now = Stamp.of(self.descriptor)
        if now != self.stamp:
            how = f"has {now.bytes} bytes, and had {self.stamp.bytes}" if now.bytes != self.stamp.bytes else "is newer"
            raise TransferError(
                f"{self.path} was changed while weights were read from it in place (it {how}): the model is no longer "
                "what it was; put the file back and start again, and write new checkpoints under other names"
            )

    def read(self, begin: int, target: memoryview) -> None:
        """Fill ``target`` from byte ``begin`` on; raises ``TransferError`` if that fails or the file is too short."""
        read_range(self.descriptor, self._direct, begin, target, str(self.path))


def _open_direct(descriptor: int) -> int | None:
    try:
        found = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        os.preadv(found, [_bounce()[:PAGE_BYTES]], 0)  # some file systems accept the flag and refuse the I/O
    except OSError:
        os.close(found)
        return None
    return found


def _close(*descriptors: int | None) -> None:
    for descriptor in descriptors:
        if descriptor is not None:
            os.close(descriptor)


_buffers = threading.local()


def _bounce() -> memoryview:
    """Return this thread's page-aligned buffer."""
    memory: memoryview | None = getattr(_buffers, "memory", None)
    if memory is None:
        memory = _buffers.memory = copy_buffer(_BOUNCE_BYTES)
    return memory


def read_range(descriptor: int, direct: int | None, begin: int, target: memoryview, name: str) -> None:
    """Fill ``target`` from byte ``begin`` of a file on, reading the whole pages around it.

    Where the two have the same alignment whole pages go straight to ``target``; else through a buffer of a few MiB,
    which stays in the processor's cache. ``direct`` is a descriptor past the page cache; without one the kernel is told
    to drop the pages. ``name`` is for errors. Raises ``TransferError`` if the system refuses or the file is too short.
    """
    source = descriptor if direct is None else direct
    done, count = 0, len(target)
    if not count:
        return
    address = address_of(target)
    if begin % PAGE_BYTES == 0 and address % PAGE_BYTES == 0:
        done = count // PAGE_BYTES * PAGE_BYTES
        for start in range(0, done, CHUNK_BYTES):
            _read(source, target[start : min(start + CHUNK_BYTES, done)], begin + start, name)
    buffer = _bounce()
    while done < count:
        at = begin + done
        first = at // PAGE_BYTES * PAGE_BYTES
        usable = min(len(buffer) - (at - first), count - done)
        wanted = round_up(at - first + usable, PAGE_BYTES)
        _read(source, buffer[:wanted], first, name, least=at - first + usable)
        # Unlike an assignment to a slice of a memoryview, this releases the GIL.
        ctypes.memmove(address + done, address_of(buffer) + at - first, usable)
        done += usable
    if direct is None:
        os.posix_fadvise(descriptor, begin, count, os.POSIX_FADV_DONTNEED)


def _read(descriptor: int, target: memoryview, offset: int, name: str, least: int | None = None) -> None:
    """Read whole pages; the last ones only as far as the file goes, but ``least`` bytes."""
    done, needed, stuck = 0, len(target) if least is None else least, False
    while done < needed:
        try:
            moved = os.preadv(descriptor, [target[done:]], offset + done)
        except OSError as error:
            raise _error(name, offset + done, error.strerror or "the read failed", error.errno) from error
        kept = kept_bytes(moved, needed - done)
        if moved == 0 or (kept == 0 and stuck):
            raise _error(name, offset + done + moved, "the file ends there", errno.EIO)
        stuck = kept == 0
        done += kept


def _error(name: str, offset: int, why: str, code: int | None) -> TransferError:
    error = TransferError(
        f"could not read {name} at byte {offset}: {why}; check that disk, and that nobody writes to the file"
    )
    error.errno = code
    return error


@dataclass(eq=False)
class _Range:
    """The bytes of a tensor in a file.

    ``file`` is None if they are in ``pages`` (offset, bytes) of the home's own, where ``begin`` counts as well;
    ``shown`` are the pages that show it, as long as anything refers to them.
    """

    begin: int
    bytes: int
    file: ReadFile | None
    pages: tuple[int, int] | None = None
    shown: Watched | None = None

    @property
    def alive(self) -> Watched | None:
        """The pages that show it, if there are any."""
        return self.shown if self.shown is not None and self.shown.is_alive else None

    @property
    def within(self) -> int:
        """Its offset in its first page."""
        return self.begin % PAGE_BYTES


class FileRanges:
    def __init__(self) -> None:
        self._ranges: dict[int, _Range] = {}
        self._starts: list[int] = []  # of all that ever were, in order
        self._by_address: dict[int, int] = {}  # of what shows one
        self._next = FIRST_RANGE

    @property
    def bytes(self) -> int:
        """Bytes in files: the home itself needs no room for them."""
        return sum(one.bytes for one in self._ranges.values() if one.file is not None)

    def adopt(self, file: ReadFile, begin: int, count: int) -> int:
        """Make a slot of ``count`` bytes of a file from ``begin`` on, and return its offset."""
        offset = self._next
        self._next += round_up(count, PAGE_BYTES)
        self._ranges[offset] = _Range(begin, count, file)
        self._starts.append(offset)
        return offset

    def has(self, offset: int) -> bool:
        """Return whether a slot was made as a range, even if it has moved to the home."""
        return offset >= FIRST_RANGE

    def release(self, offset: int) -> tuple[int, int] | None:
        """Forget a range; returns its pages (offset, bytes) of the home's own, which are then free."""
        return self._ranges.pop(offset).pages

    def needed(self, offset: int) -> int:
        """Return the bytes of the home's own that a range takes if it moves there."""
        one = self._ranges[offset]
        return one.within + one.bytes

    def is_in_file(self, offset: int) -> bool:
        """Return whether a slot is a range that is still in somebody else's file."""
        return offset >= FIRST_RANGE and self._ranges[offset].file is not None

    def check(self) -> None:
        """Raise ``TransferError`` if a file was changed."""
        for file in self._files():
            file.check()

    def _files(self) -> Iterator[ReadFile]:
        seen = {id(one.file): one.file for one in self._ranges.values() if one.file is not None}
        return iter(seen.values())

    def read(self, offset: int, target: memoryview, spill: SpillFile | None) -> None:
        """Fill ``target`` from an offset in a range on; it may be longer than the range by less than a page."""
        start = self._starts[bisect_right(self._starts, offset) - 1]
        one = self._ranges[start]
        into = offset - start
        target = target[: max(one.bytes - into, 0)]
        if one.file is not None:
            one.file.read(one.begin + into, target)
        elif spill is not None:
            plain, direct = spill.descriptors
            read_range(plain, direct, one.begin + into, target, f"the spill file in {spill.directory}")

    def face(self, offset: int, spill: SpillFile | None) -> torch.Tensor:
        """Map a range as a uint8 tensor for the user; raises ``OSError`` if that fails."""
        one = self._ranges[offset]
        memory = None if one.shown is None else one.shown.memory(one.within, one.bytes)
        if memory is None:
            first, count = one.begin - one.within, one.within + one.bytes
            if one.file is not None:
                region = map_file(one.file.descriptor, first, count, private=True)
            elif spill is not None:
                region = spill.map(first, count)
            else:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            one.shown, memory = region.watch(), region.memory(one.within, one.bytes)
        face = tensor_over(memory)
        self._by_address[face.data_ptr()] = offset
        return face

    def written(self, offset: int) -> bool:
        """Return whether somebody has written to the face of a range that is still in its file."""
        one = self._ranges[offset]
        shown = one.alive
        return one.file is not None and shown is not None and any_written(shown.address, shown.bytes)

    def restore(self, offset: int) -> None:
        """Discard what was written to the face of a range that is still in its file."""
        one = self._ranges.get(offset)
        if one is not None and one.file is not None and one.alive is not None:
            advise_pages(one.alive.address, one.alive.bytes, mmap.MADV_DONTNEED)

    def move(self, offset: int, pages: tuple[int, int], spill: SpillFile) -> None:
        """Move a range and what was written to it to pages of the home's own, at the same addresses."""
        one = self._ranges[offset]
        shown = self.face(offset, spill)  # held until all is done
        if one.shown is None or shown.data_ptr() != one.shown.address + one.within:
            raise TransferError("what shows a range of a file is not where it was mapped: please report it")
        memory = one.shown.memory(0, one.shown.bytes)
        if memory is not None:
            spill.write(pages[0], memory)
            map_over(one.shown, spill.descriptors[0], pages[0])
        one.begin, one.file, one.pages = pages[0] + one.within, None, pages

    def drop_cache(self, face: torch.Tensor, spill: SpillFile | None) -> bool:
        """Drop the pages that show a range, except written ones; returns False if the face shows none."""
        offset = self._by_address.get(face.untyped_storage().data_ptr())
        one = None if offset is None else self._ranges.get(offset)
        shown = None if one is None else one.alive
        if offset is None or one is None or shown is None:
            return False
        if not self.written(offset):
            advise_pages(shown.address, shown.bytes, mmap.MADV_DONTNEED)
            if one.file is not None:
                os.posix_fadvise(one.file.descriptor, one.begin, one.bytes, os.POSIX_FADV_DONTNEED)
            elif spill is not None:
                spill.forget(one.begin - one.within, one.within + one.bytes)
        return True


@functools.cache
def writes_are_seen() -> bool:
    """Return whether the kernel tells which pages of a private mapping were written, found by writing to one."""
    try:
        with tempfile.TemporaryFile() as file:
            file.write(b"\1" * 2 * PAGE_BYTES)
            file.flush()
            region = map_file(file.fileno(), 0, 2 * PAGE_BYTES, private=True)
            memory = region.memory(0, 2 * PAGE_BYTES)
            read = memory[0]
            before = any_written(region.address, region.bytes)
            memory[PAGE_BYTES] = read + 1
            return not before and any_written(region.address, region.bytes)
    except OSError:
        return False
