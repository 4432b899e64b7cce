"""Objects for captured steps, and a snapshot of the state that a capture must not change."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from outofcore.capture import capture_step


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.hidden: Any = None
        self.calls = 0
        self.kept: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class World:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Noisy()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.outside = torch.ones(3)
        self.array = np.ones(3, dtype=np.float32)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.x = torch.randn(5, 4)

    def capture(self, step: Callable[..., Any], *args: Any) -> Any:
        return capture_step(step, [self.model], [self.optimizer], args or (self.x,), {})

    def learn(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def snapshot(world: World) -> Any:
    """Return the state that a capture must not change."""
    model, optimizer = world.model, world.optimizer
    return (
        {name: (id(t), t.clone(), t.requires_grad, id(t.grad)) for name, t in model.named_parameters()},
        {name: (id(t), t.clone()) for name, t in model.named_buffers()},
        {k: v for k, v in vars(model).items() if not isinstance(v, dict)},
        {k: id(v) for k, v in vars(model.linear).items()},
        list(model.kept),
        copy.deepcopy(optimizer.state_dict()),
        {k: id(v) for k, v in vars(optimizer).items()},
        [{k: id(v) for k, v in group.items()} for group in optimizer.param_groups],
        world.scheduler.state_dict(),
        torch.get_rng_state(),
        random.getstate(),
        (
            nn.Module.__call__,
            inspect.getattr_static(torch.autograd.Function, "apply"),
            torch.get_rng_state,
            torch.manual_seed,
        ),
        (torch.from_numpy, torch.autograd.graph._engine_run_backward, torch.amp.GradScaler.scale, type(optimizer).step),
        torch.is_grad_enabled(),
    )


def assert_same_snapshot(actual: Any, expected: Any) -> None:
    if isinstance(actual, torch.Tensor):
        assert torch.equal(actual, expected)
    elif isinstance(actual, dict):
        assert actual.keys() == expected.keys()
        for key in actual:
            assert_same_snapshot(actual[key], expected[key])
    elif isinstance(actual, tuple | list):
        assert len(actual) == len(expected)
        for a, b in zip(actual, expected, strict=True):
            assert_same_snapshot(a, b)
    else:
        assert actual == expected
