"""What all tests share: no measurements that the user keeps, native code that is built once, few threads."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

import pytest
import torch
from briefly import measured_briefly
from building import one_at_a_time

from outofcore.compiling import user_cache_folder
from outofcore.errors import StateError
from outofcore.execution.native import load_native
from outofcore.execution.replay import load_replay
from outofcore.follow.native import load_paging


@pytest.fixture(scope="session", autouse=True)
def _one_thread_each(_one_thread_each: None) -> None:
    """Of this process too, in which PyTorch may have been imported before."""
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _measured_briefly(request: pytest.FixtureRequest) -> Iterator[None]:
    with contextlib.nullcontext() if request.config.getoption("--exhaustive") else measured_briefly():
        yield


@pytest.fixture(scope="session", autouse=True)
def _a_cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    # Built once for all sessions; no compiler: told by the tests that need it.
    with one_at_a_time(tmp_path_factory), contextlib.suppress(StateError):
        load_native()
        load_paging()
        load_replay()
    cache, built = tmp_path_factory.mktemp("cache"), user_cache_folder()
    (cache / built.name).mkdir()
    for library in built.glob("*-*"):  # for processes that tests start
        with contextlib.suppress(OSError):  # another worker is building there
            shutil.copytree(library, cache / built.name / library.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tests of many tiny ops: threads that wait for each other beside other tests would take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
