"""Tests of the benchmark of peers at a tiny size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "peers.py"


def run_benchmark(folder: Path, *arguments: str) -> None:
    # Without a C++ compiler torch.compile fails, which the benchmark must report.
    env = {**os.environ, "CXX": "/nonexistent/c++", "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    command = [sys.executable, str(BENCHMARK), "--small", "--workload", "gpt", "--rounds", "1", "--limit", "3600"]
    command += ["--policy", "auto:polish_ops=0"]  # the search for the best plan is not tested here
    command += [word for option in ("layers=1", "width=64", "context=64") for word in ("--option", option)]
    output_options = ["--results", str(folder), "--picture", str(folder / "picture.svg"), "--date", "then"]
    process = subprocess.run(
        [*command, *output_options, *arguments], env=env, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr


@pytest.mark.exhaustive
def test_benchmark_writes_numbers_table_and_picture(tmp_path: Path) -> None:
    (tmp_path / "peers.json").write_text('{"workloads": {}}')
    tools = ("eager", "checkpoint", "sequential", "compile", "outofcore")
    run_benchmark(tmp_path, *(word for tool in tools for word in ("--tool", tool)), "--share", "0.5", "--fraction", "2")
    workload = json.loads((tmp_path / "peers.json").read_text())["workloads"]["gpt"]
    names = [row["name"] for row in workload["rows"]]
    assert names[:3] == ["eager", "checkpoint", "checkpoint_sequential, 4 segments"]
    assert workload["losses_identical"]
    assert [verdict["peer"] for verdict in workload["verdicts"]] == names[:3]
    assert {row["tool"] for row in workload["rows"][3:]} == {"outofcore"}
    assert "compile, budget 0.5" in workload["missing"]
    table = (tmp_path / "peers.md").read_text()
    assert "- compile, budget 0.5: " in table
    assert all(name in table for name in names)
    picture = (tmp_path / "picture.svg").read_text()
    ET.fromstring(picture)
    assert all(f"{name}: " in picture for name in names)
