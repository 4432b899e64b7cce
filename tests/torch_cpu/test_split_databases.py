"""Tests of a few of PyTorch's samples with every op split; ``make databases`` runs all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("databases_split.py")


def run_script(*arguments: str) -> dict[str, object]:
    command = [sys.executable, SCRIPT, *arguments]
    result = subprocess.run(command, cwd=SCRIPT.parent, capture_output=True, text=True, check=False)
    assert result.stdout, result.stderr
    return json.loads(result.stdout)


@pytest.mark.exhaustive
def test_split_samples_are_exact() -> None:
    report = run_script("modules", "operators", "--first", "1", "--every", "37", "--start", "5")
    assert report["failed"] == [] and report["otherwise as a whole"] == []
    assert isinstance(report["steps in parts"], int) and report["steps in parts"] >= 6


def test_split_convolutions_of_few_elements_are_exact() -> None:
    report = run_script("operators", "--only", "nn.functional.conv2d", "--first", "2")
    assert report["failed"] == [] and report["steps in parts"]


def test_samples_without_dimensions_pass() -> None:
    report = run_script("operators", "--only", "sum", "--first", "2")
    assert report["failed"] == [] and report["samples"] == 2
