"""Training on texts of many lengths: small models of Hugging Face's transformers, random weights, random tokens.

The tasks are those of Liao et al., *Mimose: An Input-Aware Checkpointing Planner for Efficient Training on GPU*
(arXiv 2209.02478) in kind, batch size and range of lengths, with models that two cores can train.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outofcore.zoo import Workload, ZooOptions

_CHOICES = 4


@dataclass(frozen=True)
class Task:
    """What is trained on.

    Attributes:
        head: what the model has to tell: "class", "choice", "span" or "translation".
        batch: texts (with "choice" questions, of four texts each) in a batch.
        shortest, longest: lengths in tokens; they are log-normal between these.
        median: of the lengths.
        sigma: of their logarithms.
        together: whether lengths are those of batches, and not of texts, which are padded to the longest of a batch.
    """

    head: str
    batch: int
    shortest: int
    longest: int
    median: int
    sigma: float
    together: bool = False


TASKS: Mapping[str, Task] = {
    "bert-lengths": Task("class", 8, 16, 384, 110, 0.55, together=True),
    "swag": Task("choice", 16, 35, 141, 60, 0.3),
    "squad": Task("span", 12, 153, 512, 190, 0.3),
    "qqp": Task("class", 32, 30, 332, 40, 0.4),
    "un-pc": Task("translation", 8, 17, 460, 50, 0.7),
}


def texts(name: str, options: Mapping[str, Any]) -> Workload:
    """A workload on one of ``TASKS``.

    Args:
        name: of the task.
        options: ``layers``, ``width``, and what else the zoo knows; ``padded``: whether every batch has the longest
            length; ``only``: every batch has this length.
    """
    task, given = TASKS[name], dict(options)
    padded, only = given.pop("padded", False), given.pop("only", None)
    zoo = ZooOptions(**{"batch": task.batch, "layers": 4, "width": 256, "vocab": 8192, "optimizer": "adamw", **given})
    layers, width, words = zoo.layers or 4, zoo.width or 256, zoo.vocab or 8192

    def stream(batch: int, seed: int) -> Iterator[tuple[Tensor, ...]]:
        draw = torch.Generator().manual_seed(seed)
        rows = batch * (_CHOICES if task.head == "choice" else 1)
        while True:
            normal = torch.randn(1 if task.together else rows, generator=draw)
            lengths = (normal * task.sigma + math.log(task.median)).exp().long()
            lengths = lengths.clamp(task.shortest, task.longest).expand(rows)
            longest = only or (task.longest if padded else int(lengths.max()))
            # Drawn alike however far they are padded.
            tokens = torch.randint(1, words, (rows, task.longest), generator=draw)[:, :longest]
            mask = torch.arange(longest) < lengths[:, None]
            answers = torch.randint(2, (batch,), generator=draw)
            yield tokens * mask, mask.long(), answers

    def network() -> nn.Module:
        return _model(task, layers, width, words)

    shape = f"{layers} layers of width {width}, {task.shortest} to {task.longest} tokens, {task.head}"
    return Workload(name, zoo, shape, "random tokens", network, _LOSSES[task.head], stream)


def _model(task: Task, layers: int, width: int, words: int) -> nn.Module:
    import transformers as hf  # noqa: PLC0415 - slow, and this one's only

    heads = max(1, width // 64)
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


_LOSSES = {"class": _class, "choice": _choice, "span": _span, "translation": _translation}
