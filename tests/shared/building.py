"""Native code that workers need is built by one of them."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def one_at_a_time(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What one worker builds here the others, which wait for it, then find."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (shared / "building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
