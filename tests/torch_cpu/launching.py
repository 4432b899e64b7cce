"""Starts the processes of a scenario: see ``together.py``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run_together(script: Path, scenario: str, processes: int, folder: Path) -> list[tuple[int, str]]:
    """The return code and the output of each process of a scenario."""
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), scenario, str(rank), str(processes), str(folder / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        told = [rank.communicate(timeout=180)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, text) for rank, text in zip(ranks, told, strict=True)]
