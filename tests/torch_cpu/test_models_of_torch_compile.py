"""Tests of models wrapped by torch.compile: plain PyTorch inside a step, compiled code outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outofcore

WIDTH = 144


@dataclass
class Compiler:
    """A backend for torch.compile that counts calls and doubles all results, so that losses show where it ran."""

    ran: list[int] = field(default_factory=list[int])

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            self.ran.append(1)
            return tuple(value * 2 for value in graph(*values))

        return run


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    yield Compiler()
    torch.compiler.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(self.linear(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def build() -> Any:
    torch.manual_seed(0)
    return Net()


def make(model: nn.Module, loss_of: Callable[..., torch.Tensor]) -> tuple[torch.optim.Optimizer, Callable[..., Any]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return optimizer, step


def squares(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(x, y)


def batch(number: int) -> torch.Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(number))


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("outofcore")]


@pytest.mark.parametrize("before", [False, True], ids=["new", "has_run"])
@pytest.mark.parametrize(
    ("wrapped", "named"),
    [
        ("model", "the model (OptimizedModule): wrapped by torch.compile"),
        ("model in place", "the model (Net): wrapped by torch.compile"),
        ("part", "'first' (OptimizedModule): wrapped by torch.compile"),
        ("part in place", "'first' (Block): wrapped by torch.compile"),
        ("two parts", "'first' (OptimizedModule) and 1 more: wrapped by torch.compile"),
        ("loss", ""),
    ],
)
def test_step_with_torch_compile_gives_plain_pytorch_results(
    wrapped: str, named: str, before: bool, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    reference = build()
    _, plain = make(reference, squares)
    inner = build()
    model: Any = inner
    loss_of: Callable[..., torch.Tensor] = squares
    settings: dict[str, Any] = {"backend": compiler, "fullgraph": True}
    if wrapped == "model":
        model = torch.compile(inner, **settings)
    elif wrapped == "model in place":
        inner.compile(**settings)
    elif wrapped in ("part", "two parts"):
        inner.first = torch.compile(inner.first, **settings)
        if wrapped == "two parts":
            inner.second = torch.compile(inner.second, **settings)
    elif wrapped == "part in place":
        inner.first.compile(**settings)
    else:
        loss_of = torch.compile(squares, **settings)
    optimizer, step = make(model, loss_of)
    if before:
        inner.eval()
        loss_of(model(batch(7)), batch(7))
        inner.train()
        assert compiler.ran
    budget = outofcore.smallest_budget(step, model, optimizer, inputs=(batch(0),))
    count = len(compiler.ran)
    with outofcore.compile(step, model, optimizer, budget=budget) as compiled:
        for k in range(3):
            assert torch.equal(compiled(batch(k)), plain(batch(k)))
        assert len(compiler.ran) == count
        if named:
            assert any(text.startswith(f"{named}; in this step it runs as plain PyTorch") for text in messages(caplog))
        else:
            assert not messages(caplog)
        # Between steps, compiled code runs again, on the parameters that the steps left.
        inner.eval()
        reference.eval()
        with torch.no_grad():
            ours, theirs = loss_of(model(batch(9)), batch(9)), squares(reference(batch(9)), batch(9))
        assert len(compiler.ran) > count
        assert not torch.equal(ours, theirs)
        if wrapped == "loss":
            assert torch.equal(ours, 2 * theirs)
    for (name, value), (_, expected) in zip(inner.state_dict().items(), reference.state_dict().items(), strict=True):
        assert torch.equal(value, expected), name


def test_plain_models_log_no_message(caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    optimizer, step = make(model, squares)
    with outofcore.compile(step, model, optimizer, budget="1GiB") as compiled:
        compiled(batch(0))
    assert not messages(caplog)
