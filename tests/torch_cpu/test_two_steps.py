"""Tests of several steps over one model, such as training and evaluation, with a shared home or one each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outofcore
from outofcore.capture.optimizers import BoundUpdate
from outofcore.errors import InputError, StateError


def make() -> tuple[nn.Module, torch.optim.Optimizer, Callable[..., Any], Callable[..., Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(x: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def evaluate(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(x)

    return model, optimizer, train, evaluate


def batch(number: int) -> torch.Tensor:
    return torch.randn(32, 256, generator=torch.Generator().manual_seed(number))


def alternate(model: nn.Module, optimizer: Any, train: Any, evaluate: Any) -> list[torch.Tensor]:
    torch.manual_seed(4)
    results = []
    for epoch in range(3):
        results += [train(batch(k)) for k in (epoch, epoch + 1)]
        model.eval()
        results += [evaluate(batch(k)) for k in (7, 8)]
        model.train()
        with torch.no_grad():
            model[4].weight.mul_(0.99)  # type: ignore[union-attr]
            model[0].weight.data = model[0].weight.data + 0.001  # type: ignore[union-attr]
    results += [p.detach().clone() for p in model.parameters()]
    state = optimizer.state_dict()["state"]
    results += [state[number][name].clone() for number in sorted(state) for name in sorted(state[number])]
    return results


def assert_alike(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> None:
    assert len(ours) == len(plain)
    assert all(torch.equal(actual, expected) for actual, expected in zip(ours, plain, strict=True))


Compiled = tuple[nn.Module, torch.optim.Optimizer, outofcore.Step, outofcore.Step]


@pytest.fixture(params=["opened", "the other's", "each its own"])
def pair(request: pytest.FixtureRequest) -> Iterator[Compiled]:
    model, optimizer, train, evaluate = make()
    smallest = outofcore.smallest_budget(train, model, optimizer, inputs=(batch(0),))
    home = outofcore.open_home() if request.param == "opened" else None
    training = outofcore.compile(train, model, optimizer, budget=int(1.3 * smallest), home=home, policy="window")
    shared = None if request.param == "each its own" else training.home
    with training, outofcore.compile(evaluate, model, budget=smallest, home=shared) as evaluation:
        yield model, optimizer, training, evaluation
    if home is not None:
        home.close()


def test_alternating_training_and_evaluation_are_exact(pair: Compiled) -> None:
    assert_alike(alternate(*pair), alternate(*make()))


def test_closing_one_step_leaves_the_other_exact(pair: Compiled) -> None:
    model, _, training, evaluation = pair
    plain = make()
    ours = alternate(*pair)
    training.close()
    model.eval()
    ours += [evaluation(batch(9)), *(p.detach().clone() for p in model.parameters())]
    expected = alternate(*plain)
    plain[0].eval()
    expected += [plain[3](batch(9)), *(p.detach().clone() for p in plain[0].parameters())]
    assert_alike(ours, expected)
    evaluation.close()
    assert_alike([model(batch(9))], [plain[0](batch(9))])


def test_steps_with_a_shared_home_use_one_arena_at_a_time(pair: Compiled) -> None:
    _, _, training, evaluation = pair
    training(batch(0))
    evaluation(batch(0))
    if training.home is evaluation.home:
        assert training._session.steps.arena is None
    for k in range(6):
        training(batch(k))
        evaluation(batch(k))
    # The state of the two large layers in one slot per tensor, plus some activations.
    assert training.home.bytes < 2 * 6 * 256 * 256 * 4


def test_torn_model_is_refused_by_other_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, train, evaluate = make()
    with outofcore.compile(train, model, optimizer, budget="1GiB") as training:
        evaluation = outofcore.compile(evaluate, model, budget="1GiB", home=training.home)
        training(batch(0))
        with monkeypatch.context() as patch:
            patch.setattr(BoundUpdate, "__call__", mock.Mock(side_effect=TypeError))
            with pytest.raises(TypeError):  # the model stays consistent, as in plain PyTorch
                training(batch(1))
        evaluation(batch(1))
        training(batch(1))
        training._session.torn = "TransferError: the disk is gone"
        with pytest.raises(StateError, match="half way"):
            evaluation(batch(1))
        evaluation.close()


def test_host_budget_is_refused_with_an_open_home() -> None:
    model, optimizer, train, _ = make()
    with outofcore.open_home() as home, pytest.raises(InputError, match="open_home"):
        outofcore.compile(train, model, optimizer, budget="1GiB", home=home, host_budget="1MiB")
