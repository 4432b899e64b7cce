"""Measure step times of models that no other benchmark uses, at fractions of plain PyTorch's peak.

Processes take turns step by step; ratios to our in-core step are medians by round. For busy machines there are also
ratios of the quickest fifths of steps, and of processor time. ``--noise`` keeps a core busy in every other second of
the first ten rounds; decisions made then should not last.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
from collections.abc import Iterator
from enum import Enum
from typing import Annotated, Any

import typer
from _common import (
    TINY,
    Spec,
    Worker,
    WorkerError,
    console,
    peak_of,
    round_by_round,
    survey,
    take_turns,
    write_result,
)
from _unseen import UNSEEN
from rich.table import Table

from outofcore.units import format_bytes, format_seconds

_IN_CORE = 1.1  # of the in-core budget, so that no eviction is needed
_PARTS = (2.0, 4.0)
_POLICIES = ("auto",)
_QUOTIENTS = ("to_in_core", "calm_to_in_core", "processor_to_in_core")
_NOISY_ROUNDS = 10
_EAGER_STEPS = 4  # the peak is reached in the second or a later step
# Keeps one core busy in every other second.
_NOISE = """
import time
while True:
    end = time.monotonic() + 1
    while time.monotonic() < end:
        pass
    time.sleep(1)
"""


class Whole(Enum):
    """The bytes that budgets are fractions of."""

    EAGER = "eager"  # peak memory of plain PyTorch
    STEP = "step"  # in-core budget of our step


@contextlib.contextmanager
def _run_noise(is_on: bool) -> Iterator[None]:
    if not is_on:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", _NOISE])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _median_of_quickest(seconds: list[float]) -> float:
    """Return the median of the quickest fifth; other load makes steps only longer."""
    return statistics.median(sorted(seconds)[: max(len(seconds) // 5, 1)])


def _measure(
    model: str,
    parts: list[float],
    policies: list[str],
    rounds: int,
    warm_up: int,
    home: str,
    noise: bool,
    whole_kind: Whole,
) -> dict[str, Any]:
    sizes = survey(Spec(model, {}, home=home))
    eager_peak = peak_of(Spec(model, {}), _EAGER_STEPS) - peak_of(Spec("gpt", TINY), 1)
    whole = eager_peak if whole_kind is Whole.EAGER else sizes["in_core_budget"]
    print(
        f"{sizes['workload']}\nin-core budget {format_bytes(sizes['in_core_budget'])}, "
        f"smallest {format_bytes(sizes['smallest_budget'])}; plain PyTorch peaks at {format_bytes(eager_peak)}"
    )
    runs = [("in core", Spec(model, {}, "outofcore", int(_IN_CORE * sizes["in_core_budget"]), home))]
    for part in parts:
        for policy in policies:
            label = f"1/{part:g}, {policy}"
            runs.append((label, Spec(model, {}, "outofcore", int(whole / part), home, policy)))
    failures: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        workers: list[Worker] = []
        for label, spec in runs:
            worker = stack.enter_context(Worker(label, spec))
            try:
                worker.step()  # plans; raises if the budget is too small
            except WorkerError as error:
                failures[label] = str(error)
                print(error)
                continue
            workers.append(worker)
        with _run_noise(noise):
            take_turns(workers, min(_NOISY_ROUNDS, rounds - 1))
        take_turns(workers, max(rounds - 1 - _NOISY_ROUNDS, 0))
    in_core, processor_in_core = (workers[0].columns()[key] for key in ("seconds", "processor_seconds"))
    rows: list[dict[str, Any]] = []
    for worker in workers:
        columns, last = worker.columns(), worker.steps[-1]
        seconds, processor = columns["seconds"], columns["processor_seconds"]
        rows.append(
            {
                "name": worker.name,
                "budget": worker.spec.budget,
                "seconds": statistics.median(seconds[warm_up:]),
                "to_in_core": round_by_round(seconds[warm_up:], in_core[warm_up:]),
                "calm_to_in_core": _median_of_quickest(seconds[warm_up:]) / _median_of_quickest(in_core[warm_up:]),
                "processor_to_in_core": round_by_round(processor[warm_up:], processor_in_core[warm_up:]),
                "waits": statistics.median(
                    1 - step["compute_seconds"] / step["seconds"] for step in worker.steps[warm_up:]
                ),
                "predicted_seconds": last["predicted_seconds"],
                "bytes_in": last["bytes_in"],
                "steps": seconds,
            }
        )
    return {**sizes, "eager_peak": eager_peak, "rows": rows, "refused": failures}


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("process")
    for heading in ("budget", "step", "predicted", "to in-core", "quickest fifths", "processor", "waits", "in"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["name"],
            format_bytes(row["budget"]),
            format_seconds(row["seconds"]),
            format_seconds(row["predicted_seconds"]),
            f"{row['to_in_core']:.3f}",
            f"{row['calm_to_in_core']:.3f}",
            f"{row['processor_to_in_core']:.3f}",
            f"{row['waits']:.1%}",
            format_bytes(row["bytes_in"]),
        )
    return table


def main(
    *,
    model: Annotated[list[str] | None, typer.Option(help="Models to run; repeatable (default: all).")] = None,
    fraction: Annotated[
        list[float] | None, typer.Option(help="Divisors of the bytes chosen by --of; repeatable (default: 2, 4).")
    ] = None,
    of: Annotated[Whole, typer.Option(help="Bytes that budgets are fractions of.")] = Whole.EAGER,
    policy: Annotated[list[str] | None, typer.Option(help="Planning policies; repeatable (default: auto).")] = None,
    rounds: Annotated[int, typer.Option(help="Number of steps per process.")] = 55,
    warm_up: Annotated[int, typer.Option(help="Number of these steps excluded from medians.")] = 35,
    home: Annotated[str, typer.Option(help="Home: disk, host, or a folder on a disk.")] = "disk",
    noise: Annotated[bool, typer.Option(help="Keep a core busy in every other second of the first rounds.")] = False,
    date: Annotated[str | None, typer.Option(help="Date of the measurement, ISO 8601 (default: now).")] = None,
) -> None:
    """Measure, print a table for each model and the medians, and write results/unseen.json or unseen-noise.json."""
    results: dict[str, Any] = {}
    for model_name in model or list(UNSEEN):
        results[model_name] = _measure(
            model_name, fraction or list(_PARTS), policy or list(_POLICIES), rounds, warm_up, home, noise, of
        )
        console().print(_table(f"{model_name}, {UNSEEN[model_name].shape}", results[model_name]["rows"]))
    medians: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(row["name"] for result in results.values() for row in result["rows"]):
        rows = [row for result in results.values() for row in result["rows"] if row["name"] == name]
        medians[name] = {key: statistics.median(row[key] for row in rows) for key in _QUOTIENTS}
        print(
            f"{name}: {medians[name]['to_in_core']:.3f} of in core round by round (median of {len(rows)} models), "
            f"{medians[name]['calm_to_in_core']:.3f} by the quickest fifths, "
            f"{medians[name]['processor_to_in_core']:.3f} in processor time"
        )
    name = "unseen-noise" if noise else "unseen"
    facts = {"noise": noise, "of": of.value, "home": home, "rounds": rounds, "warm_up": warm_up}
    print(f"written to {write_result(name, {**facts, 'medians': medians, 'models': results}, date)}")


if __name__ == "__main__":
    typer.run(main)
