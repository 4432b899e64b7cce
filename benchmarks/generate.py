"""Generate text from a checkpoint larger than the memory limit: an eager loop compared with accelerate's offloading.

Each tool loads a Llama-shaped bfloat16 model in its own process and generates with greedy decoding. ``--ram`` limits a
process and its page cache, so that every token reads the checkpoint from the disk. Seconds per token are the median
without the first three. The last column compares a token with reading the same bytes from the files.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from _common import console, write_result
from rich.table import Table

from outofcore.units import MIB, format_bytes, format_seconds, parse_bytes

screen = console()
_WAYS = ("plain", "outofcore", "device_map", "disk_offload", "cpu_offload")
_PIECE = 8 * MIB
_WORKER = Path(__file__).with_name("_generate_worker.py")


def _read_rate(folder: Path, *, direct: bool) -> float:
    """Return the bytes per second of reading the checkpoint into one buffer, bypassing the page cache if ``direct``."""
    region = mmap.mmap(-1, _PIECE)  # page-aligned, as direct reads require
    count, start = 0, time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        file = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        try:
            while read_count := os.readv(file, [region]):
                count += read_count
        finally:
            os.close(file)
    return count / (time.perf_counter() - start)


@contextlib.contextmanager
def _control_group(limit: int | None) -> Iterator[Callable[[], None] | None]:
    """Yield a function that moves the calling process into a control group limited to ``limit`` bytes."""
    if limit is None:
        yield None
        return
    root, name = Path("/sys/fs/cgroup"), "memory.max"
    if not (root / "cgroup.controllers").exists():
        root, name = root / "memory", "memory.limit_in_bytes"
    group = root / f"outofcore-{os.getpid()}"
    group.mkdir()
    try:
        (group / name).write_text(str(limit))
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None
    finally:
        group.rmdir()


def _drop_page_cache() -> None:
    """Drop the page cache, which no control group owns."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def _print(rows: list[dict[str, Any]], rate: float) -> None:
    table = Table("tool", "token", "first token", "memory", "with files", "disk", "read per token", "over reading")
    for row in rows:
        reading = row["read_bytes"] / rate
        table.add_row(
            row["way"],
            format_seconds(row["token_seconds"]),
            format_seconds(row["first_token_seconds"]),
            format_bytes(row["anonymous_bytes"]),
            format_bytes(row["resident_bytes"]),
            format_bytes(row["disk_bytes"]),
            format_bytes(row["read_bytes"]),
            f"{row['token_seconds'] / reading:.2f}" if reading else "",
        )
    screen.print(table)


def main(
    folder: Annotated[Path, typer.Option(help="Folder of the checkpoint; written if it does not exist.")],
    budget: Annotated[str, typer.Option(help="Memory budget for all tensors, e.g. 1GiB.")] = "1GiB",
    tokens: Annotated[int, typer.Option(help="Number of tokens to generate.")] = 32,
    layers: Annotated[int, typer.Option(help="Layers of a new checkpoint.")] = 22,
    width: Annotated[int, typer.Option(help="Width of a new checkpoint, a multiple of 512.")] = 4096,
    ways: Annotated[str, typer.Option(help="Tools, separated by commas.")] = ",".join(_WAYS),
    rounds: Annotated[int, typer.Option(help="Runs of each tool, in turns.")] = 1,
    ram: Annotated[
        str | None, typer.Option(help="Memory limit per process, including its page cache; needs root.")
    ] = None,
    date: Annotated[str | None, typer.Option(help="Date of the measurement, ISO 8601 (default: now).")] = None,
) -> None:
    """Generate text from a checkpoint within a budget, with each tool."""
    if not folder.exists():
        screen.print("writing the checkpoint")
        shape = ["--layers", str(layers), "--width", str(width)]
        subprocess.run([sys.executable, str(_WORKER), "write", str(folder), *shape], check=True)
    checkpoint = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    runs: dict[str, list[dict[str, Any]]] = {}
    rates: list[float] = []
    for _ in range(rounds):
        for tool in ways.split(","):
            if ram is None:
                rates.append(_read_rate(folder, direct=False))
            else:
                rates.append(_read_rate(folder, direct=True))
                _drop_page_cache()
            options = ["--budget", budget, "--tokens", str(tokens)]
            with _control_group(None if ram is None else parse_bytes(ram)) as enter:
                worker = subprocess.run(
                    [sys.executable, str(_WORKER), tool, str(folder), *options],
                    stdout=subprocess.PIPE,
                    text=True,
                    check=False,
                    env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
                    preexec_fn=enter,
                )
            if worker.returncode:
                screen.print(f"{tool} failed with status {worker.returncode}")
                continue
            runs.setdefault(tool, []).append(json.loads(worker.stdout.splitlines()[-1]))
    rate = statistics.median(rates)
    rows = [
        sorted(measurements, key=lambda row: row["token_seconds"])[len(measurements) // 2]
        for measurements in runs.values()
    ]
    tokens_of = {row["way"]: row.pop("tokens") for row in rows}
    tokens_match = {tool: measurements == tokens_of[rows[0]["way"]] for tool, measurements in tokens_of.items()}
    source = "the page cache" if ram is None else f"the disk, with {ram} of memory"
    screen.print(
        f"checkpoint {format_bytes(checkpoint)}, budget {budget}, read at {format_bytes(int(rate))}/s from {source}"
    )
    _print(rows, rate)
    screen.print(f"same tokens as {rows[0]['way']}: {tokens_match}")
    facts = {
        "checkpoint_bytes": checkpoint,
        "budget": budget,
        "ram": ram,
        "bytes_per_second": rate,
        "same_tokens": tokens_match,
    }
    write_result("generate" if ram is None else "generate-from-disk", {**facts, "rows": rows}, date)


if __name__ == "__main__":
    typer.run(main)
