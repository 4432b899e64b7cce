"""``outofcore train`` and ``outofcore report``: run steps of a model within a budget, and tell how it goes."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.optim import Optimizer

import outofcore
from outofcore.cli.subjects import build, find_workload, is_script
from outofcore.errors import InputError
from outofcore.execution.opening import open_backend
from outofcore.report import moved_text, page_content, step_report, step_text, write_report
from outofcore.report.machine import peak_memory_bytes
from outofcore.units import format_bytes, format_seconds
from outofcore.zoo import Workload
from outofcore.zoo.workload import TrainStep


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
        self.shown = nullcontext()

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
        self.shown = self._progress

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
    """Train and print progress and a summary; arguments are as on the command line, without a budget plain PyTorch.

    Raises:
        OutOfCoreError: an argument cannot be used, or the step cannot be captured, planned or run.
    """
    work = find_workload(model, options)
    print(work.describe())
    display = (_Live if sys.stdout.isatty() else _Lines)(steps)
    if budget is None:
        _train_eagerly(work, device, display, steps, save, resume, bits)
        return
    with (
        _built(work, device, home, host_budget, resume) as (plain, network, optimizer, begun, places),
        outofcore.compile(plain, network, optimizer, budget=budget, policy=policy, cache=cache, **places) as step,
    ):
        step.on_progress = display.stage
        done = _loop(work, step, steps, display, step, begun, bits)
        if save is not None:
            step.save(save, extra={"steps": begun + steps})
            print(f"saved: {save}")
        _print_summary(done, step, budget)
        if picture is not None:
            planned, graph = step.planned, step.captured.graph
            timelines = [("measured", step.timeline), ("predicted", planned.timeline)]
            title = work.describe()
            write_report(
                picture, page_content(graph, planned.plan, planned.program, timelines, budget=budget, title=title)
            )
            print(f"picture: {picture}")


def _train_eagerly(
    work: Workload,
    device: str,
    display: _Lines | _Live,
    steps: int,
    save: Path | None,
    resume: Path | None,
    bits: bool,
) -> None:
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


@contextmanager
def _built(
    work: Workload, device: str, home: str | None, host_budget: int | None, resume: Path | None = None
) -> Generator[tuple[TrainStep, nn.Module, Optimizer, int, dict[str, Any]]]:
    """A workload ready to be compiled: its step, model, optimizer, steps behind it, and ``compile``'s device and home.

    On the CPU the model is made at the home; on a GPU in ordinary memory, and the step opens homes of its own.
    """
    with ExitStack() as stack:
        opened, places = None, {"device": device, "home": home, "host_budget": host_budget}
        if open_backend(device).device.type == "cpu":
            opened = stack.enter_context(outofcore.open_home(home, host_budget))
            places = {"home": opened}
        if opened is None:
            network = work.build()
        else:
            network = outofcore.build(work.build, home=opened) if resume is None else work.skeleton()
        optimizer = work.optimizer(network)
        torch.manual_seed(work.options.seed)  # for dropout; the weights have a generator of their own
        begun = 0 if resume is None else _steps_in(outofcore.load(resume, network, optimizer, home=opened))
        yield work.make_step(network, optimizer), network, optimizer, begun, places


def report(
    model: str,
    options: Mapping[str, Any],
    *,
    budget: int,
    steps: int,
    device: str,
    home: str | None,
    host_budget: int | None,
    policy: str,
    output: Path,
    trace: Path | None,
    curve: bool,
    cache: bool | Path = True,
) -> None:
    """Train some steps, at least one, and report the last of them; arguments are as on the command line.

    Raises:
        OutOfCoreError: an argument cannot be used, or the step cannot be captured, planned or run.
    """
    with ExitStack() as stack:
        if is_script(model):
            own = build(model)
            plain, network, optimizer, title = own.step, own.models, own.optimizers, own.title
            places: dict[str, Any] = {"device": device, "home": home, "host_budget": host_budget}
            batches: Iterator[tuple[Any, ...]] = itertools.repeat(own.inputs)
        else:
            work = find_workload(model, options)
            batches, title = work.batches(), work.describe()
            made = stack.enter_context(_built(work, device, home, host_budget))
            plain, network, optimizer, _, places = made
        step = stack.enter_context(
            outofcore.compile(plain, network, optimizer, budget=budget, policy=policy, cache=cache, **places)
        )
        for number in range(1, steps + 1):
            step(*next(batches))
            print(f"step {number}/{steps}  {format_seconds(step.stats.seconds)}", flush=True)
        step.report(output, title=title, budgets=None if curve else 0)
        print(f"report: {output}")
        if trace is not None:
            step.trace(trace)
            print(f"trace: {trace}")


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
    with display.shown:
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
