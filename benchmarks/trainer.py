"""Fine-tune GPT-2 (124 million parameters) with ``transformers.Trainer``, alone and in ``outofcore.budget``.

Weights and tokens are random, so no download is needed. The trainings take turns step by step.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer
from _common import Spec, Worker, console, round_by_round, take_turns, write_result
from rich.table import Table

from outofcore.units import format_bytes, parse_bytes

_SCRIPT = Path(__file__).with_name("_trainer_worker.py")
_GPT2: dict[str, Any] = {"config": {}, "batch": 2, "tokens": 256}
_SMALL: dict[str, Any] = {
    "config": {"n_embd": 128, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 1000},
    "batch": 2,
    "tokens": 64,
}


def main(
    *,
    budget: Annotated[list[str] | None, typer.Option(help="Memory budgets; repeatable (default: 1GiB).")] = None,
    rounds: Annotated[int, typer.Option(min=3, help="Number of steps per process.")] = 20,
    small: Annotated[bool, typer.Option("--small", help="Run a tiny model, as a smoke test.")] = False,
    date: Annotated[str | None, typer.Option(help="Date of the measurement, ISO 8601 (default: now).")] = None,
) -> None:
    """Measure, print a table, and write the numbers to benchmarks/results/trainer.json (not with --small)."""
    options = _SMALL if small else _GPT2
    budgets = [parse_bytes(text) for text in budget or (["3MiB"] if small else ["1GiB"])]
    with contextlib.ExitStack() as stack:
        workers = [Worker("eager", Spec("gpt2", options), script=_SCRIPT)]
        workers += [Worker(format_bytes(b), Spec("gpt2", options, "followed", b), script=_SCRIPT) for b in budgets]
        for worker in workers:
            stack.enter_context(worker)
        take_turns(workers, rounds)
        reports = [worker.ask("report") for worker in workers]
        steps = [worker.columns() for worker in workers]
        facts = workers[0].facts
    planned_from = rounds // 2  # later steps have a plan
    plain = steps[0]
    table = Table(title=f"GPT-2, {facts['parameters']:,} parameters, Trainer", title_justify="left")
    for heading in ("budget", "peak RSS", "first step", "later steps", "same bits"):
        table.add_column(heading, justify="right")
    rows: list[dict[str, Any]] = []
    for limit, report, columns in zip([None, *budgets], reports, steps, strict=True):
        row = {
            "budget": limit,
            "peak_rss": report["peak_rss"],
            "first_over_eager": columns["seconds"][0] / plain["seconds"][0],
            "over_eager": round_by_round(columns["seconds"][planned_from:], plain["seconds"][planned_from:]),
            "same_bits": columns["loss"] == plain["loss"] and report["weights"] == reports[0]["weights"],
            "report": report,
            "steps": columns,
        }
        rows.append(row)
        table.add_row(
            "none, plain PyTorch" if limit is None else format_bytes(limit),
            format_bytes(row["peak_rss"]),
            f"{row['first_over_eager']:.2f}",
            f"{row['over_eager']:.2f}",
            "" if limit is None else "yes" if row["same_bits"] else "NO",
        )
    console().print(table)
    if not small:
        print(f"written to {write_result('trainer', {'facts': facts, 'options': options, 'rows': rows}, date)}")


if __name__ == "__main__":
    typer.run(main)
