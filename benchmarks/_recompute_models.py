"""Training steps for ``recompute.py`` in the form that ``outofcore plan FILE:FUNCTION`` accepts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = tuple[Any, nn.Module, torch.optim.Optimizer, tuple[Tensor, ...]]


class Unrolled(nn.Module):
    """An unrolled LSTM cell over (batch, length, width), with a linear layer on the last state."""

    def __init__(self, width: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.read, self.carry = nn.Linear(width, 4 * hidden), nn.Linear(hidden, 4 * hidden)
        self.head = nn.Linear(hidden, classes)
        self.hidden = hidden

    def forward(self, x: Tensor) -> Tensor:
        state = cell = x.new_zeros(x.shape[0], self.hidden)
        for step in range(x.shape[1]):
            inner, forget, new, out = (self.read(x[:, step]) + self.carry(state)).chunk(4, 1)
            cell = torch.sigmoid(forget) * cell + torch.sigmoid(inner) * torch.tanh(new)
            state = torch.sigmoid(out) * torch.tanh(cell)
        return self.head(state)


class Branches(nn.Module):
    """An Inception block of Szegedy et al., "Going Deeper with Convolutions", with batch norm."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.one = _convolution(channels, width, 1)
        self.three = nn.Sequential(_convolution(channels, width, 1), _convolution(width, width, 3))
        self.five = nn.Sequential(_convolution(channels, width // 2, 1), _convolution(width // 2, width, 5))
        self.pooled = _convolution(channels, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.pooled(F.max_pool2d(x, 3, stride=1, padding=1))
        return torch.cat([self.one(x), self.three(x), self.five(x), pooled], 1)


def _convolution(channels: int, width: int, size: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, size, padding=size // 2, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
    )


class Inception(nn.Module):
    """A stem, twelve ``Branches`` blocks with two poolings, and a classifier."""

    def __init__(self, blocks: int = 12, width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4 * width, 7, stride=4, padding=3), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList(Branches(4 * width, width) for _ in range(blocks))
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index in (3, 7):
                x = F.max_pool2d(x, 2)
        return self.head(x.mean((2, 3)))


class UNet(nn.Module):
    """A U-Net with five levels of two convolutions and batch norm, after arXiv 1505.04597."""

    def __init__(self, base: int = 32, levels: int = 5, classes: int = 3) -> None:
        super().__init__()
        widths = [base << level for level in range(levels)]
        self.down = nn.ModuleList(
            _two_convolutions(before, width) for before, width in zip([3, *widths[:-1]], widths, strict=True)
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1]))
        self.merge = nn.ModuleList(_two_convolutions(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(base, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else F.max_pool2d(x, 2))
            skipped.append(x)
        skipped.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skipped.pop(), up(x)], 1))
        return self.head(x)


def _two_convolutions(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(_convolution(channels, width, 3), _convolution(width, width, 3))


def _make_step(model: nn.Module, inputs: Tensor, labels: Tensor) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(inputs: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, model, optimizer, (inputs, labels)


def _labels(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long)


def lstm() -> Step:
    return _make_step(Unrolled(128, 512, 10), torch.empty(256, 64, 128), _labels(256))


def inception() -> Step:
    return _make_step(Inception(), torch.empty(16, 3, 128, 128), _labels(16))


def unet() -> Step:
    return _make_step(UNet(), torch.empty(8, 3, 128, 128), _labels(8, 128, 128))
