"""Steps with Inductor's kernels: what compiling them takes, and that their losses are the same at every budget.

Each row is a process of its own. The first of a model compiles with an empty cache, the others find its kernels there.
The first step of a process captures, compiles, measures and plans; that with PyTorch's own kernels shows what of it is
not compiling. Ops were measured before in all of them.
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

_IN_CORE = 1.1  # of what the step needs: a budget that does not pinch
_CACHE = "TORCHINDUCTOR_CACHE_DIR"  # where Inductor keeps what it compiled
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
        found = worker.columns()
    return {"name": name, "budget": spec.budget, "first_step_s": found["seconds"][0], "losses": found["loss"]}


def _measure(model: str, steps: int) -> dict[str, Any]:
    options = _WORKLOADS.get(model, {})
    compiled = Spec(model, options, "outofcore", kernels="inductor")
    usual = Spec(model, options, "outofcore")
    need, least = survey(usual), survey(compiled)["smallest_budget"]
    in_core = int(_IN_CORE * need["in_core_budget"])

    def at(spec: Spec, budget: int) -> Spec:
        return Spec(spec.model, spec.options, spec.mode, budget, kernels=spec.kernels)

    rows = [_run("PyTorch's own kernels", at(usual, in_core), steps)]
    with tempfile.TemporaryDirectory() as empty:
        before = os.environ.get(_CACHE)
        os.environ[_CACHE] = empty
        try:
            rows.append(_run("in core, nothing compiled before", at(compiled, in_core), steps))
            rows.append(_run("in core", at(compiled, in_core), steps))
            half = max(int(need["in_core_budget"] / 2), least)
            rows.append(_run("half of that", at(compiled, half), steps))
            rows.append(_run("the smallest budget", at(compiled, least), steps))
        finally:
            if before is None:
                del os.environ[_CACHE]
            else:
                os.environ[_CACHE] = before
    own, *others = rows
    apart = [
        abs(float.fromhex(ours) - float.fromhex(its)) / max(abs(float.fromhex(its)), 1e-12)
        for ours, its in zip(others[0]["losses"], own["losses"], strict=True)
    ]
    return {
        **need,
        "smallest_budget_compiled": least,
        "rows": rows,
        "same": all(row["losses"] == others[0]["losses"] for row in others),
        "off_eager": apart,  # of each step, relative: what differs in the last bits grows as training goes on
    }


def main(
    *,
    model: Annotated[list[str] | None, typer.Option(help="May be given several times; by default all.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Of each process.")] = 10,
    date: Annotated[str | None, typer.Option(help="Of the measurement; by default now.")] = None,
) -> None:
    """Measure, print a table, and write the numbers to benchmarks/results/kernels.json; fails where losses differ."""
    found: dict[str, Any] = {}
    table = Table(
        "model",
        "budgets",
        "first step: own kernels",
        "compiled",
        "from the cache",
        "losses",
        "off eager's: first",
        "last",
    )
    for which in model or [*_WORKLOADS, *UNSEEN]:
        found[which] = one = _measure(which, steps)
        own, cold, *cached = one["rows"]
        table.add_row(
            which,
            ", ".join(format_bytes(row["budget"]) for row in cached),
            format_seconds(own["first_step_s"]),
            format_seconds(cold["first_step_s"]),
            format_seconds(cached[0]["first_step_s"]),
            "the same" if one["same"] else "DIFFER",
            *(f"{one['off_eager'][step]:.1e}" for step in (0, -1)),
        )
        print(f"{which}: losses {'the same' if one['same'] else 'DIFFER'}", flush=True)
    console().print(table)
    print(f"written to {write_result('kernels', {'steps': steps, 'models': found}, date)}")
    if not all(one["same"] for one in found.values()):
        raise SystemExit("losses differ between budgets")


if __name__ == "__main__":
    typer.run(main)
