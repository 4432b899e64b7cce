"""Processes that share one model: FSDP2 beside compiled steps with ``shard=``, in core and within a part of that.

Each way to train has processes of its own, over gloo and with one thread each. All of them are alive at once, and the
ways take turns step by step, so that what slows the machine down slows all of them alike. Told are step times as ratios
round by round, the resident memory that a process has at most while it steps (the kernel's count) beyond what it had
before it built a model, and what a process sends: as worked out from the step, and as the kernel counts bytes on the
loopback interface, headers and all. Losses are compared bit for bit with those of plain ``DistributedDataParallel``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Self

import torch
import torch.distributed as dist
import typer
from _common import console, parse_options, round_by_round, write_result
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outofcore
from outofcore import zoo
from outofcore.profiling.groups import collectives_of
from outofcore.program import Run
from outofcore.units import GIB, format_bytes, format_seconds

_OPTIONS = {"params": "25M", "batch": 4, "context": 256}
_SMALL = {"layers": 2, "width": 256, "heads": 4, "context": 64, "batch": 4}
# The first is what others are compared with bit for bit, the second what they are compared with in time and memory.
_WAYS = ("ddp", "fsdp2", "fsdp2, offloaded", "shared", "within")
_ROOM = 64 * GIB
_TIMEOUT = timedelta(minutes=5)
# Steps that warm up: the first is captured and planned, and a plan may be made anew after some more.
_WARM_UP = 5


# One process


def _memory(name: str) -> int:
    """A line of what the kernel tells of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _sharded_by_fsdp(network: nn.Module, processes: int, *, offload: bool) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - of no use to other processes
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard  # noqa: PLC0415

    mesh = init_device_mesh("cpu", (processes,))
    policy = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
    for block in network.blocks:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    return fully_shard(network, mesh=mesh, offload_policy=policy)


def _sent(step: outofcore.Step[..., Any]) -> int:
    """Bytes that a process sends in a step, as worked out, with what is gathered again."""
    captured = step.captured
    runs = [i for i in step.planned.program.instructions if isinstance(i, Run) and i.communicates]
    assert len(runs) >= len(collectives_of(captured))
    return sum(captured.calls[run.op].func.sent_bytes for run in runs)


def _be_one(way: str, rank: int, processes: int, store: str, options: Mapping[str, Any], budget: int | None) -> None:
    """What each process does: a step whenever a line comes, and an answer after it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes, timeout=_TIMEOUT)
    dist.barrier()
    before = _memory("VmRSS")
    work = zoo.workload("gpt", **options)
    network: Any = work.build()
    if way == "ddp":
        network = DistributedDataParallel(network)
    elif way.startswith("fsdp2"):
        network = _sharded_by_fsdp(network, processes, offload="offloaded" in way)
    optimizer = work.optimizer(network)
    run: Any = work.make_step(network, optimizer)
    if way in ("shared", "within"):
        home = "host" if way == "shared" else None
        run = outofcore.compile(run, network, optimizer, budget=budget or _ROOM, home=home, shard=True)
    torch.manual_seed(rank)  # for dropout
    batches = (batch for number, batch in enumerate(work.batches()) if number % processes == rank)
    print(json.dumps({"ready": work.describe()}), flush=True)
    for count, _ in enumerate(sys.stdin):
        batch = next(batches)
        if count == _WARM_UP:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
        begin = time.perf_counter()
        loss = run(*batch)
        seconds = time.perf_counter() - begin
        told: dict[str, Any] = {"seconds": seconds, "loss": loss.item().hex(), "memory": _memory("VmHWM") - before}
        if isinstance(run, outofcore.Step):
            graph, planned = run.captured.graph, run.planned
            told |= {
                "arena": planned.program.arena_bytes,
                "budget": run.budget,
                "policy": planned.plan.policy,
                "lasting": sum(graph.storages[storage].bytes for storage in graph.persistent),
                "sent": _sent(run),
            }
        print(json.dumps(told), flush=True)
    os._exit(0)


# All of them


def _on_loopback() -> int:
    """Bytes that this system has sent to itself so far."""
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    return next((int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:")), 0)


@dataclass
class _Way:
    """The processes of one way to train; a context manager."""

    name: str
    ranks: list[subprocess.Popen[str]]
    steps: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    @classmethod
    def begin(cls, name: str, processes: int, options: Mapping[str, Any], budget: int | None, folder: Path) -> _Way:
        given = json.dumps([name, processes, str(folder / f"store of {name}"), dict(options), budget])
        pipe = subprocess.PIPE
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--one", str(rank), "--given", given], stdin=pipe, stdout=pipe, text=True
            )
            for rank in range(processes)
        ]
        way = cls(name, ranks)
        way._answers()
        return way

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()

    def step(self) -> None:
        if self.error:
            return
        before = _on_loopback()
        for rank in self.ranks:
            if rank.stdin is not None:
                rank.stdin.write("step\n")
                rank.stdin.flush()
        told = self._answers()
        if not told:
            return
        slowest = max(one["seconds"] for one in told)
        counted = (_on_loopback() - before) // len(told)
        most = max(one["memory"] for one in told)
        self.steps.append({**told[0], "seconds": slowest, "counted": counted, "memory": most})

    def _answers(self) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []
        for rank in self.ranks:
            line = "" if rank.stdout is None else rank.stdout.readline()
            if not line:
                self.error = "a process has ended"
                return []
            told.append(json.loads(line))
        return told

    def later(self, what: str) -> list[Any]:
        """Something of all steps that count."""
        return [step[what] for step in self.steps[_WARM_UP:] or self.steps]


def _measured(
    processes: int, rounds: int, options: Mapping[str, Any], share: float, names: Sequence[str]
) -> Iterator[_Way]:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        ways = [
            stack.enter_context(_Way.begin(way, processes, options, None, folder)) for way in names if way != "within"
        ]
        shared = ways[-1]
        shared.step()
        if shared.error:
            raise SystemExit("the step with shard= failed")
        budget = int(share * shared.steps[0]["arena"])
        ways.append(stack.enter_context(_Way.begin("within", processes, options, budget, folder)))
        for number in range(rounds):
            for way in ways:
                if len(way.steps) <= number:
                    way.step()
        yield from ways


def _row(way: _Way, ways: Mapping[str, _Way]) -> dict[str, Any]:
    if way.error:
        return {"error": way.error}
    reference, peer = ways[_WAYS[0]], ways.get(_WAYS[1])
    last = way.steps[-1]
    return {
        "seconds": way.later("seconds"),
        "same_bits": [step["loss"] for step in way.steps] == [step["loss"] for step in reference.steps],
        "over_fsdp2": None
        if peer is None or peer.error
        else round_by_round(way.later("seconds"), peer.later("seconds")),
        "memory": max(way.later("memory")),
        "counted_bytes": statistics.median(way.later("counted")),
        **{name: last[name] for name in ("sent", "arena", "budget", "policy", "lasting") if name in last},
    }


def _print(rows: Mapping[str, Mapping[str, Any]]) -> None:
    table = Table(title="Processes that share a model")
    for heading in (
        "way",
        "step",
        "over fsdp2",
        "memory",
        "budget",
        "from step to step",
        "sent",
        "counted",
        "same bits",
    ):
        table.add_column(heading, justify="right")
    for name, row in rows.items():
        if "error" in row:
            table.add_row(name, row["error"], *[""] * 7)
            continue
        ratio = row["over_fsdp2"]
        table.add_row(
            name,
            format_seconds(statistics.median(row["seconds"])),
            "" if ratio is None else f"{ratio:.3f}",
            format_bytes(row["memory"]),
            format_bytes(row["budget"]) if name == "within" else "",
            format_bytes(row["lasting"]) if "lasting" in row else "",
            format_bytes(row["sent"]) if "sent" in row else "",
            format_bytes(int(row["counted_bytes"])),
            "yes" if row["same_bits"] else "no",
        )
    console().print(table)


def main(
    *,
    option: Annotated[
        list[str] | None, typer.Option(help="Model option of the zoo, as name=value; repeatable.")
    ] = None,
    processes: Annotated[int, typer.Option(min=2, help="How many for each way.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each.")] = 15,
    share: Annotated[float, typer.Option(help="Of the arena that holds everything, as the budget.")] = 0.5,
    small: Annotated[bool, typer.Option("--small", help="Run a tiny model, as a smoke test.")] = False,
    without_fsdp2: Annotated[bool, typer.Option("--without-fsdp2", help="Leave the peer out.")] = False,
    results: Annotated[Path | None, typer.Option(help="Folder for the result file.")] = None,
    date: Annotated[str | None, typer.Option(help="Date of the measurement, ISO 8601. [default: now]")] = None,
    one: Annotated[int | None, typer.Option(hidden=True)] = None,
    given: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure, print a table, and write the numbers to benchmarks/results/sharded.json (not with --small)."""
    if one is not None:
        way, count, store, chosen, budget = json.loads(given)
        _be_one(way, one, count, store, chosen, budget)
        return
    options = {**(_SMALL if small else _OPTIONS), **parse_options(option or [])}
    names = [way for way in _WAYS if not (without_fsdp2 and way.startswith("fsdp2"))]
    ways = {way.name: way for way in _measured(processes, rounds, options, share, names)}
    rows = {name: _row(way, ways) for name, way in ways.items()}
    _print(rows)
    content = {"processes": processes, "options": options, "ways": rows}
    if results is not None:
        write_result("sharded", content, date, results)
    elif not small:
        write_result("sharded", content, date)
    if not all(rows[way].get("same_bits") for way in ("shared", "within")):
        raise SystemExit("bits differ from those of plain PyTorch")


if __name__ == "__main__":
    typer.run(main)
