"""Tests that run side by side share the cores."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def _one_thread_each() -> None:
    """Threads of several processes that wait for one another on the same cores would take many times as long."""
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        os.environ["OMP_NUM_THREADS"] = "1"  # for processes that tests start
