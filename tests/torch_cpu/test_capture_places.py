"""Tests of the module and line that are named for backward ops, updates and failing ops."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import outofcore
from outofcore.capture import capture_step
from outofcore.errors import BudgetError, CaptureError

TRAINER = """
def train(model, optimizer, x):
    loss = model(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
"""


def line_of(mark: str) -> str:
    """Return the location of the line of this file that ends with the comment ``# <mark>``."""
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(k for k, line in enumerate(lines, 1) if line.endswith(f'# {mark}'))}"


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Install a package that runs the user's loop."""
    folder = tmp_path / "site-packages" / "trainer_of_others"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(TRAINER)
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.delitem(sys.modules, folder.name, raising=False)
    return __import__(folder.name)


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.head = nn.Linear(32, 2048)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(x)
        if self.kind == "prod":
            return y[:, :2].prod(-1).mean()  # prod
        if self.kind == "sgn":
            return (y.sgn() * y).mean()  # sgn
        if self.kind == "hook":
            y.register_hook(lambda gradient: gradient * gradient.max().item())  # hook
        return y.square().mean()  # square


def build_training(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    model = nn.Sequential(nn.Linear(32, 32), Block(kind))
    return model, torch.optim.AdamW(model.parameters(), foreach=True), torch.randn(64, 32)


@pytest.mark.parametrize("kind", ["prod", "sgn"])
def test_refusal_in_backward_names_the_forward_op(kind: str, trainer: Any) -> None:
    model, optimizer, x = build_training(kind)
    with pytest.raises(CaptureError) as caught:
        capture_step(lambda x: trainer.train(model, optimizer, x), [model], [optimizer], (x,), {})
    assert caught.value.location == line_of(kind)
    assert str(caught.value).startswith(f"{line_of(kind)}: in the backward pass of 1: the ")


def test_refusal_in_a_hook_names_the_hook(trainer: Any) -> None:
    model, optimizer, x = build_training("hook")
    with pytest.raises(CaptureError, match="reads the value of a tensor") as caught:
        capture_step(lambda x: trainer.train(model, optimizer, x), [model], [optimizer], (x,), {})
    assert caught.value.location == line_of("hook")


def test_ops_of_a_trainer_have_the_line_of_the_users_call(trainer: Any) -> None:
    model, optimizer, x = build_training("")

    def step(x: torch.Tensor) -> torch.Tensor:
        return trainer.train(model, optimizer, x)  # step

    captured = capture_step(step, [model], [optimizer], (x,), {})
    sources = {op.name: op.source for op in captured.graph.ops}
    assert sources["optimizer.AdamW"] == sources["aten.ones_like.default"] == line_of("step")
    assert {op.source for op in captured.graph.ops if op.module == "1"} == {line_of("square")}
    with (
        pytest.raises(BudgetError) as caught,
        outofcore.compile(step, model, optimizer, budget="600KiB", home="host", split="off") as compiled,
    ):
        compiled(x)
    assert f"optimizer.AdamW in 1.head (Linear) at {line_of('step')}" in str(caught.value)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.words(numbers)  # table


@pytest.mark.parametrize("steps", [1, 12])
def test_failing_op_is_named_in_a_note(steps: int) -> None:
    """In a first step, and in later steps that run in native code."""
    model = nn.Sequential(Table())

    def step(numbers: torch.Tensor) -> torch.Tensor:
        loss = model(numbers).sum()
        loss.backward()
        return loss.detach()

    with outofcore.compile(step, model, budget="4MiB", home="host") as compiled:
        for _ in range(steps):
            compiled(torch.arange(4))
        with pytest.raises(IndexError) as caught:
            compiled(torch.tensor([1, 2, 3, 40]))
        assert f"Raised by embedding in 0.words (Embedding) at {line_of('table')}." in caught.value.__notes__
        compiled(torch.arange(4))
