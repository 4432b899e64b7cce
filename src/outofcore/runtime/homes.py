"""Homes, the backing stores for bytes that are not on the device: host memory, pinned for a GPU or not, or a disk.

A home is one stretch of bytes; each storage has a slot of whole pages in it at a planned offset. Between steps a slot
has a face: a tensor over its bytes, through which the user sees and changes them.
"""

from __future__ import annotations

import mmap
import os
import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from outofcore.capture.provenance import stacklevel_of_user
from outofcore.errors import SpillError, StateError, TransferError
from outofcore.report.machine import available_memory_bytes
from outofcore.runtime.checks import Check, Sums, damaged
from outofcore.runtime.checksums import checksum
from outofcore.runtime.file_io import BUFFER_BYTES, MEMORY, ByteStore, Location, copy_buffer
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
    """What the executor needs of a home, with what holds for memory. Offsets of slots are multiples of the page size.

    The caller orders transfers of one slot, and the use of its face.

    Attributes:
        sums: of what was written in this step, which are compared when it is read. None: nothing is compared.
    """

    sums: Sums | None = None

    @property
    @abstractmethod
    def name(self) -> str:
        """The name in costs and reports: "host", "disk"."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """The name of the link: homes of one identity are equally fast."""

    @property
    @abstractmethod
    def in_memory(self) -> bool:
        """Whether slots are memory, so that bytes move within the home without any I/O."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Bytes that slots may occupy now."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Bytes that slots could occupy at most, as far as is known."""

    @property
    def edges(self) -> Sequence[int]:
        """Ordered offsets that no slot may cross; the end is one of them if added room is not contiguous to it."""
        return ()

    @property
    def files(self) -> FileRanges | None:
        """Ranges of others' files that count as slots here; None if the home takes none."""
        return None

    def move_range(self, offset: int, pages: tuple[int, int]) -> None:
        """Move a range of ``files`` to pages of the home's own, given as offset and bytes."""
        raise StateError(f"the {self.name} home has no ranges of files; please report it")

    @abstractmethod
    def check(self, count: int) -> None:
        """Raise ``SpillError`` if the home cannot hold a total of ``count`` bytes, without allocating anything."""

    @abstractmethod
    def ensure(self, count: int) -> None:
        """Make room for a total of ``count`` bytes, or raise ``SpillError``; existing slots and faces are unchanged."""

    def grow(self, count: int) -> None:
        """Do what ``ensure`` does, with more room at once where growing is expensive."""
        self.ensure(count)

    def reserve(self, count: int) -> int:
        """Make room for one more slot of ``count`` bytes, and return its offset."""
        offset = self.bytes
        self.ensure(offset + count)
        return offset

    def write(self, offset: int, source: memoryview) -> None:
        if self.sums is not None:
            self.sums.note(offset, source)
        super().write(offset, source)

    def read(self, offset: int, target: memoryview) -> None:
        super().read(offset, target)
        if self.sums is not None and not self.sums.matches(offset, target):
            raise damaged(self.name, offset, len(target))

    def read_back(self, offset: int) -> None:
        """With full checks, compare a slot with what was last written to it; raises ``TransferError`` if it differs."""
        if self.sums is None or not self.sums.full or offset not in self.sums.known:
            return
        count, known = self.sums.known[offset]
        buffer, found = copy_buffer(), 0
        for start in range(0, count, BUFFER_BYTES):
            piece = buffer[: min(BUFFER_BYTES, count - start)]
            super().read(offset + start, piece)
            found += checksum(piece, start)
        if found % 2**64 != known:
            raise damaged(self.name, offset, count)

    @abstractmethod
    def face(self, offset: int, count: int) -> torch.Tensor:
        """Return the slot's bytes as a uint8 tensor with a storage of its own of ``count`` bytes.

        It shows what was last written, and what is stored through it is what is next read. It stays valid when the home
        is closed.
        """

    def drop_cache(self, face: torch.Tensor) -> None:
        """Give back physical memory that a face occupies for caching alone; its contents stay."""

    def discard(self, offset: int, count: int) -> None:
        """Give back memory that a slot occupies; its contents are lost."""
        if self.sums is not None:
            self.sums.known.pop(offset, None)

    def start(self) -> None:
        """Begin a step: between steps the user may have changed what is here.

        Raises ``TransferError`` if something is missing.
        """
        if self.sums is not None:
            self.sums.known.clear()

    def sibling(self, count: int) -> HomeStore:
        """Make an empty home on the same link, with room for ``count`` bytes and the same checks, to measure on."""
        found = self._sibling(count)
        if self.sums is not None:
            found.sums = Sums(self.sums.full)
        return found

    @abstractmethod
    def _sibling(self, count: int) -> HomeStore: ...

    @abstractmethod
    def close(self) -> None:
        """Give everything back to the system, apart from faces in use. May be called again."""


def check_copies(home: HomeStore, check: Check) -> HomeStore:
    """Have a home's copies checked, and return it."""
    if check is Check.FULL or (check is Check.SAMPLED and not home.in_memory):
        home.sums = Sums(check is Check.FULL)
    return home


def check_slot(offset: int, count: int, total: int) -> None:
    """Raise ``TransferError`` unless the slot is in a home of ``total`` bytes and aligned."""
    if offset < 0 or offset % PAGE_BYTES or offset + count > total:
        raise TransferError(
            f"bytes [{offset}, {offset + count}) are not a slot in a home of {total} bytes: slots lie within it and "
            f"start on a multiple of {PAGE_BYTES}; this is a fault of the plan: please report it"
        )


class HostHome(HomeStore):
    """Slots in one slab of host memory.

    Its addresses are reserved at once and for good, so that slots never move; memory is taken up only as ``ensure``
    makes room and slots are written.

    Args:
        limit: bytes that slots may take, in whole pages; by default all physical memory.
        release: gives address and bytes back to the system when nothing refers to them any more.
        shared: whether the child of a fork has the same memory, and not a copy of its own.
    """

    def __init__(
        self,
        limit: int | None = None,
        release: Callable[[int, int], object] = unmap,
        *,
        shared: bool = False,
    ) -> None:
        given = limit if limit is not None else _physical_bytes()
        self._limit = max(given // PAGE_BYTES, 1) * PAGE_BYTES
        self._bytes = 0
        try:
            address = map_anonymous(self._limit, accessible=False, shared=shared)
        except OSError as error:
            raise SpillError(
                f"no addresses for {format_bytes(self._limit)} of host memory can be reserved ({error.strerror}); "
                "give a smaller limit or lift that on address space (ulimit -v)"
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
        """The limit, or the slots' current bytes and the memory available."""
        return min(self._limit, self._bytes + self._available())

    def check(self, count: int) -> None:
        if count > self._limit:
            raise SpillError(
                f"the step needs {format_bytes(count)} of host memory, and its limit is {format_bytes(self._limit)}; "
                "raise the limit or the budget, or use a disk home"
            )
        available = self._available()
        if count - self._bytes > available:
            raise SpillError(
                f"the step needs {format_bytes(count - self._bytes)} more of host memory, and the system has "
                f"{format_bytes(available)} available; raise the budget or use a disk home"
            )

    def _available(self) -> int:
        """Return the bytes of memory that can be taken beyond what slots may occupy now."""
        available = available_memory_bytes()
        return _physical_bytes() if available is None else available

    def ensure(self, count: int) -> None:
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

    def locate(self, offset: int, count: int) -> Location:
        region = self._opened()
        check_slot(offset, count, self._bytes)
        return Location(MEMORY, region.address + offset, count, region)

    def failed(self, offset: int, count: int, failure: int, *, writes: bool) -> TransferError:
        """Build an error that should not occur: copying memory returns none."""
        verb, why = "write" if writes else "read", os.strerror(failure) if failure > 0 else "no reason was given"
        return TransferError(
            f"could not {verb} {format_bytes(count)} at byte {offset} of host memory: {why}; please report it"
        )

    def face(self, offset: int, count: int) -> torch.Tensor:
        """Return the slot itself."""
        region = self._opened()
        check_slot(offset, count, self._bytes)
        return tensor_over(region.memory(offset, count))

    def discard(self, offset: int, count: int) -> None:
        """Give the pages back; they come back empty when they are next used."""
        super().discard(offset, count)
        advise_pages(self._opened().address + offset, round_up(count, PAGE_BYTES), mmap.MADV_DONTNEED)

    def _sibling(self, count: int) -> HostHome:
        return HostHome(count)

    def close(self) -> None:
        self._region = None

    def _opened(self) -> Region:
        if self._region is None:
            raise StateError("the host home is closed; compile the step again to go on")
        return self._region


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# What is pinned at once: as much again as a fourth of what there is, and within these bounds. Pinning has a price for
# each call, and no copy may lie across two stretches that were pinned apart.
_LEAST_GROWTH, _MOST_GROWTH = 16 * MIB, GIB


class PinnedHome(HostHome):
    """Slots in one slab of host memory that is pinned in place, in a few large stretches.

    There is no allocator of pinned memory, which would round sizes up to powers of two. Where the system pins no more,
    later slots are pageable, with a warning: copies to and from them are slower, and the host waits for them.

    A copy between a device and host memory, a step's or the user's own, must not cross two stretches (CUDA refuses it
    with cudaErrorInvalidValue). So their ends are ``edges``, and no slot crosses one.

    The slab is shared memory: a fork would copy all private pages that are pinned for a device. The child of a fork
    sees the model as it is, and as it changes.

    Args:
        pin: pins whole pages from an address on; returns False if it could not.
        unpin: undoes that, by the address.
        limit: as for ``HostHome``. An explicit one is trusted: some virtual machines have more memory than their
            system says, and get it as it is used.
    """

    def __init__(
        self, pin: Callable[[int, int], bool], unpin: Callable[[int], object], limit: int | None = None
    ) -> None:
        pinned: list[int] = []

        def release(address: int, count: int) -> None:
            for piece in pinned:
                unpin(piece)
            unmap(address, count)

        super().__init__(limit, release, shared=True)
        self._pin = pin
        self._unpin = unpin
        self._believed = limit is not None
        self._addresses = pinned
        self._seams: list[int] = []  # offsets where one stretch ends and the next one begins
        self._refused = False

    @property
    def identity(self) -> str:
        return "host" if self._refused else "host-pinned"

    @property
    def pinned(self) -> bool:
        """Whether all slots so far are pinned."""
        return not self._refused

    @property
    def edges(self) -> Sequence[int]:
        """The ends of stretches. Pageable memory is one stretch, however often it grew."""
        return self._seams if self._refused else [*self._seams, self.bytes]

    def _available(self) -> int:
        return self._limit - self.bytes if self._believed else super()._available()

    def ensure(self, count: int) -> None:
        """Add one stretch, its pages touched by several threads: the device's driver would use one."""
        before = self.bytes
        super().ensure(count)
        added = self.bytes - before
        if not added or self._refused:
            return
        address = self._opened().address + before
        if before:
            self._seams.append(before)
        try:
            populate(address, added)
        except OSError as error:
            self._bytes = before
            if before:
                self._seams.pop()
            raise SpillError(
                f"the system does not give {format_bytes(added)} more of host memory ({error.strerror}); lower "
                "host_budget, raise the budget or use a disk home"
            ) from error
        if self._pin(address, added):
            self._addresses.append(address)
            return
        self._refused = True
        warnings.warn(
            f"the system does not pin {format_bytes(added)} of host memory beyond {format_bytes(before)}; copies will "
            "be slower and make the host wait: raise the limit on locked memory (ulimit -l), or lower host_budget",
            stacklevel=stacklevel_of_user(),
        )

    def grow(self, count: int) -> None:
        """Grow in large stretches, as far as there is room for them."""
        wanted = round_up(count, PAGE_BYTES)
        if wanted <= self.bytes:
            return
        ahead = min(max(self.bytes // 4, _LEAST_GROWTH), _MOST_GROWTH)
        # A machine is not to run short of memory for what may never be needed.
        spare = self._limit if self._believed else min(self._limit, self.bytes + self._available() // 2)
        try:
            self.ensure(max(wanted, min(self.bytes + ahead, spare)))
        except SpillError:
            self.ensure(wanted)

    def discard(self, offset: int, count: int) -> None:
        """Do nothing: pinned pages stay in place, since the device knows their addresses."""

    def _sibling(self, count: int) -> PinnedHome:
        return PinnedHome(self._pin, self._unpin, count)


class DiskHome(HomeStore):
    """Slots in one spill file without a name, by direct I/O where the file system allows it.

    Nothing is opened before the first ``ensure``.

    Args:
        directory: where the file goes; by default a folder on a real disk (``default_spill_directory``). Raises
            ``SpillError`` if it is missing, not a directory, or read-only.
        limit: bytes that the file may take; by default the free space.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, *, limit: int | None = None) -> None:
        self.directory = default_spill_directory() if directory is None else Path(directory)
        self._limit = limit
        self._file: SpillFile | None = None
        self._faces: dict[int, int] = {}  # slot of the last face at each address; a face that is gone does no harm
        self._closed = False
        self._ranges = FileRanges()
        check_directory(self.directory)
        if directory is not None and in_memory(self.directory):
            warnings.warn(
                f"the spill directory {self.directory} is kept in memory by the system, so that spilling to it frees "
                "none; name a directory on a disk",
                stacklevel=stacklevel_of_user(),
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
        """The limit, or the slots' current bytes and the free space; plus bytes in files."""
        room = self.bytes + free_bytes(self.directory)
        return self._ranges.bytes + (room if self._limit is None else min(self._limit, room))

    @property
    def files(self) -> FileRanges | None:
        return self._ranges

    def move_range(self, offset: int, pages: tuple[int, int]) -> None:
        self._ranges.move(offset, pages, self._opened())

    def check(self, count: int) -> None:
        count = max(count - self._ranges.bytes, 0)
        if self._limit is not None and count > self._limit:
            raise SpillError(
                f"the step needs {format_bytes(count)} on disk, and its limit is {format_bytes(self._limit)}; "
                "raise the limit or the budget"
            )
        check_directory(self.directory, max(count - self.bytes, 0))

    def ensure(self, count: int) -> None:
        if self._closed:
            raise StateError("the disk home is closed; compile the step again to go on")
        if count <= self.bytes:
            return
        self.check(count)
        if self._file is None:
            self._file = SpillFile(self.directory)
        self._file.grow(count)

    def locate(self, offset: int, count: int) -> Location:
        """Return a location in the spill file, or in somebody else's file, which is only read."""
        if offset >= FIRST_RANGE:
            return self._ranges.locate(offset, count)
        file = self._opened()
        check_slot(offset, count, file.bytes)
        return file.locate(offset, count)

    def failed(self, offset: int, count: int, failure: int, *, writes: bool) -> TransferError:
        if offset >= FIRST_RANGE:
            return self._ranges.failed(offset, count, failure)
        return self._opened().failed(offset, count, failure, writes=writes)

    def face(self, offset: int, count: int) -> torch.Tensor:
        """Map pages of the file as shared memory, coherent with direct I/O on Linux.

        Those of somebody else's file are mapped privately (see ``runtime.file_ranges``).
        """
        if offset >= FIRST_RANGE:
            return self._face_in_file(offset)
        file = self._opened()
        check_slot(offset, count, file.bytes)
        if not count:
            return torch.empty(0, dtype=torch.uint8)
        try:
            face = tensor_over(file.map(offset, count).memory(0, count))
        except OSError as error:
            raise TransferError(
                f"a slot of {format_bytes(count)} in the spill file in {self.directory} cannot be mapped "
                f"({error.strerror}); raise vm.max_map_count or the limit on address space (ulimit -v)"
            ) from error
        self._faces[face.data_ptr()] = offset
        return face

    def _face_in_file(self, offset: int) -> torch.Tensor:
        try:
            return self._ranges.face(offset)
        except OSError as error:
            raise TransferError(
                f"weights cannot be mapped from the file that has them ({error.strerror}); raise vm.max_map_count or "
                "the limit on address space (ulimit -v)"
            ) from error

    def drop_cache(self, face: torch.Tensor) -> None:
        """Unmap the pages, which stay in the file, and let the page cache drop them."""
        storage = face.untyped_storage()
        if self._ranges.drop_cache(face):
            return
        offset = self._faces.get(storage.data_ptr())
        if offset is None or not storage.nbytes():
            return
        # A face starts on a page and its mapping has whole pages, so that rounding up stays within it.
        advise_pages(storage.data_ptr(), round_up(storage.nbytes(), PAGE_BYTES), mmap.MADV_DONTNEED)
        if self._file is not None:
            self._file.forget(offset, storage.nbytes())

    def discard(self, offset: int, count: int) -> None:
        """Drop the slot from the page cache; the pages of the file are for the next slot."""
        super().discard(offset, count)
        if offset < FIRST_RANGE:
            self._opened().forget(offset, count)

    def start(self) -> None:
        """Check that the spill file has its length, and that others' files are unchanged."""
        super().start()
        self._ranges.check()
        if self._file is not None and not self._closed:
            self._file.check_length()

    def _sibling(self, count: int) -> DiskHome:
        check_directory(self.directory, count)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is to be said of the directory was said before
            return DiskHome(self.directory)

    def close(self) -> None:
        self._closed = True
        if self._file is not None:
            self._file.close()

    def _opened(self) -> SpillFile:
        if self._file is None or self._closed:
            raise StateError("the disk home is not open; call ensure() first, and do not use it after close()")
        return self._file
