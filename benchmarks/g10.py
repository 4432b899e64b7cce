"""Plan the five training steps of G10 (Zhang et al., MICRO 2023) at 40 GiB: predicted step over compute seconds.

Usage: python benchmarks/g10.py FOLDER   (the folder of the g10_*.json.gz graph files)
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

# Step time over compute time of the paper's own policy.
PUBLISHED = {"BERT": 1.004, "VIT": 1.491, "Inception": 1.023, "ResNet": 1.016, "SENet": 1.071}
BUDGET = 40 << 30
RESULTS = Path(__file__).parent / "results" / "g10.json"


@dataclass(frozen=True)
class Result:
    instance: str
    published: float
    ratio: float
    bound: float
    cpu_seconds: float
    wall_seconds: float
    peak_mib: float
    valid: bool


def plan(path: Path, published: float) -> Result:
    from outofcore.errors import ValidationError  # noqa: PLC0415  (not needed in the parent)
    from outofcore.graphfile import read_graph  # noqa: PLC0415
    from outofcore.planning import lower_bound_seconds, plan_step  # noqa: PLC0415
    from outofcore.validator import validate  # noqa: PLC0415

    file = read_graph(path)
    cpu, wall = time.process_time(), time.perf_counter()
    planned = plan_step(file.graph, file.costs, BUDGET)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    try:
        validate(file.graph, planned.program, BUDGET, file.costs)
        valid = True
    except ValidationError as error:
        print(error, file=sys.stderr)
        valid = False
    bound = lower_bound_seconds(file.graph, file.costs, BUDGET) or float("nan")
    compute = file.costs.compute_seconds
    name = path.name.removeprefix("g10_").removesuffix(".json.gz")
    return Result(name, published, planned.timeline.step_seconds / compute, bound / compute, cpu, wall, peak, valid)


def main() -> None:
    """Plan every instance in the folder, print a table and write the results."""
    if len(sys.argv) != 2:
        sys.exit("usage: g10.py FOLDER (make bench-g10 INSTANCES=FOLDER), the folder of the g10_*.json.gz graph files")
    folder = Path(sys.argv[1])
    results: list[Result] = []
    for key, published in PUBLISHED.items():
        path = next(iter(sorted(folder.glob(f"g10_{key}*.json.gz"))), None)
        if path is None:
            sys.exit(f"{folder} has no g10_{key}*.json.gz; pass the folder that contains the five graph files")
        command = [sys.executable, __file__, "--one", str(path), str(published)]
        worker = subprocess.run(command, check=True, capture_output=True, text=True, env=dict(os.environ))
        print(worker.stderr, end="", file=sys.stderr)
        results.append(Result(**json.loads(worker.stdout)))
    table = Table(title="G10's training steps at 40 GiB: seconds of a step over seconds of its ops, simulated")
    for column in ("instance", "published", "ours", "lower bound", "CPU s", "peak MiB", "valid"):
        table.add_column(column, justify="left" if column == "instance" else "right")
    for r in results:
        numbers = (
            f"{r.published:.3f}",
            f"{r.ratio:.4f}",
            f"{r.bound:.4f}",
            f"{r.cpu_seconds:.1f}",
            f"{r.peak_mib:.0f}",
        )
        table.add_row(r.instance, *numbers, "yes" if r.valid else "NO")
    Console().print(table)
    RESULTS.write_text(json.dumps([asdict(r) for r in results], indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(asdict(plan(Path(sys.argv[2]), float(sys.argv[3])))))
    else:
        main()
