"""Training steps of ``transformers`` models: random weights, published sizes, 16 texts of 512 tokens or 32 images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    Qwen2Config,
    T5Config,
    ViTConfig,
)

# The form that ``outofcore plan`` accepts: a step, its model, its optimizer and batches.
Step = tuple[Callable[[dict[str, torch.Tensor]], torch.Tensor], torch.nn.Module, torch.optim.Optimizer, list[Any]]

_TOKENS = torch.zeros(16, 512, dtype=torch.int64)
_TEXT = {"input_ids": _TOKENS, "labels": _TOKENS}
_IMAGES = {"pixel_values": torch.zeros(32, 3, 224, 224), "labels": torch.zeros(32, dtype=torch.int64)}
_LLAMA = LlamaConfig(
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=22,
    num_attention_heads=32,
    num_key_value_heads=4,
    dtype="bfloat16",
)
_QWEN = Qwen2Config(
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    vocab_size=151936,
    dtype="bfloat16",
)
_T5 = T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12)
_T5.decoder_start_token_id = 0  # pyright: ignore[reportAttributeAccessIssue] - shifts the labels


def bert() -> Step:
    return _step(AutoModelForMaskedLM.from_config(BertConfig()), _TEXT)


def gpt2() -> Step:
    return _step(AutoModelForCausalLM.from_config(GPT2Config()), _TEXT)


def llama() -> Step:
    return _step(AutoModelForCausalLM.from_config(_LLAMA), _TEXT)


def qwen() -> Step:
    return _step(AutoModelForCausalLM.from_config(_QWEN), _TEXT)


def t5() -> Step:
    return _step(AutoModelForSeq2SeqLM.from_config(_T5), _TEXT)


def vit() -> Step:
    return _step(AutoModelForImageClassification.from_config(ViTConfig()), _IMAGES)


def _step(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Step:
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-5)

    def step(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        return loss

    return step, model, optimizer, [batch]
