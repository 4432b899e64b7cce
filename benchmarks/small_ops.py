"""Measure the overhead of ops on small tensors in an eager loop under ``outofcore.budget``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from _common import console, write_result
from rich.table import Table
from torch import nn

import outofcore

_CALLS = 1000


def _ops() -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    a, b, c = torch.rand(8, 8), torch.rand(8, 8), torch.rand(8, 8)
    weight, tensors = torch.rand(8, 8, requires_grad=True), [torch.rand(8) for _ in range(4)]
    return {
        "add": lambda: a + b,
        "add_": lambda: c.add_(b),
        "addcmul_": lambda: c.addcmul_(a, b, value=0.0),
        "relu": lambda: torch.relu(a),
        "sum": lambda: torch.sum(a),
        "mm": lambda: a @ b,
        "softmax": lambda: a.softmax(1),
        "layer_norm": lambda: F.layer_norm(a, (8,)),
        "cat": lambda: torch.cat([a, b]),
        "zeros": lambda: torch.zeros(8),
        "item": b[0, 0].item,
        "add, with a gradient": lambda: weight + b,
        "_foreach_mul_ of four": lambda: torch._foreach_mul_(tensors, 1.0),
        "cumprod (no kernel of its own)": lambda: a.cumprod(1),
    }


def _seconds(op: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(_CALLS):
        op()
    return (time.perf_counter() - start) / _CALLS


def main(
    *,
    rounds: Annotated[int, typer.Option(min=3, help="Number of rounds per op.")] = 30,
    date: Annotated[str | None, typer.Option(help="Date of the measurement, ISO 8601 (default: now).")] = None,
) -> None:
    """Measure, print a table, and write the numbers to benchmarks/results."""
    torch.set_num_threads(1)
    model, ops = nn.Linear(512, 512), _ops()
    plain: dict[str, list[float]] = {name: [] for name in ops}
    in_loop: dict[str, list[float]] = {name: [] for name in ops}
    for _ in range(rounds):
        for name, op in ops.items():
            plain[name].append(_seconds(op))
        with outofcore.budget("64MiB", model, cache=False):
            model(torch.rand(512, 512)).sum().backward()  # an op on a large tensor
            for name, op in ops.items():
                in_loop[name].append(_seconds(op))
    rows = [
        {
            "op": name,
            "plain": statistics.median(plain[name]),
            "beyond": statistics.median(a - b for a, b in zip(in_loop[name], plain[name], strict=True)),
        }
        for name in ops
    ]
    table = Table(title="Microseconds per op on small tensors", title_justify="left")
    for heading in ("op", "plain PyTorch", "overhead in a loop"):
        table.add_column(heading, justify="left" if heading == "op" else "right")
    for row in rows:
        table.add_row(str(row["op"]), f"{1e6 * float(row['plain']):.2f}", f"{1e6 * float(row['beyond']):.2f}")
    console().print(table)
    print(f"written to {write_result('small-ops', {'rounds': rounds, 'rows': rows}, date)}")


if __name__ == "__main__":
    typer.run(main)
