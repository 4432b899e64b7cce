"""Compare compiled steps and loops within a budget with DistributedDataParallel in plain PyTorch.

Processes run over gloo with one thread each; in each, training runs take turns of several steps. Budgets are half (or
``--share``) of the in-core arena, or of the loop's unconstrained peak. Losses and all state must equal plain PyTorch's
bit for bit. Sent bytes are compared with the minimum on a ring.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from _common import console, parse_options, write_result
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

import outofcore
from outofcore import zoo
from outofcore.profiling.groups import collectives_of
from outofcore.program import Run
from outofcore.report.waits import time_spent
from outofcore.units import GIB, format_bytes, format_seconds

_WORKLOADS: dict[str, dict[str, Any]] = {
    "gpt": {"params": "25M", "batch": 4, "context": 256},
    "resnet": {"depth": 18, "size": 64, "batch": 32},
}
_SMALL: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 2, "width": 64, "heads": 2, "context": 64, "batch": 4},
    "resnet": {"depth": 18, "size": 32, "batch": 4},
}
_ROOM = 64 * GIB
_TIMEOUT = timedelta(minutes=5)
# Steps per turn. A loop also copies between its steps; turns of one step would hide these copies.
_TURN = 5
# Steps excluded from medians: they capture and plan.
_WARM_UP = 2 * _TURN
# Steps that measure the peak of an unconstrained loop.
_PEAK_STEPS = 3


class _Training:
    """One training run: plain PyTorch, a compiled step, or a loop within a budget."""

    def __init__(self, work: zoo.Workload, rank: int, budget: int | None = None, *, is_loop: bool = False) -> None:
        self.model = DistributedDataParallel(work.build())
        self.optimizer = work.optimizer(self.model)
        self._run: Any = work.make_step(self.model, self.optimizer)
        self.loop: outofcore.Loop | None = None
        if budget is not None and is_loop:
            self.loop = outofcore.budget(budget, self.model, cache=False).start()
            self.loop.pause()
        elif budget is not None:
            self._run = outofcore.compile(self._run, self.model, self.optimizer, budget=budget)
        torch.manual_seed(rank)  # for dropout
        self._drawn = torch.get_rng_state()
        self.seconds: list[float] = []
        self.losses: list[str] = []

    def take_turn(self, batches: Sequence[tuple[torch.Tensor, ...]]) -> None:
        torch.set_rng_state(self._drawn)
        dist.barrier()
        if self.loop is not None:
            self.loop.resume()
        for batch in batches:
            begin = time.perf_counter()
            loss = self._run(*batch)
            self.seconds.append(time.perf_counter() - begin)
            self.losses.append(loss.item().hex())
        if self.loop is not None:
            self.loop.pause()
        self._drawn = torch.get_rng_state()

    def close(self) -> None:
        if self.loop is not None:
            self.loop.stop()
        else:
            self._run.close()

    @property
    def compiled(self) -> outofcore.Step[..., Any]:
        return self._run

    def state(self) -> list[torch.Tensor]:
        optimizer_values = (value for p in self.model.parameters() for value in self.optimizer.state[p].values())
        return [
            t.detach() for t in (*self.model.state_dict().values(), *optimizer_values) if isinstance(t, torch.Tensor)
        ]


def _batches(work: zoo.Workload, rank: int, processes: int) -> Iterator[tuple[torch.Tensor, ...]]:
    for number, batch in enumerate(work.batches()):
        if number % processes == rank:
            yield batch


def _collective_seconds(step: outofcore.Step[..., Any]) -> tuple[float, float]:
    """Return the seconds of the last step's collectives, and the seconds that ops waited for them."""
    planned, timeline, graph = step.planned, step.timeline, step.captured.graph
    if timeline is None:
        return 0.0, 0.0
    spans = zip(planned.program.instructions, timeline.starts, timeline.ends, strict=True)
    communication_seconds = sum(
        end - start for instruction, start, end in spans if isinstance(instruction, Run) and instruction.communicates
    )
    return communication_seconds, time_spent(graph, planned.program, timeline)[0].for_others


def _peak_of_loop(work: zoo.Workload, rank: int, batches: Sequence[tuple[torch.Tensor, ...]]) -> int:
    run = _Training(work, rank, _ROOM, is_loop=True)
    run.take_turn(batches[:_PEAK_STEPS])
    stats = run.loop.stats if run.loop is not None else outofcore.LoopStats()
    run.close()
    peaks: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(peaks, stats.peak_bytes + stats.peak_small_bytes)
    return max(peaks)


def _run_rank(
    rank: int, processes: int, store: str, name: str, options: Mapping[str, Any], rounds: int, share: float
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes, timeout=_TIMEOUT)
    work = zoo.workload(name, **options)
    batches = [batch for _, batch in zip(range(rounds), _batches(work, rank, processes), strict=False)]
    turns = [batches[first : first + _TURN] for first in range(0, rounds, _TURN)]
    eager, unconstrained = _Training(work, rank), _Training(work, rank, _ROOM)
    constrained: _Training | None = None
    waits: list[tuple[float, float]] = []
    for turn in turns:
        eager.take_turn(turn)
        unconstrained.take_turn(turn)
        if constrained is None:
            constrained = _Training(work, rank, int(share * unconstrained.compiled.planned.program.arena_bytes))
        constrained.take_turn(turn)
        waits.append(_collective_seconds(constrained.compiled))
    if constrained is None:
        raise RuntimeError("no round has run: --rounds must be at least 1")
    collectives = collectives_of(constrained.compiled.captured)
    planned, budget = constrained.compiled.planned, constrained.compiled.budget
    for run in (unconstrained, constrained):
        run.close()
    # A loop can start only after all compiled steps are closed.
    loop_budget = int(share * _peak_of_loop(work, rank, batches))
    second_eager, loop = _Training(work, rank), _Training(work, rank, loop_budget, is_loop=True)
    for turn in turns:
        second_eager.take_turn(turn)
        loop.take_turn(turn)
    loop.close()
    reference, same = eager.state(), True
    for run in (unconstrained, constrained, second_eager, loop):
        ours = run.state()
        same &= run.losses == eager.losses and len(ours) == len(reference)
        same &= all(torch.equal(a, b) for a, b in zip(ours, reference, strict=False))
    same_bits: list[Any] = [None] * processes
    dist.all_gather_object(same_bits, same)
    gradients = sum(p.numel() * p.element_size() for p in eager.model.parameters() if p.requires_grad)
    buffers = sum(b.numel() * b.element_size() for b in eager.model.buffers())
    min_sent_bytes = (2 * gradients + buffers) * (processes - 1) // processes
    trainings = {
        "eager": eager,
        "in core": unconstrained,
        "within": constrained,
        "eager beside loop": second_eager,
        "loop": loop,
    }
    communication_seconds, wait_seconds = (
        statistics.median(column) for column in zip(*waits[_WARM_UP // _TURN :] or waits, strict=True)
    )
    if not rank:
        print(
            json.dumps(
                {
                    "work": work.describe(),
                    "budget": budget,
                    "loop_budget": loop_budget,
                    "loop_stats": str(loop.loop.stats) if loop.loop is not None else "",
                    "arena": planned.program.arena_bytes,
                    "policy": planned.plan.policy,
                    "same_bits": same_bits,
                    "seconds": {name_of_run: run.seconds for name_of_run, run in trainings.items()},
                    "collectives": len(collectives),
                    "sent_bytes": sum(collective.sent_bytes for collective in collectives),
                    "least_bytes": min_sent_bytes,
                    "communication_seconds": communication_seconds,
                    "waited_seconds": wait_seconds,
                }
            )
        )
    dist.destroy_process_group()


def _measure(name: str, options: Mapping[str, Any], processes: int, rounds: int, share: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = json.dumps([processes, str(Path(folder, "store")), name, dict(options), rounds, share])
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--one", str(rank), "--given", arguments], stdout=subprocess.PIPE
            )
            for rank in range(processes)
        ]
        try:
            outputs = [rank.communicate()[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(rank.returncode for rank in ranks):
            raise SystemExit(f"{name}: a process failed with {[rank.returncode for rank in ranks]}")
    return json.loads(outputs[0].splitlines()[-1])


def _ratio(row: Mapping[str, Any], training: str, eager: str = "eager") -> float:
    pairs = list(zip(row["seconds"][training], row["seconds"][eager], strict=True))
    return statistics.median(seconds / reference for seconds, reference in pairs[_WARM_UP:] or pairs)


def _print(rows: Mapping[str, Mapping[str, Any]]) -> None:
    table = Table(title="Distributed data parallel training")
    headings = (
        "model",
        "eager step",
        "in core",
        "within budget",
        "budget",
        "loop",
        "loop budget",
        "same bits",
        "sent over minimum",
        "overlapped",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, row in rows.items():
        eager = statistics.median(row["seconds"]["eager"][_WARM_UP:] or row["seconds"]["eager"])
        communication_seconds = row["communication_seconds"]
        table.add_row(
            name,
            format_seconds(eager),
            f"{_ratio(row, 'in core'):.3f}",
            f"{_ratio(row, 'within'):.3f}",
            format_bytes(row["budget"]),
            f"{_ratio(row, 'loop', 'eager beside loop'):.3f}",
            format_bytes(row["loop_budget"]),
            "yes" if all(row["same_bits"]) else "no",
            f"{row['sent_bytes'] / row['least_bytes']:.3f}",
            f"{1 - row['waited_seconds'] / communication_seconds:.0%}" if communication_seconds else "",
        )
    console().print(table)


def main(
    *,
    workload: Annotated[
        list[str] | None, typer.Option(help="Workload: gpt or resnet; repeatable (default: both).")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="Model option of the zoo, as name=value; repeatable.")
    ] = None,
    processes: Annotated[int, typer.Option(min=2, help="Number of processes.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Steps per training run.")] = 30,
    share: Annotated[
        float | None, typer.Option(help="Budget as a share of the peak (default: 0.5; 0.7 with --small).")
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="Run tiny models, as a smoke test.")] = False,
    results: Annotated[Path | None, typer.Option(help="Folder for the result file.")] = None,
    date: Annotated[str | None, typer.Option(help="Date of the measurement, ISO 8601 (default: now).")] = None,
    one: Annotated[int | None, typer.Option(hidden=True)] = None,
    given: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure, print a table, and write the numbers to benchmarks/results/distributed.json (not with --small)."""
    if one is not None:
        count, store, name, options, steps, part = json.loads(given)
        _run_rank(one, count, store, name, options, steps, part)
        return
    workloads = _SMALL if small else _WORKLOADS
    rows = {
        name: _measure(
            name,
            {**workloads[name], **parse_options(option or [])},
            processes,
            rounds,
            share or (0.7 if small else 0.5),
        )
        for name in workload or list(workloads)
    }
    _print(rows)
    if results is not None:
        write_result("distributed", {"processes": processes, "workloads": rows}, date, results)
    elif not small:
        write_result("distributed", {"processes": processes, "workloads": rows}, date)
    if not all(all(row["same_bits"]) for row in rows.values()):
        raise SystemExit("losses or state differ from plain PyTorch's: see the column 'same bits'")


if __name__ == "__main__":
    typer.run(main)
