"""Tests of complex numbers and mixtures of experts within the smallest budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outofcore
from outofcore.execution.binding import BoundRun, GeneratorUse
from outofcore.profiling.scratch import HALVES

grouped: Any = torch.ops.aten._grouped_mm.default
WORDS, WIDTH, EXPERTS = 32, 64, 4


class Fourier(nn.Module):
    """A layer of a Fourier neural operator: a product per frequency, with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, WORDS // 2 + 1, dtype=torch.cfloat) / WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        modes = torch.einsum("bik,iok->bok", torch.fft.rfft(x.mT), self.weight)
        return self.linear(torch.fft.irfft(modes, n=WORDS).mT)


class Rotary(nn.Module):
    """Positions as rotations in the complex plane; the backward pass rotates by the conjugate."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        angles = torch.outer(torch.arange(WORDS), 0.5 ** torch.arange(WIDTH // 2))
        self.turns: torch.Tensor
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(self.linear(x).unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.turns * 1j).flatten(-2)


class Experts(nn.Module):
    """Routes each word to one expert; the number of words per expert changes from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.wide = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 8)
        self.narrow = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = x.flatten(0, 1)
        scores, expert = self.router(words).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        ends = (expert[:, None] == torch.arange(EXPERTS)).sum(0).cumsum(0).to(torch.int32)
        hidden = F.silu(grouped(words[order], self.wide, offs=ends))
        output = grouped(hidden, self.narrow, offs=ends) * scores[order, None]
        return torch.empty_like(output).index_copy(0, order, output).view_as(x)


def make(kind: type[nn.Module], at_start: bool) -> tuple[nn.Module, Any, Callable[..., torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(kind(), nn.Tanh(), kind())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: torch.Tensor) -> torch.Tensor:
        if at_start:
            optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        if not at_start:
            optimizer.zero_grad()
        return loss

    return model, optimizer, step


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, WORDS, WIDTH, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("at_start", [False, True], ids=["cleared", "left"])
@pytest.mark.parametrize("kind", [Fourier, Rotary, Experts])
def test_same_bits_within_the_smallest_budget(kind: type[nn.Module], at_start: bool) -> None:
    reference, _, plain = make(kind, at_start)
    model, optimizer, step = make(kind, at_start)
    budget = outofcore.smallest_budget(step, model, optimizer, inputs=(batch(0),))
    with outofcore.compile(step, model, optimizer, budget=budget) as compiled:
        for k in range(4):
            assert torch.equal(compiled(batch(k)), plain(batch(k)))
            for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
                assert torch.equal(ours, expected)
                assert (ours.grad is None) == (expected.grad is None)
                assert ours.grad is None or torch.equal(ours.grad, expected.grad)  # type: ignore[arg-type]
        assert compiled.stats.off_plan == 0


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((12, 8), (3, 8, 4), [4, 8, 12]),  # rows of the first in groups
        ((8, 12), (12, 4), [4, 8, 12]),  # the summed dimension in groups
        ((3, 8, 4), (4, 16), [5, 10, 16]),  # columns of the second in groups
    ],
)
def test_grouped_mm_is_measured_with_nonempty_groups(
    first: tuple[int, ...], second: tuple[int, ...], expected: list[int]
) -> None:
    offsets = torch.zeros(3, dtype=torch.int32)
    for args, kwargs in (
        ((torch.ones(first), torch.ones(second), offsets), {}),
        ((torch.ones(first), torch.ones(second)), {"offs": offsets}),
    ):
        offsets.zero_()
        HALVES.fill(BoundRun(0, 0, grouped, args, kwargs, (), (), 1, False, GeneratorUse.UNTOUCHED))
        assert offsets.tolist() == expected
        assert grouped(*args, **kwargs).abs().sum() > 0


def test_fill_leaves_other_ops_unchanged() -> None:
    index = torch.zeros(3, dtype=torch.int64)
    for func in (torch.ops.aten.take.default, print):
        HALVES.fill(BoundRun(0, 0, func, (torch.ones(4, 4), index), {}, (), (), 1, False, GeneratorUse.UNTOUCHED))
    HALVES.fill(BoundRun(0, 0, grouped, (torch.ones(2, 4, 4),) * 2, {}, (), (), 1, False, GeneratorUse.UNTOUCHED))
    assert index.tolist() == [0, 0, 0]
