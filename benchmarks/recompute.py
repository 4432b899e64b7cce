"""Plan steps without homes, so that evicted storages are recomputed.

Steps are captured once each, with preset device costs; no step is run. Every plan is validated. ``--sweep 20`` plans at
20 budgets, without and with the preset's homes, and reports plans slower than at a smaller budget.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from _common import console

from outofcore.costs import Costs
from outofcore.errors import BudgetError
from outofcore.estimation.sweep import budgets_between
from outofcore.graph import StepGraph
from outofcore.graphfile import read_graph, write_graph
from outofcore.planning import in_core_budget, plan_step, smallest_budget
from outofcore.planning.front import Front
from outofcore.planning.placing import Planned
from outofcore.validator import validate

_GPU = "v100-16gb-pcie3"
_ZOO: dict[str, dict[str, Any]] = {
    "unet3d": {"batch": 2, "size": 64},
    "densenet121": {"batch": 32},
    "gpt": {"batch": 8, "layers": 12},
}
_OWN = ("unet", "inception", "lstm")
_PARTS = (0.2, 0.3, 0.5)


def capture(model: str, path: Path) -> None:
    from outofcore.cli.subjects import find_step, subject_of  # noqa: PLC0415 - only this function needs PyTorch

    script = Path(__file__).parent / "_recompute_models.py"
    plain = find_step(model, _ZOO[model]) if model in _ZOO else find_step(f"{script}:{model}", {})
    write_graph(path, subject_of(plain, device=_GPU).file)


def _time_planning(plan: Callable[[], Planned]) -> tuple[Planned | None, float]:
    """Return a plan, or None, and the processor seconds of planning."""
    start = time.process_time()
    with suppress(BudgetError):
        return plan(), time.process_time() - start
    return None, time.process_time() - start


def print_policies(model: str, graph: StepGraph, costs: Costs) -> None:
    """Print a row for one step: step over op seconds for auto, auto without annealing, and dtr."""
    in_core = in_core_budget(graph, costs)
    start = time.process_time()
    smallest = smallest_budget(graph, costs)
    cells = [f"{smallest / in_core:.3f} in {time.process_time() - start:.1f} s"]
    for budget in (smallest, *(int(in_core * part) for part in _PARTS)):
        results: list[str] = []
        for policy in ("auto", "auto:annealing=0", "dtr"):
            planned, took = _time_planning(lambda policy=policy, budget=budget: plan_step(graph, costs, budget, policy))
            if planned is not None:
                validate(graph, planned.program, budget, costs)
                results.append(f"{planned.timeline.step_seconds / costs.compute_seconds:.4f} in {took:.1f} s")
        cells.append(", ".join(results) or "-")
    console().print(f"| {model} | {len(graph.ops)} | {' | '.join(cells)} |")


def sweep_budgets(model: str, graph: StepGraph, costs: Costs, count: int) -> None:
    """Print step over op seconds at a geometric series of budgets, and plans slower than at a smaller budget."""
    front = None if costs.homes else Front(graph, costs)
    low, high = smallest_budget(graph, costs) if front is None else front.smallest, in_core_budget(graph, costs)
    label, write, last_seconds = "with a home" if costs.homes else "without homes", console().print, float("inf")
    ratios: list[str] = []
    for budget in budgets_between(low, high, count):
        planned = plan_step(graph, costs, budget) if front is None else front.plan(budget)
        if planned is None:
            write(f"{model} {label}: no plan at {budget / high:.3f}")
            continue
        validate(graph, planned.program, budget, costs)
        seconds = planned.timeline.step_seconds
        if seconds > last_seconds:
            write(
                f"{model} {label}: slower at {budget / high:.3f}, "
                f"{seconds / last_seconds:.4f} of the step at the smaller budget"
            )
        last_seconds = seconds
        ratios.append(f"{budget / high:.3f}: {seconds / costs.compute_seconds:.3f}")
    write(f"{model} {label}: {', '.join(ratios)}")


def main(
    model: Annotated[list[str] | None, typer.Option(help="Models to run; repeatable (default: all).")] = None,
    graphs: Annotated[Path | None, typer.Option(help="Folder for graph files, written and reused.")] = None,
    sweep: Annotated[int, typer.Option(help="Number of budgets to plan at; 0 compares policies instead.")] = 0,
) -> None:
    """Print ops, smallest budget, step times and planning times of each step, or sweep budgets."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = graphs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for model_name in model or (*_ZOO, *_OWN):
            path = folder / f"{model_name}.json.gz"
            if not path.exists():
                subprocess.run([sys.executable, __file__, "capture", model_name, str(path)], check=True)
            file = read_graph(path)
            without_homes = replace(file.costs, homes=())
            if sweep:
                sweep_budgets(model_name, file.graph, without_homes, sweep)
                sweep_budgets(model_name, file.graph, file.costs, sweep)
            else:
                print_policies(model_name, file.graph, without_homes)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["capture", model_, path_]:
            capture(model_, Path(path_))
        case _:
            typer.run(main)
