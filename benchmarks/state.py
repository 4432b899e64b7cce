"""Train a GPT whose parameters and state live at home, from its birth to a checkpoint and on from there.

Processes one after the other, each as a user would start it: a tiny model, to see what the interpreter takes; the model
under a budget, saved at the end; the model from that checkpoint; and, with ``--in-core``, the model in plain
PyTorch. Peaks are counted above the tiny model.
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

_SLACK_SHARE, _SLACK_BYTES = 1.02, 64 * MIB  # what the process may take above its budget
_TINY = ["--params", "100K", "--context", "32", "--batch", "1", "--budget", "64MiB", "--steps", "1"]

# Runs the command, and tells what it took in all.
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
class _Told:
    losses: list[str]
    seconds: list[str]
    rss: int
    peak: int


def _train(name: str, arguments: list[str]) -> _Told:
    print(f"{name}: outofcore train gpt {' '.join(arguments)}", file=sys.stderr, flush=True)
    command = [sys.executable, "-c", _RUN, "train", "gpt", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        lines: list[str] = []
        for line in process.stdout or ():
            lines.append(line.rstrip())
            print(f"  {lines[-1]}", file=sys.stderr, flush=True)
    if process.returncode:
        raise typer.Exit(process.returncode)
    steps = [found for line in lines if (found := re.match(r"step \d+/\d+  loss \S+ \((\S+)\)  (.+?)(  |$)", line))]
    memory = json.loads(lines[-1])
    return _Told([s[1] for s in steps], [s[2] for s in steps], memory["rss"], memory["peak"])


def main(
    *,
    params: Annotated[str, typer.Option(help="How many parameters, about.")] = "350M",
    budget: Annotated[str, typer.Option(help="Bytes for all tensors of a step.")] = "1GiB",
    home: Annotated[str, typer.Option(help="disk, or a folder on a disk.")] = "disk",
    context: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 256,
    batch: Annotated[int, typer.Option(help="Sequences in a batch.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Steps to train, half of them after the checkpoint.")] = 6,
    policy: Annotated[str, typer.Option(help="Planning policy.")] = "auto",
    in_core: Annotated[bool, typer.Option("--in-core", help="Train in plain PyTorch as well, to compare.")] = False,
    name: Annotated[str, typer.Option(help="Of the result.")] = "state",
    date: Annotated[str | None, typer.Option(help="To be written into the result.")] = None,
) -> None:
    """Exit status 1: a peak is above the budget, or a loss is not the same."""
    limit = parse_bytes(budget)
    model = ["--params", params, "--context", str(context), "--batch", str(batch), "--bits", "--optimizer", "adamw"]
    under = [*model, "--budget", budget, "--home", home, "--policy", policy]
    first = steps - steps // 2
    tiny = _train("tiny", [*_TINY, "--bits"])
    with tempfile.TemporaryDirectory(dir=None if home == "disk" else home) as folder:
        saved = str(Path(folder) / "checkpoint")
        begun = _train("from birth to checkpoint", [*under, "--steps", str(first), "--save", saved])
        ended = _train("from the checkpoint on", [*under, "--steps", str(steps - first), "--resume", saved])
    plain = _train("in core", [*model, "--eager", "--steps", str(steps)]) if in_core else None
    allowed = int(_SLACK_SHARE * limit) + _SLACK_BYTES
    peaks = [told.peak - tiny.rss for told in (begun, ended)]
    holds = max(peaks) <= allowed
    print(f"budget {format_bytes(limit)}; allowed above a tiny model: {format_bytes(allowed)}")
    print(f"peak from birth to checkpoint: {format_bytes(peaks[0])}; from the checkpoint on: {format_bytes(peaks[1])}")
    print(f"within what is allowed: {'yes' if holds else 'no'}")
    losses = begun.losses + ended.losses
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
            "step_times": begun.seconds + ended.seconds,
            "in_core_step_times": None if plain is None else plain.seconds,
        },
        date,
    )
    if not holds or same is False:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
