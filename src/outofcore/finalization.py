"""A quiet end of the interpreter for processes of a group.

A thread of a process group releases a collective's tensors after it has reported that the collective is done, and needs
the interpreter for that. If the interpreter is ending by then, Python ends the thread in the middle of C++ code, and
the process aborts ("terminate called without an active exception") although all its work was done. So such processes
end only when their other threads are idle.
"""

from __future__ import annotations

import atexit
import threading
import time
from pathlib import Path

_THREADS = Path("/proc/self/task")
_ONCE_SECONDS = 0.01
_SECONDS = 1.0


def end_when_threads_rest() -> None:
    """Delay the end of the interpreter until no other thread of the process runs, or a second has passed."""
    atexit.unregister(_wait)
    atexit.register(_wait)


def _wait() -> None:
    until = time.monotonic() + _SECONDS
    resting = 0
    # Twice in a row, for a thread that has just got the interpreter may rest between two pieces of work.
    while resting < 2 and time.monotonic() < until:
        time.sleep(_ONCE_SECONDS)  # others may have the interpreter meanwhile
        resting = 0 if running_threads() else resting + 1


def running_threads() -> int:
    """Return how many other threads of the process run or could run; 0 where the system does not tell."""
    count = 0
    own = str(threading.get_native_id())
    try:
        for task in _THREADS.iterdir():
            if task.name != own:
                # The state follows the name, which is in parentheses and may hold anything.
                count += (task / "stat").read_text().rpartition(")")[2].split()[0] == "R"
    except OSError:  # a thread that has ended meanwhile, or another system
        return count
    return count
