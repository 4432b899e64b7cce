"""A model with steps, plain and compiled, and a comparison after each action on both."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import outofcore

WIDTH = 144  # a weight of this width is large (more than 64 KiB)
_UPDATING = ("train", "renew")


def batch(number: int, rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(number))


def values(number: int) -> torch.Tensor:
    return 0.1 * torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(number))


@dataclass
class Side:
    model: nn.Sequential
    optimizer: torch.optim.Optimizer
    train: Callable[..., torch.Tensor]
    renew: Callable[..., torch.Tensor]
    gather: Callable[..., torch.Tensor]
    evaluate: Callable[..., torch.Tensor]
    steps: list[outofcore.Step] = field(default_factory=list[outofcore.Step])
    saved: dict[str, Any] = field(default_factory=dict[str, Any])

    def weights(self) -> list[nn.Parameter]:
        return [self.model[0].weight, self.model[3].weight]  # type: ignore[list-item]


def build_side(seed: int) -> Side:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(x: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def renew(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        return loss

    def gather(x: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), x)
        loss.backward()
        return loss

    def evaluate(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(x)

    return Side(model, optimizer, train, renew, gather, evaluate)


@functools.cache
def _smallest(name: str) -> int:
    side = build_side(0)
    optimizer = side.optimizer if name in _UPDATING else None
    smallest = outofcore.smallest_budget(getattr(side, name), side.model, optimizer, inputs=(batch(0),))
    return 2 * smallest if name == "gather" else smallest  # it also accumulates gradients


def compile_side(seed: int, *, budget: str, home: str, shared: bool, host_budget: str | None = None) -> Side:
    side = build_side(seed)
    steps: list[outofcore.Step] = []
    for name in ("train", "renew", "gather", "evaluate"):
        smallest = _smallest(name)
        room = {"smallest": smallest, "half": 3 * smallest // 2, "all": 1 << 28}[budget]
        if steps and shared:
            home_options: dict[str, Any] = {"home": steps[0].home}
        else:
            home_options = {"home": home, "host_budget": host_budget}
        function, optimizer = getattr(side, name), side.optimizer if name in _UPDATING else None
        steps.append(outofcore.compile(function, side.model, optimizer, budget=room, policy="window", **home_options))
    side.train, side.renew, side.gather, side.evaluate = steps
    side.steps = steps
    return side


Act = Callable[[Side], Any]


def is_same(ours: Any, theirs: Any) -> bool:
    """Return whether two values are equal, including the strides of tensors, which select kernels."""
    if isinstance(theirs, torch.Tensor):
        return torch.equal(ours, theirs) and ours.stride() == theirs.stride()
    if isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(is_same(a, b) for a, b in zip(ours, theirs, strict=True))
    return bool(ours == theirs)


def visible_tensors(side: Side) -> list[Any]:
    visible: list[Any] = list(side.model.state_dict().values())
    for parameter in side.model.parameters():
        visible.append(parameter.grad if parameter.grad is not None else "no gradient")
        state = side.optimizer.state.get(parameter, {})
        visible += [state[name] for name in sorted(state)]
    return visible


def act_on_both(pair: tuple[Side, Side], act: Act) -> None:
    results = []
    for side in pair:
        torch.manual_seed(7)
        results.append(act(side))
        for step in side.steps:
            step._session.keeper.check_invariants()
    assert is_same(*results)
    assert is_same(visible_tensors(pair[0]), visible_tensors(pair[1]))
