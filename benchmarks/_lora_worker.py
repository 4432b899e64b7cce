"""Worker of the adapter benchmark: trains LoRA on all linear layers of a Llama-shaped model.

Protocol as in ``_worker.py``; ``mode`` is "eager" (PEFT in core), "outofcore" (compiled step, weights read from files)
or "followed" (eager loop). ``--make FOLDER OPTIONS`` writes a model with random weights instead.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import outofcore
from outofcore.errors import OutOfCoreError
from outofcore.program import CopyIn, CopyOut
from outofcore.report.machine import peak_memory_bytes, resident_memory_bytes

# Rows per block of logits: with a vocabulary of 32,000, the logits of a batch exceed the budget.
_ROWS = 256
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def config_of(options: dict[str, Any]) -> Any:
    """Return the model configuration; the default shape is TinyLlama 1.1B's."""
    return LlamaConfig(
        hidden_size=options.get("width", 2048),
        num_hidden_layers=options.get("layers", 22),
        num_attention_heads=options.get("heads", 32),
        num_key_value_heads=options.get("kv_heads", 4),
        intermediate_size=options.get("intermediate", 5632),
        vocab_size=options.get("vocab", 32000),
        max_position_embeddings=2048,
        dtype=_DTYPES[options["dtype"]],
        tie_word_embeddings=False,
        use_cache=False,
    )


def write_checkpoint(folder: Path, options: dict[str, Any]) -> None:
    """Write a model with random weights, one file per layer, unless it exists."""
    if (folder / "model.safetensors.index.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(options)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict().items():
        group = name.split(".")[2] if ".layers." in name else name.split(".")[0]
        files.setdefault(f"model-{group}.safetensors", {})[name] = tensor
    total = 0
    for number, (file, tensors) in enumerate(files.items()):
        generator = torch.Generator().manual_seed(number)
        weights = {
            name: (
                torch.ones(tensor.shape) if tensor.dim() == 1 else torch.randn(tensor.shape, generator=generator) * 0.02
            ).to(_DTYPES[options["dtype"]])
            for name, tensor in tensors.items()
        }
        total += sum(tensor.nbytes for tensor in weights.values())
        save_file(weights, folder / file, {"format": "pt"})
    config.save_pretrained(folder)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: file for file, tensors in files.items() for name in tensors},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _unnamed_bytes() -> int:
    """Return the disk bytes of unnamed files that this process has open."""
    bytes_of_file: dict[tuple[int, int], int] = {}
    for opened in Path("/proc/self/fd").iterdir():
        try:
            facts = opened.stat()
        except OSError:
            continue
        if stat.S_ISREG(facts.st_mode) and facts.st_nlink == 0:
            bytes_of_file[facts.st_dev, facts.st_ino] = 512 * facts.st_blocks
    return sum(bytes_of_file.values())


class _Training:
    def __init__(self, spec: dict[str, Any]) -> None:
        self._options: dict[str, Any] = spec["options"]
        self._mode: str = spec["mode"]
        torch.set_num_threads(self._options.get("threads", torch.get_num_threads()))
        begin = time.perf_counter()
        folder = Path(self._options["folder"])
        self._home: outofcore.OpenHome | None = None
        if self._mode == "outofcore":
            config = config_of(self._options)
            before = torch.get_default_dtype()
            torch.set_default_dtype(config.dtype)
            with torch.device("meta"):
                model = LlamaForCausalLM(config)
            torch.set_default_dtype(before)
            # The rotary table is not a weight and is in no file.
            model.model.rotary_emb = type(model.model.rotary_emb)(config)
            self._home = outofcore.open_home(spec["home"])
            outofcore.materialize(model, home=self._home, weights=folder)
        else:
            model = LlamaForCausalLM.from_pretrained(folder, dtype=_DTYPES[self._options["dtype"]])
        torch.manual_seed(1)
        self._model = get_peft_model(
            model, LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear")
        )
        self._model.train()
        if self._options.get("checkpointing", True):
            # Without checkpointing, activations (13 GiB per batch) would dominate the measurement.
            self._model.enable_input_require_grads()
            self._model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        trained = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-4)
        self._run: Any = self._train
        self._step: Any = None
        self._loop: Any = None
        if self._mode == "outofcore":
            self._step = self._run = outofcore.compile(
                self._train, self._model, self._optimizer, budget=spec["budget"], home=self._home, dynamic=False
            )
        elif self._mode == "followed":
            self._loop = outofcore.budget(spec["budget"], self._model, home=spec["home"]).start()
        self._draw = torch.Generator().manual_seed(2)
        torch.manual_seed(3)
        self.seconds = time.perf_counter() - begin
        self.trained_bytes = sum(p.nbytes for p in trained)

    def _train(self, ids: torch.Tensor) -> torch.Tensor:
        inner: nn.Module = self._model.base_model.model
        hidden = inner.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
        targets = ids[:, 1:].flatten()
        losses = [
            F.cross_entropy(inner.lm_head(rows).float(), labels, reduction="sum")
            for rows, labels in zip(hidden.split(_ROWS), targets.split(_ROWS), strict=True)
        ]
        loss = torch.stack(losses).sum() / targets.numel()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def step(self) -> dict[str, Any]:
        options = self._options
        shape = (options.get("batch", 4), options.get("sequence", 512))
        ids = torch.randint(0, options.get("vocab", 32000), shape, generator=self._draw)
        begin = time.perf_counter()
        loss = self._run(ids)
        seconds = time.perf_counter() - begin
        measurements = {"loss": loss.item().hex(), "seconds": seconds, "written_bytes": 0, "fetched_bytes": 0}
        if self._loop is not None:
            measurements |= {key: getattr(self._loop.stats, key) for key in ("written_bytes", "fetched_bytes")}
        return measurements

    def report(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                digest.update(name.encode() + parameter.detach().contiguous().numpy().tobytes())
        facts = {
            "adapters": digest.hexdigest(),
            "peak_rss": peak_memory_bytes(),
            "rss": resident_memory_bytes(),
            "disk_bytes": _unnamed_bytes(),
        }
        if self._step is not None:
            graph, program = self._step.captured.graph, self._step.planned.program
            written = [program.blocks[i.block].storage for i in program.instructions if isinstance(i, CopyOut)]
            read = [program.blocks[i.block].storage for i in program.instructions if isinstance(i, CopyIn)]
            size = [storage.bytes for storage in graph.storages]
            facts |= {
                "frozen_bytes_out": sum(size[s] for s in written if s in graph.frozen),
                "frozen_bytes_in": sum(size[s] for s in read if s in graph.frozen),
                "frozen_bytes": sum(size[s] for s in graph.frozen),
                "bytes_out": sum(size[s] for s in written if s is not None),
            }
        return facts

    def close(self) -> None:
        if self._step is not None:
            self._step.close()
        if self._loop is not None:
            self._loop.stop()
        if self._home is not None:
            self._home.close()


def main() -> None:
    if sys.argv[1] == "--make":
        write_checkpoint(Path(sys.argv[2]), json.loads(sys.argv[3]))
        return
    spec = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # other output goes to standard error

    def answer(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=out, flush=True)

    try:
        training = _Training(spec)
        answer({"seconds": training.seconds, "trained_bytes": training.trained_bytes, "torch": torch.__version__})
        for line in sys.stdin:
            answer(training.step() if line.strip() == "step" else training.report())
        training.close()
    except OutOfCoreError as error:
        answer({"error": f"{type(error).__name__}: {error}"})
    except Exception:
        answer({"error": traceback.format_exc()})


if __name__ == "__main__":
    main()
