"""Tests of the lock order in native code, as ``locks.h`` checks it on request."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from native_checks import build_check, run_check


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_check("locks", tmp_path_factory.mktemp("locks"))


@pytest.mark.parametrize(
    "steps",
    [
        "python loops allocator -allocator -loops python",
        "loops loops allocator -allocator allocator -allocator -loops -loops",
        "allocator -allocator loops -loops python",
        "loops loops fork loops -loops python",
    ],
)
def test_locks_are_taken_in_their_order(steps: str, program: Path) -> None:
    assert run_check(program, *steps.split()) == "ok"


@pytest.mark.parametrize(
    ("steps", "later", "lock"),
    [
        ("allocator loops", 2, 1),
        ("loops allocator loops", 2, 1),
        ("loops python", 1, 0),
        ("loops loops -loops python", 1, 0),
        ("allocator python", 2, 0),
        ("allocator allocator", 2, 2),
    ],
)
def test_wrong_lock_order_aborts_the_process(steps: str, later: int, lock: int, program: Path) -> None:
    process = subprocess.run([program, *steps.split()], capture_output=True, text=True, check=False)
    assert process.returncode == -signal.SIGABRT
    assert process.stderr == f"outofcore: a thread that holds lock {later} takes lock {lock} (locks.h)\n"
