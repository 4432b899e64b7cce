"""Plans without homes, with chains that run each op once and with chains that run some several times.

Steps are captured once each, in a process of their own, for a device that is not here (a preset; nothing is run), and
kept as graph files if ``--graphs`` names a folder. Each is planned with ``SearchParams.nested`` as it is and empty, at
parts of what everything takes and at the smallest budget of each. Every plan is validated.

``--sweep 20`` plans at 20 budgets instead, without homes and with the preset's, and says where a plan is slower than
the one for the budget before.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from _common import console

from outofcore.costs import Costs
from outofcore.estimation.sweep import budgets_between
from outofcore.graph import StepGraph
from outofcore.graphfile import read_graph, write_graph
from outofcore.planning import SearchParams, in_core_budget, plan_step, smallest_budget
from outofcore.planning.ladder import Ladder
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
    """Capture a step and write its graph file."""
    from outofcore.cli.subjects import find_step, subject_of  # noqa: PLC0415 - the one place that needs PyTorch

    script = Path(__file__).parent / "_recompute_models.py"
    plain = find_step(model, _ZOO[model]) if model in _ZOO else find_step(f"{script}:{model}", {})
    write_graph(path, subject_of(plain, device=_GPU).file)


def _shown(costs: Costs, planned: Planned | None) -> str:
    if planned is None:
        return "-"
    nested = f" ({len(planned.plan.chains)} nested)" if planned.plan.chains else ""
    return f"{planned.timeline.step_seconds / costs.compute_seconds:.3f}{nested}"


def compared(model: str, graph: StepGraph, costs: Costs) -> None:
    """Print the rows of one step."""
    ladders = [Ladder(graph, costs, SearchParams(nested=())), Ladder(graph, costs)]
    begin = [0.0, 0.0]
    for which, ladder in enumerate(ladders):
        start = time.process_time()
        assert ladder.smallest > 0
        begin[which] = time.process_time() - start
    in_core, bound = ladders[0].in_core, ladders[0].budgets[0]
    once, nested = (ladder.smallest / in_core for ladder in ladders)
    tell = console().print
    tell(
        f"{model}: {len(graph.ops)} ops; no plan below {bound / in_core:.3f}; smallest {once:.3f} in {begin[0]:.1f} s, "
        f"nested {nested:.3f} in {begin[1]:.1f} s"
    )
    budgets = {f"{part}": int(in_core * part) for part in _PARTS}
    budgets |= {"smallest, nested": ladders[1].smallest, "smallest, once": ladders[0].smallest}
    for name, budget in budgets.items():
        row: list[str] = []
        for ladder in ladders:
            start = time.process_time()
            auto = ladder.plan(budget)
            took = time.process_time() - start
            evicted = ladder.plan_by_eviction(budget)
            for planned in (auto, evicted):
                if planned is not None:
                    validate(graph, planned.program, budget, costs)
            row += [_shown(costs, auto), _shown(costs, evicted), f"{took:.1f} s"]
        tell(f"| {model} | {name} | {' | '.join(row)} |")


def swept(model: str, graph: StepGraph, costs: Costs, count: int) -> None:
    """Print steps over their ops at budgets of equal ratios, and where a larger budget has the slower plan."""
    ladder = None if costs.homes else Ladder(graph, costs)
    low, high = smallest_budget(graph, costs) if ladder is None else ladder.smallest, in_core_budget(graph, costs)
    where, tell, before = "with a home" if costs.homes else "without homes", console().print, float("inf")
    shown: list[str] = []
    for budget in budgets_between(low, high, count):
        planned = plan_step(graph, costs, budget) if ladder is None else ladder.plan(budget)
        if planned is None:
            tell(f"{model} {where}: no plan at {budget / high:.3f}")
            continue
        validate(graph, planned.program, budget, costs)
        seconds = planned.timeline.step_seconds
        if seconds > before:
            tell(f"{model} {where}: slower at {budget / high:.3f}, {seconds / before:.4f} of the budget before")
        before = seconds
        shown.append(f"{budget / high:.3f}: {seconds / costs.compute_seconds:.3f}")
    tell(f"{model} {where}: {', '.join(shown)}")


def main(
    model: Annotated[list[str] | None, typer.Option(help="May be given several times.")] = None,
    graphs: Annotated[Path | None, typer.Option(help="A folder that keeps the graph files.")] = None,
    sweep: Annotated[int, typer.Option(help="Budgets to plan at; 0: compare policies instead.")] = 0,
) -> None:
    """Print, for each step and budget, auto, dtr and planning's processor time: each op once, then nested; or sweep."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = graphs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for which in model or (*_ZOO, *_OWN):
            path = folder / f"{which}.json.gz"
            if not path.exists():
                subprocess.run([sys.executable, __file__, "capture", which, str(path)], check=True)
            file = read_graph(path)
            alone = replace(file.costs, homes=())
            if sweep:
                swept(which, file.graph, alone, sweep)
                swept(which, file.graph, file.costs, sweep)
            else:
                compared(which, file.graph, alone)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["capture", model_, path_]:
            capture(model_, Path(path_))
        case _:
            typer.run(main)
