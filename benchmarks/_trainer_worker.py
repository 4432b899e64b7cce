"""Worker of the trainer benchmark: fine-tunes GPT-2 with ``transformers.Trainer``, one step per command.

Protocol as in ``_worker.py``; ``mode`` is "eager" or "followed". ``report`` returns a digest of the weights and the
peak memory. Closing standard input ends the training.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
import time
import traceback
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import outofcore
from outofcore.report.machine import peak_memory_bytes

_STEPS = 10_000  # more than any caller requests


class _DoneError(Exception):
    """Ends training at once; a trainer that is asked to stop would run one more step."""


class _Turns(TrainerCallback):
    """A callback that waits for the parent before each step and answers after it."""

    def __init__(self, answer: Any, model: torch.nn.Module, run: outofcore.Loop | None) -> None:
        self._answer = answer
        self._model = model
        self._run = run
        self._begin = 0.0
        self.loss = torch.zeros(())

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._answer({"parameters": sum(p.numel() for p in self._model.parameters()), "torch": torch.__version__})

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for line in sys.stdin:
            if line.strip() == "step":
                break
            self._answer(self._report())
        else:
            raise _DoneError
        self._begin = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seconds = time.perf_counter() - self._begin
        self._answer({"seconds": seconds, "loss": self.loss.item().hex()})

    def _report(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for parameter in self._model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        facts: dict[str, Any] = {"weights": digest.hexdigest(), "peak_rss": peak_memory_bytes()}
        if self._run is not None:
            stats = self._run.stats
            facts |= {"written_bytes": stats.written_bytes, "fetched_bytes": stats.fetched_bytes}
        return facts


class _Trainer(Trainer):
    turns: _Turns

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        output = super().compute_loss(*args, **kwargs)
        self.turns.loss = (output[0] if isinstance(output, tuple) else output).detach()
        return output


def _train(spec: dict[str, Any], answer: Any) -> None:
    options = spec["options"]
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(use_cache=False, **options["config"]))
    batch, tokens = options["batch"], options["tokens"]
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, (16 * batch, tokens), generator=draw)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        arguments = TrainingArguments(
            folder,
            max_steps=_STEPS,
            per_device_train_batch_size=batch,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = _Trainer(model, arguments, train_dataset=rows)
        run = None
        if spec["mode"] == "followed":
            run = stack.enter_context(outofcore.budget(spec["budget"], model))
        trainer.turns = _Turns(answer, model, run)
        trainer.add_callback(trainer.turns)
        with contextlib.suppress(_DoneError):
            trainer.train()


def main() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # other output goes to standard error

    def answer(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=out, flush=True)

    try:
        _train(json.loads(sys.argv[1]), answer)
    except Exception:
        answer({"error": traceback.format_exc()})


if __name__ == "__main__":
    main()
