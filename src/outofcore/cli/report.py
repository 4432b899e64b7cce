"""``outofcore report``: a few steps of a model, or a plan alone, as a page and as a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

import outofcore
from outofcore.cli.common import find_workload
from outofcore.cli.script import build, is_script
from outofcore.units import format_seconds

_Batches = Iterator[tuple[Any, ...]]


def _training(model: str, options: Mapping[str, Any]) -> tuple[Callable[..., Any], Any, Any, _Batches, str]:
    """Step, models, optimizers, batches and title."""
    if is_script(model):
        script = build(model)
        return script.step, script.model, script.optimizer, repeat(script.inputs), script.title
    work = find_workload(model, options)
    network = work.build()
    optimizer = work.optimizer(network)
    torch.manual_seed(work.options.seed)  # for dropout; the weights have a generator of their own
    return work.make_step(network, optimizer), network, optimizer, work.batches(), work.describe()


def train(
    model: str,
    options: Mapping[str, Any],
    *,
    budget: int,
    steps: int,
    home: str,
    host_budget: int | None,
    policy: str,
    output: Path,
    trace: Path | None,
    curve: bool,
    cache: bool | Path = True,
) -> None:
    """Train some steps and report the last of them.

    Args:
        model: of the zoo, or the user's own as "file.py:function".
        options: of the workload.
        budget: bytes.
        steps: how many; at least 1.
        home: "disk", "host" or a folder.
        host_budget: as for ``outofcore.compile``.
        policy: one of ``outofcore.planning.POLICIES``.
        output: the HTML file.
        trace: a file for the trace, if one is wanted.
        curve: plan for other budgets as well.
        cache: as for ``outofcore.compile``.

    Raises:
        OutOfCoreError: an argument cannot be used, or the step cannot be captured, planned or run.
    """
    plain, network, optimizer, batches, title = _training(model, options)
    compiled = outofcore.compile(
        plain, network, optimizer, budget=budget, home=home, host_budget=host_budget, policy=policy, cache=cache
    )
    with compiled as step:
        for number in range(1, steps + 1):
            step(*next(batches))
            print(f"step {number}/{steps}  {format_seconds(step.stats.seconds)}", flush=True)
        step.report(output, title=title, budgets=None if curve else 0)
        print(f"report: {output}")
        if trace is not None:
            step.trace(trace)
            print(f"trace: {trace}")
