"""Compare an eager loop under ``outofcore.budget`` with plain PyTorch and with a compiled step.

Processes take turns step by step; ratios are medians over the second half of the rounds. Budgets are shares of the
loop's unconstrained peak. ``--ablate`` runs loops with one technique switched off instead.
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
    last, second_last = ours.steps[-1], ours.steps[-2]
    planned_from = rounds // 2  # later steps have plans
    return {
        **facts,
        "share": share,
        "budget": budget,
        "losses_identical": all(values == losses[0] for values in losses),
        "first_over_eager": seconds["followed"][0] / seconds["eager"][0],
        "over_eager": {
            name: round_by_round(times[planned_from:], seconds["eager"][planned_from:])
            for name, times in seconds.items()
        },
        "eager_seconds": statistics.median(seconds["eager"][planned_from:]),
        "peak_rss": peaks,
        "moved_in_last_step": {key: last[key] - second_last[key] for key in ("fetched_bytes", "written_bytes")},
        "arena_peak": last["peak_bytes"],
        "seconds": seconds,
    }


_WITHOUT = {
    "auto": "(all techniques)",
    "moves": "recomputation",
    "unplaced": "planned addresses",
    "demand": "plans",
    "late": "plans and copies ahead of ops",
}


def _ablate(model: str, options: dict[str, Any], share: float, rounds: int) -> dict[str, Any]:
    budget = int(share * _peak(model, options))
    with contextlib.ExitStack() as stack:
        specs = {name: Spec(model, options, "followed", budget, policy=name) for name in _WITHOUT}
        workers = [stack.enter_context(Worker(name, spec)) for name, spec in specs.items()]
        eager = stack.enter_context(Worker("eager", Spec(model, options)))
        take_turns([eager, *workers], rounds)
    half = rounds // 2  # later steps have plans
    seconds = {worker.name: [step["seconds"] for step in worker.steps] for worker in (eager, *workers)}
    return {
        **eager.facts,
        "share": share,
        "budget": budget,
        "losses_identical": len({tuple(step["loss"] for step in worker.steps) for worker in (eager, *workers)}) == 1,
        "over_eager": {
            worker.name: round_by_round(seconds[worker.name][half:], seconds["eager"][half:]) for worker in workers
        },
        "moved_in_last_step": {
            worker.name: {
                key: worker.steps[-1][key] - worker.steps[-2][key] for key in ("fetched_bytes", "written_bytes")
            }
            for worker in workers
        },
        "faults": {
            worker.name: statistics.median(step["faults"] for step in worker.steps[half:]) for worker in workers
        },
        "seconds": seconds,
    }


def _print_ablation(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        title = f"{row['workload']}: {row['share']:g} ({format_bytes(row['budget'])})"
        table = Table(title=title, title_justify="left")
        for heading in ("without", "over eager", "in", "out", "page faults"):
            table.add_column(heading, justify="left" if heading == "without" else "right")
        for name, text in _WITHOUT.items():
            moved = row["moved_in_last_step"][name]
            table.add_row(
                text,
                f"{row['over_eager'][name]:.3f}",
                format_bytes(moved["fetched_bytes"]),
                format_bytes(moved["written_bytes"]),
                f"{row['faults'][name]:,.0f}",
            )
        console().print(table)


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
    model: Annotated[str | None, typer.Option(help="Model of the zoo (default: resnet50 and gpt).")] = None,
    option: Annotated[list[str] | None, typer.Option(help="Model option, as name=value; repeatable.")] = None,
    share: Annotated[list[float] | None, typer.Option(help="Budgets, as shares of the peak; repeatable.")] = None,
    rounds: Annotated[int, typer.Option(min=_WARM_UP + 2, help="Number of steps per process.")] = 8,
    compiled: Annotated[bool, typer.Option(help="Also measure a compiled step.")] = True,
    ablate: Annotated[bool, typer.Option("--ablate", help="Measure loops with one technique switched off.")] = False,
    date: Annotated[str | None, typer.Option(help="Date of the measurement, ISO 8601 (default: now).")] = None,
) -> None:
    """Measure, print tables, and write the numbers to benchmarks/results."""
    chosen = _WORKLOADS if model is None else {model: _WORKLOADS.get(model, {"batch": 8})}
    for workload, defaults in chosen.items():
        options = {**defaults, **parse_options(option or [])}
        if ablate:
            rows = [_ablate(workload, options, peak_share, rounds) for peak_share in share or (0.5,)]
            _print_ablation(rows)
            print(f"written to {write_model('follow-ablate', workload, {'rounds': rounds, 'rows': rows}, date)}")
            continue
        rows = [
            _measure(workload, options, peak_share, rounds, compiled=compiled)
            for peak_share in share or (1.1, 0.5, 0.25)
        ]
        _print(workload, rows)
        print(f"written to {write_model('follow', workload, {'rounds': rounds, 'rows': rows}, date)}")


if __name__ == "__main__":
    typer.run(main)
