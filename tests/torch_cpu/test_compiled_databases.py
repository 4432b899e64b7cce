"""A part of PyTorch's own databases through compiled steps; ``databases_compiled.py`` runs all of it, in an hour."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("which", "every"), [("optimizers", 23), pytest.param("modules operators", 97, marks=pytest.mark.exhaustive)]
)
def test_entries_have_the_bits_of_plain_pytorch(which: str, every: int) -> None:
    script = Path(__file__).with_name("databases_compiled.py")
    ran = subprocess.run(
        [sys.executable, str(script), *which.split(), "--first", "1", "--every", str(every), "--start", "3"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout, ran.stderr[-2000:]
    told = json.loads(ran.stdout)
    assert told["failed"] == []
    assert told["ran"] >= 2  # how many there are, the version of PyTorch decides
