"""Processes that end only when their threads rest."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading

from outofcore.finalization import running_threads

_PROGRAM = """
import hashlib, sys, threading
from outofcore.finalization import end_when_threads_rest

def work():
    hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)  # runs without the interpreter
    print("done", flush=True)

if sys.argv[1] == "rest":
    end_when_threads_rest()
    end_when_threads_rest()
threading.Thread(target=work, daemon=True).start()
"""


def _printed(how: str) -> str:
    done = subprocess.run([sys.executable, "-c", _PROGRAM, how], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_process_ends_when_its_threads_rest() -> None:
    assert _printed("rest") == "done\n"
    assert _printed("at once") == ""


def test_threads_that_run_are_counted() -> None:
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)

    before = running_threads()
    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert any(running_threads() > before for _ in range(10_000))
    finally:
        ended.set()
        thread.join()
