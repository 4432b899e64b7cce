"""Plans for steps that others publish, beside what they found for them.

Usage: python benchmarks/published.py FOLDER [--only checkmate,googlenet]   (make bench-published FOLDER=...)

FOLDER holds clones of these repositories, bare or not::

    git clone https://github.com/utsaslab/monet-schedules   # checkmate, googlenet

Each instance is planned in a process of its own, so that its peak memory is its own. Prints tables and writes
results/published.json; of that, parts that did not run stay. Nothing is trained: all times are those of the simulator,
for costs that the instances name. What the instances are, and what is comparable, say the modules in ``instances/``.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from _common import RESULTS, circumstances, console, write_result
from instances import checkmate
from instances.sources import Clone, Instance
from rich.table import Table

from outofcore.errors import BudgetError, ValidationError
from outofcore.planning import lower_bound_seconds, plan_step
from outofcore.units import GIB
from outofcore.validator import validate


@dataclass(frozen=True)
class Part:
    """Instances from one repository.

    Attributes:
        title: of the table.
        repository: the name of its clone.
        cases: names of the instances.
        read: makes an instance.
    """

    title: str
    repository: str
    cases: Collection[str]
    read: Callable[[Clone, str], Instance]


PARTS = {
    "checkmate": Part(
        "Steps of Checkmate's 24-hour schedules, without homes",
        checkmate.REPOSITORY,
        checkmate.CASES,
        checkmate.read_instance,
    ),
    "googlenet": Part(
        "GoogleNet, batch 320, beside Checkmate where its solver ended, else MONeT; without homes",
        checkmate.REPOSITORY,
        checkmate.GOOGLENET_CASES,
        checkmate.read_googlenet,
    ),
}


@dataclass(frozen=True)
class Row:
    """What planning one instance gave; ``seconds`` is None where there is no plan."""

    instance: str
    budget: int
    published: dict[str, float]
    seconds: float | None
    bound_seconds: float
    op_seconds: float
    ops: int
    planning_seconds: float
    peak_mib: float
    valid: bool

    @property
    def ratio(self) -> float | None:
        """Our step over that which is published first; where nothing is, over the seconds of its ops."""
        theirs = next(iter(self.published.values()), self.op_seconds)
        return None if self.seconds is None else self.seconds / theirs


def plan_instance(instance: Instance) -> Row:
    """Plan an instance, here."""
    graph, costs, budget = instance.file.graph, instance.file.costs, instance.budget
    begin = time.perf_counter()
    try:
        planned = plan_step(graph, costs, budget)
    except BudgetError as error:
        print(f"{instance.name}: {error}", file=sys.stderr)
        planned = None
    wall = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    valid = planned is not None
    if planned is not None:
        try:
            validate(graph, planned.program, budget, costs)
        except ValidationError as error:
            print(f"{instance.name}: {error}", file=sys.stderr)
            valid = False
    return Row(
        instance.name,
        budget,
        instance.published,
        None if planned is None else planned.timeline.step_seconds,
        lower_bound_seconds(graph, costs, budget) or costs.compute_seconds,
        costs.compute_seconds,
        len(graph.ops),
        wall,
        peak,
        valid,
    )


def run_part(name: str, part: Part, folder: Path) -> list[Row]:
    """Plan all instances of a part, each in its own process, and print a table."""
    rows: list[Row] = []
    for case in part.cases:
        command = [sys.executable, __file__, str(folder), "--one", f"{name}/{case}"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(Row(**json.loads(done.stdout)))
    print_rows(part.title, rows)
    return rows


def print_rows(title: str, rows: list[Row]) -> None:
    """Print a table, with the median and the worst ratio."""
    table = Table(title=title)
    for column in ("instance", "ops", "budget GiB", "theirs s", "ours s", "ratio", "planning s", "peak MiB", "valid"):
        table.add_column(column, justify="left" if column == "instance" else "right")
    for row in rows:
        table.add_row(
            row.instance,
            str(row.ops),
            f"{row.budget / GIB:.3f}",
            " / ".join(f"{theirs:.5f}" for theirs in row.published.values()) or "-",
            "no plan" if row.seconds is None else f"{row.seconds:.5f}",
            "-" if row.ratio is None else f"{row.ratio:.4f}",
            f"{row.planning_seconds:.1f}",
            f"{row.peak_mib:.0f}",
            "yes" if row.valid else "NO",
        )
    console().print(table)
    ratios = [row.ratio for row in rows if row.ratio is not None]
    if ratios:
        console().print(f"ratio: median {statistics.median(ratios):.4f}, worst {max(ratios):.4f}")


def store(name: str, rows: list[dict[str, Any]]) -> None:
    """Write what came of a part; what the file holds of others stays."""
    path = RESULTS / "published.json"
    parts = json.loads(path.read_text(encoding="utf-8"))["parts"] if path.exists() else {}
    parts[name] = {**circumstances(None), "rows": rows}
    write_result("published", {"parts": dict(sorted(parts.items()))}, None)


def main(
    folder: Annotated[Path | None, typer.Argument(help="Folder of the clones.")] = None,
    only: Annotated[str, typer.Option(help="Parts to run, such as checkmate,dtr.")] = ",".join(PARTS),
    one: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Plan every published instance and print what came of it."""
    if folder is None or not set(only.split(",")) <= PARTS.keys():
        sys.exit(f"{__doc__}\nParts: {', '.join(PARTS)}")
    if one:
        name, case = one.split("/", 1)
        part = PARTS[name]
        print(json.dumps(asdict(plan_instance(part.read(Clone(folder / part.repository), case)))))
        return
    for name in only.split(","):
        store(name, [{**asdict(row), "ratio": row.ratio} for row in run_part(name, PARTS[name], folder)])


if __name__ == "__main__":
    typer.run(main)
