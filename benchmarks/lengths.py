"""Batches of many lengths within a budget: as an eager loop, and as a compiled step that is then followed.

First BERT, GPT-2 and a ResNet on batches of log-normal lengths, at half of the longest batch's peak: what the first 60
steps and the later ones take over plain PyTorch, and what the first step of a length takes over later ones of it (both
over plain PyTorch's step on the same batch). Then the tasks of Mimose (see ``_texts.py``), beside what one does without
a budget: padding every batch to the longest, and checkpointing every block.

Each process runs all its steps while no other one does: between turns its planner would have the cores for itself. The
processes of a workload repeat that in turns, and each step counts with the median over the repetitions.
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
_FIRST = 60  # batches that are summed apart
# By name: the mode of the worker, and what differs in its options.
_WAYS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "eager": ("eager", {}),
    "budget": ("followed", {}),
    "compile": ("outofcore", {}),
    "padded to the longest": ("eager", {"padded": True}),
    "checkpointed": ("checkpoint", {}),
}


def _peak(task: str, options: Mapping[str, Any]) -> int:
    """Bytes of the arena that the longest batch takes where everything fits."""
    with Worker("longest", Spec(task, {**options, "only": TASKS[task].longest}, "followed", _ROOM)) as worker:
        take_turns([worker], 2)
        return worker.steps[-1]["peak_bytes"]


def _run(task: str, options: Mapping[str, Any], ways: Sequence[str], rounds: int, repeats: int) -> dict[str, Any]:
    budget = _peak(task, options) // 2
    runs: dict[str, list[list[dict[str, Any]]]] = {way: [] for way in ways}
    peaks: dict[str, int] = {}
    facts: dict[str, Any] = {}
    for _ in range(repeats):
        for way in ways:
            mode, more = _WAYS[way]
            spec = Spec(task, {**options, **more}, mode, None if mode in ("eager", "checkpoint") else budget)
            with Worker(way, spec) as worker:
                take_turns([worker], rounds)
                peaks[way] = max(peaks.get(way, 0), worker.ask("report")["peak_rss"])
                facts = worker.facts if way == "eager" else facts
                runs[way].append(worker.steps)
    seconds = {
        way: [statistics.median(step["seconds"] for step in same) for same in zip(*found, strict=True)]
        for way, found in runs.items()
    }
    steps = {way: found[-1] for way, found in runs.items()}
    losses = {way: [step["loss"] for step in found] for way, found in steps.items()}
    last = {way: found[-1] for way, found in steps.items()}
    return {
        **facts,
        "budget": budget,
        "lengths": [step["length"] for step in steps["eager"]],
        "same_losses": {way: found == losses["eager"] for way, found in losses.items()},
        "arena_peak": last["budget"]["peak_bytes"],
        "followed_calls": last["compile"]["followed_calls"] if "compile" in last else None,
        "peak_rss": peaks,
        "repeats": repeats,
        "total_over_eager": {way: sum(found) / sum(seconds["eager"]) for way, found in seconds.items()},
        "first_over_eager": _over_eager(seconds, slice(_FIRST)),
        "later_over_eager": _over_eager(seconds, slice(_FIRST, None)) if rounds > _FIRST else None,
        "total_without_first_over_eager": {
            way: sum(found[1:]) / sum(seconds["eager"][1:]) for way, found in seconds.items()
        },
        "seconds": seconds,
    }


def _over_eager(seconds: Mapping[str, Sequence[float]], part: slice) -> dict[str, float]:
    return {way: sum(found[part]) / sum(seconds["eager"][part]) for way, found in seconds.items()}


def _new_over_known(row: Mapping[str, Any], way: str) -> float | None:
    """The first step of a length over later ones, each over plain PyTorch's step on the same batch; medians.

    The first length and its first call are left out: that is the first step of all.
    """
    seen, new, known = {row["lengths"][0]}, [], []
    for number, length in enumerate(row["lengths"][1:], 1):
        ratio = row["seconds"][way][number] / row["seconds"]["eager"][number]
        (known if length in seen else new).append(ratio)
        seen.add(length)
    return statistics.median(new) / statistics.median(known) if new and known else None


def _print_batches(row: Mapping[str, Any]) -> None:
    count, kinds = len(row["lengths"]), len(set(row["lengths"]))
    title = f"{row['workload']}: {count} batches of {kinds} lengths within {format_bytes(row['budget'])}"
    table = Table(title=title, title_justify="left")
    for heading in (
        "",
        f"first {_FIRST} over eager",
        "later over eager",
        "new over known length",
        "peak",
        "same losses",
    ):
        table.add_column(heading, justify="left" if not heading else "right")
    for way in row["seconds"]:
        ratio = row["new_over_known"][way]
        table.add_row(
            way,
            f"{row['first_over_eager'][way]:.3f}",
            f"{row['later_over_eager'][way]:.3f}" if row["later_over_eager"] else "",
            "" if ratio is None else f"{ratio:.3f}",
            format_bytes(row["peak_rss"][way]),
            "yes" if row["same_losses"][way] else "no",
        )
    console().print(table)


def _print_tasks(rows: Mapping[str, Mapping[str, Any]]) -> None:
    table = Table(title="Tasks of Mimose, in small: all steps over eager's, and the peak of the process")
    ways = [way for way in _WAYS if way != "eager"]
    for heading in ("task", "budget", "eager", *ways):
        table.add_column(heading, justify="right")
    for task, row in rows.items():
        eager = sum(row["seconds"]["eager"]) / len(row["seconds"]["eager"])
        found = [f"{format_seconds(eager)} a step, {format_bytes(row['peak_rss']['eager'])}"]
        found += [
            f"{row['total_without_first_over_eager'][way]:.3f}, {format_bytes(row['peak_rss'][way])}" for way in ways
        ]
        table.add_row(task, format_bytes(row["budget"]), *found)
    console().print(table)


def main(
    *,
    batches: Annotated[int, typer.Option(min=3, help="Batches of BERT, GPT-2 and the ResNet.")] = 260,
    rounds: Annotated[int, typer.Option(min=3, help="Batches of each of Mimose's tasks.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each process on these batches.")] = 3,
    task: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(TASKS)}. [default: all]")] = None,
    compiled: Annotated[bool, typer.Option(help="Beside a compiled step as well.")] = True,
    small: Annotated[bool, typer.Option("--small", help="Tiny models and few batches: to see that it runs.")] = False,
    date: Annotated[str | None, typer.Option(help="Of the measurement; by default now.")] = None,
) -> None:
    """Measure, print tables, and write the numbers to benchmarks/results/lengths.json (not with --small)."""
    options: dict[str, Any] = {"layers": 2, "width": 64, "batch": 2, "vocab": 512} if small else {}
    chosen = task or list(TASKS)
    content: dict[str, Any] = {"batches": {}}
    ways = ("eager", "budget", "compile") if compiled else ("eager", "budget")
    for name in chosen:
        if not TASKS[name].together:
            continue
        shape = {"batch": 2} if small and TASKS[name].head == "image" else options
        row = _run(name, shape, ways, 12 if small else batches, 1 if small else repeats)
        row["new_over_known"] = {way: _new_over_known(row, way) for way in ways}
        content["batches"][name] = row
        _print_batches(row)
    others = [name for name in chosen if not TASKS[name].together]
    if others:
        content["tasks"] = {name: _run(name, options, tuple(_WAYS), 3 if small else rounds, 1) for name in others}
        _print_tasks(content["tasks"])
    if not small:
        print(f"written to {write_result('lengths', content, date)}")


if __name__ == "__main__":
    typer.run(main)
