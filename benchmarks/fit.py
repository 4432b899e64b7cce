"""Compare steps that fit in the budget with plain PyTorch on its own malloc and on tcmalloc.

Processes take turns step by step; ratios are medians over the rounds. They are restarted several times, because the
physical memory of a process changes its speed by a few percent.
"""

from __future__ import annotations

import contextlib
import statistics
from typing import Annotated, Any

import typer
from _common import Spec, Worker, console, find_tcmalloc, parse_options, round_by_round, survey, take_turns, write_model
from rich.table import Table

from outofcore.units import format_bytes, format_seconds

_WARM_UP = 3
_IN_CORE = 1.1
_WORKLOADS: dict[str, dict[str, Any]] = {
    "resnet50": {"batch": 16},
    "gpt": {"batch": 2, "layers": 4, "width": 768, "context": 1024},
}


def _measure(model: str, options: dict[str, Any], rounds: int, launches: int, policy: str) -> dict[str, Any]:
    need = survey(Spec(model, options))
    budget = int(_IN_CORE * need["in_core_budget"])
    tcmalloc = find_tcmalloc()
    steps: dict[str, list[dict[str, Any]]] = {}
    identical, copied, off_plan, plan = True, 0, 0, {}
    for _ in range(launches):
        with contextlib.ExitStack() as stack:
            workers = [stack.enter_context(Worker("eager", Spec(model, options)))]
            if tcmalloc is not None:
                workers.append(stack.enter_context(Worker("eager, tcmalloc", Spec(model, options), tcmalloc)))
            ours = Worker("outofcore", Spec(model, options, "outofcore", budget, policy=policy))
            workers.append(stack.enter_context(ours))
            take_turns(workers, rounds)
            plan = ours.ask("report")["plan"]
            for worker in workers:
                steps.setdefault(worker.name, []).extend(worker.steps[_WARM_UP:])
            losses = [[s["loss"] for s in worker.steps] for worker in workers]
            identical &= all(values == losses[-1] for values in losses)
            copied = max([copied, *(step["bytes_out"] + step["bytes_in"] for step in ours.steps[1:])])
            off_plan = max(off_plan, ours.steps[-1]["off_plan"])
    seconds = {name: [step["seconds"] for step in rows_of_steps] for name, rows_of_steps in steps.items()}
    rows = [
        {
            "name": name,
            "seconds": statistics.median(seconds[name]),
            "ours_over_it": round_by_round(seconds["outofcore"], seconds[name]),
            "faults": statistics.median(s["faults"] for s in rows_of_steps),
            "steps": {key: [s[key] for s in rows_of_steps] for key in rows_of_steps[0]},
        }
        for name, rows_of_steps in steps.items()
    ]
    return {
        **need,
        "tcmalloc": None if tcmalloc is None else str(tcmalloc),
        "budget": budget,
        "plan": plan,
        "bytes_copied_per_step_after_the_first": copied,
        "off_plan": off_plan,
        "losses_identical": identical,
        "rows": rows,
    }


def _print(result: dict[str, Any]) -> None:
    table = Table(title=result["workload"], title_justify="left")
    table.add_column("process")
    for heading in ("median step", "outofcore over it", "page faults a step"):
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        table.add_row(
            row["name"], format_seconds(row["seconds"]), f"{row['ours_over_it']:.3f}", f"{row['faults']:,.0f}"
        )
    console().print(table)
    print(
        f"budget {format_bytes(result['budget'])}; most bytes copied in a step after the first: "
        f"{result['bytes_copied_per_step_after_the_first']}; requests off the plan: {result['off_plan']}; "
        f"losses identical: {'yes' if result['losses_identical'] else 'no'}"
    )
    if result["tcmalloc"] is None:
        print("no tcmalloc row: libtcmalloc_minimal.so.4 is not installed (Debian: apt install libtcmalloc-minimal4)")


def main(
    *,
    model: Annotated[str | None, typer.Option(help="Model of the zoo (default: resnet50 and gpt).")] = None,
    option: Annotated[list[str] | None, typer.Option(help="Model option, as name=value; repeatable.")] = None,
    rounds: Annotated[int, typer.Option(min=_WARM_UP + 1, help="Number of steps per process.")] = 8,
    launches: Annotated[int, typer.Option(min=1, help="Number of process restarts.")] = 4,
    policy: Annotated[str, typer.Option(help="Planning policy.")] = "auto",
    name: Annotated[str, typer.Option(help="Name of the result file under benchmarks/results.")] = "fit",
    date: Annotated[str | None, typer.Option(help="Date of the measurement, ISO 8601 (default: now).")] = None,
) -> None:
    """Measure, print tables, and write the numbers to benchmarks/results."""
    chosen = _WORKLOADS if model is None else {model: _WORKLOADS.get(model, {"batch": 8})}
    for workload, defaults in chosen.items():
        result = _measure(workload, {**defaults, **parse_options(option or [])}, rounds, launches, policy)
        _print(result)
        path = write_model(name, workload, {"rounds": rounds, "launches": launches, **result}, date)
        print(f"written to {path}")


if __name__ == "__main__":
    typer.run(main)
