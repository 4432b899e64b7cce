"""CTC losses in a compiled step: what their backward pass is given depends on lengths that change from call to call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import outofcore

FRAMES, BATCH, LONGEST, CLASSES = 20, 3, 6, 5
LENGTHS = [[6, 4, 5], [3, 2, 6], [1, 1, 1], [6, 6, 6], [2, 0, 3]]
Made = tuple[Callable[..., torch.Tensor], nn.Module, torch.optim.Optimizer]


def made(reduction: str, zero_infinity: bool) -> Made:
    torch.manual_seed(1)
    model = nn.Linear(8, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    criterion = nn.CTCLoss(reduction=reduction, zero_infinity=zero_infinity)

    def step(x: torch.Tensor, targets: torch.Tensor, frames: Any, lengths: Any) -> torch.Tensor:
        loss = criterion(model(x).log_softmax(-1), targets, frames, lengths)
        loss.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, model, optimizer


def batch(number: int, in_a_row: bool, as_lists: bool) -> tuple[Any, ...]:
    torch.manual_seed(number)
    lengths = torch.tensor(LENGTHS[number])
    frames = torch.tensor([FRAMES, FRAMES - 2, FRAMES - 2 * number])
    targets = torch.randint(1, CLASSES, (BATCH, LONGEST))
    if in_a_row:
        targets = torch.cat([row[:length] for row, length in zip(targets, lengths, strict=True)])
    given = (frames.tolist(), lengths.tolist()) if as_lists else (frames, lengths)
    return torch.randn(FRAMES, BATCH, 8), targets, *given


def trained(run: Callable[..., torch.Tensor], model: nn.Module, in_a_row: bool, as_lists: bool) -> list[torch.Tensor]:
    seen = [run(*batch(number, in_a_row, as_lists)).clone() for number in range(len(LENGTHS))]
    return [*seen, *[p.detach().clone() for p in model.parameters()]]


def smallest(made_step: Made, *given: Any) -> int:
    with (
        outofcore.compile(*made_step, budget=4096, home="host") as run,
        pytest.raises(outofcore.BudgetError) as told,
    ):
        run.prepare(*given)
    assert told.value.smallest_budget is not None
    return told.value.smallest_budget


@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("as_lists", [False, True], ids=["tensors", "lists"])
@pytest.mark.parametrize("in_a_row", [False, True], ids=["rows", "in a row"])
def test_the_bits_of_plain_pytorch(in_a_row: bool, as_lists: bool, reduction: str, zero_infinity: bool) -> None:
    step, model, _ = made(reduction, zero_infinity)
    wanted = trained(step, model, in_a_row, as_lists)
    budget = smallest(made(reduction, zero_infinity), *batch(0, in_a_row, as_lists))
    for room in (1 << 24, budget):
        step, model, optimizer = made(reduction, zero_infinity)
        # Other kinds of inputs, which lists of lengths are as well, may need more than the first.
        with outofcore.compile(
            step, model, optimizer, budget=max(room, 1 << 19 if as_lists else 0), home="host"
        ) as run:
            seen = trained(run, model, in_a_row, as_lists)
        assert all(torch.equal(a, b) for a, b in zip(seen, wanted, strict=True))


def test_lengths_of_other_values_are_one_kind_of_inputs() -> None:
    step, model, optimizer = made("mean", False)
    with outofcore.compile(step, model, optimizer, budget=1 << 24, home="host", dynamic=False) as run:
        trained(run, model, in_a_row=False, as_lists=False)
        assert len(run._session.steps.known) == 1


def test_a_length_that_is_refused_leaves_the_model_as_plain_pytorch_does() -> None:
    def refused(run: Callable[..., torch.Tensor], model: nn.Module) -> tuple[str, list[torch.Tensor]]:
        run(*batch(0, in_a_row=False, as_lists=False))
        x, targets, frames, lengths = batch(1, in_a_row=False, as_lists=False)
        with pytest.raises(RuntimeError) as told:
            run(x, targets, frames, lengths + LONGEST)
        run(*batch(2, in_a_row=False, as_lists=False))
        return str(told.value).partition("\n")[0], [p.detach().clone() for p in model.parameters()]

    step, model, _ = made("mean", False)
    message, wanted = refused(step, model)
    step, model, optimizer = made("mean", False)
    with outofcore.compile(step, model, optimizer, budget=1 << 24, home="host") as run:
        told, seen = refused(run, model)
    assert message in told
    assert all(torch.equal(a, b) for a, b in zip(seen, wanted, strict=True))
