"""``outofcore train``: train a model of the zoo and tell how it goes."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import outofcore
from outofcore.cli.common import find_workload
from outofcore.errors import InputError
from outofcore.execution.opening import open_backend
from outofcore.report import moved_text, step_report, step_text, write_picture
from outofcore.report.machine import peak_memory_bytes
from outofcore.units import format_bytes, format_seconds
from outofcore.zoo import Workload


@dataclass(frozen=True, slots=True)
class _Done:
    """What is told of a step."""

    loss: float
    seconds: float
    arena_bytes: int | None = None
    bytes_out: int = 0
    bytes_in: int = 0

    bits: bool = False  # whether the loss is to be told exactly

    def text(self) -> str:
        loss = f"{self.loss:.4f} ({self.loss.hex()})" if self.bits else f"{self.loss:.4f}"
        parts = [f"loss {loss}", format_seconds(self.seconds)]
        if self.arena_bytes is not None:
            parts.append(f"resident {format_bytes(self.arena_bytes)}")
            parts.append(f"out {format_bytes(self.bytes_out)}, in {format_bytes(self.bytes_in)}")
        return "  ".join(parts)


class _Lines:
    """A line for each stage and each step: for logs."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._stage = ""

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def stage(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self._stage = stage
            print(f"{stage} …", flush=True)

    def step(self, number: int, done: _Done) -> None:
        print(f"step {number}/{self._steps}  {done.text()}", flush=True)


class _Live:
    """A progress bar: for terminals."""

    def __init__(self, steps: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[told]}"),
            BarColumn(bar_width=10),  # last: a narrow terminal cuts it off first
            refresh_per_second=4,  # drawing takes time from the training
        )
        self._stage_task = self._progress.add_task("", total=1, told="", visible=False)
        self._steps = self._progress.add_task("train", total=steps, told="")

    def __enter__(self) -> _Live:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def stage(self, stage: str, done: int, total: int) -> None:
        self._progress.update(self._stage_task, description=stage, completed=done, total=total, visible=True)

    def step(self, number: int, done: _Done) -> None:
        self._progress.update(self._stage_task, visible=False)
        self._progress.update(self._steps, completed=number, told=done.text())


def train(
    model: str,
    options: Mapping[str, Any],
    *,
    budget: int | None,
    steps: int,
    home: str | None,
    policy: str,
    picture: Path | None,
    save: Path | None = None,
    resume: Path | None = None,
    bits: bool = False,
    cache: bool | Path = True,
    host_budget: int | None = None,
    device: str = "cpu",
) -> None:
    """Train and print progress and a summary.

    Args:
        model: as on the command line.
        options: of the workload.
        budget: bytes; None: plain PyTorch.
        steps: how many.
        home: "disk", "host" or a folder; None: as for ``outofcore.compile``.
        policy: one of ``outofcore.planning.POLICIES``.
        picture: an HTML file to write the memory of the last step to.
        save: a folder for a checkpoint at the end.
        resume: a folder with a checkpoint to go on from.
        bits: print all bits of the losses.
        cache: as for ``outofcore.compile``.
        host_budget: as for ``outofcore.compile``.
        device: where the step runs.

    Raises:
        OutOfCoreError: an argument cannot be used, or the step cannot be captured, planned or run.
    """
    work = find_workload(model, options)
    print(work.describe())
    display = (_Live if sys.stdout.isatty() else _Lines)(steps)
    if budget is None:
        where = open_backend(device).device
        network = work.build().to(where)
        optimizer = work.optimizer(network)
        torch.manual_seed(work.options.seed)  # for dropout; the weights have a generator of their own
        begun = 0 if resume is None else _steps_in(outofcore.load(resume, network, optimizer))
        plain = work.make_step(network, optimizer)

        def on_device(*batch: torch.Tensor) -> torch.Tensor:
            return plain(*(tensor.to(where) for tensor in batch))

        done = _loop(work, plain if where.type == "cpu" else on_device, steps, display, None, begun, bits)
        if save is not None:
            outofcore.save(save, network, optimizer, extra={"steps": begun + steps})
        _print_summary(done, None, None)
        return
    if torch.device(device).type != "cpu":
        _train_on(
            work,
            device,
            display,
            budget=budget,
            steps=steps,
            home=home,
            policy=policy,
            save=save,
            resume=resume,
            bits=bits,
            cache=cache,
            host_budget=host_budget,
        )
        return
    with outofcore.open_home(home, host_budget) as opened:
        network = outofcore.build(work.build, home=opened) if resume is None else work.skeleton()
        optimizer = work.optimizer(network)
        torch.manual_seed(work.options.seed)
        begun = 0 if resume is None else _steps_in(outofcore.load(resume, network, optimizer, home=opened))
        plain = work.make_step(network, optimizer)
        with outofcore.compile(
            plain, network, optimizer, budget=budget, home=opened, policy=policy, cache=cache
        ) as step:
            step.on_progress = display.stage
            done = _loop(work, step, steps, display, step, begun, bits)
            if save is not None:
                step.save(save, extra={"steps": begun + steps})
                print(f"saved: {save}")
            _print_summary(done, step, budget)
            if picture is not None:
                planned, graph = step.planned, step.captured.graph
                timelines = [("measured", step.timeline), ("predicted", planned.timeline)]
                write_picture(picture, graph, planned.program, timelines, budget=budget, title=work.describe())
                print(f"picture: {picture}")


def _train_on(
    work: Workload,
    device: str,
    display: _Lines | _Live,
    *,
    budget: int,
    steps: int,
    home: str | None,
    policy: str,
    save: Path | None,
    resume: Path | None,
    bits: bool,
    cache: bool | Path,
    host_budget: int | None,
) -> None:
    """Train on a GPU: the model is made in ordinary memory, and the step has homes of its own."""
    network = work.build()
    optimizer = work.optimizer(network)
    torch.manual_seed(work.options.seed)
    begun = 0 if resume is None else _steps_in(outofcore.load(resume, network, optimizer))
    plain = work.make_step(network, optimizer)
    with outofcore.compile(
        plain,
        network,
        optimizer,
        budget=budget,
        device=device,
        home=home,
        host_budget=host_budget,
        policy=policy,
        cache=cache,
    ) as step:
        step.on_progress = display.stage
        done = _loop(work, step, steps, display, step, begun, bits)
        if save is not None:
            step.save(save, extra={"steps": begun + steps})
            print(f"saved: {save}")
        _print_summary(done, step, budget)


def _steps_in(extra: Any) -> int:
    """How many steps a checkpoint of this command has behind it."""
    steps = extra.get("steps") if isinstance(extra, dict) else None
    if not isinstance(steps, int):
        raise InputError(
            "the checkpoint does not say how many steps it has behind it: it was not saved by this command"
        )
    return steps


def _loop(
    work: Workload,
    run: Callable[..., torch.Tensor],
    steps: int,
    display: _Lines | _Live,
    step: outofcore.Step | None,
    begun: int,
    bits: bool,
) -> list[_Done]:
    batches = itertools.islice(work.batches(), begun, None)
    told: list[_Done] = []
    with display:
        for number in range(1, steps + 1):
            batch = next(batches)
            start = time.perf_counter()
            loss = run(*batch)
            seconds = time.perf_counter() - start
            if step is None:
                told.append(_Done(loss.item(), seconds, bits=bits))
            else:
                stats, arena = step.stats, step.planned.program.arena_bytes
                told.append(_Done(loss.item(), seconds, arena, stats.bytes_out, stats.bytes_in, bits))
            display.step(number, told[-1])
    return told


def _print_summary(done: list[_Done], step: outofcore.Step | None, budget: int | None) -> None:
    first, rest = done[0], done[1:] or done
    rows = [
        ("loss", f"{first.loss:.4f} at first, {done[-1].loss:.4f} at last"),
        ("median step", f"{format_seconds(statistics.median(d.seconds for d in rest))} (the first step left out)"),
        ("first step", format_seconds(first.seconds)),
    ]
    if step is not None:
        rows.append(("predicted", format_seconds(step.stats.predicted_seconds)))
        if step.stats.off_plan:
            rows.append(("off the plan", f"{step.stats.off_plan} requests for memory"))
    peak = peak_memory_bytes()
    if peak is not None:
        rows.append(("process peak", f"{format_bytes(peak)} (RSS, PyTorch itself included)"))
    if step is not None and budget is not None:
        planned, graph = step.planned, step.captured.graph
        report = step_report(graph, planned.plan, planned.program, step.timeline, budget)
        print(f"the last step\n{step_text(report)}\n{moved_text(report)}")
    width = max(len(name) for name, _ in rows)
    print("training")
    print("\n".join(f"  {name:<{width}}  {value}" for name, value in rows))
    sys.stdout.flush()
