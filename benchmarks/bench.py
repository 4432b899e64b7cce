"""Measure step times at shrinking budgets against plain PyTorch, checkpointing and our in-core step.

All processes of a workload run at once and take turns step by step, so the machine needs memory for all of them.
Medians exclude the first rounds, which plan. Peaks are RSS above that of a tiny model's process.
"""

from __future__ import annotations

import contextlib
import statistics
from typing import Annotated, Any

import typer
from _common import (
    TINY,
    Spec,
    Worker,
    WorkerError,
    budget_below,
    console,
    parse_options,
    peak_of,
    round_by_round,
    survey,
    take_turns,
    write_model,
)
from rich.table import Table

from outofcore.units import format_bytes, format_seconds

_WARM_UP = 5
_IN_CORE = 1.1  # of the in-core budget, so that no eviction is needed
_PARTS = (2.0, 4.0, 7.5)
_WORKLOADS: dict[str, dict[str, Any]] = {
    "resnet50": {"batch": 16},
    "gpt": {"batch": 8, "layers": 6, "width": 512, "context": 512},
    "unet3d": {"batch": 1, "size": 64},
}


def _timed_seconds(worker: Worker) -> list[float]:
    return worker.columns()["seconds"][_WARM_UP:]


def _row(worker: Worker, report: dict[str, Any], base: int, eager: list[float], in_core: list[float]) -> dict[str, Any]:
    seconds = worker.median("seconds", _WARM_UP)
    row: dict[str, Any] = {
        "name": worker.name,
        "budget": worker.spec.budget,
        "seconds": seconds,
        "to_eager": round_by_round(_timed_seconds(worker), eager),
        "to_in_core": round_by_round(_timed_seconds(worker), in_core),
        "peak_rss": report["peak_rss"],
        "peak_above_tiny": report["peak_rss"] - base,
        "faults": worker.median("faults", _WARM_UP),
        "steps": worker.columns(),
    }
    if "plan" in report:
        row["plan"] = report["plan"]
        for key in ("predicted_seconds", "compute_seconds", "bytes_out", "bytes_in"):
            row[key] = worker.median(key, _WARM_UP)
        row["predicted_to_measured"] = row["predicted_seconds"] / seconds
        # Compare with the arena's resident bytes only; the plan does not cover the rest of the process.
        row["arena_rss"] = report["arena_rss"]
        row["predicted_to_arena_rss"] = report["plan"]["peak_bytes"] / report["arena_rss"]
    return row


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("process")
    for heading in ("budget", "step", "predicted", "to eager", "to in-core", "out", "in", "policy", "peak"):
        table.add_column(heading, justify="right")
    for row in rows:
        planned = "plan" in row
        table.add_row(
            row["name"],
            format_bytes(row["budget"]) if planned else "",
            format_seconds(row["seconds"]),
            format_seconds(row["predicted_seconds"]) if planned else "",
            f"{row['to_eager']:.3f}",
            f"{row['to_in_core']:.3f}",
            format_bytes(row["bytes_out"]) if planned else "",
            format_bytes(row["bytes_in"]) if planned else "",
            row["plan"]["policy"] if planned else "",
            format_bytes(row["peak_above_tiny"]),
        )
    return table


def _measure(
    model: str, options: dict[str, Any], parts: list[float], rounds: int, home: str, policy: str, base: int
) -> dict[str, Any]:
    need = survey(Spec(model, options, home=home))
    in_core = need["in_core_budget"]
    print(
        f"{need['workload']}\nin core {format_bytes(in_core)}, smallest budget {format_bytes(need['smallest_budget'])}"
    )

    def ours(budget: int) -> Spec:
        return Spec(model, options, "outofcore", budget, home, policy)

    runs = [("eager", Spec(model, options)), ("in core", ours(int(_IN_CORE * in_core)))]
    runs += [(f"1/{part:g}", ours(int(in_core / part))) for part in parts]
    checkpointed = Spec(model, options, "checkpoint")
    failures: dict[str, str] = {}
    try:
        peak = peak_of(checkpointed, 2) - base
    except WorkerError as error:
        failures["checkpoint"] = str(error)
    else:
        runs += [("checkpoint", checkpointed), ("at its peak", ours(budget_below(peak)))]
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
        take_turns(workers, rounds - 1)
        reports = [worker.ask("report") for worker in workers]
    seconds = {worker.name: _timed_seconds(worker) for worker in workers}
    rows = [_row(w, r, base, seconds["eager"], seconds["in core"]) for w, r in zip(workers, reports, strict=True)]
    return {**need, "rows": rows, "refused": failures}


def main(
    *,
    model: Annotated[str | None, typer.Option(help="Model of the zoo (default: resnet50, gpt, unet3d).")] = None,
    option: Annotated[list[str] | None, typer.Option(help="Model option, as name=value; repeatable.")] = None,
    fraction: Annotated[
        list[float] | None, typer.Option(help="In-core peak divided by budget; repeatable (default: 2, 4, 7.5).")
    ] = None,
    rounds: Annotated[int, typer.Option(min=_WARM_UP + 1, help="Number of steps per process.")] = 12,
    home: Annotated[str, typer.Option(help="Home: disk, host, or a folder on a disk.")] = "disk",
    policy: Annotated[str, typer.Option(help="Planning policy.")] = "auto",
    name: Annotated[str, typer.Option(help="Name of the result file under benchmarks/results.")] = "bench",
    date: Annotated[str | None, typer.Option(help="Date of the measurement, ISO 8601 (default: now).")] = None,
) -> None:
    """Measure, print a table for each model, and write the numbers to benchmarks/results."""
    chosen = _WORKLOADS if model is None else {model: _WORKLOADS.get(model, {"batch": 8})}
    base = peak_of(Spec("gpt", TINY), 1)
    for workload, defaults in chosen.items():
        options = {**defaults, **parse_options(option or [])}
        result = _measure(workload, options, fraction or list(_PARTS), rounds, home, policy, base)
        console().print(_table(f"{workload}, {options}, policy {policy}, home {home}", result["rows"]))
        errors = [abs(row["predicted_to_measured"] - 1) for row in result["rows"] if "predicted_seconds" in row]
        print(f"predicted step times are off by {statistics.median(errors):.1%} (median of {len(errors)})")
        peaks = [abs(row["predicted_to_arena_rss"] - 1) for row in result["rows"] if "arena_rss" in row]
        print(f"predicted peaks are off by {max(peaks):.2%} at most of the arena's resident memory")
        facts = {"options": options, "policy": policy, "home": home, "rounds": rounds, "tiny_rss": base}
        print(f"written to {write_model(name, workload, {**facts, **result}, date)}")


if __name__ == "__main__":
    typer.run(main)
