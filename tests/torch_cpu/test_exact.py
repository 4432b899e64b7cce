"""Steps under a budget compute the very bits of plain PyTorch: smallest budget, halfway, and all resident."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import capture_cases as cases
import capture_more_cases as more
import pytest
import torch
from capture_cases import Case
from torch.utils import _pytree as pytree

import outofcore
from outofcore import zoo
from outofcore.planning import in_core_budget
from outofcore.validator import validate

STEPS = 5

ZOO: dict[str, dict[str, Any]] = {
    "resnet": {"depth": 18, "size": 64, "batch": 2},
    "vgg16": {"size": 32, "batch": 1, "optimizer": "sgd"},
    "densenet121": {"size": 64, "batch": 2, "optimizer": "momentum"},
    "unet3d": {"size": 16, "base": 8, "batch": 1},
    "gpt": {"layers": 2, "width": 128, "heads": 4, "context": 128, "batch": 4, "dropout": 0.1},
}


def from_zoo(name: str, **options: Any) -> Case:
    workload = zoo.workload(name, **{**ZOO[name], **options})
    model = workload.build()
    optimizer = workload.optimizer(model)
    batches = workload.batches()
    return Case(workload.make_step(model, optimizer), [model], [optimizer], lambda: next(batches))


def optimizer_case(make: Callable[[Any], torch.optim.Optimizer]) -> Case:
    """A model with parameters large enough to leave the device."""
    model = torch.nn.Sequential(torch.nn.Linear(160, 160), torch.nn.Tanh(), torch.nn.Linear(160, 4))
    optimizer = make(model.parameters())
    return Case(cases.supervised(model, optimizer), [model], [optimizer], cases.classify(width=160))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "sgd_momentum_foreach": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1, foreach=True),
    "sgd_fused": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adamw": torch.optim.AdamW,
    "adamw_foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "adamw_fused": functools.partial(torch.optim.AdamW, fused=True, amsgrad=True),
    "adagrad": functools.partial(torch.optim.Adagrad, initial_accumulator_value=0.1),
    "rmsprop": functools.partial(torch.optim.RMSprop, momentum=0.9, centered=True),
}

CASES: dict[str, Callable[[], Case]] = {
    **{name: functools.partial(from_zoo, name) for name in ZOO},
    "gpt_clipped_bf16": functools.partial(from_zoo, "gpt", clip=1.0, amp=True),
    "resnet_bf16": functools.partial(from_zoo, "resnet", amp=True),
    **{f"optimizer_{name}": functools.partial(optimizer_case, make) for name, make in OPTIMIZERS.items()},
    "llama": functools.partial(cases.hugging_face, "llama"),
    "bert": functools.partial(cases.hugging_face, "bert"),
    "gan": cases.gan,
    "accumulation_inside": cases.accumulation_inside,
    "accumulation_across": cases.accumulation_across,
    "gradients_left": cases.gradients_left,
    "moving_average": cases.moving_average,
    "autocast": cases.autocast,
    "checkpointed": functools.partial(cases.gpt, again="plain"),
    "lstm": functools.partial(cases.recurrent, torch.nn.LSTM),
    "inference": cases.inference,
    "mutated_input": cases.mutated_input,
    "rebinding": cases.rebinding,
    "shared_memory": more.shared_memory,
    "two_passes": more.two_passes,
}


def everything(case: Case) -> Iterator[tuple[str, torch.Tensor]]:
    """All that the user can see: parameters, buffers, gradients and optimizer state, in a fixed order."""
    for m, model in enumerate(case.models):
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            yield f"{m}.{name}", tensor
            if tensor.grad is not None:
                yield f"{m}.{name}.grad", tensor.grad
    for o, optimizer in enumerate(case.optimizers):
        for number, entries in optimizer.state_dict()["state"].items():
            for name, item in entries.items():
                yield f"{o}.{number}.{name}", torch.as_tensor(item)


def assert_same(ours: Any, theirs: Any) -> None:
    for one, other in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
        if isinstance(other, torch.Tensor):
            assert torch.equal(one, other.detach())
        else:
            assert one == other


def run(make: Callable[[], Case], budget: int | None, home: str = "disk") -> tuple[list[Any], Case, list[Any]]:
    """Train; with a budget out of core, each program proved valid. Returns results, the case, and mutated arguments."""
    torch.manual_seed(1234)
    case = make()
    step: Any = case.step
    if budget is not None:
        step = outofcore.compile(case.step, list(case.models), list(case.optimizers), budget=budget, home=home)
    results: list[Any] = []
    seen: list[Any] = []
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
    return results, case, seen


def budgets_of(make: Callable[[], Case]) -> tuple[int, int]:
    """The smallest budget, and one that holds everything."""
    torch.manual_seed(1234)
    case = make()
    batch = case.batch()
    smallest = outofcore.minimum_budget(
        case.step,
        list(case.models),
        list(case.optimizers),
        inputs=batch,
        **({"kwargs": case.kwargs} if case.kwargs else {}),
    )
    with outofcore.compile(case.step, list(case.models), list(case.optimizers), budget="64GiB") as step:
        step(*batch, **case.kwargs)
        return smallest, in_core_budget(step.captured.graph, step.costs)


@pytest.mark.parametrize("name", CASES)
def test_same_bits_at_every_budget(name: str) -> None:
    theirs, plain, their_arguments = run(CASES[name], None)
    smallest, everything_fits = budgets_of(CASES[name])
    # A later call of a step may need more than its first (a gradient that is there already).
    room = 1.25 if name in {"accumulation_across", "gradients_left"} else 1.0
    for budget in (int(smallest * room), (smallest + everything_fits) // 2, 2 * everything_fits):
        ours, case, our_arguments = run(CASES[name], budget)
        assert_same(ours, theirs)
        assert_same(our_arguments, their_arguments)
        left, right = dict(everything(case)), dict(everything(plain))
        assert left.keys() == right.keys()
        for key, tensor in right.items():
            assert torch.equal(left[key], tensor), f"{key} differs at {budget} bytes"


def test_a_home_in_host_memory_gives_the_same_bits() -> None:
    make = CASES["gpt"]
    theirs, plain, _ = run(make, None)
    ours, case, _ = run(make, budgets_of(make)[0], home="host")
    assert_same(ours, theirs)
    right = dict(everything(plain))
    for key, tensor in everything(case):
        assert torch.equal(tensor, right[key])
