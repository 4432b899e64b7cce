"""Plan published training steps and compare with the published results.

Usage: python benchmarks/published.py FOLDER [--only checkmate,googlenet]   (make bench-published FOLDER=...)

FOLDER contains clones of these repositories, bare or not::

    git clone https://github.com/utsaslab/monet-schedules       # checkmate, googlenet
    git clone https://github.com/uwsampl/dtr-prototype          # dtr
    git clone https://github.com/facebookresearch/param         # traces
    git clone https://github.com/cappadokes/idealloc            # packings

No step is run: times are simulated with the instances' costs. ``instances/`` describes the comparisons.
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
from instances import checkmate, dtr, execution_traces, packings
from instances.sources import Clone, Instance
from rich.table import Table

from outofcore.cli.pack import EFFORT
from outofcore.errors import BudgetError, ValidationError
from outofcore.planning import lower_bound_seconds, plan_step
from outofcore.planning.placement import PlacementParams, Rectangle, pack, peak
from outofcore.units import GIB
from outofcore.validator import Placed, check_packing, validate

_PACK_SECONDS = 20.0  # time limit of the longer search


@dataclass(frozen=True)
class Part:
    """Instances from one repository; ``read`` reads an instance, or rectangles to place."""

    title: str
    repository: str
    cases: Collection[str]
    read: Callable[[Clone, str], Instance | tuple[Rectangle, ...]]


PARTS = {
    "checkmate": Part(
        "Steps of Checkmate's 24-hour schedules, without homes",
        checkmate.REPOSITORY,
        checkmate.CASES,
        checkmate.read_instance,
    ),
    "googlenet": Part(
        "GoogleNet, batch 320, compared with Checkmate where its solver finished, else MONeT; without homes",
        checkmate.REPOSITORY,
        checkmate.GOOGLENET_CASES,
        checkmate.read_googlenet,
    ),
    "dtr": Part(
        "Steps logged by DTR's prototype, compared with its simulator with h_DTR; without homes",
        dtr.REPOSITORY,
        dtr.CASES,
        dtr.read_instance,
    ),
    "traces": Part(
        "PyTorch's execution traces on a simulated V100 with a link of 12 GB/s; ratios to the seconds of their ops",
        execution_traces.REPOSITORY,
        execution_traces.CASES,
        execution_traces.read_instance,
    ),
    "packings": Part(
        f"Addresses: height over peak live bytes, without search and with search up to {_PACK_SECONDS:.0f} s",
        packings.REPOSITORY,
        packings.CASES,
        packings.read_rectangles,
    ),
}


@dataclass(frozen=True)
class Row:
    """The result of planning one instance; ``seconds`` is None without a plan."""

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
    def unit(self) -> float:
        """Return the first published step time, or the seconds of the ops if there is none."""
        return next(iter(self.published.values()), self.op_seconds)

    @property
    def ratio(self) -> float | None:
        return None if self.seconds is None else self.seconds / self.unit

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the cells of the row, in the order of ``COLUMNS``."""
        return (
            self.instance,
            str(self.ops),
            f"{self.budget / GIB:.3f}",
            " / ".join(f"{published:.5f}" for published in self.published.values()) or "-",
            "no plan" if self.seconds is None else f"{self.seconds:.5f}",
            "-" if self.ratio is None else f"{self.ratio:.4f}",
            f"{self.bound_seconds / self.unit:.4f}",
            f"{self.planning_seconds:.1f}",
            f"{self.peak_mib:.0f}",
            "-" if self.seconds is None else "yes" if self.valid else "NO",
        )


COLUMNS = ("instance", "ops", "GiB", "published s", "ours s", "ratio", "bound", "planning s", "peak MiB", "valid")


@dataclass(frozen=True)
class PackRow:
    """The heights to which one instance was placed."""

    instance: str
    rectangles: int
    load: int
    quick_height: int
    quick_seconds: float
    height: int
    seconds: float
    peak_mib: float

    @property
    def ratio(self) -> float:
        return self.height / self.load

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the cells of the row, in the order of ``PACK_COLUMNS``."""
        quick = (f"{self.quick_height / self.load:.7f}", f"{self.quick_seconds:.2f}")
        searched = (f"{self.ratio:.7f}", f"{self.seconds:.2f}")
        return (self.instance, str(self.rectangles), str(self.load), *quick, *searched, f"{self.peak_mib:.0f}")


PACK_COLUMNS = ("instance", "rectangles", "load", "quick ratio", "quick s", "ratio", "s", "peak MiB")


def plan_instance(instance: Instance) -> Row:
    graph, costs, budget = instance.file.graph, instance.file.costs, instance.budget
    begin = time.perf_counter()
    try:
        planned = plan_step(graph, costs, budget)
    except BudgetError as error:
        print(f"{instance.name}: {str(error).splitlines()[-1]}", file=sys.stderr)
        planned = None
    wall = time.perf_counter() - begin
    peak_mib = _measure_peak_mib()
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
        peak_mib,
        valid,
    )


def pack_rectangles(instance: str, rectangles: tuple[Rectangle, ...]) -> PackRow:
    """Place rectangles without and with a search, in this process, and check both placements."""

    def place(effort: int, seconds: float | None) -> tuple[int, float]:
        begin = time.perf_counter()
        packing = pack(rectangles, params=PlacementParams(effort=effort, seconds=seconds))
        elapsed = time.perf_counter() - begin
        placed = zip(rectangles, packing.offsets, strict=True)
        return check_packing(Placed(r.id, r.lower, r.upper, r.size, offset) for r, offset in placed), elapsed

    pack(rectangles[:2])  # compiles the native code before timing
    quick, searched = place(0, None), place(EFFORT, _PACK_SECONDS)
    return PackRow(instance, len(rectangles), peak(rectangles).bytes, *quick, *searched, _measure_peak_mib())


def _measure_peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_part(name: str, part: Part, folder: Path) -> list[Row] | list[PackRow]:
    """Run all instances of a part in separate processes, and print a table with the median and worst ratio."""
    row_class, columns = (PackRow, PACK_COLUMNS) if name == "packings" else (Row, COLUMNS)
    rows: list[Any] = []
    table = Table(*columns, title=part.title)
    for column in table.columns[1:]:
        column.justify = "right"
    for case in part.cases:
        command = [sys.executable, __file__, str(folder), "--one", f"{name}/{case}"]
        worker = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(row_class(**json.loads(worker.stdout)))
        table.add_row(*rows[-1].cells)
    console().print(table)
    ratios = [row.ratio for row in rows if row.ratio is not None]
    if ratios:
        console().print(f"ratio: median {statistics.median(ratios):.4f}, worst {max(ratios):.4f}")
    return rows


def store(name: str, rows: list[dict[str, Any]]) -> None:
    """Write the results of a part; other parts in the file stay."""
    path = RESULTS / "published.json"
    parts = json.loads(path.read_text(encoding="utf-8"))["parts"] if path.exists() else {}
    parts[name] = {**circumstances(None), "rows": rows}
    write_result("published", {"parts": dict(sorted(parts.items()))}, None)


def main(
    folder: Annotated[Path | None, typer.Argument(help="Folder with the clones.")] = None,
    only: Annotated[str, typer.Option(help="Parts to run, e.g. checkmate,dtr.")] = ",".join(PARTS),
    one: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Plan every published instance and print the comparison."""
    if folder is None or not set(only.split(",")) <= PARTS.keys():
        sys.exit(f"{__doc__}\nParts: {', '.join(PARTS)}")
    if one:
        name, case = one.split("/", 1)
        part = PARTS[name]
        instance = part.read(Clone(folder / part.repository), case)
        row = plan_instance(instance) if isinstance(instance, Instance) else pack_rectangles(case, instance)
        print(json.dumps(asdict(row)))
        return
    for name in only.split(","):
        store(name, [{**asdict(row), "ratio": row.ratio} for row in run_part(name, PARTS[name], folder)])


if __name__ == "__main__":
    typer.run(main)
