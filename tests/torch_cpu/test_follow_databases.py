"""A part of PyTorch's own databases of modules and operators; ``databases.py`` runs all of it, in some minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_modules_and_operators_of_pytorchs_own_tests() -> None:
    """Takes ten seconds, of which most are for the import of PyTorch's tests."""
    script = Path(__file__).with_name("databases.py")
    ran = subprocess.run(
        [sys.executable, str(script), "modules", "operators", "--first", "1", "--every", "211", "--start", "5"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout, ran.stderr[-2000:]
    told = json.loads(ran.stdout)
    assert told["failed"] == []
    assert ran.returncode == 0
    assert told["ran"] >= 10  # how many there are, the version of PyTorch decides
    assert told["evictions"] > 1000
