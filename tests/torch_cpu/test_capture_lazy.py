"""Lazy modules get their shapes at the first call and their values in the first step, as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import outofcore
from outofcore.capture import capture_step
from outofcore.errors import BudgetError


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.5), nn.LazyLinear(256), nn.Tanh(), nn.LazyLinear(8))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.LazyConv2d(16, 3),
        nn.LazyBatchNorm2d(),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.LazyLinear(8, bias=False),
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def pair(make: Callable[[], nn.Module]) -> Any:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    return [(model, torch.optim.AdamW(model.parameters(), lr=0.01)) for model in models]


@pytest.mark.parametrize("smallest", [False, True], ids=["roomy", "smallest budget"])
@pytest.mark.parametrize("make", [mlp, convolutions])
def test_a_lazy_model_is_trained_bit_for_bit(make: Callable[[], nn.Module], smallest: bool) -> None:
    (plain, one), (ours, other) = pair(make)
    x = torch.randn(32, 64)
    step = train(ours, other)
    budget = outofcore.smallest_budget(step, ours, other, inputs=(x,)) if smallest else "64MiB"
    assert any(nn.parameter.is_lazy(p) for p in ours.parameters())
    compiled = outofcore.compile(step, ours, other, budget=budget, policy="offload-all" if smallest else "auto")
    results = []
    for run in (train(plain, one), compiled):
        torch.manual_seed(1)
        results.append([run(x + k) for k in range(3)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    for a, b in zip(plain.state_dict().values(), ours.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert [type(m) for m in plain.modules()] == [type(m) for m in ours.modules()]
    assert repr(plain) == repr(ours)
    compiled.close()


def test_a_capture_leaves_lazy_modules_as_they_are() -> None:
    _, (model, optimizer) = pair(convolutions)
    before, text = [len(m._forward_pre_hooks) for m in model.modules()], repr(model)
    captured = capture_step(train(model, optimizer), [model], [optimizer], (torch.randn(2, 64),), {})
    assert captured.lazy
    assert repr(model) == text
    assert [nn.parameter.is_lazy(p) for p in model.parameters()] == [True] * 5
    assert [len(m._forward_pre_hooks) for m in model.modules()] == before
    model(torch.randn(2, 64))
    assert not any(nn.parameter.is_lazy(p) for p in model.parameters())


def test_a_budget_that_is_too_small_leaves_lazy_modules_as_they_are() -> None:
    _, (model, optimizer) = pair(mlp)
    compiled = outofcore.compile(train(model, optimizer), model, optimizer, budget="64KiB")
    with pytest.raises(BudgetError):
        compiled(torch.randn(32, 64))
    assert sum(nn.parameter.is_lazy(p) for p in model.parameters()) == 4
    compiled.close()
    model(torch.randn(2, 64))


def test_a_lazy_module_that_is_not_called_stays_lazy() -> None:
    _, (model, optimizer) = pair(mlp)
    model.other = nn.LazyLinear(3)  # type: ignore[assignment]
    used = nn.Sequential(*list(model)[:5])
    compiled = outofcore.compile(train(used, optimizer), model, optimizer, budget="64MiB")
    compiled(torch.randn(32, 64))
    assert nn.parameter.is_lazy(model.other.weight)
    compiled.close()
