"""A loop's arena and homes: a thin layer over the functions of ``paging.cpp``."""

from __future__ import annotations

import ctypes
import enum
import logging
from collections.abc import Iterable, Sequence
from dataclasses import fields

import torch

from outofcore._torch_internals import storage_address
from outofcore.errors import ArenaError, StateError
from outofcore.follow.devices import LoopDevice
from outofcore.follow.native import Refusal, call
from outofcore.follow.sources import forward_place
from outofcore.follow.stats import LoopStats
from outofcore.progress import ProgressCallback, ignore_progress
from outofcore.runtime.checks import Check
from outofcore.runtime.mapped_files import FileMapping
from outofcore.units import format_bytes

_log = logging.getLogger("outofcore")

# The codes that ``follow_new`` in paging.cpp accepts.
_CHECK_CODES = {Check.OFF: 0, Check.SAMPLED: 1, Check.FULL: 2}


class Excess(enum.IntEnum):
    REFUSED = 0  # the op is refused
    ALLOWED = 1  # the op may exceed the budget
    MEASURED = 2  # the op may exceed the budget, and its need is recorded


class AdoptionResult(enum.IntEnum):
    NO = 0
    YES = 1
    HAS_ARRAY = 2  # not adopted, because a NumPy array may share its memory


class Space:
    """The native part of one loop; it must not be used after ``close``."""

    def __init__(self, device: LoopDevice, limit: int, check: Check, excess: Excess, *, is_planned: bool) -> None:
        self.device, self.library = device, device.library
        self.library_bytes = 0  # bytes of the budget that libraries keep, set by reserve()
        index, check_code = device.device.index or 0, _CHECK_CODES[check]
        # ctypes passes this pointer as the argument.
        self._as_parameter_: int | None = call(
            self.library, "follow_new", limit, index, check_code, int(is_planned), excess
        )

    def call(self, function: str, *arguments: object) -> int:
        return call(self.library, function, self, *arguments)

    def read_numbers(self, function: str) -> list[int]:
        """Call a native function by name, and return the numbers that it writes to a buffer."""
        capacity = 0
        while True:  # other threads may add numbers between two calls
            numbers = (ctypes.c_int64 * capacity)()
            needed = self.call(function, numbers, capacity)
            if needed <= capacity:
                return numbers[:needed]
            capacity = needed

    def read_names(self, function: str) -> list[str]:
        text: bytes = getattr(self.library, function)(self)
        return text.decode().splitlines()

    def close(self) -> None:
        # A second call has no effect, even if a signal handler raised in the first.
        pointer, self._as_parameter_ = self._as_parameter_, None
        if pointer is not None:
            self.library.follow_close(pointer)

    def reserve(self, budget: int) -> int:
        """Reserve the arena; return the bytes left for tensors. Raises ``BudgetError`` or ``ArenaError``."""
        shares = self.device.divide_budget(budget)
        self.library_bytes = shares.library_bytes
        if self.call("follow_reserve", shares.arena, shares.spare, shares.segments) == 0:
            raise ArenaError(
                f"{self.device.device} does not give {format_bytes(shares.arena)} for the arena; lower the budget, or "
                "free other memory there"
            )
        return shares.room

    def adopt(
        self, tensors: Iterable[torch.Tensor], report_progress: ProgressCallback = ignore_progress, total: int = 0
    ) -> None:
        """Move tensors to the home, except memory shared with files, other processes or NumPy."""
        mapped = self.device.mapped_files()
        files: dict[FileMapping, int] = {}
        unmoved_bytes = 0
        for position, tensor in enumerate(tensors, 1):
            report_progress("move the model to its home", position - 1, total)
            if not self.device.can_move(tensor):
                continue
            # A private mapping of a weights file can be adopted. A shared mapping must stay, since others see writes.
            if mapped is not None and mapped.is_shared(tensor):
                continue
            storage = tensor.untyped_storage()
            address = self.library.follow_memory(storage_address(storage))
            mapping = mapped and mapped.find(address, storage.nbytes())
            number = -1 if mapping is None else self._file_number(mapping, files)
            offset = 0 if mapping is None else mapping.offset + address - mapping.begin
            adopted = call(self.library, "follow_adopt", storage_address(storage), number, offset)
            unmoved_bytes += storage.nbytes() if adopted == AdoptionResult.HAS_ARRAY else 0
        if total:
            report_progress("move the model to its home", total, total)
        if unmoved_bytes:
            _log.warning(
                "%s of parameters and buffers stay where they are, outside the budget: NumPy arrays may share their "
                "memory; take arrays of clones, as by .detach().clone().numpy()",
                format_bytes(unmoved_bytes),
            )

    def _file_number(self, mapping: FileMapping, files: dict[FileMapping, int]) -> int:
        """Return the native number of a mapped file, after adding a new file; -1 if the file cannot be read."""
        if mapping not in files:
            file = mapping.open()
            files[mapping] = -1 if file is None else self.call("follow_add_file", file)
        return files[mapping]

    def find_untracked(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors of 64 KiB and more that are outside the arena and the homes."""
        addresses = [storage_address(tensor.untyped_storage()) for tensor in tensors]
        untracked: list[torch.Tensor] = []
        begin, count = 0, len(addresses)
        pointers = (ctypes.c_void_p * count)(*addresses)
        while begin < count:
            remaining = ctypes.byref(pointers, begin * ctypes.sizeof(ctypes.c_void_p))
            begin += self.call("follow_strangers", remaining, count - begin)
            if begin < count:
                untracked.append(tensors[begin])
            begin += 1
        return untracked

    def largest_need(self) -> tuple[int, str] | None:
        """Return the largest memory need of an op, in bytes, and a description of that op; None if not recorded."""
        numbers = Refusal()
        text: bytes | None = self.library.follow_need(self, ctypes.byref(numbers))
        if text is None:
            return None
        op, _, place = text.decode(errors="replace").partition("\n")
        return numbers.asked + numbers.used + numbers.kept + numbers.small, op + forward_place(place)

    def read_stats(self, *, steps: int, plans: int) -> LoopStats:
        """Return the loop's counters, except the budget and the memory of the process, which are 0."""
        expected = (
            len(fields(LoopStats)) - 6
        )  # Python counts steps and plans, and has the budget and the memory of the process
        counts = (ctypes.c_int64 * expected)()
        actual = self.library.follow_counters(self, counts, expected)
        if actual != expected:
            raise StateError(
                f"the native code has {actual} counters instead of {expected}; this is a bug in outofcore: please "
                "report it"
            )
        return LoopStats(*counts, steps=steps, plans=plans)
