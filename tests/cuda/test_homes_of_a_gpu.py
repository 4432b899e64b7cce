"""Tests of the homes of a GPU step, by the names that users give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outofcore.errors import UnitError
from outofcore.execution import opening
from outofcore.runtime.homes import DiskHome, PinnedHome
from outofcore.units import MIB


class Backend:
    """The parts of ``CudaBackend`` that homes need."""

    device = torch.device("cuda", 0)

    def home(self, limit: int | None) -> PinnedHome:
        return PinnedHome(lambda *_: True, lambda _: None, limit)


def test_named_disk_is_behind_host_memory(tmp_path: Path) -> None:
    for home, kinds in ((None, [PinnedHome]), ("host", [PinnedHome]), (tmp_path, [PinnedHome, DiskHome])):
        stores = opening.open_device_homes(Backend(), home, "8MiB")  # type: ignore[arg-type]
        assert [type(store) for store in stores] == kinds
        assert stores[0].capacity == 8 * MIB
        for store in stores:
            store.close()


def test_too_small_host_budget_is_refused() -> None:
    with pytest.raises(UnitError, match="not even one page"):
        opening.open_device_homes(Backend(), None, 100)  # type: ignore[arg-type]
