"""Worker of ``generate.py``: writes the checkpoint, or generates text from it with one tool."""

from __future__ import annotations

import contextlib
import json
import resource
import statistics
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from accelerate import cpu_offload, disk_offload
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import outofcore
from outofcore.units import parse_bytes

_WARM_UP = 3
_VOCABULARY = 32000


def _write(folder: Path, layers: int, width: int) -> None:
    """Write a checkpoint layer by layer, to bound peak memory."""
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


def _memory() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {name: int(value.split()[0]) for name, value in (line.split(":") for line in lines if " kB" in line)}


def _load(tool: str, folder: Path, budget: int, scratch: str) -> Any:
    options: dict[str, Any] = {"dtype": torch.bfloat16}
    if tool == "device_map":
        options |= {"device_map": "auto", "max_memory": {"cpu": budget}, "offload_folder": scratch}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    if tool == "disk_offload":
        disk_offload(model, scratch, execution_device=torch.device("cpu"), offload_buffers=True)
    elif tool == "cpu_offload":
        cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)
    return model


def _generate(tool: str, folder: Path, budget: int, tokens: int) -> dict[str, Any]:
    peak, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            peak[0] = max(peak[0], _memory()["RssAnon"])

    before = _memory()["RssAnon"]
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    moments = [time.perf_counter()]
    with tempfile.TemporaryDirectory() as scratch:
        model = _load(tool, folder, budget, scratch)
        loaded = time.perf_counter() - moments[0]
        model.register_forward_hook(lambda *_: moments.append(time.perf_counter()))
        context = outofcore.budget(budget, model) if tool == "outofcore" else contextlib.nullcontext()
        read: list[int] = []
        with context as run:
            if run is not None:
                model.register_forward_hook(lambda *_: read.append(run.stats.fetched_bytes))
            prompt = torch.arange(1, 17)[None]
            output = model.generate(
                prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
            )
        stats = None if run is None else run.stats
        disk = sum(path.stat().st_size for path in Path(scratch).rglob("*") if path.is_file())
    stop.set()
    watcher.join()
    token_seconds = [after - before for before, after in pairwise(moments)]
    steady = token_seconds[_WARM_UP:]
    return {
        "way": tool,
        "tokens": output[0].tolist(),
        "load_seconds": loaded,
        "first_token_seconds": token_seconds[0],
        "token_seconds": statistics.median(steady),
        "token_seconds_all": token_seconds,
        "anonymous_bytes": (max(peak[0], _memory()["RssAnon"]) - before) * 1024,
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "disk_bytes": disk + (0 if stats is None else stats.peak_home_bytes),
        "read_bytes": 0 if len(read) <= _WARM_UP else (read[-1] - read[_WARM_UP - 1]) // (len(read) - _WARM_UP),
        "plans": 0 if stats is None else stats.plans,
    }


def main(
    tool: str,
    folder: Path,
    budget: Annotated[str, typer.Option()] = "1GiB",
    tokens: Annotated[int, typer.Option()] = 32,
    layers: Annotated[int, typer.Option()] = 22,
    width: Annotated[int, typer.Option()] = 4096,
) -> None:
    """Write the checkpoint (``write``), or generate text with one tool and print measurements."""
    if tool == "write":
        _write(folder, layers, width)
    else:
        print(json.dumps(_generate(tool, folder, parse_bytes(budget), tokens)))


if __name__ == "__main__":
    typer.run(main)
