"""Each allocation, disk write, disk read and thread start fails once: see faults_everywhere.py.

By default a sample of them fails; ``make test-all`` makes all of them fail.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from preloaded import environment

SCRIPT = Path(__file__).with_name("faults_everywhere.py")


def swept(*arguments: str, timeout_s: float = 600) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run the program; returns what it printed of runs and of sweeps."""
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment())
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    runs, sweeps = [line for line in lines if "n" in line], [line for line in lines if "runs" in line]
    failed = [run for run in runs if run["faults"]]
    assert not failed, f"{len(failed)} of {len(runs)} runs failed, the first: {json.dumps(failed[0], indent=1)}"
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return runs, sweeps


# Around each allocation, and at transfers and threads, with which the library once dealt badly.
SAMPLE = (
    "compile:disk:thread:1",
    "compile:disk:allocation:20",
    "compile:disk:short:9",
    "budget:disk:thread:1",
    "budget:disk:allocation:2,9,13",
    "budget:disk:short:2",
    "budget:disk:write:20",
)


def test_fault_ends_in_error_or_right_result() -> None:
    runs, _ = swept("--sample", *SAMPLE)
    assert len(runs) == sum(part.count(",") + 1 for part in SAMPLE)
    assert {run["outcome"] for run in runs} <= {"right", "error", "torn"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("home", ["disk", "host", "both"])
@pytest.mark.parametrize("door", ["compile", "budget"])
def test_every_fault_ends_in_error_or_right_result(door: str, home: str, lasting: bool) -> None:
    arguments = ["--door", door, "--home", home, *(["--lasting"] if lasting else [])]
    runs, sweeps = swept(*arguments, timeout_s=7200)
    assert len(runs) > 100
    print(*(json.dumps(sweep) for sweep in sweeps), sep="\n")
