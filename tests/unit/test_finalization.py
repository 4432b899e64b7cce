"""Tests of processes that wait for their threads before they exit."""

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


def _run_program(mode: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", _PROGRAM, mode], capture_output=True, text=True, check=False)


def test_process_exits_once_its_threads_are_idle() -> None:
    process = _run_program("rest")
    assert process.returncode == 0, process.stderr
    assert process.stdout == "done\n"
    # How Python stops a running thread is not ours to test, and may fail.
    assert _run_program("at once").stdout == ""


def test_running_threads_are_counted() -> None:
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
