"""Homes: where a storage's bytes live when they are not on the device. Here the one on disk; see ``store``."""

from __future__ import annotations

import mmap
import os
import warnings
from pathlib import Path

import torch

from outofcore.errors import SpillError, StateError, TransferError
from outofcore.execution.folders import default_spill_directory, file_system_of, in_memory
from outofcore.execution.host import HostHome
from outofcore.execution.memory import advise_pages, tensor_over
from outofcore.execution.spill import SpillFile, check_directory, free_bytes
from outofcore.execution.store import HomeStore, check_slot, slot_layout
from outofcore.units import PAGE_BYTES, format_bytes, round_up


class DiskHome:
    """Slots in one spill file without a name, by direct I/O where the file system allows it.

    Nothing is opened before the first ``ensure``.

    Args:
        directory: where the file goes; by default a folder on a real disk (``default_spill_directory``).
        limit: bytes that the file may take; by default the free space.

    Raises:
        SpillError: the directory is missing, not a directory, or read-only.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, *, limit: int | None = None) -> None:
        self.directory = default_spill_directory() if directory is None else Path(directory)
        self._limit = limit
        self._file: SpillFile | None = None
        self._faces: dict[int, int] = {}  # slot of the last face at each address; a face that is gone does no harm
        self._closed = False
        check_directory(self.directory)
        if directory is not None and in_memory(self.directory):
            warnings.warn(
                f"the spill directory {self.directory} is kept in memory by the system, so that spilling to it frees "
                "none; name a directory on a disk",
                stacklevel=2,
            )

    @property
    def name(self) -> str:
        """The name in costs and reports."""
        return "disk"

    @property
    def identity(self) -> str:
        """The file system: all folders on it share a disk."""
        device = self.directory.stat().st_dev
        return f"disk-{os.major(device)}:{os.minor(device)}-{file_system_of(self.directory)}"

    @property
    def in_memory(self) -> bool:
        """Not as far as this library is concerned."""
        return False

    @property
    def bytes(self) -> int:
        """Bytes that slots may occupy now."""
        return 0 if self._file is None else self._file.bytes

    @property
    def capacity(self) -> int:
        """Bytes that slots could occupy at most: the limit, or what they have and the free space."""
        room = self.bytes + free_bytes(self.directory)
        return room if self._limit is None else min(self._limit, room)

    @property
    def direct(self) -> bool:
        """Whether the page cache is bypassed; known from the first ``ensure`` on, False before."""
        return self._file is not None and self._file.direct

    @property
    def descriptor(self) -> int:
        """Of the open file, for transfers of whole pages; it bypasses the page cache where ``direct``.

        Raises:
            StateError: the home is not open.
        """
        return self._opened().descriptor

    def check(self, count: int) -> None:
        """See ``HomeStore.check``."""
        if self._limit is not None and count > self._limit:
            raise SpillError(
                f"the step needs {format_bytes(count)} on disk, and its limit is {format_bytes(self._limit)}; "
                "raise the limit or the budget"
            )
        check_directory(self.directory, max(count - self.bytes, 0))

    def ensure(self, count: int) -> None:
        """See ``HomeStore.ensure``."""
        if self._closed:
            raise StateError("the disk home is closed; compile the step again to go on")
        if count <= self.bytes:
            return
        self.check(count)
        if self._file is None:
            self._file = SpillFile(self.directory)
        self._file.grow(count)

    def reserve(self, count: int) -> int:
        """See ``HomeStore.reserve``."""
        offset = self.bytes
        self.ensure(offset + count)
        return offset

    def write(self, offset: int, source: memoryview) -> None:
        """See ``HomeStore.write``."""
        self._opened().write(offset, source)

    def read(self, offset: int, target: memoryview) -> None:
        """See ``HomeStore.read``."""
        self._opened().read(offset, target)

    def face(self, offset: int, count: int) -> torch.Tensor:
        """See ``HomeStore.face``: pages of the file mapped as shared memory, coherent with direct I/O on Linux."""
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

    def drop_cache(self, face: torch.Tensor) -> None:
        """See ``HomeStore.drop_cache``: unmaps the pages (they stay in the file) and lets the page cache drop them."""
        storage = face.untyped_storage()
        offset = self._faces.get(storage.data_ptr())
        if offset is None or not storage.nbytes():
            return
        # A face starts on a page and its mapping has whole pages, so that rounding up stays within it.
        advise_pages(storage.data_ptr(), round_up(storage.nbytes(), PAGE_BYTES), mmap.MADV_DONTNEED)
        if not self._closed:
            self._opened().forget(offset, storage.nbytes())

    def start(self) -> None:
        """See ``HomeStore.start``: the file is as long as it was made."""
        if self._file is not None and not self._closed:
            self._file.check_length()

    def sibling(self, count: int) -> DiskHome:
        """See ``HomeStore.sibling``: a file beside this one."""
        check_directory(self.directory, count)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is to be said of the directory was said before
            return DiskHome(self.directory)

    def close(self) -> None:
        """See ``HomeStore.close``."""
        self._closed = True
        if self._file is not None:
            self._file.close()

    def _opened(self) -> SpillFile:
        if self._file is None or self._closed:
            raise StateError("the disk home is not open; call ensure() first, and do not use it after close()")
        return self._file


__all__ = ["DiskHome", "HomeStore", "HostHome", "slot_layout"]
