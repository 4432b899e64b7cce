"""Start Python child processes that end with this one."""

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

_LOWEST_NICENESS = 19  # the niceness of the lowest priority


def start_process(
    main: str,
    work: bytes | socket.socket,
    answer: IO[bytes] | None = None,
    *,
    niceness: int = 0,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a Python process that calls ``main``, with ``work`` as standard input and ``answer`` as standard output.

    ``main`` is "module:function". ``niceness`` is up to 19, the lowest priority; with 20 the process runs only on idle
    cores. The process ends with the thread that starts it. Raises ``OSError`` if it cannot be started.
    """
    # Bytes go through a file, since a pipe would block this process until the other one reads. A process group of its
    # own keeps Ctrl-C away. It stays in this session, since Linux balances sessions before it considers priorities
    # (``sched(7)``, autogroups).
    with contextlib.ExitStack() as opened:
        if isinstance(work, bytes):
            stdin = opened.enter_context(tempfile.TemporaryFile())
            stdin.write(work)
            stdin.seek(0)
        else:
            stdin = work.fileno()
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), main, str(niceness)],
            stdin=stdin,
            stdout=subprocess.DEVNULL if answer is None else answer,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
            process_group=0,
        )


def run(main: str, niceness: str) -> None:
    """Call ``main`` in this child process, and make the kernel kill the process when its parent ends."""
    signal_on_death = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(signal_on_death, signal.SIGKILL)
    if os.getppid() == 1:
        sys.exit(1)
    os.nice(min(int(niceness), _LOWEST_NICENESS))
    if int(niceness) > _LOWEST_NICENESS:
        with contextlib.suppress(OSError, AttributeError):  # some systems lack it, and sandboxes may forbid it
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    module, _, name = main.partition(":")
    getattr(__import__(module, fromlist=[name]), name)()
