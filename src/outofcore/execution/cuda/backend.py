"""The backend of a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from outofcore.execution.arena import Memory, Recorder
from outofcore.execution.cuda.driver import ALLOCATOR, CudaDriver
from outofcore.execution.cuda.engine import CudaEngine
from outofcore.execution.engines import Replaying
from outofcore.runtime.homes import HomeStore, PinnedHome
from outofcore.runtime.native import Flavor
from outofcore.units import MIB, round_up

# Off-plan requests may take a 64th of the budget, and this at least: libraries keep workspaces of tens of MiB.
_RESERVE_SHARE = 64
_LEAST_RESERVE = 32 * MIB
# Segments that the caching allocator opens beside the arena: four for small requests and the rest of a large one, and
# one for what it takes to be neither.
_BESIDE = 4 * ALLOCATOR.segment + ALLOCATOR.middle_segment


class CudaBackend:
    """One CUDA device; with ``replay`` "graphs" native code calls ops and makes CUDA graphs of them.

    Raises ``InputError`` if there is no such device.
    """

    flavor = Flavor.CUDA
    alignment = ALLOCATOR.alignment
    warms_up = True

    def __init__(self, device: torch.device, driver: CudaDriver | None = None, *, replay: Replaying = True) -> None:
        self._replay: Replaying = replay
        self.driver = CudaDriver(device) if driver is None else driver
        self.device = self.driver.device

    def arena(self, count: int, reserve: int, room: int = 0) -> Memory:
        """Open an arena as large as the program needs, whatever ``room``: others on the device can use the rest.

        PyTorch's unused cached memory goes back to the device first.
        """
        self.driver.synchronize()
        self.driver.reserved_bytes()
        return self.driver.open_arena(count, reserve)

    def engine(self, homes: Sequence[HomeStore]) -> CudaEngine:
        return CudaEngine(self.driver, homes, replay=self._replay)

    def home(self, limit: int | None) -> PinnedHome:
        """Make the home in pinned host memory, of at most ``limit`` bytes."""
        return PinnedHome(self.driver.pin, self.driver.unpin, limit)

    def reserve(self, budget: int) -> int:
        return max(budget // _RESERVE_SHARE, _LEAST_RESERVE)

    def beside(self, budget: int, given: int, moved: int) -> int:
        """Return what the arena cannot have: PyTorch's other memory on the device, the reserve, outputs, and more.

        That other memory is inputs and workspaces of libraries. Outputs count twice, as the user may hold those of the
        last step; the pieces that the caching allocator opens count as well.
        """
        others = max(self.driver.allocated_bytes() - moved, 0)
        segment = ALLOCATOR.segment
        return round_up(others, segment) + self.reserve(budget) + 2 * round_up(given, segment) + _BESIDE

    def prepare(self) -> None:
        self.driver.prepare()

    def recorder(self) -> Recorder:
        return Recorder(Flavor.CUDA)

    @property
    def timer(self) -> Callable[[Callable[[], object]], float]:
        return self.driver.time

    def generators(self) -> Sequence[torch.Generator]:
        return self.driver.generators()

    def facts(self) -> Mapping[str, object]:
        return self.driver.facts()
