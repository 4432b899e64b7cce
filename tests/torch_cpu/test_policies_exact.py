"""Steps planned by published policies compute the very bits of plain PyTorch."""

from __future__ import annotations

import functools

import pytest
import torch
from test_exact import assert_same, budgets_of, everything, from_zoo

import outofcore
from outofcore.validator import validate

STEPS = 3


# Steps whose peak lies in their activations: that is what these policies move.
MODELS = {
    "resnet": functools.partial(from_zoo, "resnet", batch=16, optimizer="sgd"),
    "unet3d": functools.partial(from_zoo, "unet3d", size=32, optimizer="sgd"),
    "gpt": functools.partial(from_zoo, "gpt", batch=16, optimizer="sgd"),
}


@pytest.mark.parametrize(
    ("policy", "name"), [("tflms", "resnet"), ("tflms", "unet3d"), ("pooch", "resnet"), ("pooch", "gpt")]
)
def test_the_same_bits(policy: str, name: str) -> None:
    make = MODELS[name]
    smallest, everything_fits = budgets_of(make)
    budget = max(everything_fits * 6 // 10, (smallest + everything_fits) // 2)
    torch.manual_seed(1234)
    plain = make()
    theirs = [plain.step(*plain.batch(), **plain.kwargs).detach().clone() for _ in range(STEPS)]
    torch.manual_seed(1234)
    case = make()
    with outofcore.compile(
        case.step, list(case.models), list(case.optimizers), budget=budget, home="host", policy=policy
    ) as step:
        ours = [step(*case.batch(), **case.kwargs).detach().clone() for _ in range(STEPS)]
        planned = step.planned
        validate(step.captured.graph, planned.program, budget, step.costs)
        assert planned.plan.policy == policy
        assert planned.plan.decisions
    assert_same(ours, theirs)
    right = dict(everything(plain))
    for key, tensor in everything(case):
        assert torch.equal(tensor, right[key]), f"{key} differs"
