"""Train LoRA on all linear layers of a 1.1 B-parameter model within 400 MiB, compared with PEFT in core.

The model has TinyLlama's shape and random weights, written on first use. Losses and adapters must be equal bit for bit.
``compile`` reads weights from their files; ``follow`` is an eager loop in ``outofcore.budget``.
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


def _measure(
    folder: Path, dtype: str, budget: int, contenders: list[str], rounds: int, **flags: bool
) -> dict[str, Any]:
    small = flags["small"]
    options: dict[str, Any] = {**(_SMALL if small else {}), "dtype": dtype, "checkpointing": flags["checkpointing"]}
    options["folder"] = str(folder / f"{dtype}{'-small' * small}")
    subprocess.run([sys.executable, str(_SCRIPT), "--make", options["folder"], json.dumps(options)], check=True)
    with contextlib.ExitStack() as stack:
        workers = {"eager": stack.enter_context(Worker("eager", Spec("lora", options), script=_SCRIPT))}
        for name in contenders:
            spec = Spec("lora", options, _MODES[name], budget, home=str(folder))
            workers[name] = stack.enter_context(Worker(name, spec, script=_SCRIPT))
        take_turns(list(workers.values()), rounds)
        reports = {name: worker.ask("report") for name, worker in workers.items()}
        facts = {name: worker.facts for name, worker in workers.items()}
    seconds = {name: [step["seconds"] for step in worker.steps] for name, worker in workers.items()}
    first = {name: facts[name]["seconds"] + times[0] for name, times in seconds.items()}
    planned_from = rounds // 2  # later steps have plans
    moved = {
        name: worker.steps[-1]["written_bytes"] - worker.steps[-2]["written_bytes"] for name, worker in workers.items()
    }
    moved |= {name: report["bytes_out"] for name, report in reports.items() if "bytes_out" in report}
    losses = {name: [step["loss"] for step in worker.steps] for name, worker in workers.items()}
    return {
        "dtype": dtype,
        "checkpointing": options["checkpointing"],
        "budget": budget,
        "trained_bytes": facts["eager"]["trained_bytes"],
        "same_losses": {name: losses[name] == losses["eager"] for name in contenders},
        "same_adapters": {name: reports[name]["adapters"] == reports["eager"]["adapters"] for name in contenders},
        "over_eager": {
            name: round_by_round(seconds[name][planned_from:], seconds["eager"][planned_from:]) for name in contenders
        },
        "first_over_eager": {name: first[name] / first["eager"] for name in contenders},
        "start_seconds": {name: times["seconds"] for name, times in facts.items()},
        "written_in_last_step": moved,
        "reports": reports,
        "seconds": seconds,
    }


def _print(row: dict[str, Any], contenders: list[str]) -> None:
    eager = row["seconds"]["eager"][-1]
    title = f"LoRA, {row['dtype']}, {format_bytes(row['budget'])}; in core {format_seconds(eager)} a step"
    table = Table(title=title, title_justify="left")
    for heading in ("", "same bits", "step", "first", "frozen out", "frozen in", "total out", "peak memory", "disk"):
        table.add_column(heading, justify="right")
    for name in ("eager", *contenders):
        report = row["reports"][name]
        is_ours = name != "eager"
        table.add_row(
            name,
            ("yes" if row["same_losses"][name] and row["same_adapters"][name] else "NO") if is_ours else "",
            f"{row['over_eager'][name]:.3f}" if is_ours else "",
            f"{row['first_over_eager'][name]:.3f}" if is_ours else "",
            format_bytes(report["frozen_bytes_out"]) if "frozen_bytes_out" in report else "",
            format_bytes(report["frozen_bytes_in"]) if "frozen_bytes_in" in report else "",
            format_bytes(row["written_in_last_step"][name]),
            format_bytes(report["peak_rss"]),
            format_bytes(report["disk_bytes"]),
        )
    console().print(table)


def main(
    folder: Annotated[Path, typer.Argument(help="Folder for weights and homes, on a fast disk with 7 GB free.")],
    *,
    way: Annotated[
        list[str] | None, typer.Option(help="Contender: compile or follow; repeatable (default: both).")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Data type: bf16 or fp32; repeatable (default: both).")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Memory budget (default: 400MiB for bf16, 800MiB for fp32).")
    ] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Number of steps per process.")] = 6,
    checkpointing: Annotated[bool, typer.Option(help="Checkpoint each layer in all processes.")] = True,
    small: Annotated[bool, typer.Option("--small", help="Run a tiny model, as a smoke test.")] = False,
    date: Annotated[str | None, typer.Option(help="Date of the measurement, ISO 8601 (default: now).")] = None,
) -> None:
    """Measure, print tables, and write the numbers to benchmarks/results/lora.json (not with --small)."""
    contenders = way or list(_MODES)
    budgets = _SMALL_BUDGETS if small else _BUDGETS
    rows = []
    for name in dtype or ["bf16"] + ["fp32"] * (not small):
        count = parse_bytes(budget or budgets[name])
        rows.append(_measure(folder, name, count, contenders, rounds, small=small, checkpointing=checkpointing))
        _print(rows[-1], contenders)
    if not small:
        print(f"written to {write_result('lora', {'rows': rows}, date)}")


if __name__ == "__main__":
    typer.run(main)
