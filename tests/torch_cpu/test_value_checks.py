"""Tests of value checks in PyTorch's own code: a compiled step runs them in each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import distributions as d
from torch import nn
from torch.distributions import constraints

import outofcore

Loss = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def _validate_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable validation, the default: torch.compile in other tests disables it for the whole process."""
    monkeypatch.setattr(d.Distribution, "_validate_args", True)


def gaussian(h: torch.Tensor) -> torch.Tensor:
    return F.gaussian_nll_loss(h[:, :4], torch.ones_like(h[:, :4]), h[:, 4:])


def normal(h: torch.Tensor) -> torch.Tensor:
    distribution = d.Normal(h[:, :4], h[:, 4:])
    z = distribution.rsample()
    prior = d.Normal(torch.zeros_like(z), torch.ones_like(z))
    return d.kl_divergence(distribution, prior).mean() - distribution.log_prob(z).mean()


def categorical(h: torch.Tensor) -> torch.Tensor:
    distribution = d.Categorical(logits=h)
    return -distribution.log_prob(distribution.sample()).mean() + distribution.entropy().mean()


def gamma(h: torch.Tensor) -> torch.Tensor:
    distribution = d.Gamma(h[:, :4], h[:, 4:])
    return distribution.rsample().square().mean() - distribution.log_prob(torch.ones_like(h[:, :4])).mean()


class Branching(constraints.Constraint):
    """Branches on the value instead of raising."""

    def check(self, value: torch.Tensor) -> torch.Tensor:
        return value < 100 if bool((value > 0).all()) else value > -100


class CustomNormal(d.Normal):
    arg_constraints = {"loc": Branching(), "scale": Branching()}  # noqa: RUF012 - as in PyTorch


def own_constraint(h: torch.Tensor) -> torch.Tensor:
    return -CustomNormal(h[:, :4], h[:, 4:].abs()).log_prob(torch.zeros_like(h[:, :4])).mean()


def make_case(loss: Loss) -> tuple[Callable[..., torch.Tensor], nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Softplus())
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def step(x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        value = loss(model(x) + shift)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step, model, optimizer


def run_steps(loss: Loss, budget: int | None) -> tuple[list[Any], list[Exception]]:
    """Return losses and parameters, and the errors of the third call, which gets NaNs."""
    step, model, optimizer = make_case(loss)
    run: Any = step if budget is None else outofcore.compile(step, model, optimizer, budget=budget, home="host")
    losses: list[Any] = []
    raised: list[Exception] = []
    torch.manual_seed(1)
    for number in range(5):
        shift = torch.full((1, 8), float("nan") if number == 2 else 0.0)
        try:
            losses.append(run(torch.ones(3, 4), shift).clone())
        except ValueError as error:
            raised.append(error)
    if budget is not None:
        run.close()
    return [*losses, *[p.detach().clone() for p in model.parameters()]], raised


def without_nan(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.nan_to_num(posinf=torch.inf, neginf=-torch.inf)


@pytest.mark.parametrize("budget", [1 << 24, 1 << 17])
@pytest.mark.parametrize("loss", [gaussian, normal, categorical, gamma], ids=lambda loss: loss.__name__)
def test_invalid_values_raise_in_the_same_call(loss: Loss, budget: int) -> None:
    expected, raised = run_steps(loss, None)
    actual, raised_compiled = run_steps(loss, budget)
    assert len(raised) == len(raised_compiled) == (loss is not gaussian)  # NaN is not negative
    assert all(torch.equal(without_nan(a), without_nan(b)) for a, b in zip(actual, expected, strict=True))


def test_negative_variance_raises_and_keeps_the_model() -> None:
    step, model, optimizer = make_case(gaussian)
    before = [p.detach().clone() for p in model.parameters()]
    with outofcore.compile(step, model, optimizer, budget=1 << 24, home="host") as run:
        with pytest.raises(ValueError, match="var has negative entry"):
            run(torch.ones(3, 4), torch.full((1, 8), -9.0))
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
        run(torch.ones(3, 4), torch.zeros(1, 8))


def test_custom_constraint_is_not_treated_as_a_check() -> None:
    step, model, optimizer = make_case(own_constraint)
    with (
        outofcore.compile(step, model, optimizer, budget=1 << 24, home="host") as run,
        pytest.raises(outofcore.CaptureError, match="a branch on a tensor"),
    ):
        run(torch.ones(3, 4), torch.zeros(1, 8))
