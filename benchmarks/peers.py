"""Measure step time and peak memory of outofcore at several budgets and of PyTorch's own tools, on the CPU.

The peers run first, and their peaks become budgets for outofcore. All processes of a workload then take turns step by
step, so the machine needs memory for all of them. Runs without enough memory and failing peers are recorded as missing.
Peaks are the RSS of a process above that of a tiny model's step.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from _common import (
    RESULTS,
    TINY,
    Spec,
    Worker,
    WorkerError,
    budget_below,
    circumstances,
    console,
    find_tcmalloc,
    parse_options,
    peak_of,
    survey,
    take_turns,
    write_result,
)
from _curves import Curve, Panel, Point, draw
from _peers import COMPILED, OURS, below_all_peers, choose_budgets, markdown, ratio_of, verdicts

from outofcore.report.machine import available_memory_bytes
from outofcore.units import GIB, format_bytes

_PICTURE = Path(__file__).parents[1] / "docs" / "assets" / "peers.svg"
_OUR_WARM_UP = 5  # capture, planning, three measurements, and possibly a second plan
_PEERS_WARM_UP = 2
_IN_CORE = 1.1  # of the in-core budget, so that no eviction is needed
_HALF = 0.48  # of torch.compile's peak, so that ours stays below half of it
_OUTSIDE_BUDGET = GIB // 2  # memory of our process outside its budget: the interpreter and its libraries
_WORKLOADS: dict[str, dict[str, Any]] = {
    "resnet50": {"batch": 16},
    "gpt": {"batch": 8, "layers": 6, "width": 384, "context": 512},
    "bert": {"batch": 8, "layers": 6, "width": 512, "context": 256},
    "unet3d": {"batch": 1, "size": 48},
}
_SMALL: dict[str, dict[str, Any]] = {
    "resnet50": {"batch": 2, "size": 64, "classes": 10},
    "gpt": {"batch": 8, "layers": 3, "width": 128, "context": 256},
    "bert": {"batch": 8, "layers": 3, "width": 128, "context": 128, "vocab": 1000},
    "unet3d": {"batch": 1, "size": 16, "base": 8},
}
_TITLES = {"resnet50": "ResNet-50", "gpt": "GPT", "bert": "BERT", "unet3d": "3D U-Net"}
_TOOLS = {
    "eager": "plain PyTorch",
    "tcmalloc": "plain PyTorch on tcmalloc",
    "checkpoint": "checkpoint around each block",
    "sequential": "checkpoint_sequential",
    "compile": "torch.compile, activation budget",
    OURS: "outofcore",
    COMPILED: "outofcore, Inductor's kernels",
}
_OUR_TOOLS = {OURS: ("eager", "outofcore"), COMPILED: ("inductor", "outofcore with Inductor's kernels")}
_VERSIONS = ("torch", "transformers", "outofcore")


@dataclass(frozen=True)
class Entry:
    tool: str
    name: str
    spec: Spec
    preload: Path | None = None
    warm_up: int = _PEERS_WARM_UP


def _peer_entries(spec: Spec, tools: Sequence[str], shares: Sequence[float], segments: Sequence[int]) -> list[Entry]:
    entries = [
        Entry("eager", "eager", spec),
        Entry("tcmalloc", "eager, tcmalloc", spec, find_tcmalloc()),
        Entry("checkpoint", "checkpoint", replace(spec, mode="checkpoint")),
        *(
            Entry("sequential", f"checkpoint_sequential, {n} segments", replace(spec, mode="sequential", segments=n))
            for n in segments
        ),
        *(Entry("compile", f"compile, budget {s:g}", replace(spec, mode="compile", share=s)) for s in shares),
    ]
    return [entry for entry in entries if entry.tool in tools]


def _start(stack: contextlib.ExitStack, entry: Entry, limit: float) -> Worker:
    """Start a process and run its warm-up steps; ``facts`` receives the peak so far."""
    if entry.tool == "tcmalloc" and entry.preload is None:
        raise WorkerError("libtcmalloc_minimal.so.4 is not installed (Debian: libtcmalloc-minimal4)")
    print(f"{entry.name} …", file=sys.stderr, flush=True)
    worker = Worker(entry.name, entry.spec, entry.preload, limit)
    try:
        for _ in range(entry.warm_up):
            worker.step()
        worker.facts["first_peak"] = worker.ask("forget-peak")["peak_rss"]
    except BaseException:
        worker.close()
        raise
    return stack.enter_context(worker)


def _row(entry: Entry, worker: Worker, report: Mapping[str, Any], base: int) -> dict[str, Any]:
    """Return the measurements of one process; peaks are bytes above ``base``."""
    timed_seconds = [step["seconds"] for step in worker.steps[entry.warm_up :]]
    timed_peak = report["peak_rss"] - base
    row: dict[str, Any] = {
        "tool": entry.tool,
        "name": entry.name,
        "budget": entry.spec.budget,
        "share": entry.spec.share if entry.tool == "compile" else None,
        "seconds": statistics.median(timed_seconds),
        "fastest": min(timed_seconds),
        "slowest": max(timed_seconds),
        "first_step_s": worker.steps[0]["seconds"],
        "peak": max(worker.facts["first_peak"] - base, timed_peak),
        "peak_of_timed_steps": timed_peak,
        "warm_up": entry.warm_up,
        "steps": worker.columns(),
    }
    if "plan" in report:
        row["policy"] = report["plan"]["policy"]
        row["predicted_seconds"] = worker.median("predicted_seconds", entry.warm_up)
    return row


def _take_turns_until(workers: Sequence[Worker], rounds: int, deadline: float) -> int:
    """Take turns until the deadline, but at least three times; return the number of rounds."""
    for number in range(rounds):
        start = time.monotonic()
        take_turns([*workers[number % len(workers) :], *workers[: number % len(workers)]], 1)
        if number + 1 >= min(3, rounds) and 2 * time.monotonic() - start > deadline:
            return number + 1
    return rounds


def _same_losses(steps: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether losses equal plain PyTorch's bit for bit, in the steps that both ran."""
    return all(a["loss"] == b["loss"] for a, b in zip(steps, plain, strict=False))


@dataclass(frozen=True)
class Settings:
    tools: tuple[str, ...]
    shares: tuple[float, ...]
    segments: tuple[int, ...]
    parts: tuple[float, ...]
    rounds: int
    seconds: float
    limit: float
    home: str
    policy: str


def _measure(model: str, options: dict[str, Any], settings: Settings, base: int) -> dict[str, Any]:
    deadline = time.monotonic() + settings.seconds
    spec = Spec(model, options, home=settings.home, policy=settings.policy)
    missing: dict[str, str] = {}
    pairs: list[tuple[Entry, Worker]] = []
    sizes = survey(spec)
    with contextlib.ExitStack() as stack:

        def start(entry: Entry) -> None:
            try:
                pairs.append((entry, _start(stack, entry, settings.limit)))
            except WorkerError as error:
                missing[entry.name] = str(error)
                print(error, file=sys.stderr)

        for entry in _peer_entries(spec, settings.tools, settings.shares, settings.segments):
            start(entry)
        peaks = [worker.facts["first_peak"] - base for _, worker in pairs]
        # Also run outofcore at half of torch.compile's own peak.
        peaks += [
            int(_HALF * (worker.facts["first_peak"] - base))
            for entry, worker in pairs
            if entry.tool == "compile" and entry.spec.share == 1
        ]
        in_core = int(_IN_CORE * sizes["in_core_budget"])
        for tool, (kernels, title) in _OUR_TOOLS.items():
            if tool not in settings.tools:
                continue

            def run(budget: int, tool: str = tool, kernels: str = kernels, title: str = title) -> None:
                name = f"{title}, {format_bytes(budget)}"
                free = available_memory_bytes()
                if free is not None and free < budget + _OUTSIDE_BUDGET:
                    missing[name] = f"not run: only {format_bytes(free)} of memory are free next to the other processes"
                    return
                start(Entry(tool, name, replace(spec, mode=OURS, budget=budget, kernels=kernels), None, _OUR_WARM_UP))

            smallest = sizes["smallest_budget"]
            if kernels != "eager":
                smallest = survey(replace(spec, kernels=kernels))["smallest_budget"]
            run(in_core)
            # Memory outside the step, libraries and data, as measured in the in-core run.
            outside = [w.facts["first_peak"] - base - sizes["in_core_budget"] for e, w in pairs if e.tool == tool]
            below = [budget_below(peak) if not outside else peak - outside[0] for peak in peaks]
            for budget in choose_budgets(smallest, in_core, below, settings.parts):
                if budget != in_core:
                    run(budget)
        if not pairs:
            raise typer.BadParameter(f"{model}: no process could run: {missing}")
        rounds_run = _take_turns_until([worker for _, worker in pairs], settings.rounds, deadline)
        rows = [_row(entry, worker, worker.ask("report"), base) for entry, worker in pairs]
        plain = next((worker.steps for entry, worker in pairs if entry.tool == "eager"), None)
        compiled = [worker.steps for entry, worker in pairs if entry.tool == COMPILED]
        for row, (_, worker) in zip(rows, pairs, strict=True):
            row["same_losses"] = None if plain is None else _same_losses(worker.steps, plain)
    eager = next((row for row in rows if row["tool"] == "eager"), None)
    for row in rows:
        row["to_eager"] = None if eager is None else ratio_of(row, eager)
    versions = {package: importlib.metadata.version(package) for package in _VERSIONS}
    return {
        **sizes,
        "options": options,
        "versions": versions,
        "rounds": rounds_run,
        "tiny_rss": base,
        "losses_identical": all(row["same_losses"] is not False for row in rows if row["tool"] == OURS),
        "compiled_losses_identical": all(_same_losses(steps, compiled[0]) for steps in compiled),
        "rows": rows,
        "verdicts": verdicts(rows),
        "verdicts_compiled": verdicts(rows, COMPILED),
        "below_all_peers": below_all_peers(rows),
        "missing": missing,
    }


def _panel(name: str, result: Mapping[str, Any]) -> Panel:
    curves: list[Curve] = []
    for tool, label in _TOOLS.items():
        points = tuple(Point(row["peak"], row["seconds"], row["name"]) for row in result["rows"] if row["tool"] == tool)
        curves.append(Curve(label, tuple(sorted(points, key=lambda point: point.x)), strong=tool == OURS))
    # Show only the options: a panel is narrow.
    shape = ", ".join(f"{option} {value}" for option, value in result["options"].items())
    return Panel(_TITLES.get(name, name), shape, tuple(curves))


def _write(workloads: Mapping[str, Any], folder: Path, name: str, picture: Path, date: str | None) -> None:
    """Write the numbers, tables and picture of all workloads measured so far."""
    write_result(name, {"workloads": workloads}, date, folder)
    (folder / f"{name}.md").write_text(markdown(workloads), encoding="utf-8")
    picture.parent.mkdir(parents=True, exist_ok=True)
    panels = [_panel(workload, result) for workload, result in workloads.items()]
    picture.write_text(draw("Step time against peak memory", panels), encoding="utf-8")


def main(
    *,
    workload: Annotated[list[str] | None, typer.Option(help="Workloads to measure; repeatable (default: all).")] = None,
    option: Annotated[list[str] | None, typer.Option(help="Model option, as name=value; repeatable.")] = None,
    tool: Annotated[
        list[str] | None, typer.Option(help=f"Tools: {', '.join(_TOOLS)}; repeatable (default: all).")
    ] = None,
    share: Annotated[
        list[float] | None, typer.Option(help="Activation budgets of torch.compile; repeatable (default: 1 0.5 0.2).")
    ] = None,
    segments: Annotated[
        list[int] | None, typer.Option(help="Segments of checkpoint_sequential; repeatable (default: 4).")
    ] = None,
    fraction: Annotated[
        list[float] | None, typer.Option(help="In-core peak divided by budget; repeatable (default: 2, 4).")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Maximum number of timed steps per process.")] = 8,
    seconds: Annotated[
        float, typer.Option(help="Time limit per workload, met by fewer rounds (at least three).")
    ] = 400.0,
    limit: Annotated[float, typer.Option(help="Time limit of one step, with compiling and planning.")] = 240.0,
    small: Annotated[bool, typer.Option("--small", help="Run tiny models, as a smoke test.")] = False,
    home: Annotated[str, typer.Option(help="Home: disk, host, or a folder on a disk.")] = "disk",
    policy: Annotated[str, typer.Option(help="Planning policy.")] = "auto",
    name: Annotated[str, typer.Option(help="Name of the result files.")] = "peers",
    results: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS,
    picture: Annotated[Path, typer.Option(help="File for the picture, SVG.")] = _PICTURE,
    date: Annotated[str | None, typer.Option(help="Date of the measurement, ISO 8601 (default: now).")] = None,
) -> None:
    """Measure, print tables, and write numbers, tables and picture; other workloads in the files stay."""
    defaults = _SMALL if small else _WORKLOADS
    for workload_name in [tool_name for tool_name in tool or () if tool_name not in _TOOLS]:
        raise typer.BadParameter(f"unknown tool {workload_name!r}; choose from {', '.join(_TOOLS)}")
    settings = Settings(
        tuple(tool or _TOOLS),
        tuple(share or (1.0, 0.5, 0.2)),
        tuple(segments or (4,)),
        tuple(fraction or (2.0, 4.0)),
        rounds,
        seconds,
        limit,
        home,
        policy,
    )
    path = results / f"{name}.json"
    results_of: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["workloads"] if path.exists() else {}
    base = peak_of(Spec("gpt", TINY), 1)
    for workload_name in workload or defaults:
        options = {**defaults.get(workload_name, {"batch": 8}), **parse_options(option or [])}
        results_of[workload_name] = {**circumstances(date), **_measure(workload_name, options, settings, base)}
        ordered = {
            key: results_of[key]
            for key in sorted(results_of, key=[*defaults, *sorted({*results_of} - {*defaults})].index)
        }
        _write(ordered, results, name, picture, date)
        console().print(
            markdown({workload_name: results_of[workload_name]}), markup=False, highlight=False, soft_wrap=True
        )
    print(f"written to {path}, {path.with_suffix('.md')} and {picture}")


if __name__ == "__main__":
    typer.run(main)
