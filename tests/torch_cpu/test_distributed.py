"""Tests of processes that train together: collectives, wrapped models and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from effort import some_of
from launching import run_together

from outofcore.distributed.agreement import Agreement
from outofcore.errors import StateError
from outofcore.peers import StepFacts

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "distributed.py"
SCRIPT = Path(__file__).with_name("gloo_process.py")


@pytest.mark.parametrize(
    ("scenario", "processes"),
    some_of(
        [("replicas", 2), ("replicas", 4), ("collectives", 2), ("refusals", 2)],
        lambda scenario: scenario != ("replicas", 4),
    ),
)
def test_scenario_passes_in_all_processes(scenario: str, processes: int, tmp_path: Path) -> None:
    results = run_together(SCRIPT, scenario, processes, tmp_path)
    report = "\n".join(f"rank {rank} ended with {code}:\n{text}" for rank, (code, text) in enumerate(results))
    assert all(code == 0 and text.endswith("same\n") for code, text in results), report


def test_different_orders_of_gradients_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    first = StepFacts("the same", "1 GiB", "auto", orders=((0, 1, 2),))
    agreement = Agreement([], None)
    monkeypatch.setattr(agreement, "_gather_facts", lambda facts: (first, facts))
    assert agreement.compare_facts(first) == (first, first)
    with pytest.raises(StateError, match="compute their gradients in different orders"):
        agreement.compare_facts(replace(first, orders=((2, 1, 0),)))


def test_death_in_mid_step_ends_the_other_processes(tmp_path: Path) -> None:
    (code, text), (dead_code, _) = run_together(SCRIPT, "death", 2, tmp_path)
    assert dead_code == 3
    assert code == 0, text
    assert text.endswith("same\n")


@pytest.mark.exhaustive
def test_command_line_trains_data_parallel_and_prints_once(tmp_path: Path) -> None:
    options = [
        "--layers",
        "1",
        "--width",
        "32",
        "--heads",
        "2",
        "--context",
        "32",
        "--batch",
        "2",
        "--steps",
        "2",
        "--budget",
        "8MiB",
        "--home",
        "host",
    ]
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launched, "-m", "outofcore", "train", "gpt", *options, "--picture", str(tmp_path / "step.html")]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("step ")] == ["step 1/2", "step 2/2"]
    assert "2 processes, a batch for each; what is told is of the first" in lines
    assert '"collectives"' in (tmp_path / "step.html").read_text()


@pytest.mark.exhaustive
def test_benchmark_runs_small(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--small", "--workload", "gpt", "--rounds", "2", "--date", "then"]
    command += ["--option", "layers=1", "--share", "0.9", "--results", str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    assert process.returncode == 0, process.stderr
    row = json.loads((tmp_path / "distributed.json").read_text())["workloads"]["gpt"]
    assert row["same_bits"] == [True, True]
    assert row["arena"] <= row["budget"]
    assert row["sent_bytes"] == row["least_bytes"]
