"""What the first calls of a compiled step cost beyond training: capture, measurements, planning, exchanged plans.

Each row is a fresh process that makes its first calls of a step, with an empty cache or with the one that such a
process has left. ``first`` and ``worst`` are the first call and the slowest later one, in units of the median of the
last calls. ``beside`` is what the first call took beside capture, in units of a step in plain PyTorch, the median of
those that the process has made before of a model of its own; with a full cache it should be 1.3 at most. ``beyond``
is the first call less one and a half of these, in seconds. ``/100`` is what all calls took beyond the
median of the last, as a share of a hundred steps. Times are of the wall clock, and of the processor: of the process
itself; ``kids`` are the seconds of processes that it has started, once they have ended. The last line has the seconds
of importing the library after PyTorch, from modules that Python has compiled before, as those of an installation are.
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
_MEASURED = 20  # calls at the end, of which the median is a step
_EAGER = 5  # steps in plain PyTorch
_ALLOWED = 1.5  # of them that a first call may take
_ABOVE_LEAST = 1.05  # times the smallest budget, where half of the peak is less
_IMPORTS = 5  # processes that import the library
_IMPORTING = """
import time
import torch
start = time.perf_counter()
import outofcore
outofcore.budget, outofcore.compile
print(time.perf_counter() - start)
"""
_Step = Callable[..., torch.Tensor]


def _made(name: str) -> tuple[_Step, torch.nn.Module, torch.optim.Optimizer, Iterator[tuple[torch.Tensor, ...]]]:
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


def _children() -> float:
    """Processor seconds of ended children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _half(name: str) -> int:
    """Half of the bytes that a step needs where nothing leaves, or a little more than the least that do."""
    step, model, optimizer, batches = _made(name)
    batch = next(batches)
    least = outofcore.smallest_budget(step, model, optimizer, inputs=batch, cache=False)
    with outofcore.compile(step, model, optimizer, budget="64GiB", cache=False) as compiled:
        compiled(*batch)
        return max(compiled.planned.program.arena_bytes // 2, int(_ABOVE_LEAST * least))


def _importing() -> float:
    """Seconds of importing the library after PyTorch, from compiled modules."""
    with tempfile.TemporaryDirectory() as compiled:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": compiled}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        taken = [
            float(subprocess.check_output([sys.executable, "-c", _IMPORTING], env=environment))
            for _ in range(1 + _IMPORTS)  # the first compiles
        ]
    return statistics.median(taken[1:])


def _eager(name: str) -> list[tuple[float, float]]:
    """Seconds of steps in plain PyTorch, of the wall clock and of the processor, after one that warms up."""
    step, _, _, batches = _made(name)
    taken = []
    for _ in range(_EAGER + 1):
        batch = next(batches)
        start, processor = time.perf_counter(), time.process_time()
        step(*batch).item()
        taken.append((time.perf_counter() - start, time.process_time() - processor))
    return taken[1:]


def _timed_captures(compiled: outofcore.Step[..., Any]) -> list[tuple[float, float]]:
    """Have the seconds of each capture listed, of the wall clock and of the processor."""
    planner, taken = compiled._session.planner, []
    capture = planner.capture

    def timed(*call: Any) -> Any:
        start, processor = time.perf_counter(), time.process_time()
        try:
            return capture(*call)
        finally:
            taken.append((time.perf_counter() - start, time.process_time() - processor))

    planner.capture = timed
    return taken


def _calls(name: str, budget: int, cache: Path, count: int, home: str) -> dict[str, Any]:
    """The times of the first calls of a step."""
    eager = _eager(name)
    step, model, optimizer, batches = _made(name)
    wall, own, losses = [], [], []
    begin = _children()
    with outofcore.compile(step, model, optimizer, budget=budget, home=home, cache=cache) as compiled:
        capturing = _timed_captures(compiled)
        for _ in range(count):
            batch = next(batches)
            start, processor = time.perf_counter(), time.process_time()
            losses.append(compiled(*batch).item())
            wall.append(time.perf_counter() - start)
            own.append(time.process_time() - processor)
        policy, predicted = compiled.planned.plan.policy, compiled.planned.timeline.step_seconds
    return {
        "wall": wall,
        "processor": own,
        "capture": capturing[0],
        "eager": eager,
        "children": _children() - begin,
        "losses": [loss.hex() for loss in losses],
        "policy": policy,
        "predicted": predicted,
    }


def _fresh(*arguments: object) -> Any:
    environment = {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count())}
    done = subprocess.run(
        [sys.executable, __file__, "--worker", json.dumps([str(a) for a in arguments])],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    return json.loads(done.stdout.splitlines()[-1])


def _summary(found: dict[str, Any]) -> dict[str, float]:
    """A row of the table: of the wall clock, and of the process' own processor time."""
    row: dict[str, float] = {}
    for number, clock in enumerate(("wall", "processor")):
        times = found[clock]
        eager = statistics.median(one[number] for one in found["eager"])
        median = statistics.median(times[-_MEASURED:])
        beyond = sum(one - median for one in times)
        row |= {
            f"{clock} median": median,
            f"{clock} first": times[0] / median,
            f"{clock} eager": eager,
            f"{clock} beside capture": (times[0] - found["capture"][number]) / eager,
            f"{clock} beyond": times[0] - _ALLOWED * eager,
            f"{clock} worst later": max(times[1:]) / median,
            f"{clock} over 100 steps": beyond / (100 * median),
        }
    return row


def _work(arguments: list[str]) -> Any:
    if arguments[0] == "half":
        return _half(arguments[1])
    name, budget, cache, count, home = arguments[1:]
    return _calls(name, int(budget), Path(cache), int(count), home)


def main(
    *,
    model: Annotated[list[str] | None, typer.Option(help="Models to run; by default all.")] = None,
    calls: Annotated[int, typer.Option(min=_MEASURED + 2, help="Calls of each process.")] = 60,
    home: Annotated[str, typer.Option(help="disk, host or a folder on a disk.")] = "disk",
    budgets: Annotated[str, typer.Option(help="By model as JSON; by default half of each peak, if it does.")] = "{}",
    out: Annotated[Path, typer.Option(help="Where the results go.")] = RESULTS / "first-calls.json",
    worker: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Print a table of the first calls of some models, cold and warm."""
    if worker is not None:
        print(json.dumps(_work(json.loads(worker))))
        return
    given: dict[str, int] = {_README: _README_BUDGET, **json.loads(budgets)}
    results: dict[str, Any] = {"command": " ".join(sys.argv), "machine": this_machine(), "rows": {}}
    print(
        f"{'model':<12} {'budget':>9} {'cache':<5} {'clock':<9} {'step':>9} {'eager':>9} {'first':>7} {'beside':>7} "
        f"{'beyond':>8} {'worst':>7} {'/100':>8} kids"
    )
    for name in model or [_README, *_WORKLOADS]:
        budget = given[name] if name in given else _fresh("half", name)
        losses = None
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm"):
                found = _fresh("calls", name, budget, cache, calls, home)
                if losses not in (None, found["losses"]):
                    raise typer.Exit(1)  # the plan changed bits
                losses = found["losses"]
                row = {**_summary(found), "children": found["children"], "policy": found["policy"]}
                results["rows"][f"{name}, {state}"] = {"budget": budget, **row, "calls": found}
                for clock in ("wall", "processor"):
                    print(
                        f"{name:<12} {format_bytes(budget):>9} {state:<5} {clock:<9} "
                        f"{format_seconds(row[f'{clock} median']):>9} {format_seconds(row[f'{clock} eager']):>9} "
                        f"{row[f'{clock} first']:>6.1f}x {row[f'{clock} beside capture']:>6.1f}x "
                        f"{row[f'{clock} beyond']:>6.2f} s "
                        f"{row[f'{clock} worst later']:>6.1f}x {row[f'{clock} over 100 steps']:>8.1%} "
                        f"{found['children']:.1f}",
                        flush=True,
                    )
    results["importing"] = _importing()
    print(f"importing outofcore after PyTorch: {format_seconds(results['importing'])}")
    out.parent.mkdir(exist_ok=True, parents=True)
    out.write_text(json.dumps(results, indent=1, default=str), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
