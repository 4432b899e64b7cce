"""Step times at shrinking budgets, beside plain PyTorch and our own in-core step.

All processes exist at once and take turns step by step, so that all meet the same machine: there must be
memory for all of them. Medians leave out the first rounds, in which steps are captured and caches fill.
"""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

import typer
from _common import Spec, Worker, WorkerError, console, parse_options, survey, take_turns, write_result
from rich.table import Table

from outofcore.units import format_bytes, format_seconds

_WARM_UP = 2
_IN_CORE = 1.1  # of what the step needs: a budget that does not pinch


def _row(worker: Worker, report: dict[str, Any], eager_s: float, in_core_s: float) -> dict[str, Any]:
    seconds = worker.median("seconds", _WARM_UP)
    row: dict[str, Any] = {
        "name": worker.name,
        "budget": worker.spec.budget,
        "seconds": seconds,
        "to_eager": seconds / eager_s,
        "to_in_core": seconds / in_core_s,
        "peak_rss": report["peak_rss"],
        "faults": worker.median("faults", _WARM_UP),
        "steps": worker.columns(),
    }
    if "plan" in report:
        row["plan"] = report["plan"]
        for key in ("predicted_seconds", "compute_seconds", "bytes_out", "bytes_in"):
            row[key] = worker.median(key, _WARM_UP)
    return row


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("process")
    for heading in ("budget", "step", "predicted", "to eager", "to in-core", "out", "in", "peak RSS"):
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
            format_bytes(row["peak_rss"]),
        )
    return table


def main(
    *,
    model: Annotated[str, typer.Option(help="A model of the zoo.")] = "resnet50",
    batch: Annotated[int, typer.Option(help="Samples in a batch.")] = 16,
    option: Annotated[list[str] | None, typer.Option(help="A further option of the model, as name=value.")] = None,
    fraction: Annotated[list[float] | None, typer.Option(help="In-core peak over budget. [default: 2, 4, 7.5]")] = None,
    rounds: Annotated[int, typer.Option(min=_WARM_UP + 1, help="Steps of each process.")] = 12,
    home: Annotated[str, typer.Option(help="disk, host or a folder on a disk.")] = "disk",
    policy: Annotated[str, typer.Option(help="How to plan.")] = "auto",
    name: Annotated[str, typer.Option(help="Of the file under benchmarks/results.")] = "bench",
    date: Annotated[str | None, typer.Option(help="Of the measurement; by default now.")] = None,
) -> None:
    """Measure, print a table, and write the numbers to benchmarks/results."""
    options = {"batch": batch, **parse_options(option or [])}
    need = survey(Spec(model, options, home=home))
    in_core = need["in_core_budget"]
    print(
        f"{need['workload']}\nin core {format_bytes(in_core)}, smallest budget {format_bytes(need['smallest_budget'])}"
    )

    def ours(budget: int) -> Spec:
        return Spec(model, options, "outofcore", budget, home, policy)

    wanted = [("eager", Spec(model, options)), ("in core", ours(int(_IN_CORE * in_core)))]
    wanted += [(f"1/{part:g}", ours(int(in_core / part))) for part in fraction or [2.0, 4.0, 7.5]]
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
        take_turns(workers, rounds - 1)
        reports = [worker.ask("report") for worker in workers]
    seconds = {worker.name: worker.median("seconds", _WARM_UP) for worker in workers}
    if "in core" not in seconds:
        raise typer.Exit(1)
    rows = [_row(w, r, seconds["eager"], seconds["in core"]) for w, r in zip(workers, reports, strict=True)]
    console().print(_table(f"{model}, batch {batch}, policy {policy}, home {home}", rows))
    content = {**need, "policy": policy, "home": home, "rounds": rounds, "rows": rows, "refused": refused}
    print(f"written to {write_result(name, content, date)}")


if __name__ == "__main__":
    typer.run(main)
