"""Tests that a captured step, replayed op by op, matches plain PyTorch bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import capture_cases as cases
import pytest
import torch
from capture_cases import Case
from exactness import CASES, check_exact

from outofcore.capture import Captured
from outofcore.transforms.passes import hoist_order, reorder, reuse_arguments, split_convolutions

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "sgd_momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1),
    "sgd_fused": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adam": torch.optim.Adam,
    "adam_tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "adam_capturable": functools.partial(torch.optim.Adam, foreach=False, maximize=True),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
    "adamw_foreach": functools.partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "adamw_fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "adamw_amsgrad": functools.partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.1),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "adafactor": torch.optim.Adafactor,
}


class Counting(torch.optim.Optimizer):
    """An optimizer with Python numbers and replaced tensors as state, which changes gradients in place."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "total": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            group["total"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["count"], state["mean"] = 0, torch.full_like(p, 0.5)
                state["count"] += 1
                p.grad.add_(p, alpha=0.1)
                state["mean"] = state["mean"] * 0.9 + p.grad
                p.sub_(state["mean"], alpha=group["lr"] / state["count"] / self.calls)


@pytest.fixture(autouse=True)
def _one_seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield


def transform(captured: Captured) -> Captured:
    captured = reuse_arguments(split_convolutions(captured), min_bytes=1)
    return reorder(captured, hoist_order(captured))


@pytest.mark.parametrize("name", CASES)
def test_steps_are_exact(name: str) -> None:
    check_exact(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_transformed_captures_are_exact(name: str) -> None:
    check_exact(CASES[name], transform)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_are_exact(name: str) -> None:
    check_exact(functools.partial(cases.mlp, OPTIMIZERS[name]))


def test_unknown_optimizer_is_exact() -> None:
    replay = check_exact(functools.partial(cases.mlp, Counting))
    updates = [op for op in replay.captured.graph.ops if op.name == "optimizer.Counting"]
    assert len(updates) == 1
    assert updates[0].random


def test_two_groups_and_a_scheduler_are_exact() -> None:
    def make() -> Case:
        case = cases.mlp()
        model = case.models[0]
        groups = [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[4].parameters(), "weight_decay": 0.1}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        case.optimizers = [optimizer]
        case.step = cases.supervised_step(model, optimizer)
        draw = case.batch

        def batch() -> Any:
            if getattr(optimizer, "_opt_called", False):
                scheduler.step()
            return draw()

        case.batch = batch
        return case

    check_exact(make)
