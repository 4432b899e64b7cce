"""No test reads or changes the measurements that the user keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from building import one_at_a_time

from outofcore.errors import StateError
from outofcore.execution.native import Flavor, load_native
from outofcore.follow.native import load_paging


@pytest.fixture(scope="session", autouse=True)
def _a_cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    # Built once for all sessions; what cannot be built is told by the tests that need it.
    with one_at_a_time(tmp_path_factory), contextlib.suppress(StateError):
        load_native()
        if torch.cuda.is_available():
            load_paging(Flavor.CUDA)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
