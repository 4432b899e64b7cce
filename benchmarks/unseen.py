"""Step times of models that no other benchmark uses, at parts of plain PyTorch's peak, beside our own in-core step.

Models of transformers with random weights (``_unseen.py``). Budgets are parts of the memory that a process of plain
PyTorch has at its peak above one that trains a tiny model (RSS); with ``--of step`` of what our step needs where all of
it fits, which is less. All processes of a model exist at once and take turns step by step. The medians of quotients,
round by round, leave out the first rounds, in which plans are made and exchanged. For machines that are never at rest
there are beside them: quotients of the quickest fifths of steps, and of processor time, which does not count what other
processes take but neither counts waits; of these the share is told. With ``--noise`` something else keeps a core busy
in every other second of the first ten rounds, as when a machine is shared: what is decided then should not stay.
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

_IN_CORE = 1.1  # of what the step needs: a budget that does not pinch
_PARTS = (2.0, 4.0)
_POLICIES = ("auto",)
_QUOTIENTS = ("to_in_core", "calm_to_in_core", "processor_to_in_core")
_NOISY_ROUNDS = 10
_EAGER_STEPS = 4  # its peak is that of the second one or a later one
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
    """What budgets are parts of."""

    EAGER = "eager"  # the peak of a process of plain PyTorch
    STEP = "step"  # what our own step needs where all of it fits


@contextlib.contextmanager
def _noise(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", _NOISE])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _calm(seconds: list[float]) -> float:
    """The median of the quickest fifth: what else runs on a machine makes steps longer and never shorter."""
    return statistics.median(sorted(seconds)[: max(len(seconds) // 5, 1)])


def _measure(
    model: str, parts: list[float], policies: list[str], rounds: int, warm_up: int, home: str, noise: bool, of: Whole
) -> dict[str, Any]:
    need = survey(Spec(model, {}, home=home))
    eager_peak = peak_of(Spec(model, {}), _EAGER_STEPS) - peak_of(Spec("gpt", TINY), 1)
    whole = eager_peak if of is Whole.EAGER else need["in_core_budget"]
    print(
        f"{need['workload']}\nneeds {format_bytes(need['in_core_budget'])}, {format_bytes(need['smallest_budget'])} at "
        f"the least; plain PyTorch takes {format_bytes(eager_peak)}"
    )
    wanted = [("in core", Spec(model, {}, "outofcore", int(_IN_CORE * need["in_core_budget"]), home))]
    for part in parts:
        for policy in policies:
            label = f"1/{part:g}, {policy}"
            wanted.append((label, Spec(model, {}, "outofcore", int(whole / part), home, policy)))
    refused: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        workers: list[Worker] = []
        for label, spec in wanted:
            worker = stack.enter_context(Worker(label, spec))
            try:
                worker.step()  # plans; a budget that cannot hold is refused here
            except WorkerError as error:
                refused[label] = str(error)
                print(error)
                continue
            workers.append(worker)
        with _noise(noise):
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
                "calm_to_in_core": _calm(seconds[warm_up:]) / _calm(in_core[warm_up:]),
                "processor_to_in_core": round_by_round(processor[warm_up:], processor_in_core[warm_up:]),
                "waits": statistics.median(
                    1 - step["compute_seconds"] / step["seconds"] for step in worker.steps[warm_up:]
                ),
                "predicted_seconds": last["predicted_seconds"],
                "bytes_in": last["bytes_in"],
                "steps": seconds,
            }
        )
    return {**need, "eager_peak": eager_peak, "rows": rows, "refused": refused}


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("process")
    for heading in ("budget", "step", "predicted", "to in-core", "calm to calm", "processor", "waits", "in"):
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
    model: Annotated[list[str] | None, typer.Option(help="Models to run; repeatable. [default: all]")] = None,
    fraction: Annotated[
        list[float] | None, typer.Option(help="What budgets are parts of, over budget. [default: 2, 4]")
    ] = None,
    of: Annotated[Whole, typer.Option(help="What budgets are parts of.")] = Whole.EAGER,
    policy: Annotated[list[str] | None, typer.Option(help="How to plan. [default: auto]")] = None,
    rounds: Annotated[int, typer.Option(help="Number of steps per process.")] = 55,
    warm_up: Annotated[int, typer.Option(help="Of these, steps that do not count.")] = 35,
    home: Annotated[str, typer.Option(help="Home: disk, host, or a folder on a disk.")] = "disk",
    noise: Annotated[bool, typer.Option(help="Keep a core busy now and then, early on.")] = False,
    date: Annotated[str | None, typer.Option(help="Date of the measurement, ISO 8601. [default: now]")] = None,
) -> None:
    """Measure, print a table for each model and the medians, and write results/unseen.json or unseen-noise.json."""
    found: dict[str, Any] = {}
    for which in model or list(UNSEEN):
        found[which] = _measure(
            which, fraction or list(_PARTS), policy or list(_POLICIES), rounds, warm_up, home, noise, of
        )
        console().print(_table(f"{which}, {UNSEEN[which].shape}", found[which]["rows"]))
    medians: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(row["name"] for one in found.values() for row in one["rows"]):
        rows = [row for one in found.values() for row in one["rows"] if row["name"] == name]
        medians[name] = {key: statistics.median(row[key] for row in rows) for key in _QUOTIENTS}
        print(
            f"{name}: {medians[name]['to_in_core']:.3f} of in core round by round (median of {len(rows)} models), "
            f"{medians[name]['calm_to_in_core']:.3f} by the quickest fifths, "
            f"{medians[name]['processor_to_in_core']:.3f} in processor time"
        )
    name = "unseen-noise" if noise else "unseen"
    facts = {"noise": noise, "of": of.value, "home": home, "rounds": rounds, "warm_up": warm_up}
    print(f"written to {write_result(name, {**facts, 'medians': medians, 'models': found}, date)}")


if __name__ == "__main__":
    typer.run(main)
