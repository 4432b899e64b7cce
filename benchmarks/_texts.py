"""Workloads with batches of many lengths: small models with random weights and data.

Three have log-normal lengths of batches. The others follow Mimose's tasks, batch sizes and lengths (Liao et al., arXiv
2209.02478), with models that two cores can train.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outofcore.zoo import Workload, ZooOptions
from outofcore.zoo.vision import ResNet

_CHOICES = 4
_CLASSES = 10


@dataclass(frozen=True)
class Task:
    """A training task with log-normal lengths, in tokens or pixels.

    Attributes:
        head: prediction target: "class", "choice", "span", "translation", "next" (token) or "image".
        batch: texts (for "choice": questions of four texts) per batch.
        sigma: standard deviation of the logarithms of lengths.
        together: whether one length is drawn per batch; otherwise texts are padded to the longest in their batch.
    """

    head: str
    batch: int
    shortest: int
    longest: int
    median: int
    sigma: float
    together: bool = False
    layers: int = 4


TASKS: Mapping[str, Task] = {
    "bert-lengths": Task("class", 8, 16, 384, 110, 0.55, together=True, layers=6),
    "gpt2-lengths": Task("next", 4, 16, 512, 140, 0.55, together=True, layers=6),
    "resnet-sizes": Task("image", 8, 48, 256, 112, 0.35, together=True, layers=18),
    "swag": Task("choice", 16, 35, 141, 60, 0.3),
    "squad": Task("span", 12, 153, 512, 190, 0.3),
    "qqp": Task("class", 32, 30, 332, 40, 0.4),
    "un-pc": Task("translation", 8, 17, 460, 50, 0.7),
}


def text_workload(name: str, options: Mapping[str, Any]) -> Workload:
    """Return the workload of one of ``TASKS``.

    In addition to the zoo's options: ``padded`` pads every batch to ``longest``; ``only`` is the length of every batch.
    """
    task, zoo_options = TASKS[name], dict(options)
    padded, only = zoo_options.pop("padded", False), zoo_options.pop("only", None)
    defaults = {"batch": task.batch, "layers": task.layers, "width": 256, "vocab": 8192, "optimizer": "adamw"}
    zoo = ZooOptions(**{**defaults, **zoo_options})
    layers, width, words = zoo.layers or task.layers, zoo.width or 256, zoo.vocab or 8192

    def stream(batch: int, seed: int) -> Iterator[tuple[Tensor, ...]]:
        draw = torch.Generator().manual_seed(seed)
        rows = batch * (_CHOICES if task.head == "choice" else 1)
        while True:
            normal = torch.randn(1 if task.together else rows, generator=draw)
            lengths = (normal * task.sigma + math.log(task.median)).exp().long()
            lengths = lengths.clamp(task.shortest, task.longest).expand(rows)
            longest = only or (task.longest if padded else int(lengths.max()))
            answers = torch.randint(2, (batch,), generator=draw)
            if task.head == "image":
                yield torch.rand((batch, 3, longest, longest), generator=draw), answers
                continue
            # Draw the same tokens regardless of padding.
            tokens = torch.randint(1, words, (rows, task.longest), generator=draw)[:, :longest]
            mask = torch.arange(longest) < lengths[:, None]
            yield tokens * mask, mask.long(), answers

    def network() -> nn.Module:
        return _model(task, layers, width, words)

    unit = "pixels" if task.head == "image" else "tokens"
    shape = f"{layers} layers of width {width}, {task.shortest} to {task.longest} {unit}, {task.head}"
    longest, rows = task.longest, (_CHOICES,) if task.head == "choice" else ()
    tokens = ((*rows, longest), torch.long)
    answer = ((), torch.long)
    sample = (((3, longest, longest), torch.float32), answer) if task.head == "image" else (tokens, tokens, answer)
    data = "random pixels" if task.head == "image" else "random tokens"
    return Workload(name, zoo, shape, data, network, _LOSSES[task.head], stream, sample)


def _model(task: Task, layers: int, width: int, words: int) -> nn.Module:
    if task.head == "image":
        return ResNet(layers, _CLASSES)
    import transformers as hf  # noqa: PLC0415 - slow to import

    heads = max(1, width // 64)
    if task.head == "next":
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=words, n_embd=width, n_layer=layers, n_head=heads, n_positions=task.longest)
        )
    if task.head == "translation":
        return hf.T5ForConditionalGeneration(
            hf.T5Config(
                decoder_start_token_id=0,
                vocab_size=words,
                d_model=width,
                d_kv=64,
                d_ff=4 * width,
                num_layers=layers // 2 or 1,
                num_heads=heads,
            )
        )
    kinds = {
        "class": hf.BertForSequenceClassification,
        "choice": hf.BertForMultipleChoice,
        "span": hf.BertForQuestionAnswering,
    }
    return kinds[task.head](
        hf.BertConfig(
            vocab_size=words,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            max_position_embeddings=task.longest,
        )
    )


def _class(model: nn.Module, tokens: Tensor, mask: Tensor, answers: Tensor) -> Tensor:
    return model(input_ids=tokens, attention_mask=mask, labels=answers).loss


def _choice(model: nn.Module, tokens: Tensor, mask: Tensor, answers: Tensor) -> Tensor:
    shape = (-1, _CHOICES, tokens.shape[1])
    return model(input_ids=tokens.view(shape), attention_mask=mask.view(shape), labels=answers).loss


def _span(model: nn.Module, tokens: Tensor, mask: Tensor, answers: Tensor) -> Tensor:
    return model(input_ids=tokens, attention_mask=mask, start_positions=answers, end_positions=answers + 1).loss


def _translation(model: nn.Module, tokens: Tensor, mask: Tensor, answers: Tensor) -> Tensor:
    return model(input_ids=tokens, attention_mask=mask, labels=tokens, use_cache=False).loss


def _next(model: nn.Module, tokens: Tensor, mask: Tensor, answers: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def _image(model: nn.Module, images: Tensor, answers: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(images), answers)


_LOSSES = {
    "class": _class,
    "choice": _choice,
    "span": _span,
    "translation": _translation,
    "next": _next,
    "image": _image,
}
