"""A captured step, replayed op by op, computes the very bits of plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import capture_cases as cases
import capture_more_cases as more
import pytest
import torch
from capture_cases import Case
from replay import Replay
from torch import nn
from torch.utils import _pytree as pytree

from outofcore.capture import Captured, capture_step
from outofcore.capture.passes import hoisting, reordered, reuse, split

STEPS = 3

CASES: dict[str, Callable[[], Case]] = {
    "mlp": cases.mlp,
    "conv_net": cases.conv_net,
    "gpt": cases.gpt,
    "gpt_foreach": functools.partial(cases.gpt, foreach=True),
    "gpt_no_foreach": functools.partial(cases.gpt, foreach=False),
    "gpt_evaluated": cases.gpt_evaluated,
    "gpt_checkpointed": functools.partial(cases.gpt, again="plain"),
    "gpt_checkpointed_reentrant": functools.partial(cases.gpt, again="reentrant"),
    "lstm": functools.partial(cases.recurrent, nn.LSTM),
    "gru": functools.partial(cases.recurrent, nn.GRU),
    "autocast": cases.autocast,
    "accumulation_inside": cases.accumulation_inside,
    "accumulation_across": cases.accumulation_across,
    "gradients_left": cases.gradients_left,
    "gan": cases.gan,
    "moving_average": cases.moving_average,
    "rebinding": cases.rebinding,
    "inference": cases.inference,
    "custom_function": cases.custom_function,
    "mutated_input": cases.mutated_input,
    "by_hand": more.by_hand,
    "two_passes": more.two_passes,
    "as_vector": more.as_vector,
    "functional": more.functional,
    "hooked_weights": more.hooked_weights,
    "shared_memory": more.shared_memory,
    "observed": more.observed,
    "llama": functools.partial(cases.hugging_face, "llama"),
    "bert": functools.partial(cases.hugging_face, "bert"),
}

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
    """Keeps Python numbers and a replaced tensor as state, and changes gradients in place."""

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


def twice(make: Callable[[], Case]) -> tuple[Case, Case]:
    torch.manual_seed(1)
    one = make()
    torch.manual_seed(1)
    return one, make()


def assert_same(one: Any, other: Any, what: str) -> None:
    left, right = pytree.tree_leaves(one), pytree.tree_leaves(other)
    assert len(left) == len(right), what
    for a, b in zip(left, right, strict=True):
        if isinstance(a, torch.Tensor):
            assert isinstance(b, torch.Tensor), what
            assert a.dtype == b.dtype, what
            assert torch.equal(a, b), f"{what}: {(a - b).abs().max()} apart"
        else:
            assert a == b, what


def grads_of(case: Case) -> list[Any]:
    return [p.grad for model in case.models for p in model.parameters()]


def as_traced(captured: Captured) -> Captured:
    return captured


def changed(captured: Captured) -> Captured:
    """All that is done to a trace, to storages of any size."""
    captured = reuse(split(captured), least=1)
    return reordered(captured, hoisting(captured))


def check_exact(make: Callable[[], Case], change: Callable[[Captured], Captured] = as_traced) -> Replay:
    ours, plain = twice(make)
    replay, seen = None, None
    for k in range(STEPS):
        torch.manual_seed(100 + k)
        args = ours.batch()
        torch.manual_seed(100 + k)
        same_args = plain.batch()
        have = [g is not None for g in grads_of(ours)]
        if have != seen:  # another signature
            captured = capture_step(ours.step, ours.models, ours.optimizers, args, ours.kwargs)
            replay = Replay(change(captured))
            seen = have
        assert replay is not None
        torch.manual_seed(k)
        result = replay(*args, **ours.kwargs)
        after = torch.get_rng_state()
        torch.manual_seed(k)
        expected = plain.step(*same_args, **plain.kwargs)
        assert torch.equal(after, torch.get_rng_state()), f"generator after step {k}"
        assert_same(result, expected, f"result of step {k}")
        assert_same(args, same_args, f"arguments after step {k}")
        assert_same(grads_of(ours), grads_of(plain), f"gradients after step {k}")
        for index, (a, b) in enumerate(zip(ours.models, plain.models, strict=True)):
            assert_same(a.state_dict(), b.state_dict(), f"model {index} after step {k}")
        for index, (a, b) in enumerate(zip(ours.optimizers, plain.optimizers, strict=True)):
            assert_same(a.state_dict(), b.state_dict(), f"optimizer {index} after step {k}")
    assert replay is not None
    assert replay.mismatches == []
    return replay


@pytest.mark.parametrize("name", CASES)
def test_steps_are_exact(name: str) -> None:
    check_exact(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_changed_captures_are_exact(name: str) -> None:
    check_exact(CASES[name], changed)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_are_exact(name: str) -> None:
    check_exact(functools.partial(cases.mlp, OPTIMIZERS[name]))


def test_an_unknown_optimizer_is_exact() -> None:
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
        case.step = cases.supervised(model, optimizer)
        draw = case.batch

        def batch() -> Any:
            if getattr(optimizer, "_opt_called", False):
                scheduler.step()
            return draw()

        case.batch = batch
        return case

    check_exact(make)
