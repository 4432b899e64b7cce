"""Interface of a device that runs compiled steps (see docs/internals/add-a-device.md), and the CPU's backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from outofcore._torch_internals import storage_key
from outofcore.analysis import SMALL_ALIGNMENT
from outofcore.capture.captured import Captured
from outofcore.errors import ArenaError, BudgetError
from outofcore.execution.arena import AllocationRecorder, Arena, DeviceArena
from outofcore.execution.cpu import CpuEngine
from outofcore.execution.cuda.interface import Driver
from outofcore.execution.engines import Engine
from outofcore.runtime.homes import HomeStore
from outofcore.runtime.native import Flavor
from outofcore.units import format_bytes

_ANNEX_BUDGETS = 2  # size of the annex in budgets: larger than 1, since its pieces may be fragmented


class Backend(Protocol):
    """Opens arenas and engines on one kind of device, and has its settings."""

    @property
    def device(self) -> torch.device: ...

    @property
    def flavor(self) -> Flavor: ...

    @property
    def alignment(self) -> int:
        """Alignment of blocks below 64 KiB, in bytes."""
        ...

    @property
    def driver(self) -> Driver | None:
        """The driver of a device with streams; None for the CPU."""
        ...

    @property
    def warms_up(self) -> bool:
        """Whether the first run of an op may allocate differently from later ones."""
        ...

    def arena(self, count: int, reserve: int, room: int = 0) -> DeviceArena:
        """Open an arena of at least ``count`` bytes, with ``reserve`` bytes for unplanned requests."""
        ...

    def engine(self, homes: Sequence[HomeStore]) -> Engine: ...

    def reserve(self, budget: int) -> int:
        """Return the bytes of a budget that are reserved for off-plan requests."""
        ...

    def unavailable_bytes(self, budget: int, output_bytes: int, state_bytes: int) -> int:
        """Return the bytes of a budget that the arena cannot have; ``state_bytes`` will be moved off the device."""
        ...

    def prepare(self) -> None:
        """Let libraries allocate their memory before any op is measured."""
        ...

    def recorder(self) -> AllocationRecorder: ...

    @property
    def timer(self) -> Callable[[Callable[[], object]], float] | None:
        """A function that returns a call's median seconds by the device's clock; None to use the host's clock."""
        ...

    def generators(self) -> Sequence[torch.Generator]: ...

    def facts(self) -> Mapping[str, object]:
        """Return the properties of device and libraries that measured costs depend on, for cache keys."""
        ...


def bytes_unavailable_to_arena(captured: Captured, backend: Backend, budget: int) -> int:
    """Return the bytes of a budget that a step's outputs and other users of the device take from the arena."""
    output_bytes = sum(captured.graph.storages[storage].bytes for storage in captured.graph.outputs)
    tensors = [b.tensor for b in captured.states if b.tensor is not None]
    moved = {storage_key(t): t.untyped_storage().nbytes() for t in tensors if t.device.type == backend.device.type}
    return backend.unavailable_bytes(budget, output_bytes, sum(moved.values()))


def room_for_arena(captured: Captured, backend: Backend, budget: int) -> int:
    """Return the bytes of a budget that remain for the arena; raise ``BudgetError`` if no bytes remain."""
    unavailable = bytes_unavailable_to_arena(captured, backend, budget)
    if unavailable >= budget:
        raise BudgetError(
            f"the budget of {format_bytes(budget)} leaves no room for the step: other tensors, outputs, libraries and "
            f"the reserve take {format_bytes(unavailable)} on {backend.device}; raise the budget, or free other memory "
            "there"
        )
    return budget - unavailable


def add_smallest_budget(error: BudgetError, budget: int, room: int) -> BudgetError:
    """Convert an error that names the smallest arena to one that names the smallest budget."""
    if room == budget or error.smallest_budget is None:
        return error
    smallest = error.smallest_budget + budget - room
    return BudgetError(
        f"{error}\nThese numbers are for the arena alone: of the budget of {format_bytes(budget)}, "
        f"{format_bytes(budget - room)} is used on the device by other tensors, outputs, libraries and the reserve. "
        f"So the smallest budget is {smallest} bytes ({format_bytes(smallest)}).",
        smallest,
    )


class CpuBackend:
    """The CPU: its arena gets the whole budget; ``replay`` lets native code call ops."""

    device = torch.device("cpu")
    flavor = Flavor.CPU
    driver = None
    alignment = SMALL_ALIGNMENT
    warms_up = False
    timer = None

    def __init__(self, *, replay: bool = True) -> None:
        self._replay = replay

    def arena(self, count: int, reserve: int, room: int = 0) -> Arena:
        """Open an arena of ``room`` bytes, or of ``count`` bytes if that fails."""
        # Unused pages take no memory.
        for size, annex in ((max(room, count), _ANNEX_BUDGETS * max(room, count)), (max(room, count), 0)):
            with contextlib.suppress(ArenaError):
                return Arena(size, reserve=reserve, annex=annex)
        return Arena(count, reserve=reserve)

    def engine(self, homes: Sequence[HomeStore]) -> CpuEngine:
        return CpuEngine(homes, replay=self._replay)

    def reserve(self, budget: int) -> int:
        return 0  # ``DemandEviction`` uses the part of the budget that the plan does not

    def unavailable_bytes(self, budget: int, output_bytes: int, state_bytes: int) -> int:
        return 0

    def prepare(self) -> None:
        """Return at once: the CPU needs no initialization."""

    def recorder(self) -> AllocationRecorder:
        return AllocationRecorder()

    def generators(self) -> Sequence[torch.Generator]:
        return (torch.default_generator,)

    def facts(self) -> Mapping[str, object]:
        return {}
