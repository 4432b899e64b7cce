"""Text from a checkpoint that is larger than the memory it may take: a followed loop beside accelerate's offloading.

A Llama-shaped model with random weights in bfloat16 is written once, as safetensors (``--folder``). Each way then has
a process of its own, in turn, that loads it and generates with greedy decoding: as plain PyTorch does, within a budget,
and as accelerate does it with ``disk_offload``, with ``cpu_offload`` and with ``device_map="auto"`` under the same
``max_memory``. Told are the seconds per token (the median of all but the first three), those to the first token with
loading, the memory (the kernel's peak of anonymous memory, and with the pages of files), and what a token would take if
only the bytes were read that came from the files, as fast as they can be read into one buffer.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from _common import console, write_result
from rich.table import Table

from outofcore.units import MIB, format_bytes, format_seconds

screen = console()
_WAYS = ("plain", "outofcore", "device_map", "disk_offload", "cpu_offload")
_PIECE = 8 * MIB
_WORKER = Path(__file__).with_name("_generate_worker.py")


def _rate(folder: Path) -> float:
    """Bytes a second at which the checkpoint can be read into one buffer, as the system has it now."""
    buffer, count, start = memoryview(bytearray(_PIECE)), 0, time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while done := file.readinto(buffer):
                count += done
    return count / (time.perf_counter() - start)


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
            rates.append(_rate(folder))
            options = ["--budget", budget, "--tokens", str(tokens)]
            told = subprocess.run(
                [sys.executable, str(_WORKER), way, str(folder), *options],
                stdout=subprocess.PIPE,
                text=True,
                check=False,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            )
            if told.returncode:
                screen.print(f"{way} failed with status {told.returncode}")
                continue
            runs.setdefault(way, []).append(json.loads(told.stdout.splitlines()[-1]))
    rate = statistics.median(rates)
    rows = [sorted(found, key=lambda row: row["token_seconds"])[len(found) // 2] for found in runs.values()]
    tokens_of = {row["way"]: row.pop("tokens") for row in rows}
    same = {way: found == tokens_of[rows[0]["way"]] for way, found in tokens_of.items()}
    screen.print(f"checkpoint {format_bytes(checkpoint)}, budget {budget}, read at {format_bytes(int(rate))}/s")
    _print(rows, rate)
    screen.print(f"tokens as {rows[0]['way']}: {same}")
    facts = {"checkpoint_bytes": checkpoint, "budget": budget, "bytes_per_second": rate, "same_tokens": same}
    write_result("generate", {**facts, "rows": rows}, date)


if __name__ == "__main__":
    typer.run(main)
