"""A budget holds the step at its first call and at later ones, which may begin with gradients that the first left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import outofcore
from outofcore.capture import capture_step
from outofcore.capture.step import gradients_from_now_on
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
def test_the_smallest_budget_holds_all_calls(ending: Callable[[Any], object]) -> None:
    model, optimizer, step = make(ending)
    plain = make(ending)[2]
    x = torch.randn(8, WIDTH)
    smallest = outofcore.smallest_budget(step, model, optimizer, inputs=(x,))
    assert all(p.grad is None for p in model.parameters())
    compiled = outofcore.compile(step, model, optimizer, budget=smallest, policy="offload-all")
    for _ in range(3):
        assert torch.equal(compiled(x), plain(x))
    compiled.close()


def test_an_estimate_holds_all_calls() -> None:
    model, optimizer, step = make(set_to_zero)
    x = torch.randn(8, WIDTH)
    found = outofcore.estimate(step, model, optimizer, inputs=(x,), policy="offload-all")
    assert found.smallest_budget == outofcore.smallest_budget(step, model, optimizer, inputs=(x,))
    assert all(point.seconds is not None for point in found.points)


def test_an_estimate_for_another_device_holds_all_calls() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def accumulate(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    x = torch.randn(8, WIDTH)
    found = outofcore.estimate(accumulate, model, inputs=(x,), device="h100", policy="offload-all")
    # A later call adds one gradient of a weight to another.
    assert found.smallest_budget >= 2 * WIDTH * WIDTH * x.element_size()
    assert {s.name for s in found.graph.storages if s.kind is StorageKind.GRADIENT} >= {"0.weight.grad"}


def test_a_budget_for_the_first_call_alone_is_refused_before_it() -> None:
    model, optimizer, step = make(set_to_zero)
    x = torch.randn(8, WIDTH)
    smallest = outofcore.smallest_budget(step, model, optimizer, inputs=(x,))
    other, others, clearing = make(clear)
    assert outofcore.smallest_budget(clearing, other, others, inputs=(x,)) < smallest
    before = [p.clone() for p in model.parameters()]
    for budget in (smallest - 4096, smallest // 2):
        compiled = outofcore.compile(step, model, optimizer, budget=budget, policy="offload-all")
        with pytest.raises(BudgetError, match="needs of the second call, which starts with the gradients") as error:
            compiled(x)
        assert error.value.smallest_budget == smallest
        assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
        compiled.close()


def test_a_step_that_does_not_repeat_needs_room_for_its_first_call_alone() -> None:
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


def test_what_is_known_of_later_gradients() -> None:
    x = torch.randn(8, WIDTH)
    model, optimizer, step = make(set_to_zero)
    first = capture_step(step, [model], [optimizer], (x,), {})
    later = gradients_from_now_on(first)
    assert later.keys() == {id(p) for p in model.parameters()}
    settled = capture_step(step, [model], [optimizer], (x,), {}, gradients=later)
    kinds = [s.kind for s in settled.states]
    assert kinds.count(StorageKind.GRADIENT) == 4
    assert gradients_from_now_on(settled) == {}
    model, optimizer, step = make(clear)
    assert gradients_from_now_on(capture_step(step, [model], [optimizer], (x,), {})) == {}
    model(x).sum().backward()
    cleared = gradients_from_now_on(capture_step(step, [model], [optimizer], (x,), {}))
    assert list(cleared.values()) == [None] * 4
