"""Tests of the error for an op that does not fit: it names the op, its module and the user's line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import outofcore

WIDTH = 256  # a batch of 256 rows has 256 KiB


class Bent(nn.Module):
    """A module that needs three tensors of its size at once in backward, and two in forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(x)  # bent
        return x[:1]


class Outer(nn.Module):
    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.inner, self.checkpointed = nn.Sequential(nn.Identity(), Bent()), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)


def line_with(text: str) -> str:
    """Return how a message names the line of this file that ends with ``# <text>``."""
    lines = inspect.getsource(inspect.getmodule(line_with)).splitlines()  # type: ignore[arg-type]
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith("  # " + text)]
    return f" at {__file__}:{number}"


def refusal_of(model: nn.Module, budget: str, loop: Callable[[], Any]) -> str:
    with pytest.raises(outofcore.BudgetError) as caught, outofcore.budget(budget, model, home="host"):
        loop()
    (description,) = re.findall(r"is too small: (.*) needs ", str(caught.value))
    return description


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("steady", [False, True])
def test_backward_op_is_named_by_the_line_of_its_forward_op(checkpointed: bool, steady: bool) -> None:
    model = Outer(checkpointed=checkpointed)

    def loop() -> None:
        for rows in [*([WIDTH // 4] * 6 * steady), WIDTH]:  # the large batch comes after the order of ops was recorded
            x = torch.ones(rows, WIDTH, requires_grad=True)
            model(x).sum().backward()

    description = refusal_of(model, "700KiB", loop)
    assert description == "aten::gelu_backward in the backward pass of inner.1 (Bent)" + line_with("bent")


def test_op_in_a_module_of_the_framework_is_named_by_its_path() -> None:
    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.GELU()))
    description = refusal_of(model, "300KiB", lambda: model(torch.ones(WIDTH, WIDTH)))  # called
    assert description == "aten::gelu in 1.0 (GELU)" + line_with("called")


def test_accumulated_gradient_is_named_by_its_parameter() -> None:
    model = nn.Sequential(nn.Embedding(WIDTH, WIDTH))

    def loop() -> None:
        for _ in range(2):
            model(torch.arange(4)).sum().backward()  # added

    assert refusal_of(model, "400KiB", loop) == (
        "aten::add_.Tensor in the backward pass of 0.weight" + line_with("added")
    )


@pytest.mark.parametrize("steady", [False, True])
def test_optimizer_op_is_named_by_the_line_of_its_step(steady: bool) -> None:
    models = [nn.Linear(WIDTH // 4, WIDTH), nn.Linear(WIDTH, WIDTH)]
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], momentum=0.9, foreach=True)

    def loop() -> None:
        for model in [*models[:1] * 6 * steady, models[1]]:
            model(torch.ones(1, model.in_features)).sum().backward()
            optimizer.step()  # stepped
            optimizer.zero_grad()

    description = refusal_of(nn.ModuleList(models), "500KiB", loop)
    assert re.fullmatch(r"aten::\S+" + re.escape(line_with("stepped")), description)


def test_op_in_an_installed_package_is_named_by_the_users_line() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=512, n_positions=512)
    model = transformers.GPT2LMHeadModel(config)

    def loop() -> None:
        model(input_ids=torch.zeros(1, 512, dtype=torch.long)).logits.sum().backward()  # generated

    description = refusal_of(model, "600KiB", loop)
    assert re.fullmatch(
        r"aten::\S+ in transformer\.h\.0\.[a-z_.]+ \(\w+\)" + re.escape(line_with("generated")), description
    )
