"""How long ``outofcore plan config.json`` takes, what it answers, and what accelerate says of the same models.

Each answer comes from a process of its own, whose time and peak memory are measured; nothing is downloaded. Accelerate
estimates from the sizes of parameters alone (``accelerate estimate-memory``): its own function is called here on a
model without weights, since its command looks models up in the Hub.

With ``--exact`` each step that was made of a few layers is compared with the one that is captured with all of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from _common import RESULTS, console, write_result
from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils import calculate_maximum_sizes
from rich.table import Table

from outofcore.cli.configs import Training, configured_step, dtype_of, read_config
from outofcore.cli.fit import Captures
from outofcore.presets import device
from outofcore.units import format_bytes, format_seconds

HERE = Path(__file__).parent
NAME = "will-it-fit"
# What is asked about a folder of ``configs``: flags of ``outofcore plan``. A second question about one says after a
# colon what it is about.
ASKED: dict[str, list[str]] = {
    "llama-3.1-8b: all parameters": ["--batch", "1", "--gpu", "rtx4090-24gb"],
    "llama-3.1-8b": ["--batch", "4", "--sequence", "4096", "--lora", "32", "--gpu", "rtx4090-24gb"],
    "qwen3-32b": ["--batch", "1", "--sequence", "4096", "--lora", "16", "--checkpointing", "--gpu", "a100-80gb-pcie4"],
    "mixtral-8x7b": ["--batch", "1", "--sequence", "4096", "--lora", "16", "--gpu", "h100-80gb-pcie5"],
    "vit-giant": ["--batch", "64", "--amp", "--gpu", "rtx4090-24gb"],
    "whisper-large": ["--batch", "16", "--sequence", "448", "--dtype", "bf16", "--gpu", "rtx4090-24gb"],
}


def _folder(name: str) -> str:
    return name.partition(":")[0]


def _asked(name: str) -> dict[str, Any]:
    """The answer for a configuration, with the time and the memory of the process that gave it."""
    command = [sys.executable, "-m", "outofcore", "plan", f"configs/{_folder(name)}", *ASKED[name], "--json"]
    start = perf_counter()
    # From there, so that what is told names no folder of this machine.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    seconds = perf_counter() - start
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, 1):
        raise SystemExit(f"outofcore plan failed for {name} with exit status {code}")
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return {
        "flags": ASKED[name],
        "seconds": seconds,
        "processor_seconds": used.ru_utime + used.ru_stime,
        "peak_memory_bytes": used.ru_maxrss * unit,
        "answer": json.loads(output),
        "accelerate": _accelerate(name),
    }


def _accelerate(name: str) -> dict[str, Any]:
    """What accelerate's own estimate says of the model in the dtype that it is configured in."""
    found = read_config(str(HERE / "configs" / _folder(name)))
    dtype = dtype_of(found, Training())
    # As its command does: from the sizes in float32, whatever the model is configured in.
    model = configured_step(found, Training(batch=1, dtype="fp32")).user.models[0]
    total, (largest, _) = calculate_maximum_sizes(model)
    training = estimate_training_usage(total, str(dtype).removeprefix("torch."))
    share = dtype.itemsize / 4
    return {
        "loading_bytes": int(total * share),
        "largest_layer_bytes": int(largest * share),
        "training_bytes": int(max(training.values())),
    }


def _check(name: str) -> None:
    """End with an error where the step made of a few layers is not the one captured with all, op by op."""
    flags = dict(zip(ASKED[name], [*ASKED[name][1:], ""], strict=True))
    training = Training(
        batch=int(flags["--batch"]),
        sequence=int(flags["--sequence"]) if "--sequence" in flags else None,
        dtype=flags.get("--dtype"),
        lora=int(flags["--lora"]) if "--lora" in flags else None,
        checkpointing="--checkpointing" in flags,
        amp="--amp" in flags,
    )
    found, card = read_config(str(HERE / "configs" / _folder(name))), device(flags["--gpu"])
    made, exact = (Captures(found, card, repeats=repeats).of(training) for repeats in (None, False))
    alike = made[0].content(families=False) == exact[0].content(families=False)
    seconds = [[cost.seconds for cost in costs.ops] for _, costs in (made, exact)]
    if not alike or any(abs(one - other) > 1e-12 for one, other in zip(*seconds, strict=True)):
        raise SystemExit(f"{name}: the step made of a few layers is not the one captured with all")
    console().print(f"{name}: {len(exact[0].ops):,} ops made of a few layers are those captured with all")


def _table(rows: dict[str, dict[str, Any]]) -> Table:
    table = Table("model", "took", "processor", "memory", "smallest", "in core", "step", "longest", "accelerate")
    for name, row in rows.items():
        told = row["answer"]
        plan, longest = told["plans"][-1], told["longest_sequence"]
        table.add_row(
            name,
            format_seconds(row["seconds"]),
            format_seconds(row["processor_seconds"]),
            format_bytes(row["peak_memory_bytes"]),
            format_bytes(told["smallest_budget"]),
            format_bytes(told["in_core_budget"]),
            "does not fit" if plan["seconds"] is None else format_seconds(plan["seconds"]),
            "-" if longest is None else str(longest["size"]),
            format_bytes(int(row["accelerate"]["training_bytes"])),
        )
    return table


def main(
    name: Annotated[list[str] | None, typer.Option(help="Which configurations; by default all.")] = None,
    date: Annotated[str | None, typer.Option(help="When this was measured; by default now.")] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Compare steps made of a few layers with whole ones.")] = False,
) -> None:
    """Ask about each configuration, and write what comes of it; results of those left out stay."""
    if exact:
        for each in name or list(ASKED):
            _check(each)
        return
    file = RESULTS / f"{NAME}.json"
    rows = json.loads(file.read_text())["models"] if file.exists() else {}
    for each in name or list(ASKED):
        rows[each] = _asked(each)
        # The machine may have had other work: then processor time says more.
        write_result(NAME, {"load": os.getloadavg()[0], "models": rows}, date)
    console().print(_table(rows))


if __name__ == "__main__":
    typer.run(main)
