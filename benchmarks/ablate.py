"""What each technique of the search for plans gives in step time, and what it costs in planning time.

Each technique of ``SearchParams`` is switched off in turn; everything else stays as it is. With ``--joint`` techniques
are removed one after the other and stay off, as long as the steps with all of them off are no more than 0.3 % slower in
the mean, and none is by more than 1 %: techniques that cover for each other all look useless one at a time. The joint
run also plans for a slower device with a disk, for a small host memory with a disk behind it, and without a home.

The steps are those of ``benchmarks/compare.py`` (graph files for a V100; ``--graphs`` names the folder that keeps them)
at several budgets, and the small ones under ``instances/small``. For each technique the table has, of the ratios of
predicted step times (switched off over switched on, so above 1 the technique helps): their geometric mean and the
largest one, over both kinds of steps; in how many cells the time moves by 0.5 % or more, up and down; and the processor
seconds of planning with and without it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from math import exp, inf, log
from pathlib import Path
from typing import Annotated, Any

import typer
from _common import console, write_result
from rich.table import Table

from outofcore.costs import Costs, Home
from outofcore.errors import BudgetError
from outofcore.graph import StepGraph
from outofcore.graphfile import read_graph
from outofcore.planning import SearchParams, in_core_budget, plan_step, smallest_budget

INSTANCES = Path(__file__).with_name("instances") / "small"
# Each technique with what switches it off, and each effort with a quarter of it.
TECHNIQUES: dict[str, dict[str, Any]] = {
    "everything on": {},
    "relaxations": {"relaxations": 0},
    "shares": {"shares": ()},
    "nothing offloaded": {"shares": (0.25, 0.5)},
    "zooms": {"zooms": 0},
    "slacks": {"slacks": (1.5,)},
    "tunings": {"tunings": 0},
    "tuned": {"tuned": 1},
    "further": {"further": 0},
    "placed": {"placed": 4},
    "recompute_changes": {"recompute_changes": 0.0},
    "polish": {"polish_ops": 0},
    "annealing": {"annealing": 0},
}
SHARES = (0.5, 0.25, 0.133)
# What the joint ablation takes off, in this order: from what gives the least by itself; efforts are lowered, too.
JOINT: dict[str, dict[str, Any]] = {
    "further": {"further": 0},
    "annealing": {"annealing": 0},
    "nothing offloaded": {"shares": (0.25, 0.5)},
    "tuned 1": {"tuned": 1},
    "zooms 1": {"zooms": 1},
    "slacks": {"slacks": (1.5,)},
    "tunings": {"tunings": 250},
    "shares": {"shares": (0.5,)},
    "placed 6": {"placed": 6},
    "recompute_changes": {"recompute_changes": 0.0},
    "zooms": {"zooms": 0},
    "relaxations": {"relaxations": 0},
    "polish": {"polish_ops": 0},
}
# How much slower plans may be when they are off: in the mean, and the worst.
_MEAN, _WORST = 1.003, 1.01
# A slower device with a disk, host memory of a quarter of the in-core bytes before it, and no home at all.
_DISK = Home("disk", None, 1.2e9, 2.0e9, 1e-4)
_OTHER_HOMES = {"disk": (0.4, 0.2), "host and disk": (0.25,), "no home": (0.6, 0.45)}
_SLOWER, _HOST_SHARE = 40, 4
# A ratio of step times that is further from 1 than this counts.
_MOVES = 0.005

Cell = tuple[str, str, int, str]  # name, graph file, budget, homes: those of the file if empty
Outcome = tuple[float, float]  # predicted seconds of a step, processor seconds of planning


def cells(graphs: Path | None, shares: Sequence[float], *, other_homes: bool = False) -> Iterator[Cell]:
    """The steps that are planned: small ones, and those of the folder at their smallest budgets and at shares of
    what they need in core."""
    budgets = json.loads((INSTANCES / "optimum.json").read_text(encoding="utf-8"))
    for name, known in sorted(budgets.items()):
        for cell in known:
            yield f"small {name} {cell['budget']}", str(INSTANCES / f"{name}.json"), cell["budget"], ""
    for path in sorted(graphs.glob("*.json.gz")) if graphs else ():
        file = read_graph(path)
        everything, smallest = in_core_budget(file.graph, file.costs), smallest_budget(file.graph, file.costs)
        name = path.name.removesuffix(".json.gz")
        # Some techniques help at the smallest budget alone: without one of them a step takes twice as long there.
        yield f"{name} smallest", str(path), smallest, ""
        for share in shares:
            if everything * share > smallest:
                yield f"{name} {share:g}", str(path), int(everything * share), ""
        for homes, parts in _OTHER_HOMES.items() if other_homes else ():
            for share in parts:
                yield f"{name} {homes} {share:g}", str(path), int(everything * share), homes


def _costs(graph: StepGraph, costs: Costs, homes: str) -> Costs:
    """Return the costs with other homes."""
    if homes == "no home":
        return replace(costs, homes=())
    if homes == "disk":
        return Costs(tuple(replace(op, seconds=op.seconds * _SLOWER) for op in costs.ops), (_DISK,))
    if homes == "host and disk":
        host = replace(costs.homes[0], bytes=in_core_budget(graph, costs) // _HOST_SHARE)
        return replace(costs, homes=(host, _DISK))
    return costs


def planned(cell: Cell, off: Mapping[str, Any]) -> Outcome:
    """Plan one step with techniques switched off; infinite where no plan is found."""
    file = read_graph(Path(cell[1]))
    costs = _costs(file.graph, file.costs, cell[3])
    start = time.process_time()
    try:
        params = replace(SearchParams(), **off)
        seconds = plan_step(file.graph, costs, cell[2], params=params).timeline.step_seconds
    except BudgetError:
        seconds = inf
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


def removed_jointly(todo: Sequence[Cell], jobs: int) -> Iterator[dict[str, Any]]:
    """Remove technique after technique; yield of each whether it stays off, and what that does to the steps."""
    with ProcessPoolExecutor(jobs) as pool:
        before = dict(zip(todo, pool.map(planned, todo, [{}] * len(todo)), strict=True))
        order = [cell for cell in todo if before[cell][0] < inf]
        off: dict[str, Any] = {}
        for name, fields in JOINT.items():
            trial = {**off, **fields}
            running = {cell: pool.submit(planned, cell, trial) for cell in order}
            ratios: dict[Cell, float] = {}
            seconds = 0.0
            for cell, future in running.items():
                step, took = future.result()
                ratios[cell], seconds = step / before[cell][0], seconds + took
                if ratios[cell] > _WORST:
                    break  # the others are not needed
            for future in running.values():
                future.cancel()
            worst = max(ratios, key=ratios.__getitem__)
            mean = exp(sum(log(ratio) for ratio in ratios.values()) / len(ratios))
            is_off = ratios[worst] <= _WORST and mean <= _MEAN
            off = trial if is_off else off
            # The next technique meets the cell that decided first.
            order.sort(key=lambda cell: cell != worst)
            yield {
                "technique": name,
                "removed": is_off,
                "mean": mean,
                "worst": ratios[worst],
                "worst_at": worst[0],
                "cells": len(ratios),
                "plan_seconds": seconds,
                "plan_seconds_before": sum(before[cell][1] for cell in ratios),
            }


def main(
    graphs: Annotated[Path | None, typer.Option(help="The folder of graph files that compare.py keeps.")] = None,
    technique: Annotated[list[str] | None, typer.Option(help="May be given several times; by default all.")] = None,
    only: Annotated[str, typer.Option(help="Steps whose name contains this, such as 'slow' or '0.25'.")] = "",
    share: Annotated[list[float] | None, typer.Option(help="Of what a model needs in core.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes that plan at once.")] = os.cpu_count() or 1,
    joint: Annotated[bool, typer.Option(help="Remove techniques one after the other.")] = False,
) -> None:
    """Print the table, and write results/ablate.json, or results/ablate-joint.json."""
    todo = [cell for cell in cells(graphs, share or SHARES, other_homes=joint) if only in cell[0]]
    if joint:
        removed: list[dict[str, Any]] = []
        for row in removed_jointly(todo, jobs):
            print(*(f"{value:.4f}" if isinstance(value, float) else value for value in row.values()), flush=True)
            removed.append(row)
        print(f"written to {write_result('ablate-joint', {'removed': removed}, None)}")
        return
    asked = ["everything on", *(name for name in technique or TECHNIQUES if name != "everything on")]
    with ProcessPoolExecutor(jobs) as pool:
        running = {(name, cell[0]): pool.submit(planned, cell, TECHNIQUES[name]) for name in asked for cell in todo}
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
