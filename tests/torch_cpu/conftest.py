"""Fixtures of all tests on the CPU: a temporary cache, native code built once, short measurements, few threads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest
import torch
from building import private_cache
from short_measurements import measure_briefly

from outofcore.follow.native import load_paging
from outofcore.runtime.native import load_native


@pytest.fixture(scope="session", autouse=True)
def _one_thread_each(_one_thread_each: None) -> None:
    """Limit threads in this process too, where PyTorch may have been imported earlier."""
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _short_measurements(request: pytest.FixtureRequest) -> Iterator[None]:
    with contextlib.nullcontext() if request.config.getoption("--exhaustive") else measure_briefly():
        yield


@pytest.fixture(scope="session", autouse=True)
def _temporary_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with private_cache(tmp_path_factory, (load_native, load_paging)):
        yield


@pytest.fixture(autouse=True)
def _separate_plans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Share measurements but no plans between tests of one worker, because some change the planner."""
    monkeypatch.setattr("outofcore.plan_store.library_version", lambda: request.node.nodeid)


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop busy machines from causing new measurements."""
    monkeypatch.setattr("outofcore.busy._delayed_seconds", lambda _: 0.0)
    monkeypatch.setattr("outofcore.profiling.links.read_disk", lambda _: None)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread in tests of many tiny ops, where waiting threads would dominate the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
