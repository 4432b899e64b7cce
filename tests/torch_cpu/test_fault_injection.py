"""Tests of failing allocations, disk accesses and thread starts: a sample, or all with ``make test-all``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from system_call_faults import environment

SCRIPT = Path(__file__).with_name("faults_everywhere.py")


def run_sweep(*arguments: str, timeout_s: float = 600) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    command = [sys.executable, str(SCRIPT), *arguments]
    process = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment())
    lines = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    runs, sweeps = [line for line in lines if "n" in line], [line for line in lines if "runs" in line]
    failed = [run for run in runs if run["faults"]]
    assert not failed, f"{len(failed)} of {len(runs)} runs failed, the first: {json.dumps(failed[0], indent=1)}"
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    return runs, sweeps


# Allocations, transfers and threads that the library once handled badly.
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
    runs, _ = run_sweep("--sample", *SAMPLE)
    assert len(runs) == sum(part.count(",") + 1 for part in SAMPLE)
    assert {run["outcome"] for run in runs} <= {"right", "error", "torn"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("home", ["disk", "host", "both"])
@pytest.mark.parametrize("door", ["compile", "budget"])
def test_every_fault_ends_in_error_or_right_result(door: str, home: str, lasting: bool) -> None:
    arguments = ["--door", door, "--home", home, *(["--lasting"] if lasting else [])]
    runs, sweeps = run_sweep(*arguments, timeout_s=7200)
    assert len(runs) > 100
    print(*(json.dumps(sweep) for sweep in sweeps), sep="\n")
