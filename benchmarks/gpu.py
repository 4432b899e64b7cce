"""The same model, batch and hard memory cap for each tool on one GPU, each in a process of its own.

The cap is ``torch.cuda.set_per_process_memory_fraction``: whoever needs more fails. Plain PyTorch alone runs without
it, as the 100 % of throughput. Rounds are interleaved: all tools of a workload run once, then again, as long as there
is time; medians of the rounds count. A result is written after every process.

Workloads: ``batch`` (ResNet-50 at 7.5 times the batch that fits the cap in core), ``need`` (ResNet-50 at the batch that
needs 50/16 of the cap), ``volume`` (3D U-Net), ``deep`` (a ResNet of many layers), ``state`` (a GPT whose optimizer
state exceeds the cap).
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from _common import console, write_result
from rich.table import Table

from outofcore.units import GIB, format_bytes, format_seconds, parse_bytes

_BESIDE = 1 << 30  # bytes of a cap that a batch is not to fill: libraries and fragmentation


@dataclass(frozen=True)
class Workload:
    """What is trained, under which cap."""

    name: str
    model: str
    options: dict[str, Any]
    cap: int
    times: float = 0.0  # of the batch that fits the cap in core; 0: the batch of the options


@dataclass(frozen=True)
class Tool:
    """A way to train."""

    name: str
    mode: str
    capped: bool = True
    policy: str = "auto"
    share: float = 1.0


_TOOLS = (
    Tool("eager, no cap", "eager", capped=False),
    Tool("outofcore", "outofcore"),
    Tool("checkpoint", "checkpoint"),
    Tool("save_on_cpu", "save-on-cpu"),
    Tool("selective checkpoint", "selective-checkpoint"),
    Tool("torch.compile, budget 0.5", "compile-budget", share=0.5),
    Tool("TRL OffloadActivations", "trl-offload"),
    Tool("FSDP2 CPU offload", "fsdp2-offload"),
    Tool("DeepSpeed", "deepspeed"),
)
_POLICIES = ("window", "superneurons", "pooch", "tflms", "sqrt-checkpoint")


def _workloads(cap: int, layers: int, edge: int, params: str) -> dict[str, Workload]:
    images = {"images": "generated", "amp": True, "optimizer": "momentum"}
    return {
        "batch": Workload("batch", "resnet50", images, cap, 7.5),
        "need": Workload("need", "resnet50", images, cap, 50 / 16),
        "volume": Workload("volume", "unet3d", {"batch": 1, "size": edge, "amp": True}, cap),
        "deep": Workload("deep", f"resnet{layers}", {**images, "batch": 8}, min(cap, 12 * GIB)),
        "state": Workload("state", "gpt", {"batch": 4, "params": params, "context": 1024, "amp": True}, cap),
    }


@dataclass
class Bench:
    """Runs processes until the time is up.

    Attributes:
        deadline: on the monotonic clock.
        limit: seconds that one process may take.
        rows: what they said, by workload and tool.
    """

    deadline: float
    limit: float
    steps: int
    warm_up: int
    rows: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)
    batches: dict[str, int] = field(default_factory=dict)

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def run(self, work: Workload, tool: Tool, options: dict[str, Any]) -> dict[str, Any]:
        """One process; its answer, or an error in its place."""
        limit = min(self.limit, self.left())
        if limit < 10:
            return {"error": "no time left"}
        spec = {
            "model": work.model,
            "options": options,
            "mode": tool.mode,
            "cap": work.cap if tool.capped else None,
            "policy": tool.policy,
            "share": tool.share,
            "steps": self.steps,
            "warm_up": self.warm_up,
        }
        command = [sys.executable, str(Path(__file__).with_name("_gpu_worker.py")), json.dumps(spec)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # it is the leader of a session of its own
            process.communicate()
            return {"error": f"not done in {limit:.0f} s"}
        lines = output.splitlines()
        return json.loads(lines[-1]) if lines else {"error": f"ended with exit status {process.returncode}"}

    def batch_for(self, work: Workload) -> int:
        """So many times the batch that fits the cap in core, by the memory that two small batches need."""
        peaks = {}
        for batch in (8, 24):
            answer = self.run(work, Tool("probe", "eager", capped=False), {**work.options, "batch": batch})
            if "error" in answer:
                raise typer.BadParameter(f"{work.name}: the batch cannot be found: {answer}")
            peaks[batch] = answer["peak_reserved"]
        each = max((peaks[24] - peaks[8]) / 16, 1)
        fits = max(int((work.cap - _BESIDE - (peaks[8] - 8 * each)) / each), 1)
        return max(int(fits * work.times), 1)


def _table(work: Workload, batch: object, rows: dict[str, list[dict[str, Any]]]) -> Table:
    title = f"{work.name}: {work.model}, batch {batch}, cap {format_bytes(work.cap)}"
    table = Table(title=title, title_justify="left")
    table.add_column("tool")
    for heading in ("step", "of in-core", "peak reserved", "first step", "note"):
        table.add_column(heading, justify="right")
    plain = _median(rows.get("eager, no cap", []))
    for name, answers in rows.items():
        seconds = _median(answers)
        last = answers[-1]
        if seconds is None:
            table.add_row(name, "", "", "", "", f"{last['error']}: {last.get('detail', '')}"[:60])
            continue
        share = "" if plain is None else f"{plain / seconds:.0%}"
        good = next(answer for answer in answers if "seconds" in answer)
        peak, first = format_bytes(good["peak_reserved"]), format_seconds(good["first_step_s"])
        table.add_row(name, format_seconds(seconds), share, peak, first, good.get("policy", ""))
    return table


def _median(answers: list[dict[str, Any]]) -> float | None:
    found = [answer["seconds"] for answer in answers if "seconds" in answer]
    return statistics.median(found) if found else None


def main(
    workloads: Annotated[str, typer.Option(help="Which, with commas between.")] = "batch,state,need,volume,deep",
    cap: Annotated[str, typer.Option(help="Device memory for each tool.")] = "16GiB",
    layers: Annotated[int, typer.Option(help="Layers of the deep ResNet.")] = 2498,
    edge: Annotated[int, typer.Option(help="Edge of the volume, in voxels.")] = 192,
    params: Annotated[str, typer.Option(help="Parameters of the GPT.")] = "1.5B",
    policies: Annotated[bool, typer.Option("--policies", help="Each policy of outofcore, too.")] = False,
    steps: Annotated[int, typer.Option(help="Timed steps of a process.")] = 5,
    warm_up: Annotated[int, typer.Option(help="Steps before them; a plan may be made anew in the first six.")] = 6,
    rounds: Annotated[int, typer.Option(help="At most so many rounds.")] = 2,
    seconds: Annotated[float, typer.Option(help="For all of it.")] = 3600.0,
    limit: Annotated[float, typer.Option(help="For one process.")] = 90.0,
    date: Annotated[str | None, typer.Option(help="To write into the result.")] = None,
) -> None:
    """Measure, print tables, and write benchmarks/results/gpu.json."""
    bench = Bench(time.monotonic() + seconds, limit, steps, warm_up)
    known = _workloads(parse_bytes(cap), layers, edge, params)
    unknown = [name for name in workloads.split(",") if name not in known]
    if unknown:
        raise typer.BadParameter(f"there is no workload {unknown[0]!r}; there are {', '.join(known)}")
    tools = [*_TOOLS, *(Tool(f"outofcore, {name}", "outofcore", policy=name) for name in _POLICIES if policies)]
    chosen = [known[name] for name in workloads.split(",")]
    failed = False
    for work in chosen:
        try:
            _measure(bench, work, tools, rounds, date)
        except typer.BadParameter as error:
            print(f"{work.name}: {error.message}", file=sys.stderr)
        answers = bench.rows.get(work.name, {}).get("outofcore", [])
        failed |= _median(answers) is None and bench.left() > 0
    for work in chosen:
        if work.name in bench.rows:
            console().print(_table(work, bench.batches.get(work.name, ""), bench.rows[work.name]))
    if failed:
        raise typer.Exit(1)


def _measure(bench: Bench, work: Workload, tools: list[Tool], rounds: int, date: str | None) -> None:
    options = dict(work.options)
    if work.times:
        options["batch"] = bench.batch_for(work)
    bench.batches[work.name] = options["batch"]
    rows = bench.rows.setdefault(work.name, {tool.name: [] for tool in tools})
    hopeless: set[str] = set()
    for _ in range(rounds):
        for tool in tools:
            if tool.name in hopeless or bench.left() < 10:
                continue
            answer = bench.run(work, tool, options)
            rows[tool.name].append(answer)
            if "error" in answer:
                hopeless.add(tool.name)
            print(f"{work.name} · {tool.name}: {answer.get('seconds', answer.get('error'))}", flush=True)
            specs = {name: asdict(Workload(w.name, w.model, w.options, w.cap)) for name, w in [(work.name, work)]}
            _write(bench, specs, date)
    for name in [name for name, answers in rows.items() if not answers]:
        rows[name] = [{"error": "no time left"}]


def _write(bench: Bench, specs: dict[str, Any], date: str | None) -> None:
    device = next(
        (a["device"] for rows in bench.rows.values() for answers in rows.values() for a in answers if "device" in a),
        None,
    )
    write_result("gpu", {"device": device, "last": specs, "batches": bench.batches, "rows": bench.rows}, date)


if __name__ == "__main__":
    typer.run(main)
