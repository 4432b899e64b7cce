"""Measure what the first calls of a compiled step cost beyond training, with a cold and a warm cache.

The columns ``first`` and ``worst`` are the first and the slowest later call, in medians of the last calls. ``beside``
is the first call without capture, in steps of plain PyTorch; at most 1.3 is expected if warm. ``beyond`` is the first
call minus 1.5 such steps. ``/100`` is the time of all calls beyond the median, as a share of a hundred steps. ``kids``
are the processor seconds of ended child processes.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from _common import RESULTS

import outofcore
from outofcore import zoo
from outofcore.report.machine import this_machine
from outofcore.units import MIB, format_bytes, format_seconds

_WORKLOADS: dict[str, dict[str, Any]] = {
    "gpt": {"batch": 4, "layers": 6, "width": 256, "heads": 4, "context": 128},
    "resnet": {"depth": 18, "batch": 8, "size": 96},
    "vgg16": {"batch": 1, "size": 32},
    "densenet121": {"batch": 2, "size": 32},
    "unet3d": {"batch": 1, "size": 32, "base": 8},
}
_README = "README"
_README_BUDGET = 64 * MIB
_MEASURED = 20  # last calls, whose median is the step time
_EAGER = 5  # steps in plain PyTorch
_ALLOWED = 1.5  # allowed time of a first call, in eager steps
_ABOVE_LEAST = 1.05  # of the smallest budget, if half of the peak is below it
_IMPORTS = 5  # number of measurements of the import
_IMPORTING = """
import time
import torch
start = time.perf_counter()
import outofcore
outofcore.budget, outofcore.compile
print(time.perf_counter() - start)
"""
_Step = Callable[..., torch.Tensor]


def _build(name: str) -> tuple[_Step, torch.nn.Module, torch.optim.Optimizer, Iterator[tuple[torch.Tensor, ...]]]:
    if name != _README:
        work = zoo.workload(name, **_WORKLOADS[name])
        torch.manual_seed(work.options.seed)
        model = work.build()
        optimizer = work.optimizer(model)
        return work.make_step(model, optimizer), model, optimizer, iter(work.batches())
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU()) for _ in range(8)]
    chain = torch.nn.Sequential(*layers)
    adamw = torch.optim.AdamW(chain.parameters(), lr=1e-4)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(chain(x), y)
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        return loss

    batch = torch.rand(512, 1024)
    return train_step, chain, adamw, iter(lambda: (batch, batch), None)


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _half_budget(name: str) -> int:
    """Return half of the in-core arena in bytes, but at least slightly more than the smallest budget."""
    step, model, optimizer, batches = _build(name)
    batch = next(batches)
    smallest = outofcore.smallest_budget(step, model, optimizer, inputs=batch, cache=False)
    with outofcore.compile(step, model, optimizer, budget="64GiB", cache=False) as compiled:
        compiled(*batch)
        return max(compiled.planned.program.arena_bytes // 2, int(_ABOVE_LEAST * smallest))


def _measure_import() -> float:
    """Return the median seconds to import the library after PyTorch, from compiled modules."""
    with tempfile.TemporaryDirectory() as compiled:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": compiled}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        seconds = [
            float(subprocess.check_output([sys.executable, "-c", _IMPORTING], env=environment))
            for _ in range(1 + _IMPORTS)  # the first import compiles the modules
        ]
    return statistics.median(seconds[1:])


def _eager_times(name: str) -> list[tuple[float, float]]:
    """Return wall-clock and processor seconds of steps in plain PyTorch, without a warm-up step."""
    step, _, _, batches = _build(name)
    times = []
    for _ in range(_EAGER + 1):
        batch = next(batches)
        start, processor = time.perf_counter(), time.process_time()
        step(*batch).item()
        times.append((time.perf_counter() - start, time.process_time() - processor))
    return times[1:]


def _record_captures(compiled: outofcore.Step[..., Any]) -> list[tuple[float, float]]:
    """Return a list that receives the wall-clock and processor seconds of each capture."""
    planner, times = compiled._session.planner, []
    capture = planner.capture

    def capture_timed(*call: Any) -> Any:
        start, processor = time.perf_counter(), time.process_time()
        try:
            return capture(*call)
        finally:
            times.append((time.perf_counter() - start, time.process_time() - processor))

    planner.capture = capture_timed
    return times


def _measure_calls(name: str, budget: int, cache: Path, count: int, home: str) -> dict[str, Any]:
    eager = _eager_times(name)
    step, model, optimizer, batches = _build(name)
    wall, processor_seconds, losses = [], [], []
    begin = _children_seconds()
    with outofcore.compile(step, model, optimizer, budget=budget, home=home, cache=cache) as compiled:
        captures = _record_captures(compiled)
        for _ in range(count):
            batch = next(batches)
            start, processor = time.perf_counter(), time.process_time()
            losses.append(compiled(*batch).item())
            wall.append(time.perf_counter() - start)
            processor_seconds.append(time.process_time() - processor)
        policy, predicted = compiled.planned.plan.policy, compiled.planned.timeline.step_seconds
    return {
        "wall": wall,
        "processor": processor_seconds,
        "capture": captures[0],
        "eager": eager,
        "children": _children_seconds() - begin,
        "losses": [loss.hex() for loss in losses],
        "policy": policy,
        "predicted": predicted,
    }


def _run_worker(*arguments: object) -> Any:
    environment = {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count())}
    worker = subprocess.run(
        [sys.executable, __file__, "--worker", json.dumps([str(a) for a in arguments])],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    return json.loads(worker.stdout.splitlines()[-1])


def _summarize(measured: dict[str, Any]) -> dict[str, float]:
    row: dict[str, float] = {}
    for number, clock in enumerate(("wall", "processor")):
        times = measured[clock]
        eager = statistics.median(seconds[number] for seconds in measured["eager"])
        median = statistics.median(times[-_MEASURED:])
        beyond = sum(seconds - median for seconds in times)
        row |= {
            f"{clock} median": median,
            f"{clock} first": times[0] / median,
            f"{clock} eager": eager,
            f"{clock} beside capture": (times[0] - measured["capture"][number]) / eager,
            f"{clock} beyond": times[0] - _ALLOWED * eager,
            f"{clock} worst later": max(times[1:]) / median,
            f"{clock} over 100 steps": beyond / (100 * median),
        }
    return row


def _run_command(arguments: list[str]) -> Any:
    if arguments[0] == "half":
        return _half_budget(arguments[1])
    name, budget, cache, count, home = arguments[1:]
    return _measure_calls(name, int(budget), Path(cache), int(count), home)


def main(
    *,
    model: Annotated[list[str] | None, typer.Option(help="Models to run; repeatable (default: all).")] = None,
    calls: Annotated[int, typer.Option(min=_MEASURED + 2, help="Number of calls per process.")] = 60,
    home: Annotated[str, typer.Option(help="Home: disk, host, or a folder on a disk.")] = "disk",
    budgets: Annotated[
        str, typer.Option(help="Budgets in bytes by model, as JSON; half of the peak for others.")
    ] = "{}",
    out: Annotated[Path, typer.Option(help="Result file.")] = RESULTS / "first-calls.json",
    worker: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure the first calls of some models with a cold and a warm cache, and print a table."""
    if worker is not None:
        print(json.dumps(_run_command(json.loads(worker))))
        return
    budget_of: dict[str, int] = {_README: _README_BUDGET, **json.loads(budgets)}
    results: dict[str, Any] = {"command": " ".join(sys.argv), "machine": this_machine(), "rows": {}}
    print(
        f"{'model':<12} {'budget':>9} {'cache':<5} {'clock':<9} {'step':>9} {'eager':>9} {'first':>7} {'beside':>7} "
        f"{'beyond':>8} {'worst':>7} {'/100':>8} kids"
    )
    for name in model or [_README, *_WORKLOADS]:
        budget = budget_of[name] if name in budget_of else _run_worker("half", name)
        losses = None
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm"):
                measured = _run_worker("calls", name, budget, cache, calls, home)
                if losses not in (None, measured["losses"]):
                    raise typer.Exit(1)  # losses differ between cold and warm cache
                losses = measured["losses"]
                row = {**_summarize(measured), "children": measured["children"], "policy": measured["policy"]}
                results["rows"][f"{name}, {state}"] = {"budget": budget, **row, "calls": measured}
                for clock in ("wall", "processor"):
                    print(
                        f"{name:<12} {format_bytes(budget):>9} {state:<5} {clock:<9} "
                        f"{format_seconds(row[f'{clock} median']):>9} {format_seconds(row[f'{clock} eager']):>9} "
                        f"{row[f'{clock} first']:>6.1f}x {row[f'{clock} beside capture']:>6.1f}x "
                        f"{row[f'{clock} beyond']:>6.2f} s "
                        f"{row[f'{clock} worst later']:>6.1f}x {row[f'{clock} over 100 steps']:>8.1%} "
                        f"{measured['children']:.1f}",
                        flush=True,
                    )
    results["importing"] = _measure_import()
    print(f"importing outofcore after PyTorch: {format_seconds(results['importing'])}")
    out.parent.mkdir(exist_ok=True, parents=True)
    out.write_text(json.dumps(results, indent=1, default=str), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
