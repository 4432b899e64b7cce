"""No test reads or changes the measurements that the user keeps."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from outofcore.execution.native import load_native


@pytest.fixture(scope="session", autouse=True)
def _one_thread_each(_one_thread_each: None) -> None:
    """Of this process too, in which PyTorch may have been imported before."""
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _a_cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    load_native()  # built once for all sessions
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
