"""Tests that the table of unmarked argument writes matches PyTorch's operators."""

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
    """Takes 15 s, mostly to import PyTorch's tests; minutes with ``--exhaustive``."""
    script = Path(__file__).with_name("silent_writes.py")
    options = [] if is_exhaustive() else ["--every", "97", "--start", "3"]
    result = subprocess.run(
        [sys.executable, str(script), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["ran"] > 100
    assert report["silent"] == {name: writes for name, writes in read_table().items() if name in report["operators"]}
    assert "aten::native_batch_norm" in report["silent"]


def test_table_covers_the_hidden_writes_of_captured_steps() -> None:
    table = read_table()
    for operator, (arguments, _) in operators._HIDDEN_WRITES.items():
        assert set(arguments) <= set(table[operator])
