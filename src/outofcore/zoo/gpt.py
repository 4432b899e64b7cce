"""A decoder-only language model.

GPT-2 (Radford et al.: Language Models are Unsupervised Multitask Learners, 2019, section 2.3) with an output layer that
shares the embedding (Press, Wolf: Using the Output Embedding to Improve Language Models, arXiv 1608.05859).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outofcore.errors import InputError

_HEAD_WIDTH = 64  # channels of an attention head, in GPT-2 and most similar models


@dataclass(frozen=True, slots=True)
class GPTShape:
    """The sizes of a model; raises ``InputError`` unless the heads divide the width."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    context: int = 1024  # maximum tokens in a sequence
    vocab: int = 256
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise InputError(
                f"gpt: {self.heads} heads do not divide a width of {self.width}; "
                f"use a width that is a multiple of {self.heads}"
            )

    @property
    def parameters(self) -> int:
        block = 12 * self.width**2 + 13 * self.width
        return (self.vocab + self.context) * self.width + self.layers * block + 2 * self.width


def choose_shape(parameters: int, context: int, vocab: int, dropout: float) -> GPTShape:
    """Choose layers and width for a model of about ``parameters`` parameters.

    Minimise |log(count / parameters)| + |log2(width / layers / 64)| / 20 over widths that are multiples of 64. Raises
    ``InputError`` if even the smallest model has more than twice the parameters.
    """

    def error(shape: GPTShape) -> float:
        aspect = shape.width / shape.layers / 64  # 1 for the first model of each GPT family
        return abs(math.log(shape.parameters / parameters)) + abs(math.log2(aspect)) / 20

    best = GPTShape(1, _HEAD_WIDTH, 1, context, vocab, dropout)
    if best.parameters > 2 * parameters:
        raise InputError(
            f"a gpt of {parameters} parameters cannot be built: with a context of {context} "
            f"and a vocabulary of {vocab} the smallest has {best.parameters}; "
            "ask for more, or for a smaller context or vocabulary"
        )
    width = _HEAD_WIDTH
    while 12 * width**2 <= 2 * parameters:
        block = 12 * width**2 + 13 * width
        exact = (parameters - (vocab + context) * width) / block
        for layers in {max(1, math.floor(exact)), max(1, math.ceil(exact))}:
            shape = GPTShape(layers, width, width // _HEAD_WIDTH, context, vocab, dropout)
            best = min(best, shape, key=error)
        width += _HEAD_WIDTH
    return best


class CausalSelfAttention(nn.Module):
    """Causal self-attention over (N, T, width)."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.dropout = shape.dropout
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.out(mixed.transpose(1, 2).reshape(n, t, width))


class TransformerBlock(nn.Module):
    """Attention and two linear layers, each with a residual: (N, T, width) to the same."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width)
        self.attention = CausalSelfAttention(shape)
        self.norm2 = nn.LayerNorm(shape.width)
        self.grow = nn.Linear(shape.width, 4 * shape.width)
        self.gelu = nn.GELU(approximate="tanh")
        self.shrink = nn.Linear(4 * shape.width, shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.shrink(self.gelu(self.grow(self.norm2(x)))))


class GPT(nn.Module):
    """A language model: (N, T) tokens to (N, T, vocab) logits; T is at most the context."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.width)
        self.positions = nn.Parameter(torch.empty(shape.context, shape.width))
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.Sequential(*(TransformerBlock(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        self.head.weight = self.embedding.weight
        self._initialise(shape.layers)

    def _initialise(self, layers: int) -> None:
        nn.init.normal_(self.positions, std=0.02)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                onto_residual = name.endswith((".out", ".shrink"))
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * layers) if onto_residual else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embedding(tokens) + self.positions[: tokens.shape[1]])
        return self.head(self.norm(self.blocks(x)))
