"""Operators that write arguments unmarked by their schemas: PyTorch has those of the table, and no others."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from effort import is_exhaustive

import outofcore
from outofcore.capture import operators

TABLE = Path(outofcore.__file__).parent / "runtime" / "csrc" / "follow" / "silent_writes.h"


def read_table() -> dict[str, list[str]]:
    table: dict[str, list[str]] = defaultdict(list)
    for operator, argument in re.findall(r'^ *{"(\w+::\w+)", "(\w+)"},$', TABLE.read_text(), re.MULTILINE):
        table[operator].append(argument)
    return table


def test_silent_writes_of_pytorch_match_the_table() -> None:
    """Takes fifteen seconds, of which most are for the import of PyTorch's tests; with ``--exhaustive``, minutes."""
    script = Path(__file__).with_name("silent_writes.py")
    part = [] if is_exhaustive() else ["--every", "97", "--start", "3"]
    ran = subprocess.run(
        [sys.executable, str(script), *part],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["ran"] > 100
    assert found["silent"] == {name: writes for name, writes in read_table().items() if name in found["operators"]}
    assert "aten::native_batch_norm" in found["silent"]


def test_table_covers_the_hidden_writes_of_captured_steps() -> None:
    table = read_table()
    for operator, (arguments, _) in operators._HIDDEN_WRITES.items():
        assert set(arguments) <= set(table[operator])
