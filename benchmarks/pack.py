"""Compare our placement algorithms with first fit and with omnimalloc's (PyPI, if installed): heights and times.

Reads the files under ``instances/pack``, other files in MiniMalloc's CSV format, or with ``--sizes`` randomly cut boxes
of known optimal height. ``--zoo`` also packs training steps of the zoo and writes ``results/pack.json``. ``--hard``
searches a placement within the capacity at the end of each file name, then again with each search technique switched
off. MiniMalloc's repository has eleven hard instances in ``benchmarks/challenging``::

    python benchmarks/pack.py --hard minimalloc/*.csv
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from _common import write_result
from rich.console import Console
from rich.table import Table

from outofcore.analysis.gaps import is_large
from outofcore.cli.pack import EFFORT, read_table
from outofcore.costs import Costs, Home, OpCost
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.graphfile import read_graph
from outofcore.lowering import lower
from outofcore.planning import in_core_budget, keep_all, plan_step, smallest_budget
from outofcore.planning.placement import PlacementParams, Rectangle, best_fit, pack, peak
from outofcore.planning.placement.compiled import first_fit
from outofcore.planning.placement.rectangles import Rectangles
from outofcore.planning.placing import EFFORT as PLANNING
from outofcore.program import Program
from outofcore.validator import Placed, check_packing

INSTANCES = Path(__file__).with_name("instances") / "pack"
_RIVALS = ("OmniAllocator", "TelamallocAllocator", "HillClimbAllocator", "SupermallocAllocator")
_RIVAL_SECONDS = 2.0
# Time limits for hard instances: the full search, and with a technique switched off.
_HARD_SECONDS, _WITHOUT_SECONDS = 60.0, 6.0
# Zoo steps: the device, shares of the in-core budget, and the largest acceptable height over the live bytes.
_GPU, _PARTS, _CLOSE = "v100-16gb-pcie3", (0.5, 0.25), 1.01
# Zoo traces committed as files, and the number of rectangles of the cut box that runs with the zoo.
_COMMITTED, _MANY = ("resnet50-in-core", "resnet50-auto-0.5"), 1000

_Place = Callable[[Sequence[Rectangle]], Sequence[int]]

# ----------------------------------------------------------------------------------------------- instances


def cut_box(count: int, width: int, height: int, seed: int) -> list[Rectangle]:
    """Cut a box at random into rectangles; the optimal height is ``height``, and hard to find."""
    generator = random.Random(seed)
    boxes = [(0, width, 0, height)]
    while len(boxes) < count:
        box = max(generator.sample(boxes, min(3, len(boxes))), key=lambda b: (b[1] - b[0]) * (b[3] - b[2]))
        begin, end, low, high = box
        is_across = generator.random() < 0.5
        if (end - begin if is_across else high - low) < 2:
            continue
        boxes.remove(box)
        if is_across:
            cut = generator.randrange(begin + 1, end)
            boxes += [(begin, cut, low, high), (cut, end, low, high)]
        else:
            cut = generator.randrange(low + 1, high)
            boxes += [(begin, end, low, cut), (begin, end, cut, high)]
    generator.shuffle(boxes)
    return [Rectangle(i, begin, end, high - low) for i, (begin, end, low, high) in enumerate(boxes)]


def random_rectangles(count: int, seed: int) -> list[Rectangle]:
    """Return rectangles with sizes over three orders of magnitude and mostly short lifetimes."""
    generator = random.Random(seed)
    rectangles: list[Rectangle] = []
    for index in range(count):
        begin = generator.randrange(count)
        length = max(1, int(count * min(1.0, generator.expovariate(10))))
        rectangles.append(Rectangle(index, begin, min(begin + length, count), int(2 ** generator.uniform(0, 12))))
    return rectangles


@dataclass
class _StepBuilder:
    """A builder of a synthetic training step."""

    storages: list[Storage] = field(default_factory=list[Storage])
    ops: list[Op] = field(default_factory=list[Op])
    costs: list[OpCost] = field(default_factory=list[OpCost])

    def new(self, kind: StorageKind, kib: float) -> int:
        self.storages.append(Storage(len(self.storages), int(kib * 1024), kind))
        return self.storages[-1].id

    def like(self, storage: int, kind: StorageKind = StorageKind.ACTIVATION) -> int:
        return self.new(kind, self.storages[storage].bytes / 1024)

    def op(self, name: str, reads: Sequence[int], creates: Sequence[int] = (), mutates: Sequence[int] = ()) -> None:
        self.ops.append(Op(len(self.ops), name, tuple(dict.fromkeys(reads)), tuple(mutates), tuple(creates)))
        touched = sum(self.storages[s].bytes for s in self.ops[-1].touched)
        workspace = touched // 5 if name.startswith("convolution") else 0
        self.costs.append(OpCost(touched / 4e9, workspace))


def residual_step(blocks: int) -> tuple[StepGraph, Costs]:
    """Build a step like a ResNet's: stages that halve the map and double the channels, skips, norms and momentum."""
    step = _StepBuilder()
    flow = step.new(StorageKind.INPUT, 1200)
    saved: list[tuple[int, int, list[int]]] = []  # a parameter, its moment, and the storages saved for backward
    for index in range(blocks):
        stage = 4 * index // blocks
        size, channels = 6272 / 2**stage, 64 * 2**stage
        skip = flow
        for part in range(3):
            parameter = step.new(StorageKind.PARAMETER, channels * channels * (9 if part == 1 else 4) / 256)
            moment = step.like(parameter, StorageKind.OPTIMIZER_STATE)
            out = step.new(StorageKind.ACTIVATION, size * (4 if part == 2 else 1))
            step.op("convolution", [flow, parameter], [out])
            normed = step.like(out)
            step.op("norm", [out], [normed])
            saved.append((parameter, moment, [flow, out, normed]))
            flow = normed
        total = step.like(flow)
        step.op("add", [flow, skip], [total])
        flow = total
    loss = step.new(StorageKind.OUTPUT, 0.1)
    step.op("loss", [flow], [loss])
    gradient = step.like(flow)
    step.op("loss_backward", [flow], [gradient])
    for parameter, moment, (layer_input, out, normed) in reversed(saved):
        out_gradient = step.like(out)
        step.op("norm_backward", [gradient, out, normed], [out_gradient])
        input_gradient = step.like(layer_input)
        parameter_gradient = step.like(parameter, StorageKind.GRADIENT)
        step.op("convolution_backward", [out_gradient, layer_input, parameter], [input_gradient, parameter_gradient])
        step.op("update", [parameter, moment, parameter_gradient], mutates=[parameter, moment])
        gradient = input_gradient
    graph = StepGraph(tuple(step.storages), tuple(step.ops), (loss,))
    graph.check()
    return graph, Costs(tuple(step.costs), (Home("disk", None, 2e9, 2e9, 1e-4),))


def rectangles_of(program: Program) -> list[Rectangle]:
    """Return the large blocks of a program as rectangles over its instructions."""
    end = len(program.instructions)
    rectangles: list[Rectangle] = []
    for block in program.blocks:
        if not is_large(block.bytes):
            continue
        begin, end_of_block = (0, end) if block.wraps else (block.born, block.dies)
        gap = (block.dies, block.born) if block.wraps and block.born > 0 else None
        rectangles.append(Rectangle(block.id, begin, end_of_block, block.bytes, gap=gap))
    return rectangles


def traces(blocks: int) -> Iterator[tuple[str, list[Rectangle]]]:
    """Yield the rectangles of programs: in core, and planned by two policies for half of that."""
    graph, costs = residual_step(blocks)
    half = in_core_budget(graph, costs) // 2
    yield f"residual{len(graph.ops)}-in-core", rectangles_of(lower(graph, costs, keep_all(0)))
    for policy in ("auto", "window"):
        yield f"residual{len(graph.ops)}-{policy}-half", rectangles_of(plan_step(graph, costs, half, policy).program)


def write_instances(zoo: Path | None) -> None:
    """Write the files under ``instances/pack``; each name ends in the peak of live bytes."""
    INSTANCES.mkdir(parents=True, exist_ok=True)
    instances = [(f"cut-up{n}", cut_box(n, 2000, 100_000, n)) for n in (40, 100, 300)]
    instances += [("scattered200", random_rectangles(200, 1)), *traces(16)]
    instances += [] if zoo is None else [(name, trace) for name, trace in zoo_traces(zoo) if name in _COMMITTED]
    for name, rectangles in instances:
        write_rectangles(INSTANCES / f"{name}.{peak(rectangles).bytes}.csv", rectangles)


def write_rectangles(path: Path, rectangles: Sequence[Rectangle]) -> None:
    """Write a file in MiniMalloc's CSV format, with a column for gaps if there are any."""
    gaps = any(r.gap for r in rectangles)
    with path.open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["id", "lower", "upper", "size", *(["gaps"] if gaps else [])])
        for r in rectangles:
            gap_cells = ["" if r.gap is None else f"{r.gap[0]}-{r.gap[1]}"] if gaps else []
            writer.writerow([r.id, r.lower, r.upper, r.size, *gap_cells])


def zoo_traces(folder: Path) -> Iterator[tuple[str, list[Rectangle]]]:
    """Yield the rectangles of zoo steps; graphs missing from the folder are captured."""
    from compare import MODELS  # noqa: PLC0415 - the rest needs neither planner nor PyTorch

    folder.mkdir(parents=True, exist_ok=True)
    for model in MODELS:
        path = folder / f"{model}-{_GPU}.json.gz"
        if not path.exists():
            worker = str(Path(__file__).with_name("compare.py"))
            subprocess.run([sys.executable, worker, "capture", model, _GPU, str(path)], check=True)
        file = read_graph(path)
        graph, costs = file.graph, file.costs
        yield f"{model}-in-core", rectangles_of(lower(graph, costs, keep_all(0)))
        for part in _PARTS:
            budget = int(in_core_budget(graph, costs) * part)
            if budget < smallest_budget(graph, costs):
                continue
            planned = plan_step(graph, costs, budget)
            yield f"{model}-auto-{part:g}", rectangles_of(planned.program)


# ------------------------------------------------------------------------------------------------- contest


def our_placers(effort: int) -> dict[str, _Place]:
    """Return each placement algorithm by name, and ``pack`` at several efforts."""

    def by(order: Callable[[Rectangles], Any]) -> _Place:
        def place(rectangles: Sequence[Rectangle]) -> Sequence[int]:
            layout = Rectangles.of(rectangles, 0)
            return first_fit(layout, order(layout)).tolist()

        return place

    return {
        "first fit: by time": by(lambda r: np.lexsort((-r.sizes, r.begin, r.second_begin > r.slots))),
        "first fit: longest": by(lambda r: np.argsort(-r.lifetimes, kind="stable")),
        "first fit: largest": by(lambda r: np.argsort(-r.sizes, kind="stable")),
        "best fit of PGMO": lambda r: best_fit(r).offsets,
        "pack, quick": lambda r: pack(r, params=PlacementParams(effort=0)).offsets,
        "pack, planning": lambda r: pack(r, params=PlacementParams(effort=PLANNING)).offsets,
        "pack": lambda r: pack(r, params=PlacementParams(effort=effort)).offsets,
    }


def place_within_capacity(files: Sequence[Path], date: str | None) -> None:
    """Print and write the time to place within a capacity, with all techniques and without one of each."""
    switches = ("", "dominance", "lifting", "precedence", "decomposition", "restarts", "canonical")
    table, rows = Table("instance", *(f"no {name}" if name else "pack" for name in switches)), list[dict[str, Any]]()
    pack([Rectangle(0, 0, 2, 1), Rectangle(1, 1, 3, 1)])  # compiles the native code before timing
    for path in files:
        rectangles = read_table(path.read_text(encoding="utf-8")).rectangles
        capacity, cells = int(path.name.split(".")[-2]), list[str]()
        for name in switches:
            limit = _WITHOUT_SECONDS if name else _HARD_SECONDS
            params = PlacementParams(effort=EFFORT, seconds=limit, **({name: False} if name else {}))
            begin, clock = time.process_time(), time.perf_counter()
            packing = pack(rectangles, capacity=capacity, params=params)
            seconds, elapsed = time.process_time() - begin, time.perf_counter() - clock
            height = _height(rectangles, packing.offsets)
            cells.append(f"{seconds:.2f}" if height <= capacity else f"{height / capacity - 1:+.1%}")
            row = {"instance": path.stem, "rectangles": len(rectangles), "capacity": capacity, "without": name}
            outcome = {"height": height, "placed": height <= capacity, "cpu_seconds": round(seconds, 3)}
            rows.append({**row, **outcome, "seconds": round(elapsed, 3)})
        table.add_row(path.stem, *cells)
    Console().print(table)
    result = {"seconds_at_most": _HARD_SECONDS, "seconds_at_most_without": _WITHOUT_SECONDS, "rows": rows}
    print(f"written to {write_result('pack-hard', result, date)}")


def rival_placers() -> dict[str, _Place]:
    """Return omnimalloc's allocators by name, if it is installed."""
    if importlib.util.find_spec("omnimalloc") is None:
        return {}
    library = importlib.import_module("omnimalloc")
    allocators = importlib.import_module("omnimalloc.allocators")

    def by(name: str) -> _Place:
        def place(rectangles: Sequence[Rectangle]) -> Sequence[int]:
            allocator_class = getattr(allocators, name)
            allocator = allocator_class() if name == "OmniAllocator" else allocator_class(timeout=_RIVAL_SECONDS)
            allocations = [
                library.Allocation(id=i, size=r.size, start=r.lower, end=r.upper) for i, r in enumerate(rectangles)
            ]
            offset_of = {a.id: a.offset for a in allocator.allocate(tuple(allocations))}
            return [offset_of[i] for i in range(len(rectangles))]

        return place

    return {f"omnimalloc: {name.removesuffix('Allocator')}": by(name) for name in _RIVALS}


def _height(rectangles: Sequence[Rectangle], offsets: Sequence[int]) -> int:
    return check_packing(
        Placed(r.id, r.lower, r.upper, r.size, offset, r.alignment, r.gap)
        for r, offset in zip(rectangles, offsets, strict=True)
    )


def main(
    files: Annotated[list[Path] | None, typer.Argument(help="CSV files (default: all instances).")] = None,
    sizes: Annotated[str, typer.Option(help="Numbers of rectangles to cut boxes into, e.g. 100,1000,10000.")] = "",
    effort: Annotated[float, typer.Option(min=0, help="Search effort, as of `outofcore pack`.")] = 0.05,
    hard_ones: Annotated[bool, typer.Option("--hard", help="Stay within the capacity in each file's name.")] = False,
    write: Annotated[bool, typer.Option("--write", help="Regenerate the instances.")] = False,
    zoo: Annotated[Path | None, typer.Option(help="Also pack zoo steps, with graphs in this folder.")] = None,
    date: Annotated[str | None, typer.Option(help="Date of the measurement, ISO 8601 (default: now).")] = None,
) -> None:
    """Print height, ratio to the lower bound, and seconds, for each instance and allocator."""
    if hard_ones:
        place_within_capacity(files or [], date)
        return
    if write:
        write_instances(zoo)
    instances = [(f"cut-up{n}", cut_box(n, 10 * n, 1_000_000, 0)) for n in map(int, filter(None, sizes.split(",")))]
    if not instances:
        paths = files or sorted(INSTANCES.glob("*.csv"))
        instances = [(p.stem, list(read_table(p.read_text(encoding="utf-8")).rectangles)) for p in paths]
    if zoo is not None:
        instances += [(f"cut-up{_MANY}", cut_box(_MANY, 10 * _MANY, 1_000_000, 0)), *zoo_traces(zoo)]
    console, rows = Console(), list[dict[str, Any]]()
    for name, rectangles in instances:
        bound = peak(rectangles).bytes
        console.print(f"\n{name}: {len(rectangles)} rectangles, {bound} bytes live at once", highlight=False)
        table = Table("allocator", box=None)
        for column in ("height", "over live", "seconds"):
            table.add_column(column, justify="right")
        for allocator, place in (our_placers(int(effort * EFFORT)) | rival_placers()).items():
            if allocator.startswith("omnimalloc") and any(r.gap for r in rectangles):
                continue
            begin = time.process_time()
            offsets = place(rectangles)
            seconds = time.process_time() - begin
            height = _height(rectangles, offsets)
            table.add_row(allocator, str(height), f"{height / bound:.4f}", f"{seconds:.3f}")
            row = {"trace": name, "rectangles": len(rectangles), "live_bytes": bound, "allocator": allocator}
            rows.append({**row, "height": height, "over_live": height / bound, "cpu_seconds": round(seconds, 3)})
        console.print(table)
    if zoo is not None:
        above_close = [row["trace"] for row in rows if row["allocator"] == "pack" and row["over_live"] > _CLOSE]
        print(f"written to {write_result('pack', {'above_1_percent': above_close, 'rows': rows}, date)}")


if __name__ == "__main__":
    typer.run(main)
