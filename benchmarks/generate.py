"""Text from a checkpoint that is larger than the memory it may take: a followed loop beside accelerate's offloading.

A Llama-shaped model with random weights in bfloat16 is written once, as safetensors (``--folder``). Each way then has
a process of its own, in turn, that loads it and generates with greedy decoding: as plain PyTorch does, within a budget,
and as accelerate does it with ``disk_offload``, with ``cpu_offload`` and with ``device_map="auto"`` under the same
``max_memory``. With ``--ram`` a control group holds each process, with the pages of files that the system keeps for it,
to so much: the checkpoint then comes from the disk again for each token, as where it is larger than memory.

Told are the seconds per token (the median of all but the first three), those to the first token with loading, the
memory (the kernel's peak of anonymous memory, and with the pages of files), and what a token would take if only the
bytes were read that came from the files, as fast as they can be read into one buffer.
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


def _rate(folder: Path, *, direct: bool) -> float:
    """Bytes a second at which the checkpoint is read into one buffer: from the disk, or as the system has it now."""
    region = mmap.mmap(-1, _PIECE)  # begins with a page, as direct reads want it
    count, start = 0, time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        file = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        try:
            while done := os.readv(file, [region]):
                count += done
        finally:
            os.close(file)
    return count / (time.perf_counter() - start)


@contextlib.contextmanager
def _group(limit: int | None) -> Iterator[Callable[[], None] | None]:
    """What puts a process into a control group with so much memory, which counts what the system keeps of files."""
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


def _forget_files() -> None:
    """Have the system let go of what it keeps of files: it is nobody's, and stays otherwise."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def _print(rows: list[dict[str, Any]], rate: float) -> None:
    table = Table("way", "token", "first token", "memory", "with files", "disk", "read a token", "over reading")
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
    folder: Annotated[Path, typer.Option(help="where the checkpoint is; made if it is not there")],
    budget: Annotated[str, typer.Option(help="bytes that the weights and all else may take")] = "1GiB",
    tokens: Annotated[int, typer.Option(help="to generate")] = 32,
    layers: Annotated[int, typer.Option(help="of the model, where it is made")] = 22,
    width: Annotated[int, typer.Option(help="of the model, where it is made: a multiple of 512")] = 4096,
    ways: Annotated[str, typer.Option(help="which, with commas between")] = ",".join(_WAYS),
    rounds: Annotated[int, typer.Option(help="how often each way runs, in turn")] = 1,
    ram: Annotated[str | None, typer.Option(help="a process may take, with pages of files; needs root")] = None,
    date: Annotated[str | None, typer.Option(help="to write into the result")] = None,
) -> None:
    """Generate text from a checkpoint within a budget, in each way."""
    if not folder.exists():
        screen.print("make the checkpoint")
        shape = ["--layers", str(layers), "--width", str(width)]
        subprocess.run([sys.executable, str(_WORKER), "write", str(folder), *shape], check=True)
    checkpoint = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    runs: dict[str, list[dict[str, Any]]] = {}
    rates: list[float] = []
    for _ in range(rounds):
        for way in ways.split(","):
            if ram is None:
                rates.append(_rate(folder, direct=False))
            else:
                rates.append(_rate(folder, direct=True))
                _forget_files()
            options = ["--budget", budget, "--tokens", str(tokens)]
            with _group(None if ram is None else parse_bytes(ram)) as enter:
                told = subprocess.run(
                    [sys.executable, str(_WORKER), way, str(folder), *options],
                    stdout=subprocess.PIPE,
                    text=True,
                    check=False,
                    env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
                    preexec_fn=enter,
                )
            if told.returncode:
                screen.print(f"{way} failed with status {told.returncode}")
                continue
            runs.setdefault(way, []).append(json.loads(told.stdout.splitlines()[-1]))
    rate = statistics.median(rates)
    rows = [sorted(found, key=lambda row: row["token_seconds"])[len(found) // 2] for found in runs.values()]
    tokens_of = {row["way"]: row.pop("tokens") for row in rows}
    same = {way: found == tokens_of[rows[0]["way"]] for way, found in tokens_of.items()}
    source = "memory that the system keeps of files" if ram is None else f"the disk, with {ram} of memory"
    screen.print(
        f"checkpoint {format_bytes(checkpoint)}, budget {budget}, read at {format_bytes(int(rate))}/s from {source}"
    )
    _print(rows, rate)
    screen.print(f"tokens as {rows[0]['way']}: {same}")
    facts = {
        "checkpoint_bytes": checkpoint,
        "budget": budget,
        "ram": ram,
        "bytes_per_second": rate,
        "same_tokens": same,
    }
    write_result("generate" if ram is None else "generate-from-disk", {**facts, "rows": rows}, date)


if __name__ == "__main__":
    typer.run(main)
