"""Train a GPT whose parameters and optimizer state stay at home, save a checkpoint, and resume from it.

Peaks are counted above a tiny model's. ``--in-core`` also trains in plain PyTorch and compares losses.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from _common import write_result

from outofcore.units import MIB, format_bytes, parse_bytes

_SLACK_SHARE, _SLACK_BYTES = 1.02, 64 * MIB  # allowed overhead of the process above its budget
_TINY = ["--params", "100K", "--context", "32", "--batch", "1", "--budget", "64MiB", "--steps", "1"]

# Runs the command and prints the memory of the process.
_RUN = """
import json, sys
from outofcore.cli import main
from outofcore.report import machine
try:
    main()
finally:
    print(json.dumps({"rss": machine.resident_memory_bytes(), "peak": machine.peak_memory_bytes()}), flush=True)
"""


@dataclass(frozen=True)
class _TrainingRun:
    losses: list[str]
    seconds: list[str]
    rss: int
    peak: int


def _train(name: str, arguments: list[str]) -> _TrainingRun:
    print(f"{name}: outofcore train gpt {' '.join(arguments)}", file=sys.stderr, flush=True)
    command = [sys.executable, "-c", _RUN, "train", "gpt", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        lines: list[str] = []
        for line in process.stdout or ():
            lines.append(line.rstrip())
            print(f"  {lines[-1]}", file=sys.stderr, flush=True)
    if process.returncode:
        raise typer.Exit(process.returncode)
    steps = [match for line in lines if (match := re.match(r"step \d+/\d+  loss \S+ \((\S+)\)  (.+?)(  |$)", line))]
    memory = json.loads(lines[-1])
    return _TrainingRun([s[1] for s in steps], [s[2] for s in steps], memory["rss"], memory["peak"])


def main(
    *,
    params: Annotated[str, typer.Option(help="Approximate number of parameters.")] = "350M",
    budget: Annotated[str, typer.Option(help="Memory budget for all tensors of a step, e.g. 1GiB.")] = "1GiB",
    home: Annotated[str, typer.Option(help="Home: disk, or a folder on a disk.")] = "disk",
    context: Annotated[int, typer.Option(help="Tokens per sequence.")] = 256,
    batch: Annotated[int, typer.Option(help="Sequences per batch.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps to train, half of them after the checkpoint.")] = 6,
    policy: Annotated[str, typer.Option(help="Planning policy.")] = "auto",
    in_core: Annotated[bool, typer.Option("--in-core", help="Also train in plain PyTorch and compare losses.")] = False,
    name: Annotated[str, typer.Option(help="Name of the result file.")] = "state",
    date: Annotated[str | None, typer.Option(help="Date of the measurement, ISO 8601 (default: now).")] = None,
) -> None:
    """Train, save and resume; exit with status 1 if a peak exceeds the allowed memory or losses differ."""
    limit = parse_bytes(budget)
    model = ["--params", params, "--context", str(context), "--batch", str(batch), "--bits", "--optimizer", "adamw"]
    under = [*model, "--budget", budget, "--home", home, "--policy", policy]
    first = steps - steps // 2
    tiny = _train("tiny", [*_TINY, "--bits"])
    with tempfile.TemporaryDirectory(dir=None if home == "disk" else home) as folder:
        saved = str(Path(folder) / "checkpoint")
        before_checkpoint = _train("until the checkpoint", [*under, "--steps", str(first), "--save", saved])
        after_checkpoint = _train("from the checkpoint", [*under, "--steps", str(steps - first), "--resume", saved])
    plain = _train("in core", [*model, "--eager", "--steps", str(steps)]) if in_core else None
    allowed = int(_SLACK_SHARE * limit) + _SLACK_BYTES
    peaks = [run.peak - tiny.rss for run in (before_checkpoint, after_checkpoint)]
    is_within = max(peaks) <= allowed
    print(f"budget {format_bytes(limit)}; allowed above a tiny model: {format_bytes(allowed)}")
    print(f"peak until the checkpoint: {format_bytes(peaks[0])}; from the checkpoint: {format_bytes(peaks[1])}")
    print(f"within the allowed memory: {'yes' if is_within else 'no'}")
    losses = before_checkpoint.losses + after_checkpoint.losses
    same = None if plain is None else losses == plain.losses
    if plain is not None:
        print(f"peak in core: {format_bytes(plain.peak - tiny.rss)}")
        print(f"losses identical: {'yes' if same else 'no'} (all bits of {steps} losses)")
    write_result(
        name,
        {
            "params": params,
            "budget": limit,
            "context": context,
            "batch": batch,
            "allowed": allowed,
            "peaks": peaks,
            "in_core_peak": None if plain is None else plain.peak - tiny.rss,
            "losses": losses,
            "in_core_losses": None if plain is None else plain.losses,
            "step_times": before_checkpoint.seconds + after_checkpoint.seconds,
            "in_core_step_times": None if plain is None else plain.seconds,
        },
        date,
    )
    if not is_within or same is False:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
