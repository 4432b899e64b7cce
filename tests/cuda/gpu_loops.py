"""Training loops on a GPU for ``outofcore.budget``: the portable ones, and some that need a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from loops import Language, Loop, MakeOptimizer, autocast, lengths_vary, loss_of, plain, rich
from torch import Tensor, nn


class Strided(nn.Module):
    """Convolutions with batch statistics, whose gradients on a GPU are not deterministic."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.GELU(),
            nn.Conv2d(32, 32, 3, stride=6), nn.SiLU(), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Dense(nn.Sequential):
    def __init__(self) -> None:
        layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)) for _ in range(5)]
        super().__init__(*layers, nn.Linear(256, 10))


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9),
    "sgd_fused": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, fused=True),
    "adamw_foreach": lambda m: torch.optim.AdamW(m.parameters(), 1e-3, foreach=True),
    "adamw_fused": lambda m: torch.optim.AdamW(m.parameters(), 1e-3, fused=True),
    "adamw_one_by_one": lambda m: torch.optim.AdamW(m.parameters(), 1e-3, foreach=False),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), momentum=0.9),
}


def batches(steps: int, shape: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(shape, generator=draw), torch.randint(0, 10, shape[:1], generator=draw)


def train_from_pinned_memory(model: nn.Module, make: MakeOptimizer, steps: int, shape: tuple[int, ...]) -> list[Any]:
    optimizer, results = make(model), []
    for batch in batches(steps, shape):
        x, y = (t.pin_memory().to("cuda", non_blocking=True) for t in batch)
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        results.append((loss.item(), norm.item()))
    return [*results, optimizer]


def train_with_side_stream(model: nn.Module, make: MakeOptimizer) -> list[Any]:
    """Prepare batches on a second stream, synchronized as PyTorch documents."""
    optimizer, results, side = make(model), [], torch.cuda.Stream()
    for rows, labels in batches(6, (256, 256)):
        with torch.cuda.stream(side):
            x, y = rows.cuda(non_blocking=True) * 2, labels.cuda(non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)
        for tensor in (x, y):
            tensor.record_stream(torch.cuda.current_stream())
        loss = loss_of(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            total = sum(p.detach().square().sum() for p in model.parameters())
        torch.cuda.current_stream().wait_stream(side)
        results.append((loss.item(), total.item()))
    return [*results, optimizer]


LOOPS: dict[str, tuple[Loop, Callable[[], nn.Module]]] = {
    "dense": (functools.partial(train_from_pinned_memory, steps=6, shape=(256, 256)), lambda: Dense().cuda()),
    "tall": (functools.partial(train_from_pinned_memory, steps=4, shape=(2048, 256)), lambda: Dense().cuda()),
    "pictures": (functools.partial(train_from_pinned_memory, steps=5, shape=(8, 3, 24, 24)), lambda: Strided().cuda()),
    "language": (plain, lambda: Language().cuda()),
    "lengths": (lengths_vary, lambda: Language().cuda()),
    "rich": (rich, lambda: Language().cuda()),
    "autocast": (autocast, lambda: Language().cuda()),
    "side_stream": (train_with_side_stream, lambda: Dense().cuda()),
}
