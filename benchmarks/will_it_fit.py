"""Measure ``outofcore plan config.json``: time, memory and answer, compared with accelerate's estimate.

Accelerate estimates from parameter sizes only; its function is called, because its command needs the Hub. ``--exact``
compares each step built from a few layers with the step captured with all layers.
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

from outofcore.cli.configs import Training, configured_step, parameter_dtype, read_config
from outofcore.cli.fit import Captures
from outofcore.presets import device
from outofcore.units import format_bytes, format_seconds

HERE = Path(__file__).parent
NAME = "will-it-fit"
# Flags of ``outofcore plan`` for each folder of ``configs``. Text after a colon distinguishes a second entry for the
# same folder.
FLAGS: dict[str, list[str]] = {
    "llama-3.1-8b: all parameters": ["--batch", "1", "--gpu", "rtx4090-24gb"],
    "llama-3.1-8b": ["--batch", "4", "--sequence", "4096", "--lora", "32", "--gpu", "rtx4090-24gb"],
    "qwen3-32b": ["--batch", "1", "--sequence", "4096", "--lora", "16", "--checkpointing", "--gpu", "a100-80gb-pcie4"],
    "mixtral-8x7b": ["--batch", "1", "--sequence", "4096", "--lora", "16", "--gpu", "h100-80gb-pcie5"],
    "vit-giant": ["--batch", "64", "--amp", "--gpu", "rtx4090-24gb"],
    "whisper-large": ["--batch", "16", "--sequence", "448", "--dtype", "bf16", "--gpu", "rtx4090-24gb"],
}


def _folder(name: str) -> str:
    return name.partition(":")[0]


def _run_plan(name: str) -> dict[str, Any]:
    """Return the answer for a configuration, with the process's time and memory."""
    command = [sys.executable, "-m", "outofcore", "plan", f"configs/{_folder(name)}", *FLAGS[name], "--json"]
    start = perf_counter()
    # Run in this folder, so that the answer contains no absolute path.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    seconds = perf_counter() - start
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, 1):
        raise SystemExit(f"outofcore plan failed for {name} with exit status {code}")
    unit = 1 if sys.platform == "darwin" else 1024  # unit of ru_maxrss
    return {
        "flags": FLAGS[name],
        "seconds": seconds,
        "processor_seconds": used.ru_utime + used.ru_stime,
        "peak_memory_bytes": used.ru_maxrss * unit,
        "answer": json.loads(output),
        "accelerate": _accelerate_estimate(name),
    }


def _accelerate_estimate(name: str) -> dict[str, Any]:
    config = read_config(str(HERE / "configs" / _folder(name)))
    dtype = parameter_dtype(config, Training())
    # Its command also scales from float32 sizes.
    model = configured_step(config, Training(batch=1, dtype="fp32")).user.models[0]
    total, (largest, _) = calculate_maximum_sizes(model)
    training = estimate_training_usage(total, str(dtype).removeprefix("torch."))
    share = dtype.itemsize / 4
    return {
        "loading_bytes": int(total * share),
        "largest_layer_bytes": int(largest * share),
        "training_bytes": int(max(training.values())),
    }


def _check_exact(name: str) -> None:
    """Exit with an error if the step built from a few layers differs from the fully captured step."""
    flags = dict(zip(FLAGS[name], [*FLAGS[name][1:], ""], strict=True))
    training = Training(
        batch=int(flags["--batch"]),
        sequence=int(flags["--sequence"]) if "--sequence" in flags else None,
        dtype=flags.get("--dtype"),
        lora=int(flags["--lora"]) if "--lora" in flags else None,
        checkpointing="--checkpointing" in flags,
        amp="--amp" in flags,
    )
    config, card = read_config(str(HERE / "configs" / _folder(name))), device(flags["--gpu"])
    from_few_layers, exact = (Captures(config, card, repeats=repeats).capture(training) for repeats in (None, False))
    same_graph = from_few_layers[0].content(families=False) == exact[0].content(families=False)
    seconds = [[cost.seconds for cost in costs.ops] for _, costs in (from_few_layers, exact)]
    if not same_graph or any(
        abs(few_seconds - all_seconds) > 1e-12 for few_seconds, all_seconds in zip(*seconds, strict=True)
    ):
        raise SystemExit(f"{name}: the step built from a few layers differs from the step captured with all layers")
    console().print(f"{name}: {len(exact[0].ops):,} ops built from a few layers equal those captured with all layers")


def _table(rows: dict[str, dict[str, Any]]) -> Table:
    table = Table("model", "time", "processor", "memory", "smallest", "in core", "step", "longest", "accelerate")
    for name, row in rows.items():
        answer = row["answer"]
        plan, longest = answer["plans"][-1], answer["longest_sequence"]
        table.add_row(
            name,
            format_seconds(row["seconds"]),
            format_seconds(row["processor_seconds"]),
            format_bytes(row["peak_memory_bytes"]),
            format_bytes(answer["smallest_budget"]),
            format_bytes(answer["in_core_budget"]),
            "does not fit" if plan["seconds"] is None else format_seconds(plan["seconds"]),
            "-" if longest is None else str(longest["size"]),
            format_bytes(int(row["accelerate"]["training_bytes"])),
        )
    return table


def main(
    name: Annotated[list[str] | None, typer.Option(help="Configurations; repeatable (default: all).")] = None,
    date: Annotated[str | None, typer.Option(help="Date of the measurement, ISO 8601 (default: now).")] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Compare steps built from a few layers with fully captured ones.")
    ] = False,
) -> None:
    """Plan each configuration and write the results; results of other configurations stay."""
    if exact:
        for label in name or list(FLAGS):
            _check_exact(label)
        return
    file = RESULTS / f"{NAME}.json"
    rows = json.loads(file.read_text())["models"] if file.exists() else {}
    for label in name or list(FLAGS):
        rows[label] = _run_plan(label)
        # With a high load, processor time is more reliable.
        write_result(NAME, {"load": os.getloadavg()[0], "models": rows}, date)
    console().print(_table(rows))


if __name__ == "__main__":
    typer.run(main)
