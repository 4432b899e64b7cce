"""Where steps run: the CPU, or a CUDA device. ``Backend`` is what a compiled step needs of a device.

docs/internals/add-a-device.md lists what else asks for a device's type.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from outofcore._torch_internals import storage_key
from outofcore.analysis import SMALL_ALIGNMENT
from outofcore.capture.captured import Captured
from outofcore.errors import ArenaError, BudgetError
from outofcore.execution.arena import Arena, Memory, Recorder
from outofcore.execution.cpu import CpuEngine
from outofcore.execution.cuda.interface import Driver
from outofcore.execution.engines import Engine
from outofcore.runtime.homes import HomeStore
from outofcore.runtime.native import Flavor
from outofcore.units import format_bytes

_ANNEX = 2  # addresses for requests beyond the plan, in budgets: pieces of them lie apart


class Backend(Protocol):
    @property
    def device(self) -> torch.device: ...

    @property
    def flavor(self) -> Flavor:
        """Which native code steps need."""
        ...

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
        """Whether the first run of an op may allocate differently from all later ones."""
        ...

    def arena(self, count: int, reserve: int, room: int = 0) -> Memory:
        """Open an arena of ``count`` bytes, with ``reserve`` bytes for off-plan requests.

        ``room`` is what programs of other input shapes may need. Where unused memory costs nothing, the arena gets that
        size at once: opening a larger one later takes all that is in it home and back.
        """
        ...

    def engine(self, homes: Sequence[HomeStore]) -> Engine:
        """Make the engine that runs steps here, with homes, nearest first."""
        ...

    def reserve(self, budget: int) -> int:
        """Return the bytes that off-plan requests may take under a budget."""
        ...

    def beside(self, budget: int, given: int, moved: int) -> int:
        """Return the bytes of a budget that the arena cannot have.

        ``given`` are bytes of outputs, which leave the arena; ``moved`` those of states on the device that will make
        room.
        """
        ...

    def prepare(self) -> None:
        """Get ready for ops to be measured and run."""
        ...

    def recorder(self) -> Recorder: ...

    @property
    def timer(self) -> Callable[[Callable[[], object]], float] | None:
        """Return a timer of median seconds by the device's own clock; None if the host's clock is right."""
        ...

    def generators(self) -> Sequence[torch.Generator]:
        """Return the random generators that ops may draw from."""
        ...

    def facts(self) -> Mapping[str, object]:
        """Return what measurements depend on, beyond the machine."""
        ...


def beside_the_arena(captured: Captured, backend: Backend, budget: int) -> int:
    """Return the bytes of a budget that a step's arena cannot have: see ``Backend.beside``."""
    given = sum(captured.graph.storages[storage].bytes for storage in captured.graph.outputs)
    tensors = [b.tensor for b in captured.states if b.tensor is not None]
    moved = {storage_key(t): t.untyped_storage().nbytes() for t in tensors if t.device.type == backend.device.type}
    return backend.beside(budget, given, sum(moved.values()))


def room_for_arena(captured: Captured, backend: Backend, budget: int) -> int:
    """Return the bytes of a budget that a step's arena may have; raises ``BudgetError`` if none are left."""
    beside = beside_the_arena(captured, backend, budget)
    if beside >= budget:
        raise BudgetError(
            f"the budget of {format_bytes(budget)} leaves nothing for the step: {format_bytes(beside)} of it are taken "
            f"on {backend.device} by other tensors, outputs, libraries and the reserve; raise the budget, or free what "
            "else lies there"
        )
    return budget - beside


def in_terms_of_the_budget(error: BudgetError, budget: int, room: int) -> BudgetError:
    """Convert the refusal of an arena's size to one of the whole budget."""
    if room == budget or error.smallest_budget is None:
        return error
    smallest = error.smallest_budget + budget - room
    return BudgetError(
        f"{error}\nThese are bytes of the arena alone: of the budget of {format_bytes(budget)}, "
        f"{format_bytes(budget - room)} are taken on the device by other tensors, outputs, libraries and the reserve. "
        f"So the smallest budget is {smallest} bytes ({format_bytes(smallest)}).",
        smallest,
    )


class CpuBackend:
    """The CPU: its arena is all of the budget; ``replay`` lets native code call ops."""

    device = torch.device("cpu")
    flavor = Flavor.CPU
    driver = None
    alignment = SMALL_ALIGNMENT
    warms_up = False
    timer = None

    def __init__(self, *, replay: bool = True) -> None:
        self._replay = replay

    def arena(self, count: int, reserve: int, room: int = 0) -> Arena:
        """Include ``room``: pages that nothing touches take no memory, but addresses may be limited as well."""
        for size, annex in ((max(room, count), _ANNEX * max(room, count)), (max(room, count), 0)):
            with contextlib.suppress(ArenaError):
                return Arena(size, reserve=reserve, annex=annex)
        return Arena(count, reserve=reserve)

    def engine(self, homes: Sequence[HomeStore]) -> CpuEngine:
        return CpuEngine(homes, replay=self._replay)

    def reserve(self, budget: int) -> int:
        return 0  # what the plan leaves of the budget: see ``DemandEviction``

    def beside(self, budget: int, given: int, moved: int) -> int:
        return 0

    def prepare(self) -> None:
        """See ``Backend.prepare``."""

    def recorder(self) -> Recorder:
        return Recorder()

    def generators(self) -> Sequence[torch.Generator]:
        return (torch.default_generator,)

    def facts(self) -> Mapping[str, object]:
        return {}
