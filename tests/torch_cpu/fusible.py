"""Small training steps with fusible ops; also run as a script by tests."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import outofcore
from outofcore.step import Step

Batch = tuple[torch.Tensor, torch.Tensor]
STEPS = 3


class _Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(160, 160) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x)) * 0.5 + x
        return x


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.other_norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norm(self.first(x)), inplace=True)
        return F.relu(self.other_norm(self.second(inner)) + x, inplace=True)


class _Transformer(nn.Module):
    """A transformer with explicit attention, so that the ops around its products can be fused."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.mixers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.inner = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.outer = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        ahead = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        for norm, mixer, inner, outer in zip(self.norms, self.mixers, self.inner, self.outer, strict=True):
            query, key, value = mixer(norm(x)).chunk(3, dim=-1)
            scores = (query @ key.transpose(1, 2) * query.shape[-1] ** -0.5).masked_fill(ahead, float("-inf"))
            x = x + torch.softmax(scores, -1) @ value
            x = x + outer(F.gelu(inner(x)))
        return self.head(x)


def _dropout_layers() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(160, 160), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)]
    return nn.Sequential(*layers)


def _convolutional() -> nn.Module:
    blocks = [_Residual(16) for _ in range(3)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": _Perceptron,
    "convolutional": _convolutional,
    "transformer": _Transformer,
    "dropping": _dropout_layers,
}


def build_case(name: str) -> tuple[nn.Module, torch.optim.Optimizer, Callable[..., torch.Tensor], list[Batch]]:
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    kinds: dict[str, Callable[[], Batch]] = {
        "convolutional": lambda: (torch.randn(8, 3, 24, 24), torch.randint(16, (8,))),
        "transformer": lambda: (torch.randint(256, (4, 96)), torch.randint(256, (4, 96))),
    }
    make = kinds.get(name, lambda: (torch.randn(192, 160), torch.randint(160, (192,))))
    return model, optimizer, step, [make() for _ in range(STEPS)]


def compile_case(name: str, budget: int | str, **overrides: Any) -> tuple[Step[..., Any], list[Batch], nn.Module]:
    model, optimizer, step, batches = build_case(name)
    options = {"home": "host", "kernels": "inductor", **overrides}
    return outofcore.compile(step, model, optimizer, budget=budget, **options), batches, model


def train_case(name: str, budget: int | str, **overrides: Any) -> tuple[list[str], list[torch.Tensor], Step[..., Any]]:
    """Return the losses in hexadecimal, the final state of the model, and the closed step."""
    step, batches, model = compile_case(name, budget, **overrides)
    torch.manual_seed(1)
    with step:
        losses = [step(*batch).item().hex() for batch in batches]
    return losses, [tensor.detach().clone() for tensor in model.state_dict().values()], step


if __name__ == "__main__":
    losses = train_case(sys.argv[1], sys.argv[2], policy="offload-all")[0]
    Path(sys.argv[3]).write_text(json.dumps(losses), encoding="utf-8")
