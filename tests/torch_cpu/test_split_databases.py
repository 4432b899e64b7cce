"""A few of PyTorch's samples with every op in parts; all of them: ``make databases``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("databases_in_parts.py")


def told(*arguments: str) -> dict[str, object]:
    command = [sys.executable, SCRIPT, *arguments]
    found = subprocess.run(command, cwd=SCRIPT.parent, capture_output=True, text=True, check=False)
    assert found.stdout, found.stderr
    return json.loads(found.stdout)


@pytest.mark.exhaustive
def test_split_samples_are_exact() -> None:
    found = told("modules", "operators", "--first", "1", "--every", "37", "--start", "5")
    assert found["failed"] == [] and found["otherwise as a whole"] == []
    assert isinstance(found["steps in parts"], int) and found["steps in parts"] >= 6


def test_split_convolutions_of_few_elements_are_exact() -> None:
    found = told("operators", "--only", "nn.functional.conv2d", "--first", "2")
    assert found["failed"] == [] and found["steps in parts"]


def test_samples_without_dimensions_pass() -> None:
    found = told("operators", "--only", "sum", "--first", "2")
    assert found["failed"] == [] and found["samples"] == 2
