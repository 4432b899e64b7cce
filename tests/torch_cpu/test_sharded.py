"""Tests of models sharded over processes: exact results, state between steps, checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from effort import some_of
from launching import run_together
from safetensors.torch import load_file
from typer.testing import CliRunner

import outofcore
from outofcore.cli.app import app
from outofcore.errors import InputError

SCRIPT = Path(__file__).with_name("sharded_process.py")
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "sharded.py"


def run_all(scenario: str, processes: int, folder: Path, codes: Sequence[int] = (0, 0, 0)) -> None:
    for (code, text), expected_code in zip(run_together(SCRIPT, scenario, processes, folder), codes, strict=False):
        assert code == expected_code, text
        assert text.endswith("same\n") or expected_code
    (folder / "store").unlink()


@pytest.mark.parametrize("scenario", some_of(["bits", "more_bits"], ["bits"]))
def test_two_processes_give_the_bits_of_replicas(scenario: str, tmp_path: Path) -> None:
    run_all(scenario, 2, tmp_path)


def test_states_refusals_and_the_death_of_a_process(tmp_path: Path) -> None:
    run_all("states", 2, tmp_path, (0, 3))


def test_two_processes_leave_frozen_weights_out_of_a_checkpoint(tmp_path: Path) -> None:
    run_all("frozen", 2, tmp_path)


@pytest.mark.exhaustive
def test_checkpoint_of_two_processes_loads_in_three_and_in_plain_pytorch(tmp_path: Path) -> None:
    run_all("saving", 2, tmp_path)
    run_all("order", 3, tmp_path)
    [spread] = (tmp_path / "saved").glob("model-*.safetensors")
    [plain] = (tmp_path / "plain").glob("model-*.safetensors")
    assert spread.read_bytes() == plain.read_bytes()
    assert load_file(spread)["hidden.0.weight"].shape == (301, 301)


def test_process_group_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # another test may leave a group
    with pytest.raises(InputError, match=r"call torch\.distributed\.init_process_group\(\) first"):
        outofcore.compile(lambda: None, torch.nn.Linear(2, 2), budget="1MiB", shard=True)


GPT = ["--layers", "1", "--width", "128", "--heads", "2", "--context", "32", "--batch", "2", "--budget", "16MiB"]


@pytest.mark.exhaustive
def test_train_command_trains_a_sharded_model(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "outofcore", "train", "gpt", *GPT, "--steps", "2", "--home", "host", "--shard"]
    result = subprocess.run(
        [*command, "--save", str(tmp_path / "saved")], capture_output=True, text=True, check=False, timeout=180
    )
    assert result.returncode == 0, result.stderr
    assert "are in each process" in result.stdout
    assert (tmp_path / "saved" / "checkpoint.json").is_file()


def test_plan_command_plans_for_assumed_processes() -> None:
    options = ["plan", "gpt", *GPT, "--device", "a100-40gb-pcie4", "--shard"]
    result = CliRunner().invoke(app, [*options, "--ranks", "8", "--between", "10GiB"])
    assert result.exit_code == 0, result.output
    assert "sharded over 8 processes that each send 10.0 GiB/s (assumed)" in " ".join(result.output.split())
    assert CliRunner().invoke(app, options).exit_code == 2


@pytest.mark.exhaustive
def test_benchmark_runs_small(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--small", "--rounds", "2", "--date", "then", "--share", "0.9"]
    command += ["--option", "layers=1", "--without-fsdp2", "--results", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    assert result.returncode == 0, result.stderr
    variants = json.loads((tmp_path / "sharded.json").read_text())["ways"]
    assert variants["shared"]["same_bits"] and variants["within"]["same_bits"]
    assert variants["within"]["arena"] <= variants["within"]["budget"]
