"""The backend of a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from outofcore.execution.arena import AllocationRecorder, DeviceArena
from outofcore.execution.cuda.driver import ALLOCATOR, CudaDriver
from outofcore.execution.cuda.engine import CudaEngine
from outofcore.execution.engines import ReplayMode
from outofcore.runtime.homes import HomeStore, PinnedHome
from outofcore.runtime.native import Flavor
from outofcore.units import MIB, round_up

# Off-plan requests may take a 64th of the budget or ``_MIN_RESERVE``: libraries keep workspaces of tens of MiB.
_RESERVE_SHARE = 64
_MIN_RESERVE = 32 * MIB
# Segments that the caching allocator opens outside of the arena: four for small requests and the remainder of a large
# one, and one for medium requests.
_SEGMENTS_BYTES = 4 * ALLOCATOR.segment + ALLOCATOR.middle_segment


class CudaBackend:
    """One CUDA device; raises ``InputError`` if there is no such device."""

    flavor = Flavor.CUDA
    alignment = ALLOCATOR.alignment
    warms_up = True

    def __init__(self, device: torch.device, driver: CudaDriver | None = None, *, replay: ReplayMode = True) -> None:
        self._replay: ReplayMode = replay
        self.driver = CudaDriver(device) if driver is None else driver
        self.device = self.driver.device

    def arena(self, count: int, reserve: int, room: int = 0) -> DeviceArena:
        """Open an arena of ``count`` bytes; ignore ``room``, so that other users of the device can have the rest."""
        self.driver.synchronize()
        self.driver.reserved_bytes()
        return self.driver.open_arena(count, reserve)

    def engine(self, homes: Sequence[HomeStore]) -> CudaEngine:
        return CudaEngine(self.driver, homes, replay=self._replay)

    def home(self, limit: int | None) -> PinnedHome:
        return PinnedHome(self.driver.pin, self.driver.unpin, limit)

    def reserve(self, budget: int) -> int:
        return max(budget // _RESERVE_SHARE, _MIN_RESERVE)

    def unavailable_bytes(self, budget: int, output_bytes: int, state_bytes: int) -> int:
        """Return the bytes of a budget that outputs, other tensors and a reserve need outside of the arena."""
        # Outputs count twice, as the user may keep outputs of the last step.
        other_bytes = max(self.driver.allocated_bytes() - state_bytes, 0)
        segment = ALLOCATOR.segment
        return (
            round_up(other_bytes, segment)
            + self.reserve(budget)
            + 2 * round_up(output_bytes, segment)
            + _SEGMENTS_BYTES
        )

    def prepare(self) -> None:
        self.driver.prepare()

    def recorder(self) -> AllocationRecorder:
        return AllocationRecorder(Flavor.CUDA)

    @property
    def timer(self) -> Callable[[Callable[[], object]], float]:
        return self.driver.time

    def generators(self) -> Sequence[torch.Generator]:
        return self.driver.generators()

    def facts(self) -> Mapping[str, object]:
        return self.driver.facts()
