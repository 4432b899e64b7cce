"""Steps under a budget compute the very bits of plain PyTorch: smallest budget, halfway, and all resident."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from capture_cases import Case
from steps import CASES, assert_same, budgets_of, everything, from_zoo
from torch.utils import _pytree as pytree

import outofcore
from outofcore.planning import QUICK
from outofcore.policies import Auto, PolicyLike
from outofcore.program import Run
from outofcore.validator import validate

STEPS = 5


# Cases whose storages are all below 64 KiB: nothing of them ever leaves.
SMALL = {
    "accumulation_inside",
    "accumulation_across",
    "gradients_left",
    "moving_average",
    "autocast",
    "checkpointed",
    "lstm",
    "inference",
    "mutated_input",
    "rebinding",
    "shared_memory",
    "two_passes",
}


# Deep networks, for which the best plan is searched for longer than is trained here.
DEEP = {"densenet121", "resnet", "resnet_bf16", "vgg16", "unet3d"}


def run(
    make: Callable[[], Case],
    budget: int | None,
    home: str = "disk",
    host_budget: int | None = None,
    policy: PolicyLike = "auto",
) -> tuple[list[Any], Case, list[Any], int, int]:
    """Train; with a budget out of core, and each program proved valid.

    Returns:
        results, the case, arguments as the step left them, bytes copied in, and how many ops ran again.
    """
    torch.manual_seed(1234)
    case = make()
    step: Any = case.step
    if budget is not None:
        step = outofcore.compile(
            *(case.step, list(case.models), list(case.optimizers)),
            budget=budget,
            home=home,
            host_budget=host_budget,
            policy=policy,
        )
    results: list[Any] = []
    seen: list[Any] = []
    moved = again = 0
    for _ in range(STEPS):
        batch = case.batch()
        results.append(
            pytree.tree_map(
                lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, step(*batch, **case.kwargs)
            )
        )
        seen.append(batch)
        if budget is not None:
            planned = step.planned
            validate(step.captured.graph, planned.program, budget, step.costs)
            assert planned.program.arena_bytes <= budget
            assert step.stats.off_plan == 0
            again += sum(isinstance(i, Run) and i.again for i in planned.program.instructions)
            moved += step.stats.bytes_in
    return results, case, seen, moved, again


@pytest.mark.parametrize("name", CASES)
def test_same_bits_at_every_budget(name: str) -> None:
    theirs, plain, their_arguments, _, _ = run(CASES[name], None)
    smallest, everything_fits = budgets_of(CASES[name])
    # A later call of a step may need more than its first (a gradient that is there already).
    spare = 1 << 16 if name in {"accumulation_across", "gradients_left"} else 0
    for least in (smallest, (smallest + everything_fits) // 2, 2 * everything_fits):
        budget = least + spare
        policy = Auto(QUICK) if name in DEEP else "auto"
        ours, case, our_arguments, moved, again = run(CASES[name], budget, policy=policy)
        if name not in SMALL:
            # Between, a plan may do with running ops again.
            assert (moved > 0 or (again > 0 and least > smallest)) == (budget < everything_fits)
        assert_same(ours, theirs)
        assert_same(our_arguments, their_arguments)
        left, right = dict(everything(case)), dict(everything(plain))
        assert left.keys() == right.keys()
        for key, tensor in right.items():
            assert torch.equal(left[key], tensor), f"{key} differs at {budget} bytes"


def test_a_home_in_host_memory_gives_the_same_bits() -> None:
    make = CASES["gpt"]
    theirs, plain, _, _, _ = run(make, None)
    ours, case, _, moved, _ = run(make, budgets_of(make)[0], home="host")
    assert moved > 0
    assert_same(ours, theirs)
    right = dict(everything(plain))
    for key, tensor in everything(case):
        assert torch.equal(tensor, right[key])


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
    theirs = [plain.step(*plain.batch(), **plain.kwargs).detach().clone() for _ in range(3)]
    torch.manual_seed(1234)
    case = make()
    with outofcore.compile(
        case.step, list(case.models), list(case.optimizers), budget=budget, home="host", policy=policy
    ) as step:
        ours = [step(*case.batch(), **case.kwargs).detach().clone() for _ in range(3)]
        planned = step.planned
        validate(step.captured.graph, planned.program, budget, step.costs)
        assert planned.plan.policy == policy
        assert planned.plan.decisions
    assert_same(ours, theirs)
    right = dict(everything(plain))
    for key, tensor in everything(case):
        assert torch.equal(tensor, right[key]), f"{key} differs"
