"""Tests of CTC losses in a compiled step, with lengths that change from call to call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import outofcore

FRAMES, BATCH, LONGEST, CLASSES = 20, 3, 6, 5
LENGTHS = [[6, 4, 5], [3, 2, 6], [1, 1, 1], [6, 6, 6], [2, 0, 3]]
Step = tuple[Callable[..., torch.Tensor], nn.Module, torch.optim.Optimizer]


def make_step(reduction: str, zero_infinity: bool) -> Step:
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


def batch(number: int, concatenated: bool, as_lists: bool) -> tuple[Any, ...]:
    torch.manual_seed(number)
    lengths = torch.tensor(LENGTHS[number])
    frames = torch.tensor([FRAMES, FRAMES - 2, FRAMES - 2 * number])
    targets = torch.randint(1, CLASSES, (BATCH, LONGEST))
    if concatenated:
        targets = torch.cat([row[:length] for row, length in zip(targets, lengths, strict=True)])
    length_args = (frames.tolist(), lengths.tolist()) if as_lists else (frames, lengths)
    return torch.randn(FRAMES, BATCH, 8), targets, *length_args


def run_batches(
    run: Callable[..., torch.Tensor], model: nn.Module, concatenated: bool, as_lists: bool
) -> list[torch.Tensor]:
    losses = [run(*batch(number, concatenated, as_lists)).clone() for number in range(len(LENGTHS))]
    return [*losses, *[p.detach().clone() for p in model.parameters()]]


def find_smallest_budget(made_step: Step, *inputs: Any) -> int:
    with (
        outofcore.compile(*made_step, budget=4096, home="host") as run,
        pytest.raises(outofcore.BudgetError) as error,
    ):
        run.prepare(*inputs)
    assert error.value.smallest_budget is not None
    return error.value.smallest_budget


@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("as_lists", [False, True], ids=["tensors", "lists"])
@pytest.mark.parametrize("concatenated", [False, True], ids=["rows", "in a row"])
def test_losses_and_parameters_match_plain_pytorch(
    concatenated: bool, as_lists: bool, reduction: str, zero_infinity: bool
) -> None:
    step, model, _ = make_step(reduction, zero_infinity)
    expected = run_batches(step, model, concatenated, as_lists)
    budget = find_smallest_budget(make_step(reduction, zero_infinity), *batch(0, concatenated, as_lists))
    for room in (1 << 24, budget):
        step, model, optimizer = make_step(reduction, zero_infinity)
        # Each list of lengths is a new input signature, which may need more than the first one.
        with outofcore.compile(
            step, model, optimizer, budget=max(room, 1 << 19 if as_lists else 0), home="host"
        ) as run:
            actual = run_batches(run, model, concatenated, as_lists)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_length_values_do_not_change_the_input_signature() -> None:
    step, model, optimizer = make_step("mean", False)
    with outofcore.compile(step, model, optimizer, budget=1 << 24, home="host", dynamic=False) as run:
        run_batches(run, model, concatenated=False, as_lists=False)
        assert len(run._session.steps.by_signature) == 1


def test_refused_length_leaves_the_model_as_in_plain_pytorch() -> None:
    def run_refused(run: Callable[..., torch.Tensor], model: nn.Module) -> tuple[str, list[torch.Tensor]]:
        run(*batch(0, concatenated=False, as_lists=False))
        x, targets, frames, lengths = batch(1, concatenated=False, as_lists=False)
        with pytest.raises(RuntimeError) as error:
            run(x, targets, frames, lengths + LONGEST)
        run(*batch(2, concatenated=False, as_lists=False))
        return str(error.value).partition("\n")[0], [p.detach().clone() for p in model.parameters()]

    step, model, _ = make_step("mean", False)
    message, expected = run_refused(step, model)
    step, model, optimizer = make_step("mean", False)
    with outofcore.compile(step, model, optimizer, budget=1 << 24, home="host") as run:
        actual_message, actual = run_refused(run, model)
    assert message in actual_message
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
