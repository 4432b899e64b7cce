"""Workloads that the library's zoo does not have, with random weights and data.

BERT for sequence classification, and ``narrow``: thousands of layers of 64 KiB, dominated by overhead per op.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from _texts import TASKS, text_workload
from _unseen import UNSEEN, unseen_workload
from torch import Tensor, nn

from outofcore.cli.subjects import find_workload
from outofcore.zoo import Workload, ZooOptions

_LABELS = 2


def workload(model: str, options: Mapping[str, Any]) -> Workload:
    """Return a workload from the zoo, from this file, from ``_texts.py`` or from ``_unseen.py``."""
    if model in TASKS:
        return text_workload(model, options)
    if model in UNSEEN:
        return unseen_workload(model, options)
    if model == "narrow":
        return _narrow(ZooOptions(**{"batch": 64, "optimizer": "sgd", **options}))
    return _bert(ZooOptions(**{"batch": 8, **options})) if model == "bert" else find_workload(model, options)


def _narrow(options: ZooOptions) -> Workload:
    options.check("narrow", frozenset({"layers"}))
    layers, width = options.layers or 1000, 128

    def network() -> nn.Module:
        return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])

    def stream(batch: int, seed: int) -> Iterator[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield (torch.rand(batch, width, generator=generator),)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    shape, sample = f"{layers} layers of {width} x {width}", (((width,), torch.float32),)
    return Workload("narrow", options, shape, "random numbers", network, loss, stream, sample)


def _bert(options: ZooOptions) -> Workload:
    options.check("bert", frozenset({"layers", "width", "heads", "context", "vocab", "dropout"}))
    layers, width, context = options.layers or 12, options.width or 768, options.context or 512
    heads, vocab = options.heads or max(1, width // 64), options.vocab or 30522
    dropout = 0.1 if options.dropout is None else options.dropout

    def network() -> nn.Module:
        from transformers import BertConfig, BertForSequenceClassification  # noqa: PLC0415 - slow to import

        return BertForSequenceClassification(
            BertConfig(
                hidden_size=width,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                intermediate_size=4 * width,
                vocab_size=vocab,
                max_position_embeddings=context,
                hidden_dropout_prob=dropout,
                attention_probs_dropout_prob=dropout,
                num_labels=_LABELS,
            )
        )

    def stream(batch: int, seed: int) -> Iterator[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(seed)
        mask = torch.ones(batch, context, dtype=torch.long)
        while True:
            tokens = torch.randint(vocab, (batch, context), generator=generator)
            yield tokens, mask, torch.randint(_LABELS, (batch,), generator=generator)

    def loss(model: nn.Module, tokens: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        return model(input_ids=tokens, attention_mask=mask, labels=labels).loss

    shape = (
        f"{layers} layers of width {width}, {heads} heads, {context} tokens, vocabulary {vocab}, dropout {dropout:g}"
    )
    tokens = ((context,), torch.long)
    return Workload("bert", options, shape, "random tokens", network, loss, stream, (tokens, tokens, ((), torch.long)))
