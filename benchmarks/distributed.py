"""Processes that train together: eager DistributedDataParallel beside compiled steps and loops within half of a peak.

All processes of a workload are started by this one, over gloo, with one thread each. In each of them runs take
turns, some steps each, each over a model of its own: plain PyTorch, a compiled step with room for everything, and one
within half of what that takes (or another share of it); then plain PyTorch and a loop, within the same share of the
peak that a loop has in its first steps where everything fits. Losses and all state are compared bit for bit with those
of plain PyTorch. What each process sends is compared with the least that its gradients and buffers take on a ring.
``hidden`` is the share of the collectives' time for which no op waited.
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
# Steps in a turn. One is too few: a loop copies between its steps too, which turns of others would hide.
_TURN = 5
# Steps that are left out of medians: capture and planning happen in them.
_WARM_UP = 2 * _TURN
# Steps of a loop with room for everything, after which its peak is known.
_PEAK_STEPS = 3


class _Training:
    """One model in training: plainly, as a compiled step or in a loop within a budget."""

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
        kept = (value for p in self.model.parameters() for value in self.optimizer.state[p].values())
        return [t.detach() for t in (*self.model.state_dict().values(), *kept) if isinstance(t, torch.Tensor)]


def _batches(work: zoo.Workload, rank: int, processes: int) -> Iterator[tuple[torch.Tensor, ...]]:
    for number, batch in enumerate(work.batches()):
        if number % processes == rank:
            yield batch


def _hidden(step: outofcore.Step[..., Any]) -> tuple[float, float]:
    """Seconds of the collectives of the last step, and those for which ops waited for them."""
    planned, timeline, graph = step.planned, step.timeline, step.captured.graph
    if timeline is None:
        return 0.0, 0.0
    spans = zip(planned.program.instructions, timeline.starts, timeline.ends, strict=True)
    taken = sum(end - start for one, start, end in spans if isinstance(one, Run) and one.communicates)
    return taken, time_spent(graph, planned.program, timeline)[0].for_others


def _peak_of_loop(work: zoo.Workload, rank: int, batches: Sequence[tuple[torch.Tensor, ...]]) -> int:
    run = _Training(work, rank, _ROOM, is_loop=True)
    run.take_turn(batches[:_PEAK_STEPS])
    stats = run.loop.stats if run.loop is not None else outofcore.LoopStats()
    run.close()
    peaks: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(peaks, stats.peak_bytes + stats.peak_small_bytes)
    return max(peaks)


def _be_one(
    rank: int, processes: int, store: str, name: str, options: Mapping[str, Any], rounds: int, share: float
) -> None:
    """What each process does; the first prints what was found as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes, timeout=_TIMEOUT)
    work = zoo.workload(name, **options)
    batches = [batch for _, batch in zip(range(rounds), _batches(work, rank, processes), strict=False)]
    turns = [batches[first : first + _TURN] for first in range(0, rounds, _TURN)]
    eager, roomy = _Training(work, rank), _Training(work, rank, _ROOM)
    half: _Training | None = None
    waits: list[tuple[float, float]] = []
    for turn in turns:
        eager.take_turn(turn)
        roomy.take_turn(turn)
        if half is None:
            half = _Training(work, rank, int(share * roomy.compiled.planned.program.arena_bytes))
        half.take_turn(turn)
        waits.append(_hidden(half.compiled))
    if half is None:
        raise RuntimeError("no round was run")
    collectives = collectives_of(half.compiled.captured)
    planned, budget = half.compiled.planned, half.compiled.budget
    for run in (roomy, half):
        run.close()
    # A loop begins once no compiled step is open.
    loop_budget = int(share * _peak_of_loop(work, rank, batches))
    again, loop = _Training(work, rank), _Training(work, rank, loop_budget, is_loop=True)
    for turn in turns:
        again.take_turn(turn)
        loop.take_turn(turn)
    loop.close()
    theirs, same = eager.state(), True
    for run in (roomy, half, again, loop):
        ours = run.state()
        same &= run.losses == eager.losses and len(ours) == len(theirs)
        same &= all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=False))
    told: list[Any] = [None] * processes
    dist.all_gather_object(told, same)
    gradients = sum(p.numel() * p.element_size() for p in eager.model.parameters() if p.requires_grad)
    buffers = sum(b.numel() * b.element_size() for b in eager.model.buffers())
    least = (2 * gradients + buffers) * (processes - 1) // processes
    ways = {"eager": eager, "in core": roomy, "within": half, "eager beside loop": again, "loop": loop}
    taken, waited = (statistics.median(column) for column in zip(*waits[_WARM_UP // _TURN :] or waits, strict=True))
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
                    "same_bits": told,
                    "seconds": {way: run.seconds for way, run in ways.items()},
                    "collectives": len(collectives),
                    "sent_bytes": sum(collective.sent_bytes for collective in collectives),
                    "least_bytes": least,
                    "communication_seconds": taken,
                    "waited_seconds": waited,
                }
            )
        )
    dist.destroy_process_group()


def _measure(name: str, options: Mapping[str, Any], processes: int, rounds: int, share: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        given = json.dumps([processes, str(Path(folder, "store")), name, dict(options), rounds, share])
        ranks = [
            subprocess.Popen([sys.executable, __file__, "--one", str(rank), "--given", given], stdout=subprocess.PIPE)
            for rank in range(processes)
        ]
        try:
            found = [rank.communicate()[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(rank.returncode for rank in ranks):
            raise SystemExit(f"{name}: a process failed with {[rank.returncode for rank in ranks]}")
    return json.loads(found[0].splitlines()[-1])


def _ratio(row: Mapping[str, Any], way: str, eager: str = "eager") -> float:
    pairs = list(zip(row["seconds"][way], row["seconds"][eager], strict=True))
    return statistics.median(ours / theirs for ours, theirs in pairs[_WARM_UP:] or pairs)


def _print(rows: Mapping[str, Mapping[str, Any]]) -> None:
    table = Table(title="Processes that train together")
    headings = (
        "model",
        "eager step",
        "in core",
        "within",
        "budget",
        "loop",
        "its budget",
        "same bits",
        "sent over least",
        "hidden",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, row in rows.items():
        eager = statistics.median(row["seconds"]["eager"][_WARM_UP:] or row["seconds"]["eager"])
        taken = row["communication_seconds"]
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
            f"{1 - row['waited_seconds'] / taken:.0%}" if taken else "",
        )
    console().print(table)


def main(
    *,
    workload: Annotated[list[str] | None, typer.Option(help="gpt or resnet. [default: both]")] = None,
    option: Annotated[list[str] | None, typer.Option(help="An option of the zoo, as name=value.")] = None,
    processes: Annotated[int, typer.Option(min=2, help="How many.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each.")] = 30,
    share: Annotated[
        float | None, typer.Option(help="Of the peak, as the budget. [default: 0.5; 0.7 if small]")
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="Tiny models: to see that it runs.")] = False,
    results: Annotated[Path | None, typer.Option(help="A folder for the numbers.")] = None,
    date: Annotated[str | None, typer.Option(help="Of the measurement; by default now.")] = None,
    one: Annotated[int | None, typer.Option(hidden=True)] = None,
    given: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure, print a table, and write the numbers to benchmarks/results/distributed.json (not with --small)."""
    if one is not None:
        count, store, name, options, steps, part = json.loads(given)
        _be_one(one, count, store, name, options, steps, part)
        return
    chosen = _SMALL if small else _WORKLOADS
    rows = {
        name: _measure(
            name, {**chosen[name], **parse_options(option or [])}, processes, rounds, share or (0.7 if small else 0.5)
        )
        for name in workload or list(chosen)
    }
    _print(rows)
    if results is not None:
        write_result("distributed", {"processes": processes, "workloads": rows}, date, results)
    elif not small:
        write_result("distributed", {"processes": processes, "workloads": rows}, date)
    if not all(all(row["same_bits"]) for row in rows.values()):
        raise SystemExit("bits differ from those of plain PyTorch")


if __name__ == "__main__":
    typer.run(main)
