"""Tests of long parameters that are updated in pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

import outofcore
from outofcore.capture import optimizers
from outofcore.capture.optimizers import PIECE_ELEMENTS, UpdatePiece, pieces_of

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: SGD(p, lr=0.1),
    "SGD with momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01, maximize=True),
    "Nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "AdamW": lambda p: AdamW(p, lr=0.01),
    "RMSprop": lambda p: RMSprop(p, lr=0.01, centered=True, momentum=0.9, weight_decay=0.1),
    "Adagrad": lambda p: Adagrad(p, lr=0.01, lr_decay=0.1),
    "Adadelta": lambda p: Adadelta(p, lr=0.5, weight_decay=0.1),
    "Adamax": lambda p: Adamax(p, lr=0.01, weight_decay=0.1),
    "NAdam": lambda p: NAdam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam": lambda p: RAdam(p, lr=0.01, weight_decay=0.1),
}
# Primes, so that pieces end within a vector of the processor.
ROWS, COLUMNS = 1031, 1021


def make_training(
    make: Callable[[Any], Optimizer], dtype: torch.dtype
) -> tuple[nn.Module, Optimizer, Callable[..., Any]]:
    torch.manual_seed(0)
    model = nn.Linear(COLUMNS, ROWS).to(dtype)
    optimizer = make(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step


def state_of(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    states = [optimizer.state[parameter] for parameter in model.parameters()]
    return [*model.parameters(), *(state[name] for state in states for name in sorted(state))]


CASES = [(name, torch.float32, threads) for name in OPTIMIZERS for threads in (1, 2)]
CASES += [(name, torch.float64, 2) for name in OPTIMIZERS] + [("AdamW", torch.bfloat16, 2)]


@pytest.mark.parametrize(("name", "dtype", "threads"), CASES, ids=str)
def test_updates_in_pieces_have_the_bits_of_whole_updates(
    name: str, dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece_counts: list[int] = []

    def count_pieces(*args: Any) -> list[UpdatePiece]:
        pieces = pieces_of(*args)
        piece_counts.append(len(pieces))
        return pieces

    monkeypatch.setattr(optimizers, "pieces_of", count_pieces)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        plain, (model, optimizer, step) = make_training(OPTIMIZERS[name], dtype), make_training(OPTIMIZERS[name], dtype)
        with outofcore.compile(step, model, optimizer, budget="64MiB", home="host") as ours:
            for number in range(4):
                x = torch.randn(8, COLUMNS, generator=torch.Generator().manual_seed(number)).to(dtype) * 10.0**-number
                assert torch.equal(ours(x), plain[2](x))
            theirs = state_of(plain[0], plain[1])
            for actual, expected in zip(state_of(model, optimizer), theirs, strict=True):
                assert torch.equal(actual, expected) if isinstance(expected, torch.Tensor) else actual == expected
    finally:
        torch.set_num_threads(before)
    elements = ROWS * COLUMNS
    assert max(piece_counts) == (1 if dtype is torch.bfloat16 else -(-elements // PIECE_ELEMENTS))


def test_update_needs_the_scratch_memory_of_one_piece() -> None:
    width = 2048
    weight = nn.Parameter(torch.zeros(width, width))
    optimizer = AdamW([weight], lr=0.01)
    model = nn.ParameterList([weight])

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (x @ weight).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    # The update needs the weight, its gradient and two moments; without pieces it would need twice as much.
    budget = 4 * width * width * 4 + 8 * PIECE_ELEMENTS * 4
    with outofcore.compile(step, model, optimizer, budget=budget, home="host", cache=False) as ours:
        for number in range(2):
            ours(torch.randn(8, width, generator=torch.Generator().manual_seed(number)))
        update = next(op for op in ours.captured.graph.ops if op.name.startswith("optimizer."))
        assert ours.costs.ops[update.id].workspace_bytes < width * width * 4


def test_unsuitable_updates_are_not_split() -> None:
    def count(make: Callable[[Any], Optimizer], tensor: torch.Tensor) -> int:
        parameter = nn.Parameter(tensor)
        optimizer = make([parameter])
        return len(pieces_of(optimizer, 0, UpdatePiece(0, parameter, torch.zeros_like(parameter), (), {})))

    long = torch.zeros(4, PIECE_ELEMENTS)
    assert count(SGD, long) == 4
    assert count(SGD, long.t()) == 1
    assert count(SGD, long[0]) == 1
    assert count(Rprop, long) == 1
    assert count(lambda p: AdamW(p, fused=True), long) == 1
    assert count(lambda p: AdamW(p, foreach=True), long) == 1
    assert count(type("Own", (AdamW,), {}), long) == 1
