"""Measure joint optimizer updates under small budgets.

Under a small budget, each parameter is updated as soon as its gradient exists. Updates that follow one another are
joined, up to a share of the room and a number of parameter bytes (``transforms.passes.lean``). Steps with several
limits take turns in one process and must have the same losses.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Annotated, Any

import torch
import typer
from _bert import workload
from _common import TINY, Spec, console, peak_of, round_by_round, survey, write_result
from _unseen import UNSEEN
from rich.table import Table

import outofcore
from outofcore.capture import device_traits
from outofcore.transforms import passes
from outofcore.units import MIB, format_bytes, format_seconds

_EAGER_STEPS = 4  # steps of plain PyTorch before its peak is read
_FIRST = 5  # warm-up steps, which plan and replace plans
# Limits of a joint update: the divisor of the room, and bytes of parameters.
_LIMITS: dict[str, tuple[int, int]] = {
    "apart": (1, 0),
    "a 64th, 4 MiB": (64, 4 * MIB),
    "a 16th, 16 MiB": (16, 16 * MIB),
    "an 8th, 64 MiB": (8, 64 * MIB),
}


def _open_step(model: str, budget: int, limits: tuple[int, int]) -> tuple[Any, list[Any]]:
    before = passes.SHARE_OF_UPDATES, device_traits._HOST
    delayed = replace(before[1].update_bytes, delayed=limits[1])
    passes.SHARE_OF_UPDATES, device_traits._HOST = limits[0], replace(before[1], update_bytes=delayed)
    try:
        torch.manual_seed(0)
        work = workload(model, {})
        network = work.build()
        optimizer = work.optimizer(network)
        step = outofcore.compile(
            work.make_step(network, optimizer), network, optimizer, budget=budget, policy="auto", dynamic=False
        )
        stream = work.batches()
        batches = [next(stream) for _ in range(2)]
        for turn in range(_FIRST):
            step(*batches[turn % 2])
        return step, batches
    finally:
        passes.SHARE_OF_UPDATES, device_traits._HOST = before


def _measure(model: str, parts: list[float], rounds: int) -> list[dict[str, Any]]:
    whole = peak_of(Spec(model, {}), _EAGER_STEPS) - peak_of(Spec("gpt", TINY), 1)
    in_core = 2 * survey(Spec(model, {}, "outofcore"))["in_core_budget"]
    rows: list[dict[str, Any]] = []
    for part in parts:
        budget = int(whole / part)
        runs = {"in core": _open_step(model, in_core, _LIMITS["apart"])}
        runs |= {name: _open_step(model, budget, limits) for name, limits in _LIMITS.items()}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        names = list(runs)
        for turn in range(rounds):
            first = turn % len(names)
            losses: set[float] = set()
            for name in names[first:] + names[:first]:
                step, batches = runs[name]
                torch.manual_seed(turn)  # for dropout
                begin = time.perf_counter()
                losses.add(step(*batches[turn % 2]).item())
                seconds[name].append(time.perf_counter() - begin)
            if len(losses) != 1:
                raise AssertionError(f"{model} within {budget} bytes: losses differ in round {turn}: {losses}")
        for step, _ in runs.values():
            step.close()
        fifth = max(rounds // 5, 1)
        quick = {name: statistics.mean(sorted(times)[:fifth]) for name, times in seconds.items()}
        rows += [
            {
                "model": model,
                "part": part,
                "budget": budget,
                "way": name,
                "step_seconds": statistics.median(seconds[name]),
                "over_in_core": round_by_round(seconds[name], seconds["in core"]),
                "quickest_over_in_core": quick[name] / quick["in core"],
                "seconds": seconds[name],
            }
            for name in names
        ]
    return rows


def main(
    *,
    model: Annotated[list[str] | None, typer.Option(help="Models to run; repeatable (default: all).")] = None,
    part: Annotated[
        list[float] | None, typer.Option(help="Divisors of plain PyTorch's peak; repeatable (default: 2, 4).")
    ] = None,
    rounds: Annotated[int, typer.Option(min=5, help="Number of rounds; each step runs once per round.")] = 40,
    date: Annotated[str | None, typer.Option(help="Date of the measurement, ISO 8601 (default: now).")] = None,
) -> None:
    """Measure, print tables, and write the numbers to benchmarks/results/updates.json."""
    results: list[dict[str, Any]] = []
    for name in model or list(UNSEEN):
        rows = _measure(name, part or [2.0, 4.0], rounds)
        table = Table(name, "budget", "step", "over in core", "quickest fifths")
        for row in rows:
            label = row["way"] if row["way"] == "in core" else f"1/{row['part']:g}, {row['way']}"
            table.add_row(
                label,
                format_bytes(row["budget"]),
                format_seconds(row["step_seconds"]),
                f"{row['over_in_core']:.3f}",
                f"{row['quickest_over_in_core']:.3f}",
            )
        console().print(table)
        results += rows
    console().print(f"written to {write_result('updates', {'rows': results}, date)}")


if __name__ == "__main__":
    typer.run(main)
