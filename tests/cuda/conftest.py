"""Keep the measurement cache of the user out of the tests."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from building import private_cache

from outofcore.follow.native import load_paging
from outofcore.runtime.native import Flavor, load_native


@pytest.fixture(scope="session", autouse=True)
def _separate_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    flavor = Flavor.CUDA if torch.cuda.is_available() else Flavor.CPU
    with private_cache(tmp_path_factory, (load_native, functools.partial(load_paging, flavor))):
        yield
