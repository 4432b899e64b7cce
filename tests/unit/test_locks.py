"""The order of locks in native code, as ``locks.h`` checks it where that is asked for."""

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
    "taken",
    [
        "python loops allocator -allocator -loops python",
        "loops loops allocator -allocator allocator -allocator -loops -loops",
        "allocator -allocator loops -loops python",
        "loops loops fork loops -loops python",
    ],
)
def test_locks_may_be_taken_in_their_order(taken: str, program: Path) -> None:
    assert run_check(program, *taken.split()) == "ok"


@pytest.mark.parametrize(
    ("taken", "later", "lock"),
    [
        ("allocator loops", 2, 1),
        ("loops allocator loops", 2, 1),
        ("loops python", 1, 0),
        ("loops loops -loops python", 1, 0),
        ("allocator python", 2, 0),
        ("allocator allocator", 2, 2),
    ],
)
def test_a_wrong_order_of_locks_ends_the_process(taken: str, later: int, lock: int, program: Path) -> None:
    ended = subprocess.run([program, *taken.split()], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGABRT
    assert ended.stderr == f"outofcore: a thread that holds lock {later} takes lock {lock} (locks.h)\n"
