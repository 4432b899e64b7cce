"""Planning takes memory for one op at a time, however large the model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from outofcore.units import GIB, format_bytes

_CODE = """
import sys
from outofcore.cli import main
from outofcore.report.machine import peak_memory_bytes
try:
    main()
finally:
    print(peak_memory_bytes(), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        # 1.6 billion parameters: 6.4 GB with nothing but the weights.
        ["plan", "--layers", "2", "--width", "8192", "--device", "h100", "--no-curve"],
        ["report", "--layers", "2", "--width", "8192", "--device", "h100", "--budget", "60GiB", "--no-curve"],
        # Ops are measured, each on scratch tensors of its own: 1.4 GB of weights.
        ["plan", "--layers", "28", "--width", "1024", "--optimizer", "sgd"],
    ],
    ids=["simulated", "reported", "measured"],
)
def test_a_large_model_is_planned_for_in_little_memory(arguments: list[str], tmp_path: Path) -> None:
    command, *rest = arguments
    model = [command, "gpt", "--batch", "1", "--context", "256", "--no-cache", *rest]
    done = subprocess.run(
        [sys.executable, "-c", _CODE, *model], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    peak = int(done.stderr.splitlines()[-1])
    assert peak < GIB, format_bytes(peak)
