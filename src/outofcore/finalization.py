"""Delay the exit of a process with collectives until its threads are idle.

A thread that releases the tensors of a finished collective needs the GIL. If the interpreter exits meanwhile, the
process aborts ("terminate called without an active exception").
"""

from __future__ import annotations

import atexit
import threading
import time
from pathlib import Path

_THREADS = Path("/proc/self/task")
_POLL_SECONDS = 0.01
_MAX_WAIT_SECONDS = 1.0


def wait_for_threads_at_exit() -> None:
    """Delay the exit of the interpreter until all other threads are idle, for at most a second."""
    atexit.unregister(_wait_for_threads)
    atexit.register(_wait_for_threads)


def _wait_for_threads() -> None:
    until = time.monotonic() + _MAX_WAIT_SECONDS
    resting = 0
    # Twice in a row, since a thread may be idle briefly between two pieces of work.
    while resting < 2 and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)  # releases the GIL
        resting = 0 if count_running_threads() else resting + 1


def count_running_threads() -> int:
    """Return the number of other threads of this process that run now; 0 without ``/proc``."""
    count = 0
    own_name = str(threading.get_native_id())
    try:
        for task in _THREADS.iterdir():
            if task.name != own_name:
                # The state follows the name, which is in parentheses and may contain any character.
                count += (task / "stat").read_text().rpartition(")")[2].split()[0] == "R"
    except OSError:  # the thread has ended meanwhile, or the system has no /proc
        return count
    return count
