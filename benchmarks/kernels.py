"""Measure steps with Inductor's kernels: compile times, and equal losses at every budget.

Each row is a separate process; the first of a model compiles with an empty cache, later ones load its kernels.
"""

from __future__ import annotations

import os
import tempfile
from typing import Annotated, Any

import typer
from _common import Spec, Worker, console, survey, write_result
from _unseen import UNSEEN
from rich.table import Table

from outofcore.units import format_bytes, format_seconds

_IN_CORE = 1.1  # of the in-core budget, so that no eviction is needed
_CACHE = "TORCHINDUCTOR_CACHE_DIR"  # folder of Inductor's kernel cache
_WORKLOADS: dict[str, dict[str, Any]] = {
    "resnet50": {"batch": 4, "size": 128},
    "gpt": {"batch": 2, "layers": 6, "width": 384, "context": 256},
    "bert": {"batch": 2, "layers": 6, "width": 512, "context": 128},
    "unet3d": {"batch": 1, "size": 32},
}


def _run(name: str, spec: Spec, steps: int) -> dict[str, Any]:
    with Worker(name, spec) as worker:
        for _ in range(steps):
            worker.step()
        columns = worker.columns()
    return {"name": name, "budget": spec.budget, "first_step_s": columns["seconds"][0], "losses": columns["loss"]}


def _measure(model: str, steps: int) -> dict[str, Any]:
    options = _WORKLOADS.get(model, {})
    compiled = Spec(model, options, "outofcore", kernels="inductor")
    eager = Spec(model, options, "outofcore")
    sizes, smallest = survey(eager), survey(compiled)["smallest_budget"]
    in_core = int(_IN_CORE * sizes["in_core_budget"])

    def at(spec: Spec, budget: int) -> Spec:
        return Spec(spec.model, spec.options, spec.mode, budget, kernels=spec.kernels)

    rows = [_run("PyTorch's own kernels", at(eager, in_core), steps)]
    with tempfile.TemporaryDirectory() as empty:
        before = os.environ.get(_CACHE)
        os.environ[_CACHE] = empty
        try:
            rows.append(_run("in core, nothing compiled before", at(compiled, in_core), steps))
            rows.append(_run("in core", at(compiled, in_core), steps))
            half = max(int(sizes["in_core_budget"] / 2), smallest)
            rows.append(_run("half of that", at(compiled, half), steps))
            rows.append(_run("the smallest budget", at(compiled, smallest), steps))
        finally:
            if before is None:
                del os.environ[_CACHE]
            else:
                os.environ[_CACHE] = before
    eager_row, *compiled_rows = rows
    relative_errors = [
        abs(float.fromhex(compiled_loss) - float.fromhex(eager_loss)) / max(abs(float.fromhex(eager_loss)), 1e-12)
        for compiled_loss, eager_loss in zip(compiled_rows[0]["losses"], eager_row["losses"], strict=True)
    ]
    return {
        **sizes,
        "smallest_budget_compiled": smallest,
        "rows": rows,
        "same": all(row["losses"] == compiled_rows[0]["losses"] for row in compiled_rows),
        "off_eager": relative_errors,  # relative, per step; rounding differences grow during training
    }


def main(
    *,
    model: Annotated[list[str] | None, typer.Option(help="Models to run; repeatable (default: all).")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps per process.")] = 10,
    date: Annotated[str | None, typer.Option(help="Date of the measurement, ISO 8601 (default: now).")] = None,
) -> None:
    """Measure, print a table, and write benchmarks/results/kernels.json; fail if losses differ between budgets."""
    results: dict[str, Any] = {}
    table = Table(
        "model",
        "budgets",
        "first step: PyTorch kernels",
        "compiling",
        "cached",
        "losses",
        "first loss, relative error",
        "last loss",
    )
    for model_name in model or [*_WORKLOADS, *UNSEEN]:
        results[model_name] = result = _measure(model_name, steps)
        eager_row, cold, *cached = result["rows"]
        table.add_row(
            model_name,
            ", ".join(format_bytes(row["budget"]) for row in cached),
            format_seconds(eager_row["first_step_s"]),
            format_seconds(cold["first_step_s"]),
            format_seconds(cached[0]["first_step_s"]),
            "equal" if result["same"] else "DIFFER",
            *(f"{result['off_eager'][step]:.1e}" for step in (0, -1)),
        )
        print(f"{model_name}: losses {'equal' if result['same'] else 'DIFFER'}", flush=True)
    console().print(table)
    print(f"written to {write_result('kernels', {'steps': steps, 'models': results}, date)}")
    if not all(result["same"] for result in results.values()):
        raise SystemExit("losses differ between budgets")


if __name__ == "__main__":
    typer.run(main)
