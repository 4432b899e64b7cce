"""``outofcore train`` and ``outofcore report``: run steps of a model within a budget."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import outofcore
from outofcore.cli.options import PlaceOptions, ReportOptions, TrainOptions
from outofcore.cli.processes import CommandProcesses, join_processes
from outofcore.cli.subjects import build_user_step, find_workload
from outofcore.cli.targets import TargetKind, check_kind
from outofcore.errors import InputError
from outofcore.execution.opening import open_backend
from outofcore.options import UserStep
from outofcore.report import Page, copies_text, page_content, step_report, step_text, write_report
from outofcore.report.machine import peak_memory_bytes
from outofcore.units import format_bytes, format_seconds
from outofcore.zoo import Workload
from outofcore.zoo.workload import TrainStep


@dataclass(frozen=True, slots=True)
class _StepResult:
    loss: float
    seconds: float
    arena_bytes: int | None = None
    bytes_out: int = 0
    bytes_in: int = 0
    bits: bool = False  # print the loss with all bits

    def text(self) -> str:
        loss = f"{self.loss:.4f} ({self.loss.hex()})" if self.bits else f"{self.loss:.4f}"
        parts = [f"loss {loss}", format_seconds(self.seconds)]
        if self.arena_bytes is not None:
            parts.append(f"memory {format_bytes(self.arena_bytes)}")
            parts.append(f"evicted {format_bytes(self.bytes_out)}, fetched {format_bytes(self.bytes_in)}")
        return "  ".join(parts)


class _LineDisplay:
    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._stage = ""
        self.shown = nullcontext()

    def stage(self, stage: str, finished: int, total: int) -> None:
        if stage != self._stage:
            self._stage = stage
            print(f"{stage} …", flush=True)

    def step(self, number: int, result: _StepResult) -> None:
        print(f"step {number}/{self._steps}  {result.text()}", flush=True)


class _BarDisplay:
    def __init__(self, steps: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[told]}"),
            BarColumn(bar_width=10),  # last: a narrow terminal cuts it off first
            refresh_per_second=4,  # drawing slows the training
        )
        self._stage_task = self._progress.add_task("", total=1, told="", visible=False)
        self._steps = self._progress.add_task("train", total=steps, told="")
        self.shown = self._progress

    def stage(self, stage: str, finished: int, total: int) -> None:
        self._progress.update(
            self._stage_task, description=stage, completed=finished, total=total, visible=finished < total
        )

    def step(self, number: int, result: _StepResult) -> None:
        self._progress.update(self._stage_task, visible=False)
        self._progress.update(self._steps, completed=number, told=result.text())


def _make_display(steps: int) -> _LineDisplay | _BarDisplay:
    return (_BarDisplay if sys.stdout.isatty() else _LineDisplay)(steps)


@dataclass(frozen=True)
class _TrainCommand:
    work: Workload
    options: TrainOptions
    places: PlaceOptions
    processes: CommandProcesses

    def train_compiled(self, display: _LineDisplay | _BarDisplay, budget: int) -> None:
        options, processes = self.options, self.processes
        shard = options.shard and processes.count > 1
        with (
            _built_step(self.work, processes, self.places, options.resume, shard=shard) as built,
            built.compile(budget, self.places, processes.device, shard=shard) as step,
        ):
            step.on_progress = display.stage
            results = self.run_steps(display, step, built.steps_done, step)
            if options.save is not None and (shard or not processes.rank):
                step.save(options.save, extra={"steps": built.steps_done + options.steps})
            if shard:
                graph = step.captured.graph
                persistent = format_bytes(sum(graph.storages[storage].bytes for storage in graph.persistent))
                print(f"model, gradients and optimizer state in each process: {persistent}")
                step.close(whole=False)
            if processes.rank:
                return
            if options.save is not None:
                print(f"saved: {options.save}")
            _print_summary(results, step)
            if options.picture is not None:
                planned = step.planned
                timelines = [("measured", step.timeline), ("predicted", planned.timeline)]
                page = Page(self.work.describe(), budget)
                content = page_content(step.captured.graph, planned.plan, planned.program, timelines, page)
                write_report(options.picture, content)
                print(f"picture: {options.picture}")

    def train_in_plain_pytorch(self, display: _LineDisplay | _BarDisplay) -> None:
        work, options, processes = self.work, self.options, self.processes
        device = open_backend(processes.device).device
        network = work.build().to(device)
        optimizer = work.optimizer(network)
        _seed_dropout(work, processes)
        steps_done = 0 if options.resume is None else _saved_steps(outofcore.load(options.resume, network, optimizer))
        plain = work.make_step(processes.wrap(network), optimizer)
        results = self.run_steps(display, lambda *batch: plain(*(tensor.to(device) for tensor in batch)), steps_done)
        if options.save is not None and not processes.rank:
            outofcore.save(options.save, network, optimizer, extra={"steps": steps_done + options.steps})
        _print_summary(results)

    def run_steps(
        self,
        display: _LineDisplay | _BarDisplay,
        run: TrainStep,
        steps_done: int,
        step: outofcore.Step[..., Any] | None = None,
    ) -> list[_StepResult]:
        """Run and display the steps that follow the first ``steps_done``; return their results."""
        batches = self.processes.select_batches(self.work.batches(), steps_done)
        results: list[_StepResult] = []
        with display.shown:
            for number, batch in enumerate(itertools.islice(batches, self.options.steps), 1):
                start = time.perf_counter()
                loss = run(*batch)
                result = _StepResult(loss.item(), time.perf_counter() - start, bits=self.options.bits)
                if step is not None:
                    stats, arena = step.stats, step.planned.program.arena_bytes
                    result = replace(result, arena_bytes=arena, bytes_out=stats.bytes_out, bytes_in=stats.bytes_in)
                results.append(result)
                display.step(number, result)
        return results

    def train_with_logical_workers(self, workers: int, budget: int) -> None:
        work, options, places = self.work, self.options, self.places
        with ExitStack() as stack:
            home = _open_home(places, stack)
            network = work.build() if home is None else outofcore.build(work.build, home=home)
            optimizer = work.optimizer(network)
            training = stack.enter_context(
                outofcore.elastic(
                    work.make_turn(network),
                    network,
                    optimizer,
                    workers=workers,
                    budget=budget,
                    update=work.make_update(network, optimizer),
                    seed=work.options.seed,
                    device=places.device,
                    home=home or places.home,
                    host_budget=None if home else places.host_bytes,
                    policy=places.policy,
                    cache=places.cache_argument,
                )
            )
            if options.resume is not None:
                training.load(options.resume)
            batches = itertools.islice(work.batches(), training.steps * workers, None)
            results: list[_StepResult] = []
            display = _make_display(options.steps) if training.rank == 0 else None
            if display is not None:
                processes = "process" if training.processes == 1 else "processes"
                print(f"{work.describe()}; {workers} logical workers on {training.processes} {processes}")
                training.step.on_progress = display.stage
            with nullcontext() if display is None else display.shown:
                for number in range(1, options.steps + 1):
                    step_batches = list(itertools.islice(batches, workers))
                    losses = training({worker: step_batches[worker] for worker in training.workers})
                    if display is not None:
                        results.append(_StepResult(losses[0].item(), training.stats.seconds, bits=options.bits))
                        display.step(number, results[-1])
            if options.save is not None:
                training.save(options.save)
            if display is not None:
                if options.save is not None:
                    print(f"saved: {options.save}")
                _print_summary(results)
                sent, ring_bytes = format_bytes(training.stats.bytes_sent), format_bytes(training.stats.least_bytes)
                print(f"  sent per step  {sent} by this process; a ring would send {ring_bytes} on average")


def train(model: str, zoo: Mapping[str, Any], budget: int | None, options: TrainOptions, places: PlaceOptions) -> None:
    """Train a model of the zoo, in plain PyTorch if there is no budget; print progress and a summary."""
    script = f"{model.rpartition('.py')[0] or 'my_script'}.py"
    check_kind(
        model,
        [TargetKind.ZOO],
        "train",
        f"to train your own script, use: outofcore run --budget 6GiB {script}",
    )
    if options.save is not None and options.save.exists() and not options.save.is_dir():
        raise InputError(f"--save takes a folder, but {options.save} is a file; name a folder")
    work = find_workload(model, zoo)
    if options.elastic is not None and budget is not None:
        _TrainCommand(work, options, places, CommandProcesses(device=places.device)).train_with_logical_workers(
            options.elastic, budget
        )
        return
    with join_processes(places.device) as processes:
        print(work.describe())
        if processes.count > 1:
            print(f"{processes.count} processes, each with its own batches; the lines below describe the first")
        training, display = _TrainCommand(work, options, places, processes), _make_display(options.steps)
        if budget is None:
            training.train_in_plain_pytorch(display)
        else:
            training.train_compiled(display, budget)


def _seed_dropout(work: Workload, processes: CommandProcesses) -> None:
    torch.manual_seed(work.options.seed + processes.rank)  # for dropout; weights have their own generator


def _open_home(places: PlaceOptions, stack: ExitStack) -> outofcore.OpenHome | None:
    """Open a home in which the model is built; return None for a GPU."""
    if open_backend(places.device).driver is not None:
        return None
    return stack.enter_context(outofcore.open_home(places.home, places.host_bytes))


@dataclass(frozen=True)
class _BuiltStep:
    user: UserStep[..., Any]
    steps_done: int = 0  # steps that the model has been trained for
    home: outofcore.OpenHome | None = None  # where the model was built; None: in ordinary memory

    def compile(
        self, budget: int, places: PlaceOptions, device: str, *, shard: bool = False
    ) -> outofcore.Step[..., Any]:
        user, home = self.user, self.home
        return outofcore.compile(
            user.function,
            user.models,
            user.optimizers,
            budget=budget,
            device=device,
            home=home or places.home,
            host_budget=None if home else places.host_bytes,
            policy=places.policy,
            cache=places.cache_argument,
            shard=shard or None,
        )


@contextmanager
def _built_step(
    work: Workload,
    processes: CommandProcesses,
    places: PlaceOptions,
    resume: Path | None = None,
    *,
    shard: bool = False,
) -> Generator[_BuiltStep]:
    """Yield the training step of a new model, or of a model loaded from the folder ``resume``."""
    with ExitStack() as stack:
        home = _open_home(places, stack)
        if home is None:
            network = work.build()
        else:
            network = outofcore.build(work.build, home=home) if resume is None else work.skeleton()
        optimizer = work.optimizer(network)
        _seed_dropout(work, processes)
        steps_done = 0 if resume is None else _saved_steps(outofcore.load(resume, network, optimizer, home=home))
        network = processes.wrap(network, shard=shard)
        yield _BuiltStep(UserStep(work.make_step(network, optimizer), [network], [optimizer]), steps_done, home)


def report(model: str, zoo: Mapping[str, Any], budget: int, options: ReportOptions, places: PlaceOptions) -> None:
    """Train ``options.steps`` steps, and write a report of the last one; also a trace if requested."""
    with ExitStack() as stack:
        processes = CommandProcesses(device=places.device)
        kind = check_kind(
            model,
            [TargetKind.ZOO, TargetKind.SCRIPT],
            "report",
            "use outofcore plan instead, with --picture to draw the memory of a step",
        )
        if kind is TargetKind.SCRIPT:
            user_step = build_user_step(model)
            built, title = _BuiltStep(user_step.user), user_step.title
            batches: Iterator[tuple[Any, ...]] = itertools.repeat(user_step.inputs)
        else:
            work = find_workload(model, zoo)
            title = work.describe()
            processes = stack.enter_context(join_processes(places.device))
            built = stack.enter_context(_built_step(work, processes, places))
            batches = processes.select_batches(work.batches(), 0)
        step = stack.enter_context(built.compile(budget, places, processes.device))
        for number in range(1, options.steps + 1):
            step(*next(batches))
            print(f"step {number}/{options.steps}  {format_seconds(step.stats.seconds)}", flush=True)
        if processes.rank:
            return
        step.report(options.output, title=title, budgets=None if options.curve else 0)
        print(f"report: {options.output}")
        if options.trace is not None:
            step.trace(options.trace)
            print(f"trace: {options.trace}")


def _saved_steps(extra: Any) -> int:
    """Return the number of steps in a checkpoint's extra data; raise ``InputError`` if it is missing."""
    steps = extra.get("steps") if isinstance(extra, dict) else None
    if not isinstance(steps, int):
        raise InputError(
            "the checkpoint has no number of steps, so this command did not save it; load it with outofcore.load() in "
            "your own script"
        )
    return steps


def _print_summary(results: list[_StepResult], step: outofcore.Step[..., Any] | None = None) -> None:
    first, later = results[0], results[1:] or results
    rows = [
        ("loss", f"first {first.loss:.4f}, last {results[-1].loss:.4f}"),
        ("median step", f"{format_seconds(statistics.median(d.seconds for d in later))} without the first step"),
        (
            "first step",
            f"{format_seconds(first.seconds)}{'' if step is None else ', including measuring and planning'}",
        ),
    ]
    if step is not None:
        rows.append(("predicted step", format_seconds(step.stats.predicted_seconds)))
        if step.stats.off_plan:
            rows.append(("unplanned", f"{step.stats.off_plan} allocations"))
    peak = peak_memory_bytes()
    if peak is not None:
        rows.append(("process peak", f"{format_bytes(peak)} of memory (RSS), including PyTorch itself"))
    if step is not None:
        planned, graph = step.planned, step.captured.graph
        report = step_report(graph, planned.plan, planned.program, step.timeline, step.budget)
        print(f"last step\n{step_text(report)}\n{copies_text(report)}")
    width = max(len(name) for name, _ in rows)
    print("all steps")
    print("\n".join(f"  {name:<{width}}  {value}" for name, value in rows))
    sys.stdout.flush()
