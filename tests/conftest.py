"""Tests that run side by side share the cores, and what is built for them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

UNIT = Path(__file__).with_name("unit")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of two workers one begins with tests that need no native code, while the other one builds it."""
    unit = [item for item in items if UNIT in item.path.parents]
    others = [item for item in items if UNIT not in item.path.parents]
    half = min((len(items) + 1) // 2, len(others))
    items[:] = [*others[:half], *unit, *others[half:]]


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """A shell ignores Ctrl-C for what it starts in the background, and tests that are interrupted would not be."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _one_thread_each() -> None:
    """Threads of several processes that wait for one another on the same cores would take many times as long."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # each would be a process that loads PyTorch
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        os.environ["OMP_NUM_THREADS"] = "1"  # for processes that tests start
