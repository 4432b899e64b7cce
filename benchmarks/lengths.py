"""Train on batches of many lengths within a budget, as an eager loop and as a compiled step.

The first part trains BERT, GPT-2 and a ResNet on log-normal lengths at half of the longest batch's peak. The second
part runs the tasks of Mimose, compared with padding to the longest and with checkpointing. Processes run one at a time,
because a planner that runs between turns would have the cores to itself. Each step counts with its median over
``repeats`` runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from _common import Spec, Worker, console, take_turns, write_result
from _texts import TASKS
from rich.table import Table

from outofcore.units import GIB, format_bytes, format_seconds

_ROOM = 64 * GIB
_FIRST = 60  # batches in the first part of the run
# For each contender: the worker's mode, and its changed options.
_CONTENDERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "eager": ("eager", {}),
    "budget": ("followed", {}),
    "compile": ("outofcore", {}),
    "padded to the longest": ("eager", {"padded": True}),
    "checkpointed": ("checkpoint", {}),
}


def _peak(task: str, options: Mapping[str, Any]) -> int:
    with Worker("longest", Spec(task, {**options, "only": TASKS[task].longest}, "followed", _ROOM)) as worker:
        take_turns([worker], 2)
        return worker.steps[-1]["peak_bytes"]


def _run(task: str, options: Mapping[str, Any], contenders: Sequence[str], rounds: int, repeats: int) -> dict[str, Any]:
    budget = _peak(task, options) // 2
    runs: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in contenders}
    peaks: dict[str, int] = {}
    facts: dict[str, Any] = {}
    for _ in range(repeats):
        for name in contenders:
            mode, extra_options = _CONTENDERS[name]
            spec = Spec(task, {**options, **extra_options}, mode, None if mode in ("eager", "checkpoint") else budget)
            with Worker(name, spec) as worker:
                take_turns([worker], rounds)
                peaks[name] = max(peaks.get(name, 0), worker.ask("report")["peak_rss"])
                facts = worker.facts if name == "eager" else facts
                runs[name].append(worker.steps)
    seconds = {
        name: [
            statistics.median(step["seconds"] for step in step_runs) for step_runs in zip(*steps_of_runs, strict=True)
        ]
        for name, steps_of_runs in runs.items()
    }
    steps = {name: steps_of_runs[-1] for name, steps_of_runs in runs.items()}
    losses = {name: [step["loss"] for step in steps_of_runs] for name, steps_of_runs in steps.items()}
    last = {name: steps_of_runs[-1] for name, steps_of_runs in steps.items()}
    return {
        **facts,
        "budget": budget,
        "lengths": [step["length"] for step in steps["eager"]],
        "same_losses": {name: steps_of_runs == losses["eager"] for name, steps_of_runs in losses.items()},
        "arena_peak": last["budget"]["peak_bytes"],
        "eager_calls": last["compile"]["eager_calls"] if "compile" in last else None,
        "peak_rss": peaks,
        "repeats": repeats,
        "total_over_eager": {
            name: sum(steps_of_runs) / sum(seconds["eager"]) for name, steps_of_runs in seconds.items()
        },
        "first_over_eager": _over_eager(seconds, slice(_FIRST)),
        "later_over_eager": _over_eager(seconds, slice(_FIRST, None)) if rounds > _FIRST else None,
        "total_without_first_over_eager": {
            name: sum(steps_of_runs[1:]) / sum(seconds["eager"][1:]) for name, steps_of_runs in seconds.items()
        },
        "seconds": seconds,
    }


def _over_eager(seconds: Mapping[str, Sequence[float]], part: slice) -> dict[str, float]:
    return {name: sum(times[part]) / sum(seconds["eager"][part]) for name, times in seconds.items()}


def _new_over_repeated_length(row: Mapping[str, Any], contender: str) -> float | None:
    """Return the median first step of a length over the median later step, both over plain PyTorch."""
    seen_lengths, new, repeated = {row["lengths"][0]}, [], []
    for number, length in enumerate(row["lengths"][1:], 1):
        ratio = row["seconds"][contender][number] / row["seconds"]["eager"][number]
        (repeated if length in seen_lengths else new).append(ratio)
        seen_lengths.add(length)
    return statistics.median(new) / statistics.median(repeated) if new and repeated else None


def _print_batches(row: Mapping[str, Any]) -> None:
    count, kinds = len(row["lengths"]), len(set(row["lengths"]))
    title = f"{row['workload']}: {count} batches of {kinds} lengths within {format_bytes(row['budget'])}"
    table = Table(title=title, title_justify="left")
    for heading in (
        "",
        f"first {_FIRST} over eager",
        "later over eager",
        "new over repeated length",
        "peak",
        "same losses",
    ):
        table.add_column(heading, justify="left" if not heading else "right")
    for name in row["seconds"]:
        ratio = row["new_over_known"][name]
        table.add_row(
            name,
            f"{row['first_over_eager'][name]:.3f}",
            f"{row['later_over_eager'][name]:.3f}" if row["later_over_eager"] else "",
            "" if ratio is None else f"{ratio:.3f}",
            format_bytes(row["peak_rss"][name]),
            "yes" if row["same_losses"][name] else "no",
        )
    console().print(table)


def _print_tasks(rows: Mapping[str, Mapping[str, Any]]) -> None:
    table = Table(title="Tasks of Mimose at a small scale: all steps over eager's, and the peak of the process")
    contenders = [name for name in _CONTENDERS if name != "eager"]
    for heading in ("task", "budget", "eager", *contenders):
        table.add_column(heading, justify="right")
    for task, row in rows.items():
        eager = sum(row["seconds"]["eager"]) / len(row["seconds"]["eager"])
        cells = [f"{format_seconds(eager)} a step, {format_bytes(row['peak_rss']['eager'])}"]
        cells += [
            f"{row['total_without_first_over_eager'][name]:.3f}, {format_bytes(row['peak_rss'][name])}"
            for name in contenders
        ]
        table.add_row(task, format_bytes(row["budget"]), *cells)
    console().print(table)


def main(
    *,
    batches: Annotated[int, typer.Option(min=3, help="Batches of BERT, GPT-2 and the ResNet.")] = 260,
    rounds: Annotated[int, typer.Option(min=3, help="Batches of each task of Mimose.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each process.")] = 3,
    task: Annotated[
        list[str] | None, typer.Option(help=f"Tasks: {', '.join(TASKS)}; repeatable (default: all).")
    ] = None,
    compiled: Annotated[bool, typer.Option(help="Also measure a compiled step.")] = True,
    small: Annotated[bool, typer.Option("--small", help="Run tiny models on a few batches, as a smoke test.")] = False,
    date: Annotated[str | None, typer.Option(help="Date of the measurement, ISO 8601 (default: now).")] = None,
) -> None:
    """Measure, print tables, and write the numbers to benchmarks/results/lengths.json (not with --small)."""
    options: dict[str, Any] = {"layers": 2, "width": 64, "batch": 2, "vocab": 512} if small else {}
    tasks = task or list(TASKS)
    content: dict[str, Any] = {"batches": {}}
    contenders = ("eager", "budget", "compile") if compiled else ("eager", "budget")
    for name in tasks:
        if not TASKS[name].together:
            continue
        shape = {"batch": 2} if small and TASKS[name].head == "image" else options
        row = _run(name, shape, contenders, 12 if small else batches, 1 if small else repeats)
        row["new_over_known"] = {contender: _new_over_repeated_length(row, contender) for contender in contenders}
        content["batches"][name] = row
        _print_batches(row)
    mimose_tasks = [name for name in tasks if not TASKS[name].together]
    if mimose_tasks:
        content["tasks"] = {
            name: _run(name, options, tuple(_CONTENDERS), 3 if small else rounds, 1) for name in mimose_tasks
        }
        _print_tasks(content["tasks"])
    if not small:
        print(f"written to {write_result('lengths', content, date)}")


if __name__ == "__main__":
    typer.run(main)
