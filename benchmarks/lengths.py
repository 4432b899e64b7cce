"""Batches of many lengths within a budget: as a followed loop, and as a compiled step that passes to being followed.

First BERT on batches of log-normal lengths, at half of the longest batch's peak: what all steps take over plain
PyTorch, and what the first step of a length takes over later ones of it (both over plain PyTorch's step on the same
batch). Then the tasks of Mimose (see ``_texts.py``), beside what one does without a budget: padding every batch to the
longest, and checkpointing every block.

The processes of a workload take turns step by step.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from _common import Spec, Worker, console, take_turns, write_result
from _texts import TASKS
from rich.table import Table

from outofcore.units import GIB, format_bytes, format_seconds

_ROOM = 64 * GIB
_MAIN = "bert-lengths"
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


def _run(task: str, options: Mapping[str, Any], ways: Sequence[str], rounds: int) -> dict[str, Any]:
    budget = _peak(task, options) // 2
    with contextlib.ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for way in ways:
            mode, more = _WAYS[way]
            spec = Spec(task, {**options, **more}, mode, None if mode in ("eager", "checkpoint") else budget)
            workers[way] = stack.enter_context(Worker(way, spec))
        take_turns(list(workers.values()), rounds)
        peaks = {way: worker.ask("report")["peak_rss"] for way, worker in workers.items()}
        facts = workers["eager"].facts
    steps = {way: worker.steps for way, worker in workers.items()}
    seconds = {way: [step["seconds"] for step in found] for way, found in steps.items()}
    losses = {way: [step["loss"] for step in found] for way, found in steps.items()}
    last = {way: found[-1] for way, found in steps.items()}
    return {
        **facts,
        "budget": budget,
        "lengths": [step["length"] for step in steps["eager"]],
        "same_losses": {way: found == losses["eager"] for way, found in losses.items()},
        "arena_peak": last["budget"]["peak_bytes"],
        "followed_calls": last["compile"]["followed_calls"],
        "peak_rss": peaks,
        "total_over_eager": {way: sum(found) / sum(seconds["eager"]) for way, found in seconds.items()},
        "total_without_first_over_eager": {
            way: sum(found[1:]) / sum(seconds["eager"][1:]) for way, found in seconds.items()
        },
        "seconds": seconds,
    }


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


def _print_main(row: Mapping[str, Any]) -> None:
    count, kinds = len(row["lengths"]), len(set(row["lengths"]))
    title = f"{row['workload']}: {count} batches of {kinds} lengths within {format_bytes(row['budget'])}"
    table = Table(title=title, title_justify="left")
    for heading in ("", "total over eager", "without the first step", "new over known length", "peak", "same losses"):
        table.add_column(heading, justify="left" if not heading else "right")
    for way in row["seconds"]:
        ratio = _new_over_known(row, way)
        table.add_row(
            way,
            f"{row['total_over_eager'][way]:.3f}",
            f"{row['total_without_first_over_eager'][way]:.3f}",
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
    batches: Annotated[int, typer.Option(min=3, help="Batches of BERT.")] = 200,
    rounds: Annotated[int, typer.Option(min=3, help="Batches of each of Mimose's tasks.")] = 16,
    task: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(TASKS)}. [default: all]")] = None,
    small: Annotated[bool, typer.Option("--small", help="Tiny models and few batches: to see that it runs.")] = False,
    date: Annotated[str | None, typer.Option(help="Of the measurement; by default now.")] = None,
) -> None:
    """Measure, print tables, and write the numbers to benchmarks/results/lengths.json (not with --small)."""
    options: dict[str, Any] = {"layers": 2, "width": 64, "batch": 2, "vocab": 512} if small else {}
    chosen = task or list(TASKS)
    content: dict[str, Any] = {}
    if _MAIN in chosen:
        content["bert"] = _run(_MAIN, options, ("eager", "budget", "compile"), 12 if small else batches)
        content["bert"]["new_over_known"] = {
            way: _new_over_known(content["bert"], way) for way in ("budget", "compile")
        }
        _print_main(content["bert"])
    others = [name for name in chosen if name != _MAIN]
    if others:
        content["tasks"] = {name: _run(name, options, tuple(_WAYS), 3 if small else rounds) for name in others}
        _print_tasks(content["tasks"])
    if not small:
        print(f"written to {write_result('lengths', content, date)}")


if __name__ == "__main__":
    typer.run(main)
