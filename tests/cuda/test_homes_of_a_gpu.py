"""Which homes a step on a GPU gets, by the names that users give them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outofcore.errors import UnitError
from outofcore.execution import opening
from outofcore.runtime.homes import DiskHome, PinnedHome
from outofcore.units import MIB


class Backend:
    """As much of ``CudaBackend`` as homes need."""

    device = torch.device("cuda", 0)

    def home(self, limit: int | None) -> PinnedHome:
        return PinnedHome(lambda *_: True, lambda _: None, limit)


def test_a_disk_lies_behind_host_memory_if_one_is_named(tmp_path: Path) -> None:
    for home, kinds in ((None, [PinnedHome]), ("host", [PinnedHome]), (tmp_path, [PinnedHome, DiskHome])):
        stores = opening.open_device_homes(Backend(), home, "8MiB")  # type: ignore[arg-type]
        assert [type(store) for store in stores] == kinds
        assert stores[0].capacity == 8 * MIB
        for store in stores:
            store.close()


def test_what_cannot_be_is_refused_before_a_step() -> None:
    with pytest.raises(UnitError, match="not even one page"):
        opening.open_device_homes(Backend(), None, 100)  # type: ignore[arg-type]
