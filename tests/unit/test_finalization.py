"""Processes that end only when their threads rest."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading

from outofcore.finalization import count_running_threads

_PROGRAM = """
import sys, threading, zlib
from outofcore.finalization import wait_for_threads_at_exit

def work():
    zlib.compress(bytes(30_000_000), 9)  # runs without the interpreter
    print("done", flush=True)

if sys.argv[1] == "rest":
    wait_for_threads_at_exit()
    wait_for_threads_at_exit()
threading.Thread(target=work, daemon=True).start()
"""


def _ended(how: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", _PROGRAM, how], capture_output=True, text=True, check=False)


def test_a_process_ends_when_its_threads_rest() -> None:
    done = _ended("rest")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
    # How Python ends a thread that still runs is its own matter, and need not end well.
    assert _ended("at once").stdout == ""


def test_threads_that_run_are_counted() -> None:
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)

    before = count_running_threads()
    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert any(count_running_threads() > before for _ in range(10_000))
    finally:
        ended.set()
        thread.join()
