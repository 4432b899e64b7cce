"""Tests of a sample of PyTorch's own databases in compiled steps; ``databases_compiled.py`` runs all in an hour."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("databases", "every"), [("optimizers", 23), pytest.param("modules operators", 97, marks=pytest.mark.exhaustive)]
)
def test_entries_have_the_bits_of_plain_pytorch(databases: str, every: int) -> None:
    script = Path(__file__).with_name("databases_compiled.py")
    ran = subprocess.run(
        [sys.executable, str(script), *databases.split(), "--first", "1", "--every", str(every), "--start", "3"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout, ran.stderr[-2000:]
    report = json.loads(ran.stdout)
    assert report["failed"] == []
    assert report["ran"] >= 2  # the number of entries depends on the version of PyTorch
