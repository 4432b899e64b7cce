"""Find memory of this process that is mapped from a file or shared with others (``/proc/self/maps``).

Safetensors and ``torch.load(..., mmap=True)`` map checkpoints privately, and evicting unwritten pages needs no copy.
Shared mappings, such as of ``np.memmap(mode="r+")``, must stay in place, because others see writes to them.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from outofcore.errors import InputError
from outofcore.runtime.file_ranges import ReadFile, Stamp, has_written_page
from outofcore.runtime.memory import is_in_region
from outofcore.tensor_data import is_in_host_memory

_LINE = re.compile(
    r"(?P<begin>[0-9a-f]+)-(?P<end>[0-9a-f]+) r[w-][x-]p (?P<offset>[0-9a-f]+) \S+ (?P<inode>[1-9]\d*) +(?P<path>/.*)"
)
_SHARED = re.compile(r"(?P<begin>[0-9a-f]+)-(?P<end>[0-9a-f]+) [r-][w-][x-]s ")
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class FileMapping:
    """A mapping of a file: addresses [begin, end) show its bytes from ``offset`` on."""

    begin: int
    end: int
    offset: int
    inode: int
    path: str  # when the mappings were read

    def read_file(self) -> ReadFile | None:
        """Open the mapped file for reading; None if the file is unreadable or was replaced."""
        file = self.open()
        if file is None:
            return None
        try:
            return ReadFile(Path(self.path), Stamp.of(file))
        except InputError:
            return None
        finally:
            os.close(file)

    def open(self) -> int | None:
        """Return a new descriptor of the mapped file; None if the file is unreadable or was replaced."""
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        if os.fstat(file).st_ino == self.inode:
            return file
        os.close(file)
        return None


def private_mappings(lines: Iterable[str]) -> list[FileMapping]:
    """Return the private mappings of files in lines of ``/proc/self/maps``, by address."""
    return [mapping for line in lines if (mapping := _private_mapping(line)) is not None]


@lru_cache(8192)  # a process has about a thousand lines, of which few change between two reads
def _private_mapping(line: str) -> FileMapping | None:
    match = _LINE.fullmatch(line.rstrip("\n"))
    if match is None:
        return None
    path = _ESCAPED.sub(lambda escaped: chr(int(escaped[1], 8)), match["path"])
    begin, end, offset = (int(match[name], 16) for name in ("begin", "end", "offset"))
    return FileMapping(begin, end, offset, int(match["inode"]), path)


def shared_mappings(lines: Iterable[str]) -> list[tuple[int, int]]:
    """Return the addresses (begin, end) of the shared mappings in lines of ``/proc/self/maps``, in their order."""
    matches = [match for line in lines if (match := _SHARED.match(line)) is not None]
    return [(int(match["begin"], 16), int(match["end"], 16)) for match in matches]


# Predicates of other modules for storages that are in a home.
OWNERSHIP_TESTS: list[Callable[[torch.UntypedStorage], bool]] = []


class MappedFiles:
    """The file and shared mappings of this process, as of construction or the last ``refresh``."""

    def __init__(self) -> None:
        self._opened: dict[tuple[str, int], ReadFile | None] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the mappings of this process from the system again."""
        try:
            with Path("/proc/self/maps").open(errors="surrogateescape") as file:
                lines = list(file)
        except OSError:
            lines = []
        self._mappings, self._shared = private_mappings(lines), shared_mappings(lines)
        self._begins = [mapping.begin for mapping in self._mappings]
        self._shared_begins = [begin for begin, _ in self._shared]

    def find(self, address: int, count: int) -> FileMapping | None:
        """Return the private mapping that contains ``count`` bytes from an address on, or None."""
        index = bisect_right(self._begins, address) - 1
        if index < 0 or address + count > self._mappings[index].end:
            return None
        return self._mappings[index]

    def is_shared(self, tensor: torch.Tensor) -> bool:
        """Return whether writes to a user's tensor reach a file or another process."""
        if not is_in_host_memory(tensor):
            return False
        storage = tensor.untyped_storage()
        address, count = storage.data_ptr(), storage.nbytes()
        index = bisect_left(self._shared_begins, address + count) - 1
        is_mapped_shared = index >= 0 and self._shared[index][1] > address
        # If /proc is not readable, PyTorch at least reports the storages that it has shared.
        if count == 0 or not (is_mapped_shared or storage.is_shared()):
            return False
        # This library's own mappings do not count.
        return not is_in_region(address) and not any(owns(storage) for owns in OWNERSHIP_TESTS)

    def find_unwritten(self, address: int, count: int) -> tuple[ReadFile, int] | None:
        """Return the file and offset behind a stretch of unmodified mapped memory; None for other memory."""
        mapping = self.find(address, count)
        if mapping is None:
            return None
        key = (mapping.path, mapping.inode)
        if key not in self._opened:
            self._opened[key] = mapping.read_file()
        file = self._opened[key]
        begin = mapping.offset + address - mapping.begin
        if file is None or begin + count > file.stamp.bytes or has_written_page(address, count):
            return None
        return file, begin
