"""Tests of lazy modules, which are refused until a forward pass gives them shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import outofcore
from outofcore.capture import capture_step

Step = Callable[[torch.Tensor], torch.Tensor]


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


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def make_lazy_training() -> tuple[nn.Module, torch.optim.Optimizer, Step]:
    torch.manual_seed(0)
    model = convolutions()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, make_step(model, optimizer)


@pytest.mark.parametrize(
    "entry_point",
    [
        lambda step, model, optimizer: outofcore.compile(step, model, optimizer, budget="64MiB"),
        lambda step, model, optimizer: outofcore.compile(step, [nn.ReLU(), model], optimizer, budget="64MiB"),
        lambda step, model, optimizer: outofcore.estimate(step, model, optimizer, inputs=(torch.ones(2, 64),)),
        lambda step, model, optimizer: outofcore.smallest_budget(step, model, optimizer, inputs=(torch.ones(2, 64),)),
        lambda step, model, optimizer: outofcore.elastic(step, model, optimizer, workers=2, budget="64MiB"),
        lambda step, model, optimizer: capture_step(step, [model], [optimizer], (torch.ones(2, 64),), {}),
    ],
    ids=["compile", "compile of two", "estimate", "smallest_budget", "elastic", "capture_step"],
)
def test_lazy_module_is_refused_by_its_path(entry_point: Callable[..., Any]) -> None:
    model, optimizer, step = make_lazy_training()
    generator, text = torch.get_rng_state(), repr(model)
    with pytest.raises(outofcore.InputError, match=r"1 \(LazyConv2d\) has no shapes yet.*with torch\.no_grad\(\)"):
        entry_point(step, model, optimizer)
    assert torch.equal(torch.get_rng_state(), generator)
    assert repr(model) == text
    assert sum(nn.parameter.is_lazy(p) for p in model.parameters()) == 5
    model(torch.randn(2, 64))
    assert not any(nn.parameter.is_lazy(p) for p in model.parameters())


def test_materialize_refuses_a_lazy_module_by_its_path() -> None:
    with torch.device("meta"):
        model = convolutions()
    with outofcore.open_home("host") as home:
        with pytest.raises(outofcore.InputError, match=r"1 \(LazyConv2d\) has no shapes yet"):
            outofcore.materialize(model, home=home)
        model(torch.empty(2, 64, device="meta"))
        outofcore.materialize(model, home=home)
        assert model(torch.ones(2, 64)).isfinite().all()


def test_module_made_lazy_between_calls_is_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with outofcore.compile(make_step(model, optimizer), model, optimizer, budget="64MiB") as step:
        step(torch.ones(2, 64))
        model.append(nn.LazyLinear(8))
        with pytest.raises(outofcore.InputError, match=r"1 \(LazyLinear\) has no shapes yet"):
            step(torch.ones(2, 64))
        with torch.no_grad():
            model(torch.ones(2, 64))
        assert step(torch.ones(2, 64)).isfinite()


def test_lazy_model_trains_bit_for_bit_after_a_forward_pass() -> None:
    results, states = [], []
    for compiled in (False, True):
        model, _, _ = make_lazy_training()
        x = torch.randn(32, 64)
        with torch.no_grad():
            model(x)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        step = make_step(model, optimizer)
        if compiled:
            step = outofcore.compile(step, model, optimizer, budget="64MiB")
        results.append([step(x + k) for k in range(3)])
        if isinstance(step, outofcore.Step):
            step.close()
        states.append(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*(s.values() for s in states), strict=True))


def test_dynamic_step_accepts_lazy_modules() -> None:
    losses = []
    for dynamic in (False, True):
        model, optimizer, step = make_lazy_training()
        x = torch.randn(32, 64)
        if dynamic:
            step = outofcore.compile(step, model, optimizer, budget="64MiB", dynamic=True, home="host")
        losses.append([step(x).item() for _ in range(2)])
        if isinstance(step, outofcore.Step):
            step.close()
    assert losses[0] == losses[1]
