"""Of an op that does not fit: which one it is, in which module, and the user's line, wherever it is called from."""

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

WIDTH = 256  # a batch of so many rows has 256 KiB


class Bent(nn.Module):
    """Its backward pass needs three tensors of its size at once, its forward pass two."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(x)  # bent
        return x[:1]


class Outer(nn.Module):
    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.inner, self.again = nn.Sequential(nn.Identity(), Bent()), again

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)


def line_with(text: str) -> str:
    """How a message names the line of this file that ends so."""
    lines = inspect.getsource(inspect.getmodule(line_with)).splitlines()  # type: ignore[arg-type]
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith("  # " + text)]
    return f" at {__file__}:{number}"


def refusal_of(model: nn.Module, budget: str, loop: Callable[[], Any]) -> str:
    with pytest.raises(outofcore.BudgetError) as caught, outofcore.budget(budget, model, home="host"):
        loop()
    (told,) = re.findall(r"is too small: (.*) needs ", str(caught.value))
    return told


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("settled", [False, True])
def test_op_of_backward_is_named_as_its_op_of_forward(again: bool, settled: bool) -> None:
    model = Outer(again=again)

    def loop() -> None:
        for rows in [*([WIDTH // 4] * 6 * settled), WIDTH]:  # large batches come when it is known which op comes when
            x = torch.ones(rows, WIDTH, requires_grad=True)
            model(x).sum().backward()

    told = refusal_of(model, "700KiB", loop)
    assert told == "aten::gelu_backward in the backward pass of inner.1 (Bent)" + line_with("bent")


def test_op_in_a_module_of_the_framework_is_named_by_its_path() -> None:
    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.GELU()))
    told = refusal_of(model, "300KiB", lambda: model(torch.ones(WIDTH, WIDTH)))  # called
    assert told == "aten::gelu in 1.0 (GELU)" + line_with("called")


def test_gradient_that_is_added_to_is_named_by_its_parameter() -> None:
    model = nn.Sequential(nn.Embedding(WIDTH, WIDTH))

    def loop() -> None:
        for _ in range(2):
            model(torch.arange(4)).sum().backward()  # added

    assert refusal_of(model, "400KiB", loop) == (
        "aten::add_.Tensor in the backward pass of 0.weight" + line_with("added")
    )


@pytest.mark.parametrize("settled", [False, True])
def test_op_of_an_optimizer_is_named_by_the_line_that_steps(settled: bool) -> None:
    models = [nn.Linear(WIDTH // 4, WIDTH), nn.Linear(WIDTH, WIDTH)]
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], momentum=0.9, foreach=True)

    def loop() -> None:
        for model in [*models[:1] * 6 * settled, models[1]]:
            model(torch.ones(1, model.in_features)).sum().backward()
            optimizer.step()  # stepped
            optimizer.zero_grad()

    told = refusal_of(nn.ModuleList(models), "500KiB", loop)
    assert re.fullmatch(r"aten::\S+" + re.escape(line_with("stepped")), told)


def test_op_in_an_installed_package_is_named_by_the_users_line() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=512, n_positions=512)
    model = transformers.GPT2LMHeadModel(config)

    def loop() -> None:
        model(input_ids=torch.zeros(1, 512, dtype=torch.long)).logits.sum().backward()  # generated

    told = refusal_of(model, "600KiB", loop)
    assert re.fullmatch(r"aten::\S+ in transformer\.h\.0\.[a-z_.]+ \(\w+\)" + re.escape(line_with("generated")), told)
