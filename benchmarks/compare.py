"""Compare every policy on every zoo model at every budget, to find where another policy beats ``auto``.

Each model is captured once as a graph file, with preset device costs (``--gpu``); no step is run. ``--model`` also
accepts the models of ``_transformers.py``. The budgets are those of ``outofcore plan --compare``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from _common import RESULTS, console, write_result

from outofcore import planning
from outofcore.cli.answer import COMPARED_FRACTIONS
from outofcore.costs import Costs
from outofcore.errors import BudgetError
from outofcore.graph import StepGraph
from outofcore.graphfile import read_graph, write_graph
from outofcore.planning import lower_bound_seconds
from outofcore.presets import device
from outofcore.units import format_bytes
from outofcore.validator import validate

# Sizes of real steps for which all policies plan within minutes.
MODELS: dict[str, dict[str, Any]] = {
    "resnet50": {"batch": 32},
    "vgg16": {"batch": 32},
    "densenet121": {"batch": 32},
    "unet3d": {"batch": 2, "size": 64},
    "gpt": {"batch": 8, "layers": 6, "width": 512, "context": 512},
}
# Defines the steps of other models, one function per model.
_OTHERS = Path(__file__).with_name("_transformers.py")
_GPUS = ("v100-16gb-pcie3",)
# Times within this relative difference are equal.
_SAME = 1e-9

Answer = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """A captured model with the costs of a device."""

    model: str
    gpu: str
    graph: StepGraph
    costs: Costs

    def budgets(self) -> Iterator[tuple[str, int]]:
        """Yield the names and bytes of the budgets to compare, ending with the smallest."""
        in_core = planning.in_core_budget(self.graph, self.costs)
        smallest = planning.smallest_budget(self.graph, self.costs)
        for name, part in COMPARED_FRACTIONS.items():
            if (budget := int(in_core * part)) > smallest:
                yield name, budget
        yield "smallest", smallest


def capture(model: str, gpu: str, path: Path) -> None:
    from outofcore.cli.subjects import find_step, subject_of  # noqa: PLC0415 - only this function needs PyTorch

    spec, options = (model, MODELS[model]) if model in MODELS else (f"{_OTHERS}:{model}", {})
    write_graph(path, subject_of(find_step(spec, options), device=gpu).file)


def compare_policies(step: Step, name: str, budget: int, policies: Sequence[str]) -> Answer:
    """Plan one step at one budget with each policy, and validate every plan."""
    plans: dict[str, Answer | None] = {}
    for policy in policies:
        begin = time.process_time()
        try:
            planned = planning.plan_step(step.graph, step.costs, budget, policy)
        except BudgetError:
            plans[policy] = None
            continue
        took = time.process_time() - begin
        validate(step.graph, planned.program, budget, step.costs)
        entry = {"predicted_seconds": planned.timeline.step_seconds, "plan_cpu_seconds": round(took, 2)}
        plans[policy] = entry | ({"plan_of": planned.plan.policy} if policy == "auto" else {})
        seconds = planned.timeline.step_seconds / step.costs.compute_seconds
        print_progress(f"{step.model} {step.gpu} {name} {policy}: {seconds:.4f}, {took:.1f} s")
    return {
        "model": step.model,
        "gpu": step.gpu,
        "part": name,
        "budget": budget,
        "compute_seconds": step.costs.compute_seconds,
        "lower_bound_seconds": lower_bound_seconds(step.graph, step.costs, budget),
        "policies": plans,
    }


def seconds_of(cell: Answer, policy: str) -> float:
    """Return the predicted step seconds, or infinity without a plan."""
    entry = cell["policies"].get(policy)
    return float("inf") if entry is None else entry["predicted_seconds"]


def find_faster_policies(cells: Sequence[Answer]) -> list[str]:
    """Return a line for each cell in which another policy is faster than ``auto``."""
    lines: list[str] = []
    for cell in cells:
        auto = seconds_of(cell, "auto")
        for policy in cell["policies"]:
            if seconds_of(cell, policy) < auto * (1 - _SAME):
                lines.append(f"{cell['model']} on {cell['gpu']} at {cell['part']}: {policy} is faster than auto")
    return lines


def markdown(cells: Sequence[Answer], policies: Sequence[str], notes: dict[str, str]) -> str:
    lines = [
        "# Comparison of policies",
        "",
        "Predicted step seconds over the seconds of its ops, by `python benchmarks/compare.py`. Budgets are",
        "fractions of the in-core budget. A dash: the policy finds no plan. *bound*: lower bound on step time. Every",
        "plan is validated.",
        "",
        "**Simulated**: no op has run; costs are estimates for these devices:",
        "",
        *(f"- `{gpu}`: {note}" for gpu, note in notes.items()),
        "",
    ]
    for gpu in notes:
        other_policies = [policy for policy in policies if policy != "auto"]
        lines += [f"## {gpu}", "", f"| model | budget | bound | **auto** | {' | '.join(other_policies)} |"]
        lines.append("|---|---" + "|---:" * (len(other_policies) + 2) + "|")
        for cell in cells:
            if cell["gpu"] != gpu:
                continue
            times = [cell["lower_bound_seconds"] or 0.0, *(seconds_of(cell, p) for p in ("auto", *other_policies))]
            cells_of_row = ["-" if t == float("inf") else f"{t / cell['compute_seconds']:.3f}" for t in times]
            cells_of_row[1] = f"**{cells_of_row[1]}**"
            label = f"{cell['model']} | {cell['part']} ({format_bytes(cell['budget'])})"
            lines.append(f"| {label} | {' | '.join(cells_of_row)} |")
        lines.append("")
    lines += find_faster_policies(cells) or ["No policy is faster than `auto` in any cell."]
    return "\n".join(lines) + "\n"


def print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(
    model: Annotated[list[str] | None, typer.Option(help="Models to run; repeatable (default: all).")] = None,
    gpu: Annotated[list[str] | None, typer.Option(help="Device presets; repeatable.")] = None,
    graphs: Annotated[Path | None, typer.Option(help="Folder for graph files, written and reused.")] = None,
    policies: Annotated[str, typer.Option(help="Planning policies, separated by commas.")] = ",".join(
        planning.POLICIES
    ),
    name: Annotated[str, typer.Option(help="Name of the result files under benchmarks/results.")] = "compare",
    date: Annotated[str | None, typer.Option(help="Date of the measurement, ISO 8601 (default: now).")] = None,
) -> None:
    """Compare policies, print a table, and write it to benchmarks/results; exit with status 1 if ``auto`` is beaten."""
    cells: list[Answer] = []
    result_path = RESULTS
    policy_names = policies.split(",")
    notes = {key: device(key).describe() for key in gpu or _GPUS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = graphs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for key in notes:
            for model_name in model or MODELS:
                path = folder / f"{model_name}-{key}.json.gz"
                if not path.exists():
                    subprocess.run([sys.executable, __file__, "capture", model_name, key, str(path)], check=True)
                file = read_graph(path)
                step = Step(model_name, key, file.graph, file.costs)
                cells += [compare_policies(step, part, budget, policy_names) for part, budget in step.budgets()]
                # Write after each model: the whole run takes long.
                content = {
                    "models": MODELS,
                    "simulated": notes,
                    "auto_beaten": find_faster_policies(cells),
                    "cells": cells,
                }
                result_path = write_result(name, content, date)
                (RESULTS / f"{name}.md").write_text(markdown(cells, policy_names, notes), encoding="utf-8")
    console().print(markdown(cells, policy_names, notes), markup=False, highlight=False, soft_wrap=True)
    print(f"written to {result_path}")
    raise typer.Exit(1 if find_faster_policies(cells) else 0)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["capture", model_, gpu_, path_]:
            capture(model_, gpu_, Path(path_))
        case _:
            typer.run(main)
