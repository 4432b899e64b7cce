"""Measure what each technique of the plan search saves in step time and costs in planning time.

Each technique of ``SearchParams`` is switched off in turn; overlapping techniques may look useless. ``--joint`` removes
techniques cumulatively, up to a slowdown of 0.3 % on average and 1 % at worst. The steps come from
``benchmarks/compare.py`` (a V100, in the ``--graphs`` folder) and ``instances/small``. A ratio is a predicted step time
without a technique over the time with it; changes from 0.5 % count.
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
# The fields that switch each technique off, or cut its effort to a quarter.
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
# Techniques that the joint ablation removes, least useful first; some are only reduced.
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
# Allowed slowdown of the steps: mean and worst.
_MEAN, _WORST = 1.003, 1.01
# Further cells: a slower device with a disk, host memory for a quarter of the in-core bytes plus a disk, and no home.
_DISK = Home("disk", None, 1.2e9, 2.0e9, 1e-4)
_OTHER_HOMES = {"disk": (0.4, 0.2), "host and disk": (0.25,), "no home": (0.6, 0.45)}
_SLOWER, _HOST_SHARE = 40, 4
# Smallest change of a step time that counts.
_MOVES = 0.005

Cell = tuple[str, str, int, str]  # name, graph file, budget, homes (empty: the file's)
Outcome = tuple[float, float]  # predicted seconds of a step, processor seconds of planning


def cells(graphs: Path | None, shares: Sequence[float], *, other_homes: bool = False) -> Iterator[Cell]:
    """Yield the planning problems: the small steps, and the folder's graphs at several budgets."""
    budgets = json.loads((INSTANCES / "optimum.json").read_text(encoding="utf-8"))
    for name, entries in sorted(budgets.items()):
        for cell in entries:
            yield f"small {name} {cell['budget']}", str(INSTANCES / f"{name}.json"), cell["budget"], ""
    for path in sorted(graphs.glob("*.json.gz")) if graphs else ():
        file = read_graph(path)
        in_core, smallest = in_core_budget(file.graph, file.costs), smallest_budget(file.graph, file.costs)
        name = path.name.removesuffix(".json.gz")
        # Some techniques matter only at the smallest budget, where they halve the step time.
        yield f"{name} smallest", str(path), smallest, ""
        for share in shares:
            if in_core * share > smallest:
                yield f"{name} {share:g}", str(path), int(in_core * share), ""
        for homes, parts in _OTHER_HOMES.items() if other_homes else ():
            for share in parts:
                yield f"{name} {homes} {share:g}", str(path), int(in_core * share), homes


def _costs(graph: StepGraph, costs: Costs, homes: str) -> Costs:
    if homes == "no home":
        return replace(costs, homes=())
    if homes == "disk":
        return Costs(tuple(replace(op, seconds=op.seconds * _SLOWER) for op in costs.ops), (_DISK,))
    if homes == "host and disk":
        host = replace(costs.homes[0], bytes=in_core_budget(graph, costs) // _HOST_SHARE)
        return replace(costs, homes=(host, _DISK))
    return costs


def plan_cell(cell: Cell, off: Mapping[str, Any]) -> Outcome:
    """Plan one cell with techniques switched off; infinite seconds if there is no plan."""
    file = read_graph(Path(cell[1]))
    costs = _costs(file.graph, file.costs, cell[3])
    start = time.process_time()
    try:
        params = replace(SearchParams(), **off)
        seconds = plan_step(file.graph, costs, cell[2], params=params).timeline.step_seconds
    except BudgetError:
        seconds = inf
    return seconds, time.process_time() - start


def summarize(on: Mapping[str, Outcome], off: Mapping[str, Outcome]) -> dict[str, Any]:
    by_kind: dict[str, Any] = {}
    for kind, names in (
        ("small", [name for name in on if name.startswith("small ")]),
        ("models", [name for name in on if not name.startswith("small ")]),
    ):
        ratios = {name: off[name][0] / on[name][0] for name in names}
        if not ratios:
            continue
        worst = max(ratios, key=ratios.__getitem__)
        by_kind[kind] = {
            "mean": exp(sum(log(ratio) for ratio in ratios.values()) / len(ratios)),
            "largest": ratios[worst],
            "largest_at": worst,
            "helps": sum(ratio >= 1 + _MOVES for ratio in ratios.values()),
            "hurts": sum(ratio <= 1 - _MOVES for ratio in ratios.values()),
            "cells": len(ratios),
            "plan_seconds_on": sum(on[name][1] for name in names),
            "plan_seconds_off": sum(off[name][1] for name in names),
        }
    return by_kind


def remove_jointly(todo: Sequence[Cell], jobs: int) -> Iterator[dict[str, Any]]:
    """Remove techniques one after another; yield whether each stays off and how steps change."""
    with ProcessPoolExecutor(jobs) as pool:
        before = dict(zip(todo, pool.map(plan_cell, todo, [{}] * len(todo)), strict=True))
        order = [cell for cell in todo if before[cell][0] < inf]
        off: dict[str, Any] = {}
        for name, fields in JOINT.items():
            trial = {**off, **fields}
            running = {cell: pool.submit(plan_cell, cell, trial) for cell in order}
            ratios: dict[Cell, float] = {}
            seconds = 0.0
            for cell, future in running.items():
                step, took = future.result()
                ratios[cell], seconds = step / before[cell][0], seconds + took
                if ratios[cell] > _WORST:
                    break  # already too slow
            for future in running.values():
                future.cancel()
            worst = max(ratios, key=ratios.__getitem__)
            mean = exp(sum(log(ratio) for ratio in ratios.values()) / len(ratios))
            is_off = ratios[worst] <= _WORST and mean <= _MEAN
            off = trial if is_off else off
            # Try the decisive cell first for the next technique.
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
    graphs: Annotated[Path | None, typer.Option(help="Folder of graph files written by compare.py.")] = None,
    technique: Annotated[
        list[str] | None, typer.Option(help="Techniques to switch off; repeatable (default: all).")
    ] = None,
    only: Annotated[str, typer.Option(help="Run steps whose name contains this text, e.g. 'slow' or '0.25'.")] = "",
    share: Annotated[
        list[float] | None, typer.Option(help="Budgets, as shares of a model's in-core budget; repeatable.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Number of planning processes.")] = os.cpu_count() or 1,
    joint: Annotated[bool, typer.Option(help="Remove techniques cumulatively.")] = False,
) -> None:
    """Measure, print the table, and write results/ablate.json or results/ablate-joint.json."""
    todo = [cell for cell in cells(graphs, share or SHARES, other_homes=joint) if only in cell[0]]
    if joint:
        removed: list[dict[str, Any]] = []
        for row in remove_jointly(todo, jobs):
            print(*(f"{value:.4f}" if isinstance(value, float) else value for value in row.values()), flush=True)
            removed.append(row)
        print(f"written to {write_result('ablate-joint', {'removed': removed}, None)}")
        return
    techniques = ["everything on", *(name for name in technique or TECHNIQUES if name != "everything on")]
    with ProcessPoolExecutor(jobs) as pool:
        running = {
            (name, cell[0]): pool.submit(plan_cell, cell, TECHNIQUES[name]) for name in techniques for cell in todo
        }
        outcomes = {name: {cell[0]: running[name, cell[0]].result() for cell in todo} for name in techniques}
    table = Table(title="Step time without the technique over step time with it")
    for column in ("technique off", "steps", "mean", "largest", "where", "helps", "hurts", "planning s"):
        table.add_column(column, justify="left" if column in ("technique off", "steps", "where") else "right")
    rows = {name: summarize(outcomes["everything on"], outcomes[name]) for name in techniques[1:]}
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
