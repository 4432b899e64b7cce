"""Start Python processes that do a piece of work beside this one, and end with it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import IO

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    "from outofcore.child_processes import run; run(*sys.argv[2:])"
)

_LOWEST = 19  # the lowest priority that niceness gives


def start_process(
    main: str,
    work: bytes | socket.socket,
    answer: IO[bytes] | None = None,
    *,
    niceness: int = 0,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process that calls ``main`` ("module:function") without arguments, with ``work`` as its standard input.

    Bytes are passed in a file: a pipe would block this process until the other one reads. ``answer`` receives the
    standard output. ``niceness`` lowers the priority, 19 to the lowest; with 20 the process runs only where a core is
    idle. It ends with the thread that starts it.
    It is in a process group of its own, so that Ctrl-C is for this process alone, but in the same session: Linux
    balances sessions first and only then looks at priorities (``sched(7)``, autogroups).

    Raises ``OSError`` if no process can be started.
    """
    with contextlib.ExitStack() as opened:
        if isinstance(work, bytes):
            given = opened.enter_context(tempfile.TemporaryFile())
            given.write(work)
            given.seek(0)
        else:
            given = work.fileno()
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), main, str(niceness)],
            stdin=given,
            stdout=subprocess.DEVNULL if answer is None else answer,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
            process_group=0,
        )


def run(main: str, niceness: str) -> None:
    """Call a function by its name, in the process that was started for it."""
    signal_on_death = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(signal_on_death, signal.SIGKILL)
    if os.getppid() == 1:
        sys.exit(1)
    os.nice(min(int(niceness), _LOWEST))
    if int(niceness) > _LOWEST:
        with contextlib.suppress(OSError, AttributeError):  # not every system has it, and a sandbox may refuse it
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    module, _, name = main.partition(":")
    getattr(__import__(module, fromlist=[name]), name)()
