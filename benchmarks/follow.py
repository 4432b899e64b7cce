"""A loop that is followed (``outofcore.budget``) beside the same loop in plain PyTorch and as a compiled step.

The processes of a workload take turns step by step; ratios are medians over the rounds after the first ones. Budgets
are shares of the peak of the followed loop where everything fits. The first step is on demand; from the second on the
loop is known.
"""

from __future__ import annotations

import contextlib
import statistics
from typing import Annotated, Any

import typer
from _common import Spec, Worker, console, parse_options, round_by_round, take_turns, write_model
from rich.table import Table

from outofcore.units import GIB, format_bytes, format_seconds

_WARM_UP = 2
_WORKLOADS: dict[str, dict[str, Any]] = {
    "resnet50": {"batch": 16},
    "gpt": {"params": "25M", "batch": 8, "context": 256, "optimizer": "adamw"},
}
_ROOM = 64 * GIB


def _peak(model: str, options: dict[str, Any]) -> int:
    """Bytes of the arena that the loop uses where everything fits."""
    with Worker("roomy", Spec(model, options, "followed", _ROOM)) as worker:
        take_turns([worker], 2)
        return worker.steps[-1]["peak_bytes"]


def _measure(model: str, options: dict[str, Any], share: float, rounds: int, *, compiled: bool) -> dict[str, Any]:
    budget = int(share * _peak(model, options))
    with contextlib.ExitStack() as stack:
        eager = stack.enter_context(Worker("eager", Spec(model, options)))
        ours = stack.enter_context(Worker("followed", Spec(model, options, "followed", budget)))
        workers = [eager, ours]
        if compiled:
            workers.append(stack.enter_context(Worker("compiled", Spec(model, options, "outofcore", budget))))
        take_turns(workers, rounds)
        facts, peaks = eager.facts, {worker.name: worker.ask("report")["peak_rss"] for worker in workers}
    seconds = {worker.name: [step["seconds"] for step in worker.steps] for worker in workers}
    losses = [[step["loss"] for step in worker.steps] for worker in workers]
    last, before = ours.steps[-1], ours.steps[-2]
    return {
        **facts,
        "share": share,
        "budget": budget,
        "losses_identical": all(each == losses[0] for each in losses),
        "first_over_eager": seconds["followed"][0] / seconds["eager"][0],
        "over_eager": {
            name: round_by_round(found[_WARM_UP:], seconds["eager"][_WARM_UP:]) for name, found in seconds.items()
        },
        "eager_seconds": statistics.median(seconds["eager"][_WARM_UP:]),
        "peak_rss": peaks,
        "moved_in_last_step": {key: last[key] - before[key] for key in ("fetched_bytes", "written_bytes")},
        "arena_peak": last["peak_bytes"],
        "seconds": seconds,
    }


def _print(model: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"{model}: {rows[0]['workload']}", title_justify="left")
    for heading in ("budget", "eager", "first", "followed", "compiled", "in", "out", "same losses"):
        table.add_column(heading, justify="right")
    for row in rows:
        over = row["over_eager"]
        table.add_row(
            f"{row['share']:g} ({format_bytes(row['budget'])})",
            format_seconds(row["eager_seconds"]),
            f"{row['first_over_eager']:.3f}",
            f"{over['followed']:.3f}",
            f"{over['compiled']:.3f}" if "compiled" in over else "",
            format_bytes(row["moved_in_last_step"]["fetched_bytes"]),
            format_bytes(row["moved_in_last_step"]["written_bytes"]),
            "yes" if row["losses_identical"] else "no",
        )
    console().print(table)


def main(
    *,
    model: Annotated[str | None, typer.Option(help="One model of the zoo alone. [default: resnet50 and gpt]")] = None,
    option: Annotated[list[str] | None, typer.Option(help="An option of the model, as name=value.")] = None,
    share: Annotated[list[float] | None, typer.Option(help="Of the peak; may be given several times.")] = None,
    rounds: Annotated[int, typer.Option(min=_WARM_UP + 2, help="Steps of each process.")] = 8,
    compiled: Annotated[bool, typer.Option(help="Beside outofcore.compile as well.")] = True,
    date: Annotated[str | None, typer.Option(help="Of the measurement; by default now.")] = None,
) -> None:
    """Measure, print tables, and write the numbers to benchmarks/results."""
    chosen = _WORKLOADS if model is None else {model: _WORKLOADS.get(model, {"batch": 8})}
    for which, usual in chosen.items():
        options = {**usual, **parse_options(option or [])}
        rows = [_measure(which, options, each, rounds, compiled=compiled) for each in share or (1.1, 0.5, 0.25)]
        _print(which, rows)
        print(f"written to {write_model('follow', which, {'rounds': rounds, 'rows': rows}, date)}")


if __name__ == "__main__":
    typer.run(main)
