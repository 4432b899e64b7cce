"""Tests that refusals recommend an eager loop where it would work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outofcore
from outofcore.capture.refusals import suggest_loop
from outofcore.errors import CaptureError

HINT = "outofcore.budget(limit, model)"
Step = Callable[[Tensor], Any]


class World:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.saved = nn.Linear(256, 256), []
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.scale = torch.full((256,), 2.0)

    def learn(self, loss: Tensor) -> Tensor:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def read_value(self, x: Tensor) -> Any:
        loss = self.learn(self.model(x).square().mean())
        self.saved.append(loss.item())

    def branch(self, x: Tensor) -> Any:
        y = self.model(x)
        return self.learn((y if y.mean() > 0 else -y).square().mean())

    def choose_rows(self, x: Tensor) -> Any:
        return self.learn(self.model(x[x[:, 0] > 0]).square().mean())

    def use_outside_tensor(self, x: Tensor) -> Any:
        return self.learn((self.model(x) * self.scale).square().mean())

    def keep_tensor(self, x: Tensor) -> Any:
        self.saved.append(self.learn(self.model(x).square().mean()).detach())


@pytest.mark.parametrize(
    "name",
    ["read_value", "branch", "choose_rows", "use_outside_tensor", "keep_tensor"],
)
def test_refused_step_runs_in_an_eager_loop_as_hinted(name: str) -> None:
    world, x = World(), torch.randn(64, 256)
    with pytest.raises(CaptureError) as caught:
        outofcore.smallest_budget(getattr(world, name), world.model, world.optimizer, inputs=(x,))
    message = str(caught.value)
    assert message.count(HINT) == 1
    assert message.endswith(f". Or run the unchanged loop within {HINT}.")
    assert ".." not in message
    with outofcore.budget("1MiB", world.model):
        for _ in range(2):
            getattr(world, name)(x)
    plain = World()
    for _ in range(2):
        getattr(plain, name)(x)
    assert world.model.weight.equal(plain.model.weight)


def test_hint_is_omitted_when_an_eager_loop_would_not_help() -> None:
    world = World()

    def learns_nothing(x: Tensor) -> Tensor:
        return world.model(x).square().mean()

    def elsewhere(x: Tensor) -> Tensor:
        torch.ones(1024, 1024, device="meta").sum()
        return world.learn(world.model(x).square().mean())

    for step in (learns_nothing, elsewhere):
        with pytest.raises(CaptureError) as caught:
            outofcore.smallest_budget(step, world.model, world.optimizer, inputs=(torch.randn(64, 256),))
        assert HINT not in str(caught.value)
    reads = CaptureError("train.py:3: .item() reads the value of a tensor", "train.py:3")
    assert str(suggest_loop(reads, [torch.device("cpu"), torch.device("cuda")])) == reads.args[0]
    assert HINT not in str(reads)
