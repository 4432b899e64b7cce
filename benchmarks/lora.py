"""LoRA on all linear layers of a 1.1 B-parameter model within 400 MiB, beside PEFT in core.

The model has TinyLlama's shape and random weights in safetensors files, which are made on first use. Compared are
losses and adapters, bit for bit; what is copied of frozen weights; the time of a step and from the start to the end of
the first one; memory as the kernel counts it; and what we take of the disk. ``compile`` reads the weights where the
files have them; ``follow`` is a plain loop in ``outofcore.budget``. Each is a process of its own, and they take turns.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from _common import Spec, Worker, console, round_by_round, take_turns, write_result
from rich.table import Table

from outofcore.units import format_bytes, format_seconds, parse_bytes

_SCRIPT = Path(__file__).with_name("_lora_worker.py")
_MODES = {"compile": "outofcore", "follow": "followed"}
_BUDGETS = {"bf16": "400MiB", "fp32": "800MiB"}
_SMALL = {
    "width": 256,
    "layers": 4,
    "heads": 8,
    "kv_heads": 2,
    "intermediate": 704,
    "vocab": 2000,
    "batch": 2,
    "sequence": 128,
}
_SMALL_BUDGETS = {"bf16": "12MiB", "fp32": "20MiB"}


def _measure(folder: Path, dtype: str, budget: int, ways: list[str], rounds: int, **of_model: bool) -> dict[str, Any]:
    small = of_model["small"]
    options: dict[str, Any] = {**(_SMALL if small else {}), "dtype": dtype, "checkpointing": of_model["checkpointing"]}
    options["folder"] = str(folder / f"{dtype}{'-small' * small}")
    subprocess.run([sys.executable, str(_SCRIPT), "--make", options["folder"], json.dumps(options)], check=True)
    with contextlib.ExitStack() as stack:
        workers = {"eager": stack.enter_context(Worker("eager", Spec("lora", options), script=_SCRIPT))}
        for way in ways:
            spec = Spec("lora", options, _MODES[way], budget, home=str(folder))
            workers[way] = stack.enter_context(Worker(way, spec, script=_SCRIPT))
        take_turns(list(workers.values()), rounds)
        reports = {way: worker.ask("report") for way, worker in workers.items()}
        facts = {way: worker.facts for way, worker in workers.items()}
    seconds = {way: [step["seconds"] for step in worker.steps] for way, worker in workers.items()}
    first = {way: facts[way]["seconds"] + found[0] for way, found in seconds.items()}
    half = rounds // 2  # by then there are plans
    moved = {
        way: worker.steps[-1]["written_bytes"] - worker.steps[-2]["written_bytes"] for way, worker in workers.items()
    }
    moved |= {way: report["bytes_out"] for way, report in reports.items() if "bytes_out" in report}
    losses = {way: [step["loss"] for step in worker.steps] for way, worker in workers.items()}
    return {
        "dtype": dtype,
        "checkpointing": options["checkpointing"],
        "budget": budget,
        "trained_bytes": facts["eager"]["trained_bytes"],
        "same_losses": {way: losses[way] == losses["eager"] for way in ways},
        "same_adapters": {way: reports[way]["adapters"] == reports["eager"]["adapters"] for way in ways},
        "over_eager": {way: round_by_round(seconds[way][half:], seconds["eager"][half:]) for way in ways},
        "first_over_eager": {way: first[way] / first["eager"] for way in ways},
        "start_seconds": {way: found["seconds"] for way, found in facts.items()},
        "written_in_last_step": moved,
        "reports": reports,
        "seconds": seconds,
    }


def _print(row: dict[str, Any], ways: list[str]) -> None:
    eager = row["seconds"]["eager"][-1]
    title = f"LoRA, {row['dtype']}, {format_bytes(row['budget'])}; in core {format_seconds(eager)} a step"
    table = Table(title=title, title_justify="left")
    for heading in ("", "same bits", "step", "first", "frozen out", "frozen in", "all out", "peak memory", "disk"):
        table.add_column(heading, justify="right")
    for way in ("eager", *ways):
        report = row["reports"][way]
        ours = way != "eager"
        table.add_row(
            way,
            ("yes" if row["same_losses"][way] and row["same_adapters"][way] else "NO") if ours else "",
            f"{row['over_eager'][way]:.3f}" if ours else "",
            f"{row['first_over_eager'][way]:.3f}" if ours else "",
            format_bytes(report["frozen_bytes_out"]) if "frozen_bytes_out" in report else "",
            format_bytes(report["frozen_bytes_in"]) if "frozen_bytes_in" in report else "",
            format_bytes(row["written_in_last_step"][way]),
            format_bytes(report["peak_rss"]),
            format_bytes(report["disk_bytes"]),
        )
    console().print(table)


def main(
    folder: Annotated[Path, typer.Argument(help="Where weights and homes go: a folder on a fast disk, 7 GB free.")],
    *,
    way: Annotated[list[str] | None, typer.Option(help="compile, follow. [default: both]")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bf16, fp32. [default: both]")] = None,
    budget: Annotated[str | None, typer.Option(help="By default 400MiB for bf16, and twice that for fp32.")] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Steps of each process.")] = 6,
    checkpointing: Annotated[
        bool, typer.Option(help="Each layer computed again in the backward pass, on all sides.")
    ] = True,
    small: Annotated[bool, typer.Option("--small", help="A tiny model: to see that it runs.")] = False,
    date: Annotated[str | None, typer.Option(help="Of the measurement; by default now.")] = None,
) -> None:
    """Measure, print tables, and write the numbers to benchmarks/results/lora.json (not with --small)."""
    ways = way or list(_MODES)
    budgets = _SMALL_BUDGETS if small else _BUDGETS
    rows = []
    for name in dtype or ["bf16"] + ["fp32"] * (not small):
        count = parse_bytes(budget or budgets[name])
        rows.append(_measure(folder, name, count, ways, rounds, small=small, checkpointing=checkpointing))
        _print(rows[-1], ways)
    if not small:
        print(f"written to {write_result('lora', {'rows': rows}, date)}")


if __name__ == "__main__":
    typer.run(main)
