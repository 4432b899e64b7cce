"""Measure smallest budgets with whole and with split ops, and the step times at these budgets.

Contenders run in one process and must have the same losses. The budgets of larger workloads are estimated for an H100,
where all splits are assumed to be exact.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
import typer
from _bert import workload
from _common import console, round_by_round, write_result
from rich.table import Table

import outofcore
from outofcore.capture import capture_step
from outofcore.execution.opening import open_backend
from outofcore.profiling.cache import open_cache
from outofcore.step_variants import Split, StepVariants
from outofcore.units import format_bytes, format_seconds
from outofcore.variant import smallest_variant
from outofcore.zoo.gpt import GPT, GPTShape
from outofcore.zoo.vision import ResNet, UNet3d

_WARM_UP = 2
_HERE: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT, vocabulary 50257": ("gpt", {"batch": 4, "layers": 2, "width": 128, "context": 128, "vocab": 50257}),
    "BERT, 2 layers, 16 x 256 tokens": (
        "bert",
        {"batch": 16, "layers": 2, "width": 256, "context": 256, "vocab": 2000},
    ),
    "BERT, 2 layers of width 512, 2 x 64 tokens, vocabulary 30522": (
        "bert",
        {"batch": 2, "layers": 2, "width": 512, "context": 64, "vocab": 30522},
    ),
    "ResNet-50, batch 4": ("resnet50", {"batch": 4}),
    # The workloads of bench.py.
    "ResNet-50, batch 16": ("resnet50", {"batch": 16}),
    "GPT, 6 layers of width 512, 8 x 512 tokens": ("gpt", {"batch": 8, "layers": 6, "width": 512, "context": 512}),
    "3D U-Net, 64³": ("unet3d", {"batch": 1, "size": 64}),
}


def _without_ranges(step: Callable[..., Any], model: Any, optimizer: Any, inputs: tuple[Any, ...]) -> int:
    """Return the smallest budget if parameters and optimizer state are resident as a whole or not at all."""
    capture = partial(capture_step, step, [model], [optimizer], inputs, {})
    variants = StepVariants(capture(), capture, open_backend(None), open_cache(True), Split.EXACT, home_bytes=0)
    return smallest_variant(variants)[1]


def _measure(name: str, model: str, options: dict[str, Any], rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    work = workload(model, options)
    prototype, stream = work.build(), work.batches()
    batches = [next(stream) for _ in range(2)]

    def build() -> tuple[Callable[..., Any], Any, Any]:
        network = copy.deepcopy(prototype)
        optimizer = work.optimizer(network)
        return work.make_step(network, optimizer), network, optimizer

    split_modes: tuple[Literal["off", "exact"], ...] = ("off", "exact")
    budgets = {mode: outofcore.smallest_budget(*build(), inputs=batches[0], split=mode) for mode in split_modes}
    without_ranges = _without_ranges(*build(), inputs=batches[0])
    contenders: dict[str, Callable[..., Any]] = {"eager": build()[0]}
    compiled_steps: dict[str, Any] = {}
    for split in split_modes:
        step, network, optimizer = build()
        compiled_steps[split] = contenders[split] = outofcore.compile(
            step, network, optimizer, budget=budgets[split], split=split, dynamic=False
        )
    seconds: dict[str, list[float]] = {name_of_contender: [] for name_of_contender in contenders}
    order = list(contenders)
    for turn in range(_WARM_UP + rounds):
        losses: dict[str, float] = {}
        for name_of_contender in order[turn % 3 :] + order[: turn % 3]:
            torch.manual_seed(turn)
            begin = time.perf_counter()
            losses[name_of_contender] = contenders[name_of_contender](*batches[turn % 2]).item()
            seconds[name_of_contender].append(time.perf_counter() - begin)
        if len(set(losses.values())) != 1:
            raise AssertionError(f"{name}: losses differ in round {turn}: {losses}")
    ops = {
        split: sum(type(i).__name__ == "Run" for i in step.planned.program.instructions)
        for split, step in compiled_steps.items()
    }
    for step in compiled_steps.values():
        step.close()
    steady = {name_of_contender: times[_WARM_UP:] for name_of_contender, times in seconds.items()}
    return {
        "name": name,
        "budgets": budgets,
        "without_ranges": without_ranges,
        "ops": ops,
        "first_seconds": {name_of_contender: times[0] for name_of_contender, times in seconds.items()},
        "seconds": {name_of_contender: statistics.median(times) for name_of_contender, times in steady.items()},
        "over_eager": {
            name_of_contender: round_by_round(steady[name_of_contender], steady["eager"])
            for name_of_contender in budgets
        },
    }


def _estimate_splits() -> list[dict[str, Any]]:
    def language(model: torch.nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    with torch.device("meta"):
        tokens = torch.zeros(4, 512, dtype=torch.long)
        volume, labels = torch.zeros(1, 3, 192, 192, 192), torch.zeros(1, 192, 192, 192, dtype=torch.long)
        images, classes = torch.zeros(1440, 3, 224, 224), torch.zeros(1440, dtype=torch.long)
        gpt = GPT(GPTShape(layers=6, width=384, heads=6, context=512, vocab=50257))
        cases = [
            ("GPT-25M, vocabulary 50257, 4 x 512 tokens", gpt, (tokens, tokens), language, torch.optim.AdamW),
            ("3D U-Net, 192³", UNet3d(), (volume, labels), None, torch.optim.SGD),
            ("ResNet-50, batch 1440", ResNet(50), (images, classes), None, torch.optim.SGD),
        ]
    rows: list[dict[str, Any]] = []
    for name, model, inputs, loss, make in cases:
        optimizer = make(model.parameters(), lr=0.01)

        def step(
            *inputs_of_step: torch.Tensor, model: Any = model, loss: Any = loss, optimizer: Any = optimizer
        ) -> torch.Tensor:
            estimate = (
                loss(model, *inputs_of_step)
                if loss is not None
                else F.cross_entropy(model(inputs_of_step[0]), inputs_of_step[1])
            )
            estimate.backward()
            optimizer.step()
            optimizer.zero_grad()
            return estimate

        estimate = outofcore.estimate(step, model, optimizer, inputs=inputs, device="h100")
        rows.append({"name": name, "budgets": {"off": estimate.whole_budget, "exact": estimate.smallest_budget}})
    return rows


def main(
    rounds: Annotated[int, typer.Option(min=3, help="Number of rounds; each contender runs one step per round.")] = 8,
    date: Annotated[str | None, typer.Option(help="Date of the measurement, ISO 8601 (default: now).")] = None,
) -> None:
    """Measure, print tables, and write the numbers to benchmarks/results/split.json."""
    rows: list[dict[str, Any]] = []
    for name, (model, options) in _HERE.items():
        rows.append(_measure(name, model, options, rounds))
        print(json.dumps(rows[-1]), flush=True)
    smallest = ("smallest budget, whole", "split", "split, without ranges")
    table = Table("step", *smallest, "eager", "whole", "split", "first call")
    for row in rows:
        table.add_row(
            row["name"],
            format_bytes(row["budgets"]["off"]),
            f"{format_bytes(row['budgets']['exact'])} ({row['budgets']['exact'] / row['budgets']['off']:.2f})",
            format_bytes(row["without_ranges"]),
            format_seconds(row["seconds"]["eager"]),
            *(f"{format_seconds(row['seconds'][mode])} ({row['over_eager'][mode]:.2f})" for mode in ("off", "exact")),
            format_seconds(row["first_seconds"]["exact"]),
        )
    console().print(table)
    worked_out = _estimate_splits()
    table = Table("estimated for an H100", "smallest budget, whole", "split")
    for row in worked_out:
        whole_budget, split_budget = row["budgets"]["off"], row["budgets"]["exact"]
        share = "" if whole_budget is None else f" ({split_budget / whole_budget:.2f})"
        table.add_row(
            row["name"], "" if whole_budget is None else format_bytes(whole_budget), format_bytes(split_budget) + share
        )
    console().print(table)
    print(f"written to {write_result('split', {'rows': rows, 'worked_out': worked_out}, date)}")


if __name__ == "__main__":
    typer.run(main)
