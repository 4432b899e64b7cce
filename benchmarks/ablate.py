"""What each technique of the search for plans gives in step time, and what it costs in planning time.

Each technique of ``SearchParams`` is switched off in turn; everything else stays as it is. The steps are those of
``benchmarks/compare.py`` (graph files for a V100; ``--graphs`` names the folder that keeps them) at several budgets,
and the small ones under ``instances/small``. For each technique the table tells, of the ratios of predicted step times
(switched off over switched on, so above 1 the technique helps): their geometric mean and the largest one, over both
kinds of steps; in how many cells the time moves by 0.5 % or more, up and down; and the processor seconds of planning
with and without it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import Annotated, Any

import typer
from _common import console, write_result
from rich.table import Table

from outofcore.errors import BudgetError
from outofcore.graphfile import read_graph
from outofcore.planning import SearchParams, in_core_budget, plan_step, smallest_budget

INSTANCES = Path(__file__).with_name("instances") / "small"
# Each technique with what switches it off.
TECHNIQUES: dict[str, dict[str, Any]] = {
    "everything on": {},
    "relaxations": {"relaxations": 0},
    "shares": {"shares": ()},
    "nothing offloaded": {"shares": (0.25, 0.5)},
    "zooms": {"zooms": 0},
    "margins": {"margins": (0.0,)},
    "slacks": {"slacks": (1.5,)},
    "passes": {"passes": 1},
    "tuned": {"tuned": 0},
    "further": {"further": 0},
    "recompute_changes": {"recompute_changes": 0.0},
    "rounds": {"rounds": 1},
    "polish": {"polish_ops": 0},
    "annealing": {"annealing": 0},
    "nested": {"nested": ()},
}
SHARES = (0.5, 0.25, 0.133)
# A ratio of step times that is further from 1 than this counts.
_MOVES = 0.005

Cell = tuple[str, str, int]  # name, graph file, budget
Outcome = tuple[float, float]  # predicted seconds of a step, processor seconds of planning


def cells(graphs: Path | None, shares: Sequence[float]) -> Iterator[Cell]:
    """The steps that are planned: small ones, and those of the folder at shares of what they need in core."""
    budgets = json.loads((INSTANCES / "optimum.json").read_text(encoding="utf-8"))
    for name, known in sorted(budgets.items()):
        for cell in known:
            yield f"small {name} {cell['budget']}", str(INSTANCES / f"{name}.json"), cell["budget"]
    for path in sorted(graphs.glob("*.json.gz")) if graphs else ():
        file = read_graph(path)
        everything, smallest = in_core_budget(file.graph, file.costs), smallest_budget(file.graph, file.costs)
        for share in shares:
            if everything * share > smallest:
                yield f"{path.name.removesuffix('.json.gz')} {share:g}", str(path), int(everything * share)


def planned(cell: Cell, technique: str) -> Outcome:
    """Plan one step with one technique switched off; infinite where no plan is found."""
    file = read_graph(Path(cell[1]))
    start = time.process_time()
    try:
        params = replace(SearchParams(), **TECHNIQUES[technique])
        seconds = plan_step(file.graph, file.costs, cell[2], params=params).timeline.step_seconds
    except BudgetError:
        seconds = float("inf")
    return seconds, time.process_time() - start


def summary(on: Mapping[str, Outcome], off: Mapping[str, Outcome]) -> dict[str, Any]:
    """What a technique gives and costs, over cells."""
    found: dict[str, Any] = {}
    for kind, names in (
        ("small", [name for name in on if name.startswith("small ")]),
        ("models", [name for name in on if not name.startswith("small ")]),
    ):
        ratios = {name: off[name][0] / on[name][0] for name in names}
        if not ratios:
            continue
        worst = max(ratios, key=ratios.__getitem__)
        found[kind] = {
            "mean": exp(sum(log(ratio) for ratio in ratios.values()) / len(ratios)),
            "largest": ratios[worst],
            "largest_at": worst,
            "helps": sum(ratio >= 1 + _MOVES for ratio in ratios.values()),
            "hurts": sum(ratio <= 1 - _MOVES for ratio in ratios.values()),
            "cells": len(ratios),
            "plan_seconds_on": sum(on[name][1] for name in names),
            "plan_seconds_off": sum(off[name][1] for name in names),
        }
    return found


def main(
    graphs: Annotated[Path | None, typer.Option(help="The folder of graph files that compare.py keeps.")] = None,
    technique: Annotated[list[str] | None, typer.Option(help="May be given several times; by default all.")] = None,
    only: Annotated[str, typer.Option(help="Steps whose name contains this, such as 'slow' or '0.25'.")] = "",
    share: Annotated[list[float] | None, typer.Option(help="Of what a model needs in core.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes that plan at once.")] = os.cpu_count() or 1,
) -> None:
    """Print the table, and write results/ablate.json."""
    todo = [cell for cell in cells(graphs, share or SHARES) if only in cell[0]]
    asked = ["everything on", *(name for name in technique or TECHNIQUES if name != "everything on")]
    with ProcessPoolExecutor(jobs) as pool:
        running = {(name, cell[0]): pool.submit(planned, cell, name) for name in asked for cell in todo}
        outcomes = {name: {cell[0]: running[name, cell[0]].result() for cell in todo} for name in asked}
    table = Table(title="Step time without the technique, over step time with it")
    for column in ("technique off", "steps", "mean", "largest", "where", "helps", "hurts", "planning s"):
        table.add_column(column, justify="left" if column in ("technique off", "steps", "where") else "right")
    rows = {name: summary(outcomes["everything on"], outcomes[name]) for name in asked[1:]}
    for name, kinds in rows.items():
        for kind, row in kinds.items():
            plan_seconds = f"{row['plan_seconds_off']:.0f} / {row['plan_seconds_on']:.0f}"
            numbers = (f"{row['mean']:.4f}", f"{row['largest']:.4f}", row["largest_at"])
            table.add_row(name, kind, *numbers, str(row["helps"]), str(row["hurts"]), plan_seconds)
    console().print(table)
    cells_of = {name: {cell: list(outcome) for cell, outcome in of.items()} for name, of in outcomes.items()}
    print(f"written to {write_result('ablate', {'techniques': rows, 'cells': cells_of}, None)}")


if __name__ == "__main__":
    typer.run(main)
