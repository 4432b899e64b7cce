"""Measure planning time and memory, and how they grow with the depth of a network.

Residual networks are captured once each as graph files; each is planned in a new process without PyTorch.
"""

from __future__ import annotations

import cProfile
import io
import json
import math
import pstats
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from _common import console, write_result
from rich.table import Table

from outofcore import planning
from outofcore.graphfile import read_graph, write_graph
from outofcore.lowering import lower, wire
from outofcore.planning import place
from outofcore.report.machine import peak_memory_bytes
from outofcore.simulator import simulate
from outofcore.units import format_bytes

_DEPTHS = (50, 101, 200, 500, 1001)
_GPU = "v100-16gb-pcie3"
# Target processor seconds by depth.
_TARGETS = {50: 5.0, 1001: 60.0}
_PROFILE_LINES = 25

Answer = dict[str, Any]


def _print_answer(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def _facts(seconds: float, children: float = 0.0) -> Answer:
    return {"seconds": seconds, "children_seconds": children, "peak_rss": peak_memory_bytes()}


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def capture(depth: int, batch: int, path: Path, stats: Path | None) -> None:
    """Capture a step, write its graph file, and print the capture time."""
    from outofcore.cli.subjects import find_step, subject_of  # noqa: PLC0415 - only this function needs PyTorch

    plain = find_step(f"resnet{depth}", {"batch": batch})
    with cProfile.Profile() if stats else _NoProfile() as profile:
        start = time.process_time()
        subject = subject_of(plain, device=_GPU)
        facts = _facts(time.process_time() - start)
    if stats is not None and isinstance(profile, cProfile.Profile):
        profile.dump_stats(stats)
    write_graph(path, subject.file)
    _print_answer(**facts)


class _NoProfile:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def plan(path: Path, share: float, policy: str) -> None:
    """Plan the step in a graph file, and print the time and the result."""
    file = read_graph(path)
    in_core = planning.in_core_budget(file.graph, file.costs)
    budget = max(int(share * in_core), planning.smallest_budget(file.graph, file.costs))
    before = time.process_time(), _children_seconds()
    planned = planning.plan_step(file.graph, file.costs, budget, policy)
    took = time.process_time() - before[0], _children_seconds() - before[1]
    _print_answer(
        **_facts(*took),
        ops=len(file.graph.ops),
        storages=len(file.graph.storages),
        in_core_budget=in_core,
        budget=budget,
        policy=planned.plan.policy,
        predicted_seconds=planned.timeline.step_seconds,
        compute_seconds=file.costs.compute_seconds,
        torch_imported="torch" in sys.modules,
    )


def profile(path: Path, share: float, policy: str, captured: Path) -> None:
    """Print the slowest functions of each stage."""
    print(_slowest_functions(str(captured)))
    file = read_graph(path)
    graph, costs = file.graph, file.costs
    budget = max(int(share * planning.in_core_budget(graph, costs)), planning.smallest_budget(graph, costs))
    planned = _profile_stage("plan", lambda: planning.plan_step(graph, costs, budget, policy))
    program = _profile_stage("lower", lambda: lower(graph, costs, planned.plan))
    placed = _profile_stage("place", lambda: place(program, budget))
    wired = _profile_stage("wire", lambda: wire(graph, placed))
    _profile_stage("simulate", lambda: simulate(graph, costs, wired))


def _profile_stage(name: str, action: Callable[[], Any]) -> Any:
    with cProfile.Profile() as profile_of_action:
        start = time.process_time()
        result = action()
        seconds = time.process_time() - start
    print(f"\n=== {name}: {seconds:.2f} s under the profiler\n{_slowest_functions(profile_of_action)}")
    return result


def _slowest_functions(stats: cProfile.Profile | str) -> str:
    text = io.StringIO()
    pstats.Stats(stats, stream=text).strip_dirs().sort_stats("tottime").print_stats(_PROFILE_LINES)
    return text.getvalue()


def _run_worker(*arguments: str) -> Answer:
    """Return the answer of a new process of this program."""
    worker = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if worker.returncode:
        raise SystemExit(f"{' '.join(arguments)}: exit status {worker.returncode}")
    return json.loads(worker.stdout.splitlines()[-1])


def _growth(rows: list[Answer], stage: str) -> float | None:
    """Return the power of the number of ops with which a stage's time grows, by a log-log fit."""
    points = [(math.log(r["plan"]["ops"]), math.log(max(r[stage]["seconds"], 1e-3))) for r in rows]
    if len(points) < 2:
        return None
    x, y = (sum(values) / len(points) for values in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def _print(rows: list[Answer], growth: dict[str, float | None]) -> None:
    table = Table(title="processor seconds and peak memory, each in a fresh process", title_justify="left")
    for heading in ("network", "ops", "capture", "memory", "plan", "memory", "policy", "step ÷ compute", "target"):
        table.add_column(heading, justify="left" if heading == "network" else "right")
    for row in rows:
        captured, planned, target = row["capture"], row["plan"], _TARGETS.get(row["depth"])
        seconds = planned["seconds"] + planned["children_seconds"]
        table.add_row(
            f"resnet{row['depth']}",
            f"{planned['ops']:,}",
            f"{captured['seconds']:.1f} s",
            format_bytes(captured["peak_rss"]),
            f"{seconds:.1f} s",
            format_bytes(planned["peak_rss"]),
            planned["policy"],
            f"{planned['predicted_seconds'] / planned['compute_seconds']:.3f}",
            "" if target is None else f"{'met' if seconds <= target else 'missed'} ({target:.0f} s)",
        )
    console().print(table)
    for stage, power in growth.items():
        if power is not None:
            print(f"{stage}: time grows as ops to the power of {power:.2f}")


def main(
    *,
    depth: Annotated[list[int] | None, typer.Option(help="Numbers of layers; repeatable.")] = None,
    batch: Annotated[int, typer.Option(help="Samples per batch.")] = 16,
    share: Annotated[float, typer.Option(help="Budget, as a share of the in-core budget.")] = 0.25,
    policy: Annotated[str, typer.Option(help="Planning policy.")] = "auto",
    graphs: Annotated[Path | None, typer.Option(help="Folder for graph files, written and reused.")] = None,
    profiled: Annotated[bool, typer.Option("--profile", help="Profile the stages instead.")] = False,
    name: Annotated[str, typer.Option(help="Name of the result file under benchmarks/results.")] = "plan",
    date: Annotated[str | None, typer.Option(help="Date of the measurement, ISO 8601 (default: now).")] = None,
) -> None:
    """Measure, print a table, and write the numbers to benchmarks/results."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = graphs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rows: list[Answer] = []
        for layers in depth or _DEPTHS:
            path = folder / f"resnet{layers}-{batch}.json.gz"
            stats = folder / f"resnet{layers}.prof"
            extra = [str(stats)] if profiled else []
            captured = _run_worker("capture", str(layers), str(batch), str(path), *extra)
            if profiled:
                print(f"=== resnet{layers}, capture: {captured['seconds']:.2f} s under the profiler")
                profile(path, share, policy, stats)
                continue
            print(f"resnet{layers}: captured in {captured['seconds']:.1f} s", file=sys.stderr, flush=True)
            planned = _run_worker("plan", str(path), str(share), policy)
            rows.append({"depth": layers, "capture": captured, "plan": planned})
            print(f"resnet{layers}: planned in {planned['seconds']:.1f} s", file=sys.stderr, flush=True)
    if rows:
        growth = {stage: _growth(rows, stage) for stage in ("capture", "plan")}
        _print(rows, growth)
        content = {"batch": batch, "share": share, "policy": policy, "device": _GPU, "growth": growth, "rows": rows}
        print(f"written to {write_result(name, content, date)}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["capture", depth_, batch_, path_, *rest]:
            capture(int(depth_), int(batch_), Path(path_), Path(rest[0]) if rest else None)
        case ["plan", path_, share_, policy_]:
            plan(Path(path_), float(share_), policy_)
        case _:
            typer.run(main)
