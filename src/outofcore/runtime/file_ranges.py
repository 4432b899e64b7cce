"""Slots in another file, such as a checkpoint, which is read in place and never written.

A range is the bytes of one tensor in such a file, at an offset beyond all pages of the home itself. The user sees a
private mapping of the file (copy on write). If ``/proc/self/pagemap`` reports a written page, the range moves to pages
of the home, at the same addresses, before the next step reads it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import mmap
import os
import tempfile
import weakref
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

import torch

from outofcore.errors import InputError, TransferError
from outofcore.runtime.file_io import ByteStore, Cache, Location, close_files, open_direct
from outofcore.runtime.memory import Region, WeakRegion, advise_pages, map_file, tensor_over
from outofcore.runtime.native import Flavor, load_unlocked
from outofcore.runtime.spill import SpillFile
from outofcore.units import PAGE_BYTES, round_up

# Offsets from here on refer to ranges of files; every home is smaller than this.
FIRST_RANGE = 1 << 50


@dataclass(frozen=True, slots=True)
class Stamp:
    """The identity of a file's contents. ``changed_ns`` is the modification time, since 1970."""

    device: int
    inode: int
    bytes: int
    changed_ns: int

    @staticmethod
    def of(descriptor: int) -> Stamp:
        status = os.fstat(descriptor)
        return Stamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class ReadFile(ByteStore):
    """A file opened for reading; raises ``InputError`` if it is unreadable or has changed since ``stamp``."""

    def __init__(self, path: Path, stamp: Stamp) -> None:
        self.path, self.stamp = path, stamp
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error
        self._direct: int | None = None
        with contextlib.suppress(TransferError):  # no memory for a test of direct I/O
            self._direct = open_direct(self.descriptor)
        weakref.finalize(self, close_files, self.descriptor, self._direct).atexit = False
        if Stamp.of(self.descriptor) != stamp:
            raise InputError(f"{path} was changed while it was being read; wait until it is complete, and try again")

    def check(self) -> None:
        """Raise ``TransferError`` if the file has changed since its stamp was taken."""
        now = Stamp.of(self.descriptor)
        if now != self.stamp:
            change = (
                f"has {now.bytes} bytes, and had {self.stamp.bytes}" if now.bytes != self.stamp.bytes else "is newer"
            )
            raise TransferError(
                f"{self.path} was changed while weights were read from it in place (it {change}): the model is no "
                "longer valid; restore the file and start again, and write new checkpoints under other names"
            )

    def locate(self, offset: int, count: int) -> Location:
        if self._direct is None:
            return Location(self.descriptor, offset, count, self, Cache.DROPPED)
        return Location(self._direct, offset, count, self, Cache.PAST)

    def transfer_error(self, offset: int, count: int, failure: int, *, writes: bool) -> TransferError:
        reason = os.strerror(failure) if failure > 0 else "the file ends there"
        error = TransferError(
            f"could not read {self.path} at byte {offset}: {reason}; check that disk, and that no program writes to it"
        )
        error.errno = failure if failure > 0 else errno.EIO
        return error

    def map(self, offset: int, count: int) -> Region:
        """Map ``count`` bytes from the page boundary ``offset`` on; writes to them stay in this process."""
        return map_file(self.descriptor, offset, count, private=True)

    def forget(self, offset: int, count: int) -> None:
        """Let the kernel drop bytes of the file from the page cache."""
        os.posix_fadvise(self.descriptor, offset, count, os.POSIX_FADV_DONTNEED)


@dataclass(eq=False)
class _Range:
    begin: int
    bytes: int
    file: ReadFile | SpillFile  # the spill file after a move
    pages: tuple[int, int] | None = None  # (offset, bytes) in the spill file after a move
    view: WeakRegion | None = None  # the mapped pages that show the range

    @property
    def live_view(self) -> WeakRegion | None:
        return self.view if self.view is not None and self.view.is_alive else None

    @property
    def page_offset(self) -> int:
        return self.begin % PAGE_BYTES


class FileRanges:
    """The slots of a home that are ranges of other files, such as the weights of a checkpoint."""

    def __init__(self) -> None:
        self._ranges: dict[int, _Range] = {}
        self._starts: list[int] = []  # starts of all ranges, removed ones included, in order
        self._by_address: dict[int, int] = {}  # offsets of ranges, by the address of their home tensor
        self._next = FIRST_RANGE

    @property
    def bytes(self) -> int:
        """Total bytes of the ranges still in other files, for which the home needs no room."""
        return sum(file_range.bytes for file_range in self._ranges.values() if file_range.pages is None)

    def adopt(self, file: ReadFile, begin: int, count: int) -> int:
        """Add a slot for ``count`` bytes of a file from byte ``begin`` on, and return its offset in the home."""
        offset = self._next
        self._next += round_up(count, PAGE_BYTES)
        self._ranges[offset] = _Range(begin, count, file)
        self._starts.append(offset)
        return offset

    def is_range(self, offset: int) -> bool:
        """Return whether a slot was created as a range, even if it has moved to the home."""
        return offset >= FIRST_RANGE

    def release(self, offset: int) -> tuple[int, int] | None:
        """Remove a range; return the pages (offset, bytes) that it occupied in the home, or None."""
        return self._ranges.pop(offset).pages

    def needed_bytes(self, offset: int) -> int:
        """Return the bytes that a range would need in the home."""
        file_range = self._ranges[offset]
        return file_range.page_offset + file_range.bytes

    def is_in_file(self, offset: int) -> bool:
        """Return whether a slot is a range that is still in another file."""
        return offset >= FIRST_RANGE and self._ranges[offset].pages is None

    def check(self) -> None:
        for file in {file_range.file for file_range in self._ranges.values()}:
            if isinstance(file, ReadFile):
                file.check()

    def locate(self, offset: int, count: int) -> Location:
        """Return the location of ``count`` bytes of a range, or of fewer bytes if the range ends before."""
        file_range, within = self._find_range(offset)
        return file_range.file.locate(file_range.begin + within, min(count, max(file_range.bytes - within, 0)))

    def transfer_error(self, offset: int, count: int, failure: int) -> TransferError:
        file_range, within = self._find_range(offset)
        return file_range.file.transfer_error(file_range.begin + within, count, failure, writes=False)

    def _find_range(self, offset: int) -> tuple[_Range, int]:
        """Return the range that contains an offset of the home, and the distance from the range's start."""
        start = self._starts[bisect_right(self._starts, offset) - 1]
        return self._ranges[start], offset - start

    def tensor_of(self, offset: int) -> torch.Tensor:
        """Return a uint8 tensor that maps a range of a file; raises ``OSError`` if mapping fails."""
        file_range = self._ranges[offset]
        memory = None if file_range.view is None else file_range.view.memory(file_range.page_offset, file_range.bytes)
        if memory is None:
            region = file_range.file.map(
                file_range.begin - file_range.page_offset, file_range.page_offset + file_range.bytes
            )
            file_range.view, memory = region.weak_reference(), region.memory(file_range.page_offset, file_range.bytes)
        home_tensor = tensor_over(memory)
        self._by_address[home_tensor.data_ptr()] = offset
        return home_tensor

    def is_written(self, offset: int) -> bool:
        """Return whether the user has written to a range's home tensor; False after the range has moved to the home."""
        file_range = self._ranges[offset]
        view = file_range.live_view
        return file_range.pages is None and view is not None and has_written_page(view.address, view.bytes)

    def restore(self, offset: int) -> None:
        """Discard the user's writes to the home tensor of a range; no effect after the range has moved to the home."""
        file_range = self._ranges.get(offset)
        if file_range is not None and file_range.pages is None and file_range.live_view is not None:
            advise_pages(file_range.live_view.address, file_range.live_view.bytes, mmap.MADV_DONTNEED)

    def move(self, offset: int, pages: tuple[int, int], spill: SpillFile) -> None:
        """Move a range from its file to ``pages`` of the spill file; the range's tensor keeps its address."""
        file_range = self._ranges[offset]
        home_tensor = self.tensor_of(offset)  # keeps the mapping alive until the end
        if file_range.view is None or home_tensor.data_ptr() != file_range.view.address + file_range.page_offset:
            raise TransferError("mapped weights of a file have moved; this is a bug in outofcore: please report it")
        memory = file_range.view.memory(0, file_range.view.bytes)
        if memory is not None:
            spill.write(pages[0], memory)
            spill.map_over(file_range.view, pages[0])
        file_range.begin, file_range.file, file_range.pages = pages[0] + file_range.page_offset, spill, pages

    def drop_cache(self, home_tensor: torch.Tensor) -> bool:
        """Release a tensor's cached pages if unmodified; return False if the tensor maps no range of a file."""
        offset = self._by_address.get(home_tensor.untyped_storage().data_ptr())
        file_range = None if offset is None else self._ranges.get(offset)
        view = None if file_range is None else file_range.live_view
        if offset is None or file_range is None or view is None:
            return False
        if not self.is_written(offset):
            advise_pages(view.address, view.bytes, mmap.MADV_DONTNEED)
            file_range.file.forget(file_range.begin - file_range.page_offset, file_range.page_offset + file_range.bytes)
        return True


def has_written_page(address: int, count: int) -> bool:
    """Return whether any page of a private mapping was written; raises ``OSError`` if that is unknown."""
    written = load_unlocked(Flavor.CPU).outofcore_any_written(address, count)
    if written < 0:
        raise OSError(errno.EACCES, "/proc/self/pagemap cannot be read")
    return bool(written)


@functools.cache
def can_detect_writes() -> bool:
    """Return whether the kernel reports which pages of a private mapping were written."""
    try:
        with tempfile.TemporaryFile() as file:
            file.write(b"\1" * 2 * PAGE_BYTES)
            file.flush()
            region = map_file(file.fileno(), 0, 2 * PAGE_BYTES, private=True)
            memory = region.memory(0, 2 * PAGE_BYTES)
            first_byte = memory[0]
            was_written = has_written_page(region.address, region.bytes)
            memory[PAGE_BYTES] = first_byte + 1
            return not was_written and has_written_page(region.address, region.bytes)
    except OSError:
        return False
