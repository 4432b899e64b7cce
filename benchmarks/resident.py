"""Physical memory of a process beyond its tensors: loops in plain PyTorch, and within half of their peak.

Each row is two fresh processes. ``idle`` is what a process has (VmRSS) once a tiny model has been trained for a step,
before the loop's own is made; in the file, ``imported`` is what it has once PyTorch and this library are imported. What
it has at the most (VmHWM) beyond ``idle`` is compared with the bytes of the tensors: at their peak in plain PyTorch,
which a loop with room for everything counts, and the budget in the other process. The parts of that process's memory
are those at its end, as ``run.stats`` has them.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from _common import console, write_result
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import outofcore
from outofcore import zoo
from outofcore.report.machine import peak_memory_bytes, resident_memory_bytes
from outofcore.units import GIB, format_bytes

_ROOM = 64 * GIB
_ROOMY_STEPS = 3
_PARTS = ("arena_bytes", "file_pages_bytes", "other_bytes")
_Loop = tuple[nn.Module, Callable[[], Any]]


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grads[0]


class _Recurrent(nn.Module):
    """An LSTM, blocks under checkpoints, and a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(8000, 256), nn.LSTM(256, 512, 2, batch_first=True)
        blocks = (nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)) for _ in range(4))
        self.blocks, self.out = nn.ModuleList(blocks), nn.Linear(512, 8000)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(x))
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=False)
        return self.out(_Square.apply(hidden))


def _recurrent() -> _Loop:
    model = _Recurrent()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step() -> None:
        x = torch.randint(0, 8000, (8, 64))
        F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def _gan() -> _Loop:
    maker = nn.Sequential(nn.Linear(128, 8192), nn.Unflatten(1, (512, 4, 4)))
    for before, after in ((512, 256), (256, 128)):
        maker.extend([nn.ConvTranspose2d(before, after, 4, 2, 1), nn.BatchNorm2d(after), nn.ReLU()])
    maker.extend([nn.ConvTranspose2d(128, 3, 4, 2, 1), nn.Tanh()])
    judge = nn.Sequential()
    for before, after in ((3, 128), (128, 256), (256, 512)):
        judge.extend([nn.Conv2d(before, after, 4, 2, 1), nn.LeakyReLU(0.2)])
    judge.extend([nn.Flatten(), nn.Linear(8192, 1)])
    of_maker, of_judge = (torch.optim.Adam(each.parameters(), 1e-4) for each in (maker, judge))

    def step() -> None:
        real, fake = torch.randn(64, 3, 32, 32), maker(torch.randn(64, 128))
        loss = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
        of_judge.zero_grad()
        loss.backward()
        of_judge.step()
        of_maker.zero_grad()
        F.softplus(-judge(fake)).mean().backward()
        of_maker.step()

    return nn.ModuleList([maker, judge]), step


def _gpt() -> _Loop:
    work = zoo.workload("gpt", params="25M", batch=4, context=256)
    model = work.build()
    train, batches = work.make_step(model, work.optimizer(model)), work.batches()
    return model, lambda: train(*next(batches))


_LOOPS: dict[str, Callable[[], _Loop]] = {"gan": _gan, "recurrent": _recurrent, "gpt": _gpt}


def _train_tiny() -> None:
    """Have PyTorch import what optimizers need, which is as much as half of itself, and read code of its libraries."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 3, 8, 8)).sum().backward()
    optimizer.step()


def _be_one(name: str, budget: int, steps: int) -> None:
    """What a process does; ``budget`` 0 is plain PyTorch. Prints what it found as JSON."""
    torch.manual_seed(0)
    imported = resident_memory_bytes() or 0
    _train_tiny()
    idle = resident_memory_bytes() or 0
    model, step = _LOOPS[name]()
    stats = outofcore.LoopStats()
    with outofcore.budget(budget, model, cache=False) if budget else contextlib.nullcontext() as run:
        for _ in range(steps):
            step()
        if run is not None:
            stats = run.stats
    found = {part: getattr(stats, part) for part in _PARTS}
    tensors = stats.peak_bytes + stats.peak_small_bytes
    print(
        json.dumps({"imported": imported, "idle": idle, "most": peak_memory_bytes() or 0, "tensors": tensors, **found})
    )


def _measure(name: str, budget: int, steps: int) -> dict[str, int]:
    command = [sys.executable, __file__, "--one", name, "--budget", str(budget), "--steps", str(steps)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.splitlines()[-1])


def main(
    *,
    steps: Annotated[int, typer.Option(min=1, help="Of each loop.")] = 40,
    share: Annotated[float, typer.Option(help="Of the peak, as the budget.")] = 0.5,
    date: Annotated[str | None, typer.Option(help="Date of the measurement, ISO 8601. [default: now]")] = None,
    one: Annotated[str | None, typer.Option(hidden=True)] = None,
    budget: Annotated[int, typer.Option(hidden=True)] = 0,
) -> None:
    """Measure, print a table, and write the numbers to benchmarks/results/resident.json."""
    if one is not None:
        _be_one(one, budget, steps)
        return
    table = Table(title="memory of a process beyond its tensors")
    for heading in (
        "loop",
        "tensors",
        "beyond them",
        "budget",
        "beyond it",
        "arena",
        "pages of files",
        "others",
        "idle",
    ):
        table.add_column(heading, justify="left" if heading == "loop" else "right")
    rows = {}
    for name in _LOOPS:
        peak = _measure(name, _ROOM, _ROOMY_STEPS)["tensors"]
        half = int(share * peak)
        plain, ours = _measure(name, 0, steps), _measure(name, half, steps)
        beyond = [each["most"] - each["idle"] - tensors for each, tensors in ((plain, peak), (ours, half))]
        rows[name] = {"plain": plain, "ours": ours, "peak": peak, "budget": half, "beyond": beyond}
        numbers = (peak, beyond[0], half, beyond[1], *(ours[part] for part in _PARTS), ours["idle"])
        table.add_row(name, *(format_bytes(number) for number in numbers))
    console().print(table)
    print(f"written to {write_result('resident', {'steps': steps, 'share': share, 'loops': rows}, date)}")


if __name__ == "__main__":
    typer.run(main)
