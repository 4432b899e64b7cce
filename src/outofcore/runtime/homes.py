"""Homes, the backing stores of evicted bytes: host memory, pinned for a GPU or not, or a disk.

A home is one range of bytes, in which each storage has a slot of whole pages. Between steps a slot has a home tensor: a
tensor over its bytes, through which the user reads and changes them.
"""

from __future__ import annotations

import mmap
import os
import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from outofcore.capture.provenance import user_stacklevel
from outofcore.errors import SpillError, StateError, TransferError
from outofcore.report.machine import available_memory_bytes
from outofcore.runtime.checks import Check, SlotChecksums, damage_error
from outofcore.runtime.checksums import checksum
from outofcore.runtime.file_io import BUFFER_BYTES, MEMORY, ByteStore, Location, new_copy_buffer
from outofcore.runtime.file_ranges import FIRST_RANGE, FileRanges
from outofcore.runtime.folders import default_spill_directory, file_system_of, in_memory
from outofcore.runtime.memory import (
    Region,
    advise_pages,
    map_anonymous,
    populate,
    tensor_over,
    unmap,
)
from outofcore.runtime.spill import SpillFile, check_directory, free_bytes
from outofcore.units import GIB, MIB, PAGE_BYTES, format_bytes, round_up


class HomeStore(ByteStore):
    """A home, the backing store of evicted bytes. It does not order concurrent uses of one slot."""

    sums: SlotChecksums | None = None  # of the slots written in this step; None: reads are not checked

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def identity(self) -> str:
        """The name of the link to the home; homes with the same name are equally fast."""

    @property
    @abstractmethod
    def in_memory(self) -> bool:
        """Whether slots are in host memory, so that moving bytes within the home needs no I/O."""

    @property
    @abstractmethod
    def bytes(self) -> int: ...

    @property
    @abstractmethod
    def capacity(self) -> int:
        """The maximum total bytes of slots, as far as the system reports it."""

    @property
    def edges(self) -> Sequence[int]:
        """Sorted offsets that no slot may cross. They include the end if later room is not contiguous with it."""
        return ()

    @property
    def files(self) -> FileRanges | None:
        """The ranges of other files that are slots of this home; None if the home does not support them."""
        return None

    def move_range(self, offset: int, pages: tuple[int, int]) -> None:
        """Move the range of ``files`` at ``offset`` to ``pages`` (offset, bytes) of the home itself."""
        raise StateError(f"the {self.name} home has no ranges of files; please report it")

    @abstractmethod
    def check(self, count: int) -> None:
        """Raise ``SpillError`` if the home cannot hold ``count`` bytes in total. Allocates no memory."""

    @abstractmethod
    def ensure(self, count: int) -> None:
        """Grow the home to at least ``count`` bytes in total, keeping slots and home tensors; raises ``SpillError``."""

    def grow(self, count: int) -> None:
        """Grow the home like ``ensure``, and further if each growth is expensive."""
        self.ensure(count)

    def reserve(self, count: int) -> int:
        """Append a slot of ``count`` bytes to the home, and return its offset; raises ``SpillError``."""
        offset = self.bytes
        self.ensure(offset + count)
        return offset

    def write(self, offset: int, source: memoryview) -> None:
        if self.sums is not None:
            self.sums.record(offset, source)
        super().write(offset, source)

    def read(self, offset: int, target: memoryview) -> None:
        super().read(offset, target)
        if self.sums is not None and not self.sums.matches(offset, target):
            raise damage_error(self.name, offset, len(target))

    def check_last_write(self, offset: int) -> None:
        """With full checks, raise ``TransferError`` if a slot differs from its last write."""
        if self.sums is None or not self.sums.full or offset not in self.sums.recorded:
            return
        count, expected = self.sums.recorded[offset]
        buffer, actual = new_copy_buffer(), 0
        for start in range(0, count, BUFFER_BYTES):
            piece = buffer[: min(BUFFER_BYTES, count - start)]
            super().read(offset + start, piece)
            actual += checksum(piece, start)
        if actual % 2**64 != expected:
            raise damage_error(self.name, offset, count)

    @abstractmethod
    def tensor_of(self, offset: int, count: int) -> torch.Tensor:
        """Return the ``count`` bytes of a slot as a uint8 tensor with its own storage, which outlives the home."""

    def drop_cache(self, home_tensor: torch.Tensor) -> None:
        """Free the physical memory that caches a home tensor; the home tensor keeps its contents."""

    def discard(self, offset: int, count: int) -> None:
        """Free the memory of a slot; its contents are lost."""
        if self.sums is not None:
            self.sums.recorded.pop(offset, None)

    def start(self) -> None:
        """Begin a step: forget all checksums. Raises ``TransferError`` if a file of the home was changed."""
        if self.sums is not None:
            self.sums.recorded.clear()

    def sibling(self, count: int) -> HomeStore:
        """Create an empty home on the same link, with the same checks, to measure copies of ``count`` bytes."""
        home = self._sibling(count)
        if self.sums is not None:
            home.sums = SlotChecksums(self.sums.full)
        return home

    @abstractmethod
    def _sibling(self, count: int) -> HomeStore: ...

    @abstractmethod
    def close(self) -> None:
        """Free the memory and files of the home, except home tensors in use. May be called again."""


def enable_checks(home: HomeStore, check: Check) -> HomeStore:
    """Enable the checksums of a home, and return the home. ``SAMPLED`` checks exclude homes in memory."""
    if check is Check.FULL or (check is Check.SAMPLED and not home.in_memory):
        home.sums = SlotChecksums(check is Check.FULL)
    return home


def check_slot(offset: int, count: int, total: int) -> None:
    """Raise ``TransferError`` unless a slot starts on a page and ends within a home of ``total`` bytes."""
    if offset < 0 or offset % PAGE_BYTES or offset + count > total:
        raise TransferError(
            f"bytes [{offset}, {offset + count}) are not a slot in a home of {total} bytes: slots are inside it and "
            f"start on a multiple of {PAGE_BYTES}; this is a fault of the plan: please report it"
        )


class HostHome(HomeStore):
    """A home in one range of host memory. Its addresses are reserved at the start, so that slots never move.

    Args:
        limit: maximum bytes of slots, in whole pages; by default all physical memory.
        release: returns address and bytes to the system after the last reference is gone.
        shared: whether a forked child shares the memory instead of getting a copy.
    """

    def __init__(
        self,
        limit: int | None = None,
        release: Callable[[int, int], object] = unmap,
        *,
        shared: bool = False,
    ) -> None:
        limit_bytes = limit if limit is not None else _physical_bytes()
        self._limit = max(limit_bytes // PAGE_BYTES, 1) * PAGE_BYTES
        self._bytes = 0
        try:
            address = map_anonymous(self._limit, accessible=False, shared=shared)
        except OSError as error:
            raise SpillError(
                f"no addresses for {format_bytes(self._limit)} of host memory can be reserved ({error.strerror}); "
                "lower host_budget, or lift the limit on address space (ulimit -v)"
            ) from error
        self._region: Region | None = Region(address, self._limit, release)

    @property
    def name(self) -> str:
        return "host"

    @property
    def identity(self) -> str:
        return "host"

    @property
    def in_memory(self) -> bool:
        return True

    @property
    def bytes(self) -> int:
        return self._bytes

    @property
    def capacity(self) -> int:
        return min(self._limit, self._bytes + self._available())

    def check(self, count: int) -> None:
        """Raise ``SpillError`` if the home cannot grow to ``count`` bytes."""
        if count > self._limit:
            raise SpillError(
                f"the step needs {format_bytes(count)} of host memory, and its limit is {format_bytes(self._limit)} "
                "(host_budget, or else all memory); raise host_budget or the budget, or use a disk home"
            )
        available = self._available()
        if count - self._bytes > available:
            raise SpillError(
                f"the step needs {format_bytes(count - self._bytes)} more of host memory, and the system has "
                f"{format_bytes(available)} available; raise the budget or use a disk home"
            )

    def _available(self) -> int:
        available = available_memory_bytes()
        return _physical_bytes() if available is None else available

    def ensure(self, count: int) -> None:
        """Grow the home to at least ``count`` bytes; raises ``SpillError`` if memory is lacking."""
        region = self._require_region()
        total = round_up(count, PAGE_BYTES)
        if total <= self._bytes:
            return
        self.check(total)
        try:
            region.make_accessible(self._bytes, total - self._bytes)
        except OSError as error:
            raise SpillError(
                f"the system does not give {format_bytes(total - self._bytes)} more of host memory "
                f"({error.strerror}); raise the budget or use a disk home"
            ) from error
        self._bytes = total

    def locate(self, offset: int, count: int) -> Location:
        region = self._require_region()
        check_slot(offset, count, self._bytes)
        return Location(MEMORY, region.address + offset, count, region)

    def transfer_error(self, offset: int, count: int, failure: int, *, writes: bool) -> TransferError:
        verb, reason = "write" if writes else "read", os.strerror(failure) if failure > 0 else "no reason was given"
        return TransferError(
            f"could not {verb} {format_bytes(count)} at byte {offset} of host memory: {reason}; please report it"
        )

    def tensor_of(self, offset: int, count: int) -> torch.Tensor:
        region = self._require_region()
        check_slot(offset, count, self._bytes)
        return tensor_over(region.memory(offset, count))

    def discard(self, offset: int, count: int) -> None:
        """Free the pages of a slot, which then read as zeros."""
        super().discard(offset, count)
        advise_pages(self._require_region().address + offset, round_up(count, PAGE_BYTES), mmap.MADV_DONTNEED)

    def _sibling(self, count: int) -> HostHome:
        return HostHome(count)

    def close(self) -> None:
        self._region = None

    def _require_region(self) -> Region:
        if self._region is None:
            raise StateError("the host home is closed; compile the step again to go on")
        return self._region


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# Each stretch is a fourth of the pinned memory so far, within these bounds: pinning is expensive per call, and no copy
# may cross two stretches.
_MIN_GROWTH, _MAX_GROWTH = 16 * MIB, GIB


class PinnedHome(HostHome):
    """A home in host memory that is pinned for a GPU, in a few large stretches.

    An allocator of pinned memory would round sizes up to powers of two. If the system refuses to pin more, later slots
    are pageable, with a warning. A copy between a device and host memory must not cross two stretches (CUDA returns
    cudaErrorInvalidValue), so the ends of stretches are ``edges``. ``pin(address, bytes)`` returns False on failure;
    ``unpin(address)`` undoes it. A ``limit`` is trusted: some virtual machines get more memory than they report.
    """

    def __init__(
        self, pin: Callable[[int, int], bool], unpin: Callable[[int], object], limit: int | None = None
    ) -> None:
        pinned: list[int] = []

        def release(address: int, count: int) -> None:
            for piece in pinned:
                unpin(piece)
            unmap(address, count)

        # Shared, because a fork would copy all private pages that are pinned for a device.
        super().__init__(limit, release, shared=True)
        self._pin = pin
        self._unpin = unpin
        self._trusts_limit = limit is not None
        self._addresses = pinned
        self._borders: list[int] = []  # offsets of the borders between stretches
        self._refused = False

    @property
    def identity(self) -> str:
        return "host" if self._refused else "host-pinned"

    @property
    def pinned(self) -> bool:
        return not self._refused

    @property
    def edges(self) -> Sequence[int]:
        """The ends of the stretches. Pageable memory is one stretch that can grow, so its end is no edge."""
        return self._borders if self._refused else [*self._borders, self.bytes]

    def _available(self) -> int:
        return self._limit - self.bytes if self._trusts_limit else super()._available()

    def ensure(self, count: int) -> None:
        """Grow the home to at least ``count`` bytes, pinned if possible; raises ``SpillError`` on failure."""
        start = self.bytes
        super().ensure(count)
        added = self.bytes - start
        if not added or self._refused:
            return
        address = self._require_region().address + start
        if start:
            self._borders.append(start)
        try:
            populate(address, added)  # in several threads; the device's driver would use one
        except OSError as error:
            self._bytes = start
            if start:
                self._borders.pop()
            raise SpillError(
                f"the system does not give {format_bytes(added)} more of host memory ({error.strerror}); lower "
                "host_budget, raise the budget or use a disk home"
            ) from error
        if self._pin(address, added):
            self._addresses.append(address)
            return
        self._refused = True
        warnings.warn(
            f"the system does not pin {format_bytes(added)} of host memory beyond {format_bytes(start)}; copies will "
            "be slower and make the host wait: raise the limit on locked memory (ulimit -l), or lower host_budget",
            stacklevel=user_stacklevel(),
        )

    def grow(self, count: int) -> None:
        """Grow the home to at least ``count`` bytes, and add spare room if memory permits."""
        total = round_up(count, PAGE_BYTES)
        if total <= self.bytes:
            return
        extra = min(max(self.bytes // 4, _MIN_GROWTH), _MAX_GROWTH)
        # Leave memory for other programs: the extra room may never be needed.
        max_bytes = self._limit if self._trusts_limit else min(self._limit, self.bytes + self._available() // 2)
        try:
            self.ensure(max(total, min(self.bytes + extra, max_bytes)))
        except SpillError:
            self.ensure(total)

    def discard(self, offset: int, count: int) -> None:
        """Do nothing: pinned pages stay in place, because the device has their addresses."""

    def _sibling(self, count: int) -> PinnedHome:
        return PinnedHome(self._pin, self._unpin, count)


class DiskHome(HomeStore):
    """A home in one spill file, which the first ``ensure`` creates. It uses direct I/O if possible.

    Raises ``SpillError`` if ``directory`` (by default ``default_spill_directory()``) is missing or read-only. ``limit``
    is the maximum bytes of the file; by default the free space.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, *, limit: int | None = None) -> None:
        self.directory = default_spill_directory() if directory is None else Path(directory)
        self._limit = limit
        self._file: SpillFile | None = None
        # Slot of the last home tensor at each address; stale entries do no harm.
        self._slots_by_address: dict[int, int] = {}
        self._closed = False
        self._ranges = FileRanges()
        check_directory(self.directory)
        if directory is not None and in_memory(self.directory):
            warnings.warn(
                f"the spill directory {self.directory} is kept in memory by the system, so that spilling to it frees "
                "none; name a directory on a disk",
                stacklevel=user_stacklevel(),
            )

    @property
    def name(self) -> str:
        return "disk"

    @property
    def identity(self) -> str:
        """The file system: all folders on it share a disk."""
        device = self.directory.stat().st_dev
        return f"disk-{os.major(device)}:{os.minor(device)}-{file_system_of(self.directory)}"

    @property
    def in_memory(self) -> bool:
        return False

    @property
    def bytes(self) -> int:
        return 0 if self._file is None else self._file.bytes

    @property
    def capacity(self) -> int:
        room = self.bytes + free_bytes(self.directory)
        return self._ranges.bytes + (room if self._limit is None else min(self._limit, room))

    @property
    def files(self) -> FileRanges | None:
        return self._ranges

    def move_range(self, offset: int, pages: tuple[int, int]) -> None:
        self._ranges.move(offset, pages, self._require_file())

    def check(self, count: int) -> None:
        """Raise ``SpillError`` if the home cannot grow to ``count`` bytes."""
        count = max(count - self._ranges.bytes, 0)
        if self._limit is not None and count > self._limit:
            raise SpillError(
                f"the step needs {format_bytes(count)} on disk, and its limit is {format_bytes(self._limit)}; "
                "raise the limit or the budget"
            )
        check_directory(self.directory, max(count - self.bytes, 0))

    def ensure(self, count: int) -> None:
        """Grow the file to at least ``count`` bytes; raises ``SpillError`` if the disk lacks space."""
        if self._closed:
            raise StateError("the disk home is closed; compile the step again to go on")
        if count <= self.bytes:
            return
        self.check(count)
        if self._file is None:
            self._file = SpillFile(self.directory)
        self._file.grow(count)

    def locate(self, offset: int, count: int) -> Location:
        if offset >= FIRST_RANGE:
            return self._ranges.locate(offset, count)
        file = self._require_file()
        check_slot(offset, count, file.bytes)
        return file.locate(offset, count)

    def transfer_error(self, offset: int, count: int, failure: int, *, writes: bool) -> TransferError:
        if offset >= FIRST_RANGE:
            return self._ranges.transfer_error(offset, count, failure)
        return self._require_file().transfer_error(offset, count, failure, writes=writes)

    def tensor_of(self, offset: int, count: int) -> torch.Tensor:
        """Return a uint8 tensor that maps a slot of the file; raises ``TransferError`` if mapping fails."""
        if offset >= FIRST_RANGE:
            return self._tensor_of_range(offset)
        file = self._require_file()
        check_slot(offset, count, file.bytes)
        if not count:
            return torch.empty(0, dtype=torch.uint8)
        try:
            home_tensor = tensor_over(file.map(offset, count).memory(0, count))
        except OSError as error:
            raise TransferError(
                f"a slot of {format_bytes(count)} in the spill file in {self.directory} cannot be mapped "
                f"({error.strerror}); raise vm.max_map_count or the limit on address space (ulimit -v)"
            ) from error
        self._slots_by_address[home_tensor.data_ptr()] = offset
        return home_tensor

    def _tensor_of_range(self, offset: int) -> torch.Tensor:
        """Return a tensor over a range of a user's file; raises ``TransferError`` if mapping fails."""
        try:
            return self._ranges.tensor_of(offset)
        except OSError as error:
            raise TransferError(
                f"weights cannot be mapped from their file ({error.strerror}); raise vm.max_map_count or "
                "the limit on address space (ulimit -v)"
            ) from error

    def drop_cache(self, home_tensor: torch.Tensor) -> None:
        """Release the cached pages of a home tensor where possible; later uses read the file again."""
        storage = home_tensor.untyped_storage()
        if self._ranges.drop_cache(home_tensor):
            return
        offset = self._slots_by_address.get(storage.data_ptr())
        if offset is None or not storage.nbytes():
            return
        # A home tensor's mapping has whole pages, so rounding up stays within it.
        advise_pages(storage.data_ptr(), round_up(storage.nbytes(), PAGE_BYTES), mmap.MADV_DONTNEED)
        if self._file is not None:
            self._file.forget(offset, storage.nbytes())

    def discard(self, offset: int, count: int) -> None:
        """Drop a slot from the page cache; the file keeps its pages, for other slots."""
        super().discard(offset, count)
        if offset < FIRST_RANGE:
            self._require_file().forget(offset, count)

    def start(self) -> None:
        """Begin a step; raises ``TransferError`` if the spill file is too short or another file has changed."""
        super().start()
        self._ranges.check()
        if self._file is not None and not self._closed:
            self._file.check_length()

    def _sibling(self, count: int) -> DiskHome:
        check_directory(self.directory, count)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this home has warned about the directory already
            return DiskHome(self.directory)

    def close(self) -> None:
        self._closed = True
        if self._file is not None:
            self._file.close()

    def _require_file(self) -> SpillFile:
        if self._file is None or self._closed:
            raise StateError("the disk home is not open; call ensure() first, and do not use it after close()")
        return self._file
