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
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from _common import console, write_result
from rich.table import Table

from outofcore.units import MIB, format_bytes, format_seconds, parse_bytes

screen = console()
_WAYS = ("plain", "outofcore", "device_map", "disk_offload", "cpu_offload")
_WARM_UP = 3
_PIECE = 8 * MIB
_VOCABULARY = 32000


def _write(folder: Path, layers: int, width: int) -> None:
    """A checkpoint, layer by layer, so that making it takes little memory."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 128,
        num_key_value_heads=max(1, width // 512),
        vocab_size=_VOCABULARY,
        dtype="bfloat16",
    )
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    with torch.device("meta"):
        parts = LlamaForCausalLM(config).state_dict()
    places: dict[str, str] = {}
    groups: dict[str, list[str]] = {}
    for name in parts:
        groups.setdefault(name.split(".")[2] if ".layers." in name else name, []).append(name)
    for number, names in enumerate(groups.values()):
        file = f"model-{number:05d}.safetensors"
        tensors = {
            name: torch.ones_like(parts[name], device="cpu", dtype=torch.bfloat16)
            if "norm" in name
            else torch.empty_like(parts[name], device="cpu", dtype=torch.bfloat16).normal_(0, 0.02)
            for name in names
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(names, file))
    total = sum((folder / file).stat().st_size for file in set(places.values()))
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)


def _rate(folder: Path) -> float:
    """Bytes a second at which the checkpoint can be read into one buffer, as the system has it now."""
    buffer, count, start = memoryview(bytearray(_PIECE)), 0, time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while done := file.readinto(buffer):
                count += done
    return count / (time.perf_counter() - start)


def _memory() -> dict[str, int]:
    """Of this process, in KiB, by name."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {name: int(value.split()[0]) for name, value in (line.split(":") for line in lines if " kB" in line)}


def _load(way: str, folder: Path, budget: int, scratch: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": torch.bfloat16}
    if way == "device_map":
        options |= {"device_map": "auto", "max_memory": {"cpu": budget}, "offload_folder": scratch}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    if way == "disk_offload":
        from accelerate import disk_offload

        disk_offload(model, scratch, execution_device=torch.device("cpu"), offload_buffers=True)
    elif way == "cpu_offload":
        from accelerate import cpu_offload

        cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)
    return model


def _work(way: str, folder: Path, budget: int, tokens: int) -> dict[str, Any]:
    import contextlib

    import torch

    import outofcore

    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], _memory()["RssAnon"])

    before = _memory()["RssAnon"]
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    moments = [time.perf_counter()]
    with tempfile.TemporaryDirectory() as scratch:
        model = _load(way, folder, budget, scratch)
        loaded = time.perf_counter() - moments[0]
        model.register_forward_hook(lambda *_: moments.append(time.perf_counter()))
        context = outofcore.budget(budget, model) if way == "outofcore" else contextlib.nullcontext()
        read: list[int] = []
        with context as run:
            if run is not None:
                model.register_forward_hook(lambda *_: read.append(run.stats.fetched_bytes))
            prompt = torch.arange(1, 17)[None]
            made = model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
        stats = None if run is None else run.stats
        disk = sum(path.stat().st_size for path in Path(scratch).rglob("*") if path.is_file())
    done.set()
    watcher.join()
    each = [after - before for before, after in zip(moments, moments[1:], strict=False)]
    steady = each[_WARM_UP:]
    return {
        "way": way,
        "tokens": made[0].tolist(),
        "load_seconds": loaded,
        "first_token_seconds": each[0],
        "token_seconds": statistics.median(steady),
        "token_seconds_all": each,
        "anonymous_bytes": (max(peak[0], _memory()["RssAnon"]) - before) * 1024,
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "disk_bytes": disk + (0 if stats is None else stats.peak_home_bytes),
        "read_bytes": 0 if len(read) <= _WARM_UP else (read[-1] - read[_WARM_UP - 1]) // (len(read) - _WARM_UP),
        "plans": 0 if stats is None else stats.plans,
    }


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
    work: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Generate text from a checkpoint within a budget, in each way."""
    if work:
        print(json.dumps(_work(work, folder, parse_bytes(budget), tokens)))
        return
    if not folder.exists():
        screen.print("make the checkpoint")
        _write(folder, layers, width)
    checkpoint = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    runs: dict[str, list[dict[str, Any]]] = {}
    rates: list[float] = []
    for _ in range(rounds):
        for way in ways.split(","):
            rates.append(_rate(folder))
            command = [sys.executable, __file__, "--work", way, "--folder", str(folder), "--budget", budget]
            told = subprocess.run(
                [*command, "--tokens", str(tokens)],
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
