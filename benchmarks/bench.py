"""Step times at shrinking budgets, beside plain PyTorch, per-block checkpointing and our own in-core step.

All processes of a workload exist at once and take turns step by step, so that all meet the same machine: there must
be memory for all of them. Medians leave out the first rounds, in which steps are captured, planned and, where the
prediction was off, planned again. Peaks are those of the whole process (RSS), above that of one after a step of a
tiny model.
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
_IN_CORE = 1.1  # of what the step needs: a budget that does not pinch
_PARTS = (2.0, 4.0, 7.5)
_WORKLOADS: dict[str, dict[str, Any]] = {
    "resnet50": {"batch": 16},
    "gpt": {"batch": 8, "layers": 6, "width": 512, "context": 512},
    "unet3d": {"batch": 1, "size": 64},
}


def _timed(worker: Worker) -> list[float]:
    return worker.columns()["seconds"][_WARM_UP:]


def _row(worker: Worker, report: dict[str, Any], base: int, eager: list[float], in_core: list[float]) -> dict[str, Any]:
    seconds = worker.median("seconds", _WARM_UP)
    row: dict[str, Any] = {
        "name": worker.name,
        "budget": worker.spec.budget,
        "seconds": seconds,
        "to_eager": round_by_round(_timed(worker), eager),
        "to_in_core": round_by_round(_timed(worker), in_core),
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
        # What the kernel counts of the arena: whatever else the process holds is no matter of the plan.
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

    wanted = [("eager", Spec(model, options)), ("in core", ours(int(_IN_CORE * in_core)))]
    wanted += [(f"1/{part:g}", ours(int(in_core / part))) for part in parts]
    checkpointed = Spec(model, options, "checkpoint")
    refused: dict[str, str] = {}
    try:
        peak = peak_of(checkpointed, 2) - base
    except WorkerError as error:
        refused["checkpoint"] = str(error)
    else:
        wanted += [("checkpoint", checkpointed), ("at its peak", ours(budget_below(peak)))]
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
        take_turns(workers, rounds - 1)
        reports = [worker.ask("report") for worker in workers]
    seconds = {worker.name: _timed(worker) for worker in workers}
    rows = [_row(w, r, base, seconds["eager"], seconds["in core"]) for w, r in zip(workers, reports, strict=True)]
    return {**need, "rows": rows, "refused": refused}


def main(
    *,
    model: Annotated[str | None, typer.Option(help="One of the zoo alone. [default: resnet50, gpt, unet3d]")] = None,
    option: Annotated[list[str] | None, typer.Option(help="An option of the model, as name=value.")] = None,
    fraction: Annotated[list[float] | None, typer.Option(help="In-core peak over budget. [default: 2, 4, 7.5]")] = None,
    rounds: Annotated[int, typer.Option(min=_WARM_UP + 1, help="Steps of each process.")] = 12,
    home: Annotated[str, typer.Option(help="disk, host or a folder on a disk.")] = "disk",
    policy: Annotated[str, typer.Option(help="How to plan.")] = "auto",
    name: Annotated[str, typer.Option(help="Of the file under benchmarks/results.")] = "bench",
    date: Annotated[str | None, typer.Option(help="Of the measurement; by default now.")] = None,
) -> None:
    """Measure, print a table for each model, and write the numbers to benchmarks/results."""
    chosen = _WORKLOADS if model is None else {model: _WORKLOADS.get(model, {"batch": 8})}
    base = peak_of(Spec("gpt", TINY), 1)
    for which, usual in chosen.items():
        options = {**usual, **parse_options(option or [])}
        found = _measure(which, options, fraction or list(_PARTS), rounds, home, policy, base)
        console().print(_table(f"{which}, {options}, policy {policy}, home {home}", found["rows"]))
        off = [abs(row["predicted_to_measured"] - 1) for row in found["rows"] if "predicted_seconds" in row]
        print(f"predicted step times are off by {statistics.median(off):.1%} (median of {len(off)})")
        peaks = [abs(row["predicted_to_arena_rss"] - 1) for row in found["rows"] if "arena_rss" in row]
        print(f"predicted peaks are off by {max(peaks):.2%} at most of the arena's resident memory")
        facts = {"options": options, "policy": policy, "home": home, "rounds": rounds, "tiny_rss": base}
        print(f"written to {write_model(name, which, {**facts, **found}, date)}")


if __name__ == "__main__":
    typer.run(main)
