"""How eager loops differ between CPU and GPU; the native counterparts are device_cpu.h and device_cuda.h."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from outofcore.errors import SpillError
from outofcore.follow.gpu import BudgetShares, budget_for, divide_budget, make_workspaces, measure_shares, refuse_graphs
from outofcore.follow.native import flavor_of, load_paging
from outofcore.runtime.folders import default_spill_directory
from outofcore.runtime.mapped_files import MappedFiles
from outofcore.runtime.native import Flavor
from outofcore.runtime.spill import SpillFile

# Bytes of address space for a disk home; in practice the disk is the limit.
_DISK_CAPACITY = 1 << 40

# Adds a home to a space, given descriptors for buffered and direct I/O, whether it is in memory, and its bytes.
AddHome = Callable[[int, int, bool, int], object]


@dataclass(frozen=True)
class LoopHome:
    """Where evicted tensors are kept: ``home`` and ``host_budget`` (here in bytes) of ``outofcore.budget``."""

    home: str | os.PathLike[str] | None = None
    host_limit: int | None = None

    @property
    def host_capacity(self) -> int:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return memory if self.host_limit is None else min(memory, self.host_limit)


@dataclass(frozen=True)
class LoopDevice:
    """The CPU as the device of an eager loop; a subclass overrides the differences of another device."""

    device: torch.device

    flavor: ClassVar[Flavor] = Flavor.CPU
    # Whether the arena is reserved only once the models have left the device.
    reserves_late: ClassVar[bool] = False
    # Whether the arena is in host memory.
    is_host: ClassVar[bool] = True

    @property
    def library(self) -> ctypes.CDLL:
        return load_paging(self.flavor)

    def can_move(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided and flavor_of(tensor.device) is self.flavor

    def prepare(self) -> None:
        """Allocate the workspaces of libraries, if they have any, before the loop reserves its arena."""

    def add_homes(self, options: LoopHome, add: AddHome) -> None:
        """Create the homes chosen by ``options``, and call ``add`` for each; raises ``SpillError`` on failure."""
        in_memory = options.home == "host"
        if in_memory or options.host_limit is not None:
            file = _create_memory_file()
            add(file, file, True, options.host_capacity)
        if not in_memory:
            is_path = options.home is not None and options.home != "disk"
            spill = SpillFile(Path(options.home) if is_path and options.home else default_spill_directory())
            with contextlib.closing(spill):
                add(*spill.duplicate(), False, _DISK_CAPACITY)

    def divide_budget(self, budget: int) -> BudgetShares:
        return BudgetShares(budget, 0, 0)

    def room_of(self, budget: int, library_bytes: int) -> int:
        """Return the bytes of tensors that fit a budget of which libraries need ``library_bytes``."""
        return budget - library_bytes

    def budget_for(self, room: int, library_bytes: int) -> int:
        """Return the smallest budget that has ``room`` bytes for tensors."""
        return room + library_bytes

    def mapped_files(self) -> MappedFiles | None:
        """Return the mapped files of this process; None if tensors of this device cannot be mapped from files."""
        return MappedFiles()

    def running_context(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that is open while the loop runs, to refuse features that would fail in it."""
        return contextlib.nullcontext()

    def plan_key(self, policy: object) -> str:
        """Return the name under which plans of a policy are stored."""
        return repr(policy)


CPU = LoopDevice(torch.device("cpu"))


@dataclass(frozen=True)
class LoopGpu(LoopDevice):
    """One GPU as the device of an eager loop; its only home is pinned host memory."""

    flavor: ClassVar[Flavor] = Flavor.CUDA
    reserves_late: ClassVar[bool] = True
    is_host: ClassVar[bool] = False

    def can_move(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided and tensor.device == self.device

    def prepare(self) -> None:
        make_workspaces(self.device)

    def add_homes(self, options: LoopHome, add: AddHome) -> None:
        add(-1, -1, True, options.host_capacity)

    def divide_budget(self, budget: int) -> BudgetShares:
        return measure_shares(budget, self.device)

    def room_of(self, budget: int, library_bytes: int) -> int:
        return divide_budget(budget, library_bytes).room

    def budget_for(self, room: int, library_bytes: int) -> int:
        return budget_for(room, library_bytes)

    def mapped_files(self) -> None:
        return None

    def running_context(self) -> contextlib.AbstractContextManager[object]:
        return refuse_graphs()

    def plan_key(self, policy: object) -> str:
        return f"{policy!r} on cuda"


def loop_device(device: torch.device) -> LoopDevice:
    return LoopGpu(device) if flavor_of(device) is Flavor.CUDA else CPU


def _create_memory_file() -> int:
    """Return the descriptor of a new file in host memory; raises ``SpillError`` if the system refuses it."""
    try:
        return os.memfd_create("outofcore")
    except OSError as error:
        raise SpillError(
            f"no file can be created in host memory ({error.strerror}); lift the limit on open files (ulimit -n), or "
            "use a disk home"
        ) from error
