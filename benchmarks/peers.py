"""Step time against peak memory: outofcore at several budgets, beside what PyTorch itself offers, on the CPU.

Plain PyTorch (on its own malloc and on tcmalloc), ``torch.utils.checkpoint`` around each block,
``checkpoint_sequential``, ``torch.compile`` with a budget for activations, and outofcore's policy ``auto``, with
PyTorch's own kernels and with Inductor's. Each is a process of its own. First the peers run some steps, which shows
their peaks; these are budgets for outofcore, beside the smallest, that which holds everything, and parts of it. Then
all processes of a workload take turns step by step, so that all meet the same machine: there must be memory for all of
them, and a run that has none is written down as missing, as is a peer that fails. Peaks are those of the whole process
(RSS) above that of a step of a tiny model.
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
_OUR_WARM_UP = 5  # captured, planned, measured three times and, where the prediction was off, planned again
_PEERS_WARM_UP = 2
_IN_CORE = 1.1  # of what the step needs: a budget that does not pinch
_HALF = 0.48  # of torch.compile's peak, so that our own stays below half of it
_BESIDE = GIB // 2  # what a process of ours takes beside its budget: the interpreter and its libraries
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
    """A process to measure: its tool, its name, what it runs and how often before it is timed."""

    tool: str
    name: str
    spec: Spec
    preload: Path | None = None
    warm_up: int = _PEERS_WARM_UP


def _peers(spec: Spec, tools: Sequence[str], shares: Sequence[float], segments: Sequence[int]) -> list[Entry]:
    found = [
        Entry("eager", "eager", spec),
        Entry("tcmalloc", "eager, tcmalloc", spec, find_tcmalloc()),
        Entry("checkpoint", "checkpoint", replace(spec, mode="checkpoint")),
        *(
            Entry("sequential", f"checkpoint_sequential, {n} segments", replace(spec, mode="sequential", segments=n))
            for n in segments
        ),
        *(Entry("compile", f"compile, budget {s:g}", replace(spec, mode="compile", share=s)) for s in shares),
    ]
    return [entry for entry in found if entry.tool in tools]


def _start(stack: contextlib.ExitStack, entry: Entry, limit: float) -> Worker:
    """A process that has done its first steps; its peak up to then is in its facts.

    Raises:
        WorkerError: it failed.
    """
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
    """What was measured of one process; peaks are bytes above ``base``."""
    timed = [step["seconds"] for step in worker.steps[entry.warm_up :]]
    later = report["peak_rss"] - base
    row: dict[str, Any] = {
        "tool": entry.tool,
        "name": entry.name,
        "budget": entry.spec.budget,
        "share": entry.spec.share if entry.tool == "compile" else None,
        "seconds": statistics.median(timed),
        "fastest": min(timed),
        "slowest": max(timed),
        "first_step_s": worker.steps[0]["seconds"],
        "peak": max(worker.facts["first_peak"] - base, later),
        "peak_of_timed_steps": later,
        "warm_up": entry.warm_up,
        "steps": worker.columns(),
    }
    if "plan" in report:
        row["policy"] = report["plan"]["policy"]
        row["predicted_seconds"] = worker.median("predicted_seconds", entry.warm_up)
    return row


def _rounds(workers: Sequence[Worker], rounds: int, deadline: float) -> int:
    """Take turns; no more often than there is time for, but three times at least. How often it was."""
    for number in range(rounds):
        start = time.monotonic()
        take_turns([*workers[number % len(workers) :], *workers[: number % len(workers)]], 1)
        if number + 1 >= min(3, rounds) and 2 * time.monotonic() - start > deadline:
            return number + 1
    return rounds


def _same_losses(steps: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]]) -> bool:
    """Whether losses are those of plain PyTorch to the last bit, in as many steps as both ran."""
    return all(a["loss"] == b["loss"] for a, b in zip(steps, plain, strict=False))


@dataclass(frozen=True)
class Asked:
    """What to run of each workload."""

    tools: tuple[str, ...]
    shares: tuple[float, ...]
    segments: tuple[int, ...]
    parts: tuple[float, ...]
    rounds: int
    seconds: float
    limit: float
    home: str
    policy: str


def _measure(model: str, options: dict[str, Any], asked: Asked, base: int) -> dict[str, Any]:
    deadline = time.monotonic() + asked.seconds
    spec = Spec(model, options, home=asked.home, policy=asked.policy)
    missing: dict[str, str] = {}
    pairs: list[tuple[Entry, Worker]] = []
    need = survey(spec)
    with contextlib.ExitStack() as stack:

        def start(entry: Entry) -> None:
            try:
                pairs.append((entry, _start(stack, entry, asked.limit)))
            except WorkerError as error:
                missing[entry.name] = str(error)
                print(error, file=sys.stderr)

        for entry in _peers(spec, asked.tools, asked.shares, asked.segments):
            start(entry)
        peaks = [worker.facts["first_peak"] - base for _, worker in pairs]
        # What torch.compile reaches at its own peak is also asked for at half of it.
        peaks += [
            int(_HALF * (worker.facts["first_peak"] - base))
            for entry, worker in pairs
            if entry.tool == "compile" and entry.spec.share == 1
        ]
        in_core = int(_IN_CORE * need["in_core_budget"])
        for tool, (kernels, title) in _OUR_TOOLS.items():
            if tool not in asked.tools:
                continue

            def run(budget: int, tool: str = tool, kernels: str = kernels, title: str = title) -> None:
                name = f"{title}, {format_bytes(budget)}"
                free = available_memory_bytes()
                if free is not None and free < budget + _BESIDE:
                    missing[name] = f"not run: beside the other processes {format_bytes(free)} of memory are left"
                    return
                start(Entry(tool, name, replace(spec, mode=OURS, budget=budget, kernels=kernels), None, _OUR_WARM_UP))

            smallest = need["smallest_budget"]
            if kernels != "eager":
                smallest = survey(replace(spec, kernels=kernels))["smallest_budget"]
            run(in_core)
            # What our process takes beside its step, libraries and data: as that with room for everything shows.
            beside = [w.facts["first_peak"] - base - need["in_core_budget"] for e, w in pairs if e.tool == tool]
            below = [budget_below(peak) if not beside else peak - beside[0] for peak in peaks]
            for budget in choose_budgets(smallest, in_core, below, asked.parts):
                if budget != in_core:
                    run(budget)
        if not pairs:
            raise typer.BadParameter(f"{model}: nothing could be run: {missing}")
        done = _rounds([worker for _, worker in pairs], asked.rounds, deadline)
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
        **need,
        "options": options,
        "versions": versions,
        "rounds": done,
        "tiny_rss": base,
        "losses_identical": all(row["same_losses"] is not False for row in rows if row["tool"] == OURS),
        "compiled_losses_identical": all(_same_losses(steps, compiled[0]) for steps in compiled),
        "rows": rows,
        "verdicts": verdicts(rows),
        "verdicts_compiled": verdicts(rows, COMPILED),
        "below_all_peers": below_all_peers(rows),
        "missing": missing,
    }


def _panel(name: str, found: Mapping[str, Any]) -> Panel:
    curves: list[Curve] = []
    for tool, label in _TOOLS.items():
        points = tuple(Point(row["peak"], row["seconds"], row["name"]) for row in found["rows"] if row["tool"] == tool)
        curves.append(Curve(label, tuple(sorted(points, key=lambda point: point.x)), strong=tool == OURS))
    # What was asked for, and not all that there is to say: a panel is narrow.
    shape = ", ".join(f"{option} {value}" for option, value in found["options"].items())
    return Panel(_TITLES.get(name, name), shape, tuple(curves))


def _write(workloads: Mapping[str, Any], folder: Path, name: str, picture: Path, date: str | None) -> None:
    """The numbers, the tables and the picture, of all workloads that were ever measured."""
    write_result(name, {"workloads": workloads}, date, folder)
    (folder / f"{name}.md").write_text(markdown(workloads), encoding="utf-8")
    picture.parent.mkdir(parents=True, exist_ok=True)
    panels = [_panel(which, found) for which, found in workloads.items()]
    picture.write_text(draw("Step time against peak memory", panels), encoding="utf-8")


def main(
    *,
    workload: Annotated[list[str] | None, typer.Option(help="May be given several times. [default: all]")] = None,
    option: Annotated[list[str] | None, typer.Option(help="An option of the models, as name=value.")] = None,
    tool: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(_TOOLS)}. [default: all]")] = None,
    share: Annotated[
        list[float] | None, typer.Option(help="Of torch.compile's activations. [default: 1 0.5 0.2]")
    ] = None,
    segments: Annotated[list[int] | None, typer.Option(help="Of checkpoint_sequential. [default: 4]")] = None,
    fraction: Annotated[list[float] | None, typer.Option(help="In-core peak over budget. [default: 2, 4]")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps of each process, at most.")] = 8,
    seconds: Annotated[float, typer.Option(help="For a workload; kept by taking fewer rounds, to three.")] = 400.0,
    limit: Annotated[float, typer.Option(help="For one step of one process, with what it compiles or plans.")] = 240.0,
    small: Annotated[bool, typer.Option("--small", help="Tiny models: to try the benchmark, not the tools.")] = False,
    home: Annotated[str, typer.Option(help="disk, host or a folder on a disk.")] = "disk",
    policy: Annotated[str, typer.Option(help="How to plan.")] = "auto",
    name: Annotated[str, typer.Option(help="Of the files with the results.")] = "peers",
    results: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
    picture: Annotated[Path, typer.Option(help="Where the picture goes.")] = _PICTURE,
    date: Annotated[str | None, typer.Option(help="Of the measurement; by default now.")] = None,
) -> None:
    """Measure, print tables, and write numbers, tables and picture; workloads measured before stay in them."""
    usual = _SMALL if small else _WORKLOADS
    for which in [each for each in tool or () if each not in _TOOLS]:
        raise typer.BadParameter(f"there is no tool {which!r}; there are {', '.join(_TOOLS)}")
    asked = Asked(
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
    before: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["workloads"] if path.exists() else {}
    base = peak_of(Spec("gpt", TINY), 1)
    for which in workload or usual:
        options = {**usual.get(which, {"batch": 8}), **parse_options(option or [])}
        before[which] = {**circumstances(date), **_measure(which, options, asked, base)}
        ordered = {key: before[key] for key in sorted(before, key=[*usual, *sorted({*before} - {*usual})].index)}
        _write(ordered, results, name, picture, date)
        console().print(markdown({which: before[which]}), markup=False, highlight=False, soft_wrap=True)
    print(f"written to {path}, {path.with_suffix('.md')} and {picture}")


if __name__ == "__main__":
    typer.run(main)
