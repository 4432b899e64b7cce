"""Compare compiled steps with ``shard=`` with FSDP2, in core and within a share of the in-core arena.

Contenders have their own processes over gloo and take turns step by step. Sent bytes are computed from the step, and
counted by the kernel on the loopback interface. Losses must equal those of plain ``DistributedDataParallel``.
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
# The first is the reference for bits, the second the reference for time and memory.
_CONTENDERS = ("ddp", "fsdp2", "fsdp2, offloaded", "shared", "within")
_ROOM = 64 * GIB
_TIMEOUT = timedelta(minutes=5)
# Warm-up steps: the first captures and plans, and the plan may be replaced soon after.
_WARM_UP = 5


# One process


def _memory_counter(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _shard_with_fsdp(network: nn.Module, processes: int, *, offload: bool) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - other processes do not need it
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard  # noqa: PLC0415

    mesh = init_device_mesh("cpu", (processes,))
    policy = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
    for block in network.blocks:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    return fully_shard(network, mesh=mesh, offload_policy=policy)


def _sent_bytes(step: outofcore.Step[..., Any]) -> int:
    """Return the bytes that a process sends per step, computed from the plan, repeated gathers included."""
    captured = step.captured
    runs = [i for i in step.planned.program.instructions if isinstance(i, Run) and i.communicates]
    assert len(runs) >= len(collectives_of(captured))
    return sum(captured.calls[run.op].func.sent_bytes for run in runs)


def _run_rank(
    contender: str, rank: int, processes: int, store: str, options: Mapping[str, Any], budget: int | None
) -> None:
    """Run one rank: a step and an answer for each line of standard input."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes, timeout=_TIMEOUT)
    dist.barrier()
    before = _memory_counter("VmRSS")
    work = zoo.workload("gpt", **options)
    network: Any = work.build()
    if contender == "ddp":
        network = DistributedDataParallel(network)
    elif contender.startswith("fsdp2"):
        network = _shard_with_fsdp(network, processes, offload="offloaded" in contender)
    optimizer = work.optimizer(network)
    run: Any = work.make_step(network, optimizer)
    if contender in ("shared", "within"):
        home = "host" if contender == "shared" else None
        run = outofcore.compile(run, network, optimizer, budget=budget or _ROOM, home=home, shard=True)
    torch.manual_seed(rank)  # for dropout
    batches = (batch for number, batch in enumerate(work.batches()) if number % processes == rank)
    print(json.dumps({"ready": work.describe()}), flush=True)
    for count, _ in enumerate(sys.stdin):
        batch = next(batches)
        if count == _WARM_UP:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
        begin = time.perf_counter()
        loss = run(*batch)
        seconds = time.perf_counter() - begin
        answer: dict[str, Any] = {
            "seconds": seconds,
            "loss": loss.item().hex(),
            "memory": _memory_counter("VmHWM") - before,
        }
        if isinstance(run, outofcore.Step):
            graph, planned = run.captured.graph, run.planned
            answer |= {
                "arena": planned.program.arena_bytes,
                "budget": run.budget,
                "policy": planned.plan.policy,
                "lasting": sum(graph.storages[storage].bytes for storage in graph.persistent),
                "sent": _sent_bytes(run),
            }
        print(json.dumps(answer), flush=True)
    os._exit(0)


# All of them


def _loopback_bytes() -> int:
    """Return the bytes sent on the loopback interface so far."""
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    return next((int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:")), 0)


@dataclass
class _Contender:
    """The processes of one contender; a context manager."""

    name: str
    ranks: list[subprocess.Popen[str]]
    steps: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    @classmethod
    def begin(
        cls, name: str, processes: int, options: Mapping[str, Any], budget: int | None, folder: Path
    ) -> _Contender:
        arguments = json.dumps([name, processes, str(folder / f"store of {name}"), dict(options), budget])
        pipe = subprocess.PIPE
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--one", str(rank), "--given", arguments], stdin=pipe, stdout=pipe, text=True
            )
            for rank in range(processes)
        ]
        contender = cls(name, ranks)
        contender._answers()
        return contender

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()

    def step(self) -> None:
        if self.error:
            return
        before = _loopback_bytes()
        for rank in self.ranks:
            if rank.stdin is not None:
                rank.stdin.write("step\n")
                rank.stdin.flush()
        answers = self._answers()
        if not answers:
            return
        slowest = max(answer["seconds"] for answer in answers)
        counted = (_loopback_bytes() - before) // len(answers)
        max_memory = max(answer["memory"] for answer in answers)
        self.steps.append({**answers[0], "seconds": slowest, "counted": counted, "memory": max_memory})

    def _answers(self) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = []
        for rank in self.ranks:
            line = "" if rank.stdout is None else rank.stdout.readline()
            if not line:
                self.error = "a process ended early"
                return []
            answers.append(json.loads(line))
        return answers

    def timed(self, key: str) -> list[Any]:
        """Return a measurement of the steps after the warm-up."""
        return [step[key] for step in self.steps[_WARM_UP:] or self.steps]


def _run_contenders(
    processes: int, rounds: int, options: Mapping[str, Any], share: float, names: Sequence[str]
) -> Iterator[_Contender]:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        contenders = [
            stack.enter_context(_Contender.begin(contender, processes, options, None, folder))
            for contender in names
            if contender != "within"
        ]
        shared = contenders[-1]
        shared.step()
        if shared.error:
            raise SystemExit("the in-core step with shard= failed; see its traceback above")
        budget = int(share * shared.steps[0]["arena"])
        contenders.append(stack.enter_context(_Contender.begin("within", processes, options, budget, folder)))
        for number in range(rounds):
            for contender in contenders:
                if len(contender.steps) <= number:
                    contender.step()
        yield from contenders


def _row(contender: _Contender, contenders: Mapping[str, _Contender]) -> dict[str, Any]:
    if contender.error:
        return {"error": contender.error}
    reference, peer = contenders[_CONTENDERS[0]], contenders.get(_CONTENDERS[1])
    last = contender.steps[-1]
    return {
        "seconds": contender.timed("seconds"),
        "same_bits": [step["loss"] for step in contender.steps] == [step["loss"] for step in reference.steps],
        "over_fsdp2": None
        if peer is None or peer.error
        else round_by_round(contender.timed("seconds"), peer.timed("seconds")),
        "memory": max(contender.timed("memory")),
        "counted_bytes": statistics.median(contender.timed("counted")),
        **{name: last[name] for name in ("sent", "arena", "budget", "policy", "lasting") if name in last},
    }


def _print(rows: Mapping[str, Mapping[str, Any]]) -> None:
    table = Table(title="Sharded training")
    for heading in (
        "contender",
        "step",
        "over fsdp2",
        "memory",
        "budget",
        "persistent state",
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
    processes: Annotated[int, typer.Option(min=2, help="Number of processes per contender.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Number of steps per contender.")] = 15,
    share: Annotated[float, typer.Option(help="Budget, as a share of the in-core arena.")] = 0.5,
    small: Annotated[bool, typer.Option("--small", help="Run a tiny model, as a smoke test.")] = False,
    without_fsdp2: Annotated[bool, typer.Option("--without-fsdp2", help="Skip FSDP2.")] = False,
    results: Annotated[Path | None, typer.Option(help="Folder for the result file.")] = None,
    date: Annotated[str | None, typer.Option(help="Date of the measurement, ISO 8601 (default: now).")] = None,
    one: Annotated[int | None, typer.Option(hidden=True)] = None,
    given: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure, print a table, and write the numbers to benchmarks/results/sharded.json (not with --small)."""
    if one is not None:
        contender, count, store, work_options, budget = json.loads(given)
        _run_rank(contender, one, count, store, work_options, budget)
        return
    options = {**(_SMALL if small else _OPTIONS), **parse_options(option or [])}
    names = [contender for contender in _CONTENDERS if not (without_fsdp2 and contender.startswith("fsdp2"))]
    contenders = {contender.name: contender for contender in _run_contenders(processes, rounds, options, share, names)}
    rows = {name: _row(contender, contenders) for name, contender in contenders.items()}
    _print(rows)
    content = {"processes": processes, "options": options, "ways": rows}
    if results is not None:
        write_result("sharded", content, date, results)
    elif not small:
        write_result("sharded", content, date)
    if not all(rows[contender].get("same_bits") for contender in ("shared", "within")):
        raise SystemExit("losses differ from plain PyTorch's, or a process ended early: see the table")


if __name__ == "__main__":
    typer.run(main)
