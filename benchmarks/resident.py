"""Measure a process's resident memory beyond its tensors: loops in plain PyTorch and within half of their peak.

``idle`` is the VmRSS after one training step of a tiny model. The peak (VmHWM) beyond ``idle`` is compared with the
peak of an unconstrained loop's tensors, or with the budget.
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
    """An LSTM, checkpointed blocks, and a custom autograd function."""

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
    generator = nn.Sequential(nn.Linear(128, 8192), nn.Unflatten(1, (512, 4, 4)))
    for before, after in ((512, 256), (256, 128)):
        generator.extend([nn.ConvTranspose2d(before, after, 4, 2, 1), nn.BatchNorm2d(after), nn.ReLU()])
    generator.extend([nn.ConvTranspose2d(128, 3, 4, 2, 1), nn.Tanh()])
    discriminator = nn.Sequential()
    for before, after in ((3, 128), (128, 256), (256, 512)):
        discriminator.extend([nn.Conv2d(before, after, 4, 2, 1), nn.LeakyReLU(0.2)])
    discriminator.extend([nn.Flatten(), nn.Linear(8192, 1)])
    generator_optimizer, discriminator_optimizer = (
        torch.optim.Adam(module.parameters(), 1e-4) for module in (generator, discriminator)
    )

    def step() -> None:
        real, fake = torch.randn(64, 3, 32, 32), generator(torch.randn(64, 128))
        loss = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake.detach())).mean()
        discriminator_optimizer.zero_grad()
        loss.backward()
        discriminator_optimizer.step()
        generator_optimizer.zero_grad()
        F.softplus(-discriminator(fake)).mean().backward()
        generator_optimizer.step()

    return nn.ModuleList([generator, discriminator]), step


def _gpt() -> _Loop:
    work = zoo.workload("gpt", params="25M", batch=4, context=256)
    model = work.build()
    train, batches = work.make_step(model, work.optimizer(model)), work.batches()
    return model, lambda: train(*next(batches))


_LOOPS: dict[str, Callable[[], _Loop]] = {"gan": _gan, "recurrent": _recurrent, "gpt": _gpt}


def _train_tiny() -> None:
    """Train a tiny model, so that PyTorch imports its optimizers and pages in library code."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 3, 8, 8)).sum().backward()
    optimizer.step()


def _run_loop(name: str, budget: int, steps: int) -> None:
    """Run one loop and print its memory as JSON; ``budget`` 0 is plain PyTorch."""
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
    parts = {part: getattr(stats, part) for part in _PARTS}
    tensors = stats.peak_bytes + stats.peak_small_bytes
    print(
        json.dumps({"imported": imported, "idle": idle, "most": peak_memory_bytes() or 0, "tensors": tensors, **parts})
    )


def _measure(name: str, budget: int, steps: int) -> dict[str, int]:
    command = [sys.executable, __file__, "--one", name, "--budget", str(budget), "--steps", str(steps)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.splitlines()[-1])


def main(
    *,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps per loop.")] = 40,
    share: Annotated[float, typer.Option(help="Budget, as a share of the peak.")] = 0.5,
    date: Annotated[str | None, typer.Option(help="Date of the measurement, ISO 8601 (default: now).")] = None,
    one: Annotated[str | None, typer.Option(hidden=True)] = None,
    budget: Annotated[int, typer.Option(hidden=True)] = 0,
) -> None:
    """Measure, print a table, and write the numbers to benchmarks/results/resident.json."""
    if one is not None:
        _run_loop(one, budget, steps)
        return
    table = Table(title="Memory of a process beyond its tensors")
    for heading in (
        "loop",
        "tensors",
        "beyond tensors",
        "budget",
        "beyond budget",
        "arena",
        "file pages",
        "other",
        "idle",
    ):
        table.add_column(heading, justify="left" if heading == "loop" else "right")
    rows = {}
    for name in _LOOPS:
        peak = _measure(name, _ROOM, _ROOMY_STEPS)["tensors"]
        half = int(share * peak)
        plain, ours = _measure(name, 0, steps), _measure(name, half, steps)
        beyond = [measured["most"] - measured["idle"] - tensors for measured, tensors in ((plain, peak), (ours, half))]
        rows[name] = {"plain": plain, "ours": ours, "peak": peak, "budget": half, "beyond": beyond}
        numbers = (peak, beyond[0], half, beyond[1], *(ours[part] for part in _PARTS), ours["idle"])
        table.add_row(name, *(format_bytes(number) for number in numbers))
    console().print(table)
    print(f"written to {write_result('resident', {'steps': steps, 'share': share, 'loops': rows}, date)}")


if __name__ == "__main__":
    typer.run(main)
