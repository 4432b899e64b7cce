"""Every policy on every model of the zoo at every budget: is ``auto`` ever slower than another?

The models are captured once each, in a process of their own, and kept as graph files. Nothing is run: the costs are
estimates for devices that are not here (``--gpu``, the presets of ``outofcore.presets``), and marked so in the results.
``--model`` takes others as well: bert, gpt2, llama, qwen, t5 and vit, of transformers (``_transformers.py``).
The budgets are those of ``outofcore plan --compare``. With ``--graphs`` the graph files are kept and used again.
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
from outofcore.cli.answer import COMPARED
from outofcore.costs import Costs
from outofcore.errors import BudgetError
from outofcore.graph import StepGraph
from outofcore.graphfile import read_graph, write_graph
from outofcore.planning import lower_bound_seconds
from outofcore.presets import device
from outofcore.units import format_bytes
from outofcore.validator import validate

# Large enough to be real steps, small enough that all is planned in some minutes.
MODELS: dict[str, dict[str, Any]] = {
    "resnet50": {"batch": 32},
    "vgg16": {"batch": 32},
    "densenet121": {"batch": 32},
    "unet3d": {"batch": 2, "size": 64},
    "gpt": {"batch": 8, "layers": 6, "width": 512, "context": 512},
}
# Makes the steps of other models, each with a function of its name.
_OTHERS = Path(__file__).with_name("_transformers.py")
_GPUS = ("v100-16gb-pcie3",)
# Two times that differ by less than this share are the same.
_SAME = 1e-9

Answer = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """A model of the zoo on a device."""

    model: str
    gpu: str
    graph: StepGraph
    costs: Costs

    def budgets(self) -> Iterator[tuple[str, int]]:
        """What is compared: parts of what the step needs in core, and the smallest; those that can hold the step."""
        in_core = planning.in_core_budget(self.graph, self.costs)
        smallest = planning.smallest_budget(self.graph, self.costs)
        for name, part in COMPARED.items():
            if (budget := int(in_core * part)) > smallest:
                yield name, budget
        yield "smallest", smallest


def capture(model: str, gpu: str, path: Path) -> None:
    """Capture a step and write its graph file."""
    from outofcore.cli.subjects import find_step, subject_of  # noqa: PLC0415 - the one place that needs PyTorch

    where, options = (model, MODELS[model]) if model in MODELS else (f"{_OTHERS}:{model}", {})
    write_graph(path, subject_of(find_step(where, options), device=gpu).file)


def compared(step: Step, name: str, budget: int, policies: Sequence[str]) -> Answer:
    """What each policy makes of a budget; every plan is validated."""
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
        found = {"predicted_seconds": planned.timeline.step_seconds, "plan_cpu_seconds": round(took, 2)}
        plans[policy] = found | ({"plan_of": planned.plan.policy} if policy == "auto" else {})
        seconds = planned.timeline.step_seconds / step.costs.compute_seconds
        tell(f"{step.model} {step.gpu} {name} {policy}: {seconds:.4f}, {took:.1f} s")
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
    """Predicted seconds of a step; infinity where there is no plan."""
    found = cell["policies"].get(policy)
    return float("inf") if found is None else found["predicted_seconds"]


def beaten(cells: Sequence[Answer]) -> list[str]:
    """Where another policy is quicker than ``auto``."""
    found: list[str] = []
    for cell in cells:
        auto = seconds_of(cell, "auto")
        for policy in cell["policies"]:
            if seconds_of(cell, policy) < auto * (1 - _SAME):
                found.append(f"{cell['model']} on {cell['gpu']} at {cell['part']}: {policy} is quicker than auto")
    return found


def markdown(cells: Sequence[Answer], policies: Sequence[str], notes: dict[str, str]) -> str:
    """The table."""
    lines = [
        "# Policies side by side",
        "",
        "Predicted seconds of a step over those of its ops alone, by `python benchmarks/compare.py`. Budgets are",
        "parts of what the step needs in core. A dash: the policy finds no plan. *bound*: no plan is quicker. Each",
        "plan is validated.",
        "",
        "**Simulated**: no op was run; costs are estimates for these devices:",
        "",
        *(f"- `{gpu}`: {note}" for gpu, note in notes.items()),
        "",
    ]
    for gpu in notes:
        rest = [policy for policy in policies if policy != "auto"]
        lines += [f"## {gpu}", "", f"| model | budget | bound | **auto** | {' | '.join(rest)} |"]
        lines.append("|---|---" + "|---:" * (len(rest) + 2) + "|")
        for cell in cells:
            if cell["gpu"] != gpu:
                continue
            times = [cell["lower_bound_seconds"] or 0.0, *(seconds_of(cell, p) for p in ("auto", *rest))]
            shown = ["-" if t == float("inf") else f"{t / cell['compute_seconds']:.3f}" for t in times]
            shown[1] = f"**{shown[1]}**"
            where = f"{cell['model']} | {cell['part']} ({format_bytes(cell['budget'])})"
            lines.append(f"| {where} | {' | '.join(shown)} |")
        lines.append("")
    lines += beaten(cells) or ["In no cell is another policy quicker than `auto`."]
    return "\n".join(lines) + "\n"


def tell(text: str) -> None:
    """Say how far things are."""
    print(text, file=sys.stderr, flush=True)


def main(
    model: Annotated[list[str] | None, typer.Option(help="May be given several times.")] = None,
    gpu: Annotated[list[str] | None, typer.Option(help="May be given several times.")] = None,
    graphs: Annotated[Path | None, typer.Option(help="A folder that keeps the graph files.")] = None,
    policies: Annotated[str, typer.Option(help="With commas between.")] = ",".join(planning.POLICIES),
    name: Annotated[str, typer.Option(help="Of the files under benchmarks/results.")] = "compare",
    date: Annotated[str | None, typer.Option(help="Of the measurement; by default now.")] = None,
) -> None:
    """Compare policies, print a table, write it to benchmarks/results; exit status 1 where ``auto`` is beaten."""
    cells: list[Answer] = []
    written = RESULTS
    asked = policies.split(",")
    notes = {key: device(key).describe() for key in gpu or _GPUS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = graphs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for key in notes:
            for which in model or MODELS:
                path = folder / f"{which}-{key}.json.gz"
                if not path.exists():
                    subprocess.run([sys.executable, __file__, "capture", which, key, str(path)], check=True)
                file = read_graph(path)
                step = Step(which, key, file.graph, file.costs)
                cells += [compared(step, part, budget, asked) for part, budget in step.budgets()]
                # After each model: it is long until the last.
                content = {"models": MODELS, "simulated": notes, "auto_beaten": beaten(cells), "cells": cells}
                written = write_result(name, content, date)
                (RESULTS / f"{name}.md").write_text(markdown(cells, asked, notes), encoding="utf-8")
    console().print(markdown(cells, asked, notes), markup=False, highlight=False, soft_wrap=True)
    print(f"written to {written}")
    raise typer.Exit(1 if beaten(cells) else 0)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["capture", model_, gpu_, path_]:
            capture(model_, gpu_, Path(path_))
        case _:
            typer.run(main)
