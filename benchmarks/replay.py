"""Measure steps of a few milliseconds that fit: ops called by native code, by Python, and in plain PyTorch.

Contenders take turns step by step in one process and must have the same losses; ratios are medians over the rounds.
Host time is the step time minus the time of the ops as native code runs them.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from _common import console, round_by_round, write_result
from rich.table import Table
from torch import Tensor, nn

import outofcore
from outofcore.units import GIB, format_seconds
from outofcore.zoo import workload

_WARM_UP = 20
_BUDGET = 4 * GIB  # fits every step
_GPTS: dict[str, dict[str, int]] = {
    "gpt": {"batch": 2, "layers": 4, "width": 128, "context": 64},
    "gpt-124m": {"batch": 1, "layers": 12, "width": 768, "heads": 12, "context": 64, "vocab": 50257},
}
# Its steps take a hundred times as long.
_FEWER = {"gpt-124m": 20}


def _perceptron() -> tuple[nn.Module, tuple[Tensor, ...]]:
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(512, 10)), (torch.randn(8, 512), torch.randint(10, (8,)))


def _convolutional() -> tuple[nn.Module, tuple[Tensor, ...]]:
    def block(inner: int, outer: int) -> list[nn.Module]:
        return [nn.Conv2d(inner, outer, 3, 2, 1), nn.BatchNorm2d(outer), nn.ReLU()]

    model = nn.Sequential(*block(3, 16), *block(16, 32), *block(32, 64), nn.Flatten(), nn.Linear(64 * 16, 10))
    return model, (torch.randn(8, 3, 32, 32), torch.randint(10, (8,)))


def _supervised_step(model: nn.Module) -> tuple[Callable[..., Tensor], torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, optimizer


def _measure(name: str, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    if name in _GPTS:
        work = workload("gpt", dropout=0.0, **_GPTS[name])
        model, batch = work.build(), next(work.batches())
    else:
        model, batch = _perceptron() if name == "mlp" else _convolutional()
        work = None
    contenders: dict[str, Callable[..., Any]] = {}
    compiled_steps: list[Any] = []
    for way in ("eager", "native", "python"):
        network = copy.deepcopy(model)
        optimizer: torch.optim.Optimizer
        if work is None:
            step, optimizer = _supervised_step(network)
        else:
            optimizer = work.optimizer(network)
            step = work.make_step(network, optimizer)
        if way != "eager":
            step = outofcore.compile(
                step,
                network,
                optimizer,
                budget=_BUDGET,
                home="host",
                dynamic=False,
                replay=way == "native",
            )
            compiled_steps.append(step)
        contenders[way] = step
    seconds: dict[str, list[float]] = {way: [] for way in contenders}
    kernels: list[float] = []  # op seconds when native code calls them
    rounds = max(rounds // _FEWER.get(name, 1), 10)
    warm_up = max(_WARM_UP // _FEWER.get(name, 1), 5)
    order = list(contenders)
    for turn in range(warm_up + rounds):
        losses: dict[str, Any] = {}
        for way in order[turn % 3 :] + order[: turn % 3]:
            begin = time.perf_counter()
            losses[way] = contenders[way](*batch)
            seconds[way].append(time.perf_counter() - begin)
        kernels.append(contenders["native"].stats.compute_seconds)
        if not all(torch.equal(loss, losses["eager"]) for loss in losses.values()):
            raise AssertionError(f"{name}: losses differ in round {turn}")
    instructions = len(compiled_steps[0].planned.program.instructions)
    ops = len(compiled_steps[0].captured.graph.ops)
    for step in compiled_steps:
        step.close()
    steady = {way: times[warm_up:] for way, times in seconds.items()}
    host_seconds = {
        way: statistics.median(step_time - network for step_time, network in zip(times, kernels[warm_up:], strict=True))
        for way, times in steady.items()
    }
    return {
        "name": name,
        "instructions": instructions,
        "ops": ops,
        "beside_ops": host_seconds,
        "beside_ops_each": {way: times / ops for way, times in host_seconds.items()},
        "seconds": {way: statistics.median(times) for way, times in steady.items()},
        "over_eager": {way: round_by_round(steady[way], steady["eager"]) for way in ("native", "python")},
    }


def main(
    rounds: Annotated[
        int, typer.Option(min=10, help="Number of rounds; each contender runs one step per round.")
    ] = 400,
    date: Annotated[str | None, typer.Option(help="Date of the measurement, ISO 8601 (default: now).")] = None,
) -> None:
    """Measure, print a table, and write the numbers to benchmarks/results/replay.json."""
    rows = [_measure(name, rounds) for name in ("mlp", "cnn", *_GPTS)]
    table = Table(
        "step",
        "instructions",
        "eager",
        "native replay",
        "Python replay",
        "host time per op: eager",
        "native",
        "Python",
    )
    for row in rows:
        cells = [
            f"{format_seconds(row['seconds'][contender])} ({row['over_eager'][contender]:.3f})"
            for contender in ("native", "python")
        ]
        host_cells = [format_seconds(row["beside_ops_each"][contender]) for contender in ("eager", "native", "python")]
        table.add_row(
            row["name"], str(row["instructions"]), format_seconds(row["seconds"]["eager"]), *cells, *host_cells
        )
    console().print(table)
    print(f"written to {write_result('replay', {'rows': rows}, date)}")


if __name__ == "__main__":
    typer.run(main)
