"""Measure how long a compiled step compares Python values that it has read, before each call.

The five transformers models are narrow, so the share of the step is a worst case.
"""

from __future__ import annotations

import statistics
import time
from typing import Annotated, Any

import torch
import transformers as t
import typer
from _common import console, write_result
from rich.table import Table

import outofcore
from outofcore.units import format_seconds

_WORDS, _WIDTH = 1000, 128
_ROUNDS = 30


def _models() -> dict[str, Any]:
    common = {"vocab_size": _WORDS, "hidden_size": _WIDTH, "num_hidden_layers": 12, "num_attention_heads": 4}
    feed = {"intermediate_size": 2 * _WIDTH}
    return {
        "GPT-2, 24 layers": t.GPT2LMHeadModel(
            t.GPT2Config(vocab_size=_WORDS, n_embd=_WIDTH, n_layer=24, n_head=4, bos_token_id=0, eos_token_id=0)
        ),
        "Llama, 12 layers": t.LlamaForCausalLM(t.LlamaConfig(**common, **feed)),
        "BERT, 12 layers": t.BertForMaskedLM(t.BertConfig(**common, **feed)),
        "T5, 6 and 6 layers": t.T5ForConditionalGeneration(
            t.T5Config(
                vocab_size=_WORDS,
                d_model=_WIDTH,
                d_kv=32,
                d_ff=256,
                num_layers=6,
                num_heads=4,
                decoder_start_token_id=0,
            )
        ),
        "ViT, 12 layers": t.ViTForImageClassification(
            t.ViTConfig(
                image_size=64,
                patch_size=8,
                num_labels=10,
                **{k: v for k, v in common.items() if k != "vocab_size"},
                **feed,
            )
        ),
    }


def _batch(name: str) -> dict[str, torch.Tensor]:
    if name.startswith("ViT"):
        return {"pixel_values": torch.randn(4, 3, 64, 64), "labels": torch.zeros(4, dtype=torch.long)}
    words = torch.randint(0, _WORDS, (4, 64))
    return {"input_ids": words, "labels": words}


def main(
    write: Annotated[bool, typer.Option(help="Write benchmarks/results/guards.json.")] = False,
    date: Annotated[str | None, typer.Option(help="Date of the measurement, ISO 8601 (default: now).")] = None,
) -> None:
    """Measure the comparisons and print a table."""
    table = Table("model", "modules", "values", "comparison", "repeated", "step", "share of step")
    rows: list[dict[str, Any]] = []
    for name, model in _models().items():
        model.train()
        optimizer, batch = torch.optim.AdamW(model.parameters(), 1e-3), _batch(name)

        def step(batch: dict[str, torch.Tensor], model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        with outofcore.compile(step, model, optimizer, budget="2GiB", home="host") as compiled:
            for _ in range(3):
                compiled(batch)
            session = compiled._session
            (snapshots,) = session._captures._snapshots.values()
            snapshot = next(reversed(snapshots.values()))
            compared, repeats, steps = list[float](), list[float](), list[float]()
            for _ in range(_ROUNDS):
                begin = time.perf_counter()
                snapshot.change()
                second = time.perf_counter()
                snapshot.change()
                middle = time.perf_counter()
                compiled(batch)
                compared.append(second - begin)
                repeats.append(middle - second)
                steps.append(time.perf_counter() - middle)
        row = {
            "model": name,
            "modules": sum(1 for _ in model.modules()),
            "values": len(snapshot),
            "compared_seconds": statistics.median(compared),
            "compared_again_seconds": statistics.median(repeats),
            "step_seconds": statistics.median(steps),
        }
        rows.append(row)
        share = row["compared_seconds"] / row["step_seconds"]
        table.add_row(
            name,
            str(row["modules"]),
            str(row["values"]),
            format_seconds(row["compared_seconds"]),
            format_seconds(row["compared_again_seconds"]),
            format_seconds(row["step_seconds"]),
            f"{share:.2%}",
        )
    console().print(table)
    if write:
        write_result("guards", {"models": rows}, date)


if __name__ == "__main__":
    typer.run(main)
