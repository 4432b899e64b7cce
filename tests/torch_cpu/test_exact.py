"""Tests that compiled steps compute the bits of plain PyTorch at every budget."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from capture_cases import Case
from effort import is_exhaustive, some_of
from steps import CASES, assert_same, budgets_of, from_zoo, smallest_of, visible_tensors
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import outofcore
from outofcore.execution.opening import open_backend
from outofcore.planning import QUICK, in_core_budget
from outofcore.policies import Auto, PolicyLike
from outofcore.program import Run
from outofcore.units import GIB
from outofcore.validator import validate

STEPS = 5
ROOMY = 64 * GIB

# Cases with only storages below 64 KiB, which are never evicted.
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


# Deep networks take half a minute each; the others take longer to plan than to train here.
DEEP = {"densenet121", "resnet", "resnet_bf16", "vgg16", "unet3d"}
LIKE_GPT = {"gpt_clipped_bf16", "llama", "bert"}
SEARCHED_LONG = {*DEEP, *LIKE_GPT, "gpt", "gan"}


@dataclass
class Outcome:
    """A training and its results."""

    case: Case
    results: list[Any]
    arguments: list[Any]  # as the step left them
    visible: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])  # before the step was closed
    fetched_bytes: int = 0
    recomputed_ops: int = 0
    in_core: int = 0  # the budget that holds the whole first step; 0 for plain PyTorch

    def differs_from(self, reference: Outcome) -> list[str]:
        """Return the names of visible tensors with different bits; check results and arguments first."""
        assert_same(self.results, reference.results)
        assert_same(self.arguments, reference.arguments)
        closed, right = dict(visible_tensors(self.case)), dict(visible_tensors(reference.case))
        assert self.visible.keys() == closed.keys() == right.keys()
        return [
            key
            for key, tensor in right.items()
            if not (torch.equal(self.visible[key], tensor) and torch.equal(closed[key], tensor))
        ]


def run(
    make: Callable[[], Case],
    budget: int | None,
    home: str = "disk",
    policy: PolicyLike = "auto",
    steps: int = STEPS,
) -> Outcome:
    torch.manual_seed(1234)
    case = make()
    if budget is None:
        return _run(case, case.step, None, steps)
    models, optimizers = list(case.models), list(case.optimizers)
    with outofcore.compile(case.step, models, optimizers, budget=budget, home=home, policy=policy) as step:
        return _run(case, step, budget, steps)


def _run(case: Case, step: Any, budget: int | None, steps: int) -> Outcome:
    outcome = Outcome(case, [], [])
    proved = None
    for _ in range(steps):
        batch = case.batch()
        outcome.results.append(
            pytree.tree_map(
                lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, step(*batch, **case.kwargs)
            )
        )
        outcome.arguments.append(batch)
        if budget is not None:
            planned = step.planned
            if planned.program is not proved:
                validate(step.captured.graph, planned.program, budget, step.costs)
                proved = planned.program
            assert planned.program.arena_bytes <= budget
            assert step.stats.off_plan == 0
            outcome.recomputed_ops += sum(isinstance(i, Run) and i.again for i in planned.program.instructions)
            outcome.fetched_bytes += step.stats.bytes_in
            outcome.in_core = outcome.in_core or in_core_budget(step.captured.graph, step.costs)
    outcome.visible = {key: tensor.clone() for key, tensor in visible_tensors(case)}
    return outcome


@pytest.mark.parametrize("name", some_of(CASES, lambda name: name not in DEEP))
def test_same_bits_at_every_budget(name: str) -> None:
    make, steps = CASES[name], 3 if name in DEEP else STEPS
    policy = Auto(QUICK) if is_exhaustive() and name in SEARCHED_LONG else "auto"
    theirs = run(make, None, steps=steps)
    roomy = run(make, ROOMY, policy=policy, steps=steps)
    assert roomy.differs_from(theirs) == []
    assert roomy.fetched_bytes == roomy.recomputed_ops == 0
    smallest = smallest_of(make)
    # Later calls of these steps need more than the first one, because gradients exist already.
    spare = 1 << 16 if name in {"accumulation_across", "gradients_left"} else 0
    # Without evictions, a budget in between adds no coverage.
    smallest_only = name in SMALL or (name in LIKE_GPT and not is_exhaustive())
    for budget in (smallest,) if smallest_only else (smallest, (smallest + roomy.in_core) // 2):
        ours = run(make, budget + spare, policy=policy, steps=steps)
        if name not in SMALL:
            # At the budget in between, recomputation alone may suffice.
            assert (ours.fetched_bytes > 0 or (ours.recomputed_ops > 0 and budget > smallest)) == (
                budget < roomy.in_core
            )
        assert ours.differs_from(theirs) == [], f"{budget + spare} bytes"


def test_same_bits_with_a_home_in_host_memory() -> None:
    make = CASES["gpt"]
    ours = run(make, smallest_of(make), home="host")
    assert ours.fetched_bytes > 0
    assert ours.differs_from(run(make, None)) == []


# Steps with their peak in activations, which these policies move.
MODELS = {
    "resnet": functools.partial(from_zoo, "resnet", batch=16, optimizer="sgd"),
    "unet3d": functools.partial(from_zoo, "unet3d", size=32, optimizer="sgd"),
    "gpt": functools.partial(from_zoo, "gpt", batch=16, optimizer="sgd"),
}


@pytest.mark.parametrize(
    ("policy", "name"),
    some_of(
        [("tflms", "resnet"), ("tflms", "unet3d"), ("pooch", "resnet"), ("pooch", "gpt")],
        [("pooch", "gpt")],
    ),
)
def test_published_policy_gives_the_same_bits(policy: str, name: str) -> None:
    make = MODELS[name]
    smallest, everything_fits = budgets_of(make, "off")
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
    right = dict(visible_tensors(plain))
    for key, tensor in visible_tensors(case):
        assert torch.equal(tensor, right[key]), f"{key} differs"


def test_open_backend_initializes_vector_functions_in_one_thread() -> None:
    """MKL splits a vector function among threads from some thousand elements on."""
    calls: list[tuple[str, int]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            calls.append((str(func), result.numel()))
            return result

    with Watch():
        open_backend(None)
    assert any(name.startswith("aten.sqrt") and 1 < elements <= 64 for name, elements in calls), calls
