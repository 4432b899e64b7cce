"""A part of PyTorch's own databases with ops in parts; ``databases_in_parts.py`` runs all of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_modules_and_operators_of_pytorchs_own_tests_in_parts() -> None:
    """Most of the time it takes is for the import of PyTorch's tests."""
    script = Path(__file__).with_name("databases_in_parts.py")
    ran = subprocess.run(
        [sys.executable, str(script), "modules", "operators", "--first", "1", "--every", "37", "--start", "5"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout, ran.stderr[-2000:]
    told = json.loads(ran.stdout)
    assert told["failed"] == []
    assert ran.returncode == 0
    assert told["steps in parts"] >= 6
