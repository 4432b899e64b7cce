"""``outofcore train`` and ``outofcore report``: run steps of a model within a budget, and print progress."""

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
from outofcore.cli.processes import Processes, joined
from outofcore.cli.subjects import build, find_workload
from outofcore.cli.targets import Kind, check_takes
from outofcore.errors import InputError
from outofcore.execution.opening import open_backend
from outofcore.report import moved_text, page_content, step_report, step_text, write_report
from outofcore.report.machine import peak_memory_bytes
from outofcore.units import format_bytes, format_seconds
from outofcore.zoo import Workload
from outofcore.zoo.workload import TrainStep


@dataclass(frozen=True, slots=True)
class _Done:
    """The printed facts of a step."""

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
    """Progress as lines, for logs."""

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
    """Progress as a bar, for terminals."""

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
    elastic: int | None = None,
    shard: bool = False,
) -> None:
    """Train and print progress and a summary; arguments are as on the command line, without a budget plain PyTorch."""
    check_takes(
        model,
        [Kind.ZOO],
        "train",
        "plan and report take others; train your own step by outofcore.compile, or the script as it is by: "
        "outofcore run --budget 6GiB my_script.py",
    )
    if save is not None and save.exists() and not save.is_dir():
        raise InputError(f"--save takes a folder, and {save} is a file; name another one")
    work = find_workload(model, options)
    if elastic is not None and budget is not None:
        places = {"device": device, "home": home, "host_budget": host_budget, "policy": policy, "cache": cache}
        _train_elastically(work, elastic, budget, steps, save, resume, bits, places)
        return
    with joined(device) as processes:
        print(work.describe())
        if processes.count > 1:
            print(f"{processes.count} processes, a batch for each; what is told is of the first")
        display = (_Live if sys.stdout.isatty() else _Lines)(steps)
        if budget is None:
            _train_eagerly(work, processes, display, steps, save, resume, bits)
            return
        _train_within(
            work,
            processes,
            display,
            budget,
            steps,
            home,
            policy,
            picture,
            save,
            resume,
            bits,
            cache,
            host_budget,
            shard=shard and processes.count > 1,
        )


def _train_within(
    work: Workload,
    processes: Processes,
    display: _Lines | _Live,
    budget: int,
    steps: int,
    home: str | None,
    policy: str,
    picture: Path | None,
    save: Path | None,
    resume: Path | None,
    bits: bool,
    cache: bool | Path,
    host_budget: int | None,
    *,
    shard: bool,
) -> None:
    with (
        _built(work, processes, home, host_budget, resume, shard=shard) as (plain, network, optimizer, begun, places),
        outofcore.compile(
            plain, network, optimizer, budget=budget, policy=policy, cache=cache, shard=shard or None, **places
        ) as step,
    ):
        step.on_progress = display.stage
        done = _loop(work, step, steps, display, step, begun, bits, processes)
        if save is not None and (shard or not processes.rank):
            step.save(save, extra={"steps": begun + steps})
        if shard:
            graph = step.captured.graph
            lasting = sum(graph.storages[storage].bytes for storage in graph.persistent)
            print(f"of the model, its gradients and the optimizer's state {format_bytes(lasting)} are in each process")
            step.close(whole=False)
        if processes.rank:
            return
        if save is not None:
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
    processes: Processes,
    display: _Lines | _Live,
    steps: int,
    save: Path | None,
    resume: Path | None,
    bits: bool,
) -> None:
    where = open_backend(processes.device).device
    network = work.build().to(where)
    optimizer = work.optimizer(network)
    torch.manual_seed(work.options.seed + processes.rank)  # for dropout; the weights have a generator of their own
    begun = 0 if resume is None else _steps_in(outofcore.load(resume, network, optimizer))
    plain = work.make_step(processes.wrapped(network), optimizer)

    def on_device(*batch: torch.Tensor) -> torch.Tensor:
        return plain(*(tensor.to(where) for tensor in batch))

    done = _loop(work, plain if where.type == "cpu" else on_device, steps, display, None, begun, bits, processes)
    if save is not None and not processes.rank:
        outofcore.save(save, network, optimizer, extra={"steps": begun + steps})
    _print_summary(done, None, None)


def _train_elastically(
    work: Workload,
    workers: int,
    budget: int,
    steps: int,
    save: Path | None,
    resume: Path | None,
    bits: bool,
    places: dict[str, Any],
) -> None:
    """Train with logical workers; process 0 prints.

    Batches come in the order of the steps and within a step of the workers; each process takes its own.
    """
    with ExitStack() as stack:
        if open_backend(places["device"]).device.type == "cpu":
            opened = stack.enter_context(outofcore.open_home(places.pop("home"), places.pop("host_budget")))
            places["home"] = opened
            network = outofcore.build(work.build, home=opened)
        else:
            network = work.build()
        optimizer = work.optimizer(network)
        run = stack.enter_context(
            outofcore.elastic(
                work.make_turn(network),
                network,
                optimizer,
                workers=workers,
                budget=budget,
                update=work.make_update(network, optimizer),
                seed=work.options.seed,
                **places,
            )
        )
        if resume is not None:
            run.load(resume)
        batches = itertools.islice(work.batches(), run.steps * workers, None)
        told: list[_Done] = []
        display = (_Live if sys.stdout.isatty() else _Lines)(steps) if run.rank == 0 else None
        if display is not None:
            processes = "process" if run.processes == 1 else "processes"
            print(f"{work.describe()}; {workers} logical workers on {run.processes} {processes}")
            run.step.on_progress = display.stage
        with nullcontext() if display is None else display.shown:
            for number in range(1, steps + 1):
                together = list(itertools.islice(batches, workers))
                losses = run({worker: together[worker] for worker in run.workers})
                if display is not None:
                    told.append(_Done(losses[0].item(), run.stats.seconds, bits=bits))
                    display.step(number, told[-1])
        if save is not None:
            run.save(save)
        if display is not None:
            if save is not None:
                print(f"saved: {save}")
            _print_summary(told, None, None)
            sent, least = run.stats.bytes_sent, run.stats.least_bytes
            print(f"  sent in a step: {format_bytes(sent)} by this process, {format_bytes(least)} on average in a ring")


@contextmanager
def _built(
    work: Workload,
    processes: Processes,
    home: str | None,
    host_budget: int | None,
    resume: Path | None = None,
    *,
    shard: bool = False,
) -> Generator[tuple[TrainStep, nn.Module, Optimizer, int, dict[str, Any]]]:
    """Yield a workload ready to be compiled: step, model, optimizer, steps done, and ``compile``'s device and home.

    On the CPU the model is made at the home; on a GPU in ordinary memory, and the step opens homes of its own.
    """
    with ExitStack() as stack:
        opened, places = None, {"device": processes.device, "home": home, "host_budget": host_budget}
        if open_backend(processes.device).device.type == "cpu":
            opened = stack.enter_context(outofcore.open_home(home, host_budget))
            places = {"home": opened}
        if opened is None:
            network = work.build()
        else:
            network = outofcore.build(work.build, home=opened) if resume is None else work.skeleton()
        optimizer = work.optimizer(network)
        torch.manual_seed(work.options.seed + processes.rank)  # for dropout; the weights have a generator of their own
        begun = 0 if resume is None else _steps_in(outofcore.load(resume, network, optimizer, home=opened))
        network = processes.wrapped(network, shard=shard)
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
    """Train some steps, at least one, and report the last of them; arguments are as on the command line."""
    with ExitStack() as stack:
        processes = Processes(device=device)
        kind = check_takes(
            model, [Kind.ZOO, Kind.SCRIPT], "report", "plan it instead, with --picture for the memory of a step"
        )
        if kind is Kind.SCRIPT:
            own = build(model)
            plain, network, optimizer, title = own.step, own.models, own.optimizers, own.title
            places: dict[str, Any] = {"device": device, "home": home, "host_budget": host_budget}
            batches: Iterator[tuple[Any, ...]] = itertools.repeat(own.inputs)
        else:
            work = find_workload(model, options)
            title = work.describe()
            processes = stack.enter_context(joined(device))
            made = stack.enter_context(_built(work, processes, home, host_budget))
            batches = processes.share(work.batches(), 0)
            plain, network, optimizer, _, places = made
        step = stack.enter_context(
            outofcore.compile(plain, network, optimizer, budget=budget, policy=policy, cache=cache, **places)
        )
        for number in range(1, steps + 1):
            step(*next(batches))
            print(f"step {number}/{steps}  {format_seconds(step.stats.seconds)}", flush=True)
        if processes.rank:
            return
        step.report(output, title=title, budgets=None if curve else 0)
        print(f"report: {output}")
        if trace is not None:
            step.trace(trace)
            print(f"trace: {trace}")


def _steps_in(extra: Any) -> int:
    """Return how many steps a checkpoint of this command has behind it."""
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
    processes: Processes,
) -> list[_Done]:
    batches = processes.share(work.batches(), begun)
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
