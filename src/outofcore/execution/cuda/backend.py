"""A CUDA device to compile steps for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from outofcore.execution.arena import Memory, Recorder
from outofcore.execution.cuda.driver import ALIGNMENT, MIDDLE_SEGMENT, SEGMENT, CudaDriver
from outofcore.execution.cuda.engine import CudaEngine
from outofcore.execution.engines import Replaying
from outofcore.execution.homes import HomeStore, PinnedHome
from outofcore.units import MIB, round_up

# Off-plan requests may take a 64th of the budget, and this at least: libraries keep workspaces of tens of MiB.
_RESERVE_SHARE = 64
_LEAST_RESERVE = 32 * MIB
# Pieces that the caching allocator opens beside the arena: for small requests, and the rest of a large one; and one
# for what it takes to be neither.
_POOLS = 4
_BESIDE = _POOLS * SEGMENT + MIDDLE_SEGMENT


class CudaBackend:
    """One CUDA device; as ``backend.Backend`` has it.

    Args:
        device: such as ``torch.device("cuda")``.
        driver: of that device; None: a new one.
        replay: whether native code may call ops; "graphs": and makes CUDA graphs of them.

    Raises:
        InputError: there is no such device.
    """

    alignment = ALIGNMENT
    warms_up = True

    def __init__(self, device: torch.device, driver: CudaDriver | None = None, *, replay: Replaying = True) -> None:
        self._replay: Replaying = replay
        self.driver = CudaDriver(device) if driver is None else driver
        self.device = self.driver.device

    def arena(self, count: int, reserve: int, room: int = 0) -> Memory:
        """See ``Backend.arena``. What PyTorch keeps unused goes back to the device first.

        It is as large as the program needs, whatever the room: what it does not use, others on the device can.
        """
        self.driver.synchronize()
        self.driver.reserved_bytes()
        return self.driver.open_arena(count, reserve)

    def engine(self, homes: Sequence[HomeStore]) -> CudaEngine:
        """See ``Backend.engine``."""
        return CudaEngine(self.driver, homes, replay=self._replay)

    def home(self, limit: int | None) -> PinnedHome:
        """Host memory for what does not fit.

        Args:
            limit: bytes of it; None: all that there is.

        Raises:
            SpillError: the system will not reserve the addresses.
        """
        return PinnedHome(self.driver.pin, self.driver.unpin, limit)

    def reserve(self, budget: int) -> int:
        """See ``Backend.reserve``."""
        return max(budget // _RESERVE_SHARE, _LEAST_RESERVE)

    def beside(self, budget: int, given: int, moved: int) -> int:
        """See ``Backend.beside``.

        That is what else PyTorch has on the device (inputs, workspaces of libraries), the reserve, twice the outputs,
        as the user may hold those of the last step, and the pieces that the caching allocator opens.
        """
        others = max(self.driver.allocated_bytes() - moved, 0)
        return round_up(others, SEGMENT) + self.reserve(budget) + 2 * round_up(given, SEGMENT) + _BESIDE

    def prepare(self) -> None:
        """See ``Backend.prepare``."""
        self.driver.prepare()

    def recorder(self) -> Recorder:
        """See ``Backend.recorder``."""
        return self.driver.recorder()

    @property
    def timer(self) -> Callable[[Callable[[], object]], float]:
        """See ``Backend.timer``."""
        return self.driver.time

    def generators(self) -> Sequence[torch.Generator]:
        """See ``Backend.generators``."""
        return self.driver.generators()

    def facts(self) -> Mapping[str, object]:
        """See ``Backend.facts``."""
        return self.driver.facts()
