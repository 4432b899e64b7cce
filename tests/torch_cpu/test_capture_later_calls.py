"""Tests of budgets for the first call and for later ones, which may begin with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import outofcore
from outofcore.capture import capture_step
from outofcore.capture.step import steady_state_gradients
from outofcore.errors import BudgetError
from outofcore.graph import StorageKind

WIDTH = 256


def make(
    ending: Callable[[Any], object], rows: int = 8
) -> tuple[nn.Module, Any, Callable[[torch.Tensor], torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        ending(optimizer)
        return loss

    return model, optimizer, step


def set_to_zero(optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


def clear(optimizer: Any) -> None:
    optimizer.zero_grad()


def leave(optimizer: Any) -> None:
    pass


@pytest.mark.parametrize("ending", [set_to_zero, leave, clear])
def test_smallest_budget_suffices_for_all_calls(ending: Callable[[Any], object]) -> None:
    model, optimizer, step = make(ending)
    plain = make(ending)[2]
    x = torch.randn(8, WIDTH)
    smallest = outofcore.smallest_budget(step, model, optimizer, inputs=(x,))
    assert all(p.grad is None for p in model.parameters())
    compiled = outofcore.compile(step, model, optimizer, budget=smallest, policy="offload-all")
    for _ in range(3):
        assert torch.equal(compiled(x), plain(x))
    compiled.close()


def test_estimate_covers_all_calls() -> None:
    model, optimizer, step = make(set_to_zero)
    x = torch.randn(8, WIDTH)
    estimate = outofcore.estimate(step, model, optimizer, inputs=(x,), policy="offload-all")
    assert estimate.smallest_budget == outofcore.smallest_budget(step, model, optimizer, inputs=(x,))
    assert all(point.seconds is not None for point in estimate.points)


def test_estimate_for_another_device_covers_all_calls() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def accumulate(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    x = torch.randn(8, WIDTH)
    estimate = outofcore.estimate(accumulate, model, inputs=(x,), device="h100", policy="offload-all")
    # A later call adds one gradient of a weight to another.
    assert estimate.smallest_budget >= 2 * WIDTH * WIDTH * x.element_size()
    assert {s.name for s in estimate.graph.storages if s.kind is StorageKind.GRADIENT} >= {"0.weight.grad"}


def test_budget_too_small_for_later_calls_is_refused_at_the_first() -> None:
    model, optimizer, step = make(set_to_zero)
    x = torch.randn(8, WIDTH)
    smallest = outofcore.smallest_budget(step, model, optimizer, inputs=(x,))
    cleared_model, cleared_optimizer, cleared_step = make(clear)
    assert outofcore.smallest_budget(cleared_step, cleared_model, cleared_optimizer, inputs=(x,)) < smallest
    before = [p.clone() for p in model.parameters()]
    for budget in (smallest - 4096, smallest // 2):
        compiled = outofcore.compile(step, model, optimizer, budget=budget, policy="offload-all")
        with pytest.raises(BudgetError, match="needs of the second call, which starts with the gradients") as error:
            compiled(x)
        assert error.value.smallest_budget == smallest
        assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        compiled.close()


def test_budget_covers_only_the_first_call_when_repeats_is_false() -> None:
    model, optimizer, step = make(set_to_zero)
    x = torch.randn(8, WIDTH)
    smallest = outofcore.smallest_budget(step, model, optimizer, inputs=(x,))
    budget = smallest - 4096
    with outofcore.compile(
        step, model, optimizer, budget=budget, policy="offload-all", repeats=False, dynamic=False
    ) as compiled:
        compiled(x)
        with pytest.raises(BudgetError):
            compiled.prepare(x)


def test_gradients_of_later_calls_are_predicted() -> None:
    x = torch.randn(8, WIDTH)
    model, optimizer, step = make(set_to_zero)
    first = capture_step(step, [model], [optimizer], (x,), {})
    later = steady_state_gradients(first)
    assert later.keys() == {id(p) for p in model.parameters()}
    steady = capture_step(step, [model], [optimizer], (x,), {}, gradients=later)
    kinds = [s.kind for s in steady.states]
    assert kinds.count(StorageKind.GRADIENT) == 4
    assert steady_state_gradients(steady) == {}
    model, optimizer, step = make(clear)
    assert steady_state_gradients(capture_step(step, [model], [optimizer], (x,), {})) == {}
    model(x).sum().backward()
    cleared = steady_state_gradients(capture_step(step, [model], [optimizer], (x,), {}))
    assert list(cleared.values()) == [None] * 4
