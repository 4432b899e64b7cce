"""Many kinds of captured steps, and a comparison of all their results with plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import capture_cases as cases
import capture_more_cases as more
import torch
from capture_cases import Case
from replay import Replay
from torch import nn
from torch.utils import _pytree as pytree

from outofcore.capture import Captured, capture_step

STEPS = 3

CASES: dict[str, Callable[[], Case]] = {
    "mlp": cases.mlp,
    "conv_net": cases.conv_net,
    "gpt": cases.gpt,
    "gpt_foreach": functools.partial(cases.gpt, foreach=True),
    "gpt_no_foreach": functools.partial(cases.gpt, foreach=False),
    "gpt_evaluated": cases.gpt_evaluated,
    "gpt_checkpointed": functools.partial(cases.gpt, checkpointing="plain"),
    "gpt_checkpointed_reentrant": functools.partial(cases.gpt, checkpointing="reentrant"),
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
    "observed": more.hooks_everywhere,
    "llama": functools.partial(cases.hugging_face, "llama"),
    "bert": functools.partial(cases.hugging_face, "bert"),
}


def build_twice(make: Callable[[], Case]) -> tuple[Case, Case]:
    torch.manual_seed(1)
    first = make()
    torch.manual_seed(1)
    return first, make()


def assert_same(actual: Any, expected: Any, label: str) -> None:
    actual_leaves, expected_leaves = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
    assert len(actual_leaves) == len(expected_leaves), label
    for a, b in zip(actual_leaves, expected_leaves, strict=True):
        if isinstance(a, torch.Tensor):
            assert isinstance(b, torch.Tensor), label
            assert a.dtype == b.dtype, label
            assert torch.equal(a, b), f"{label}: {(a - b).abs().max()} apart"
        else:
            assert a == b, label


def ordered_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer state sorted by parameter: a capture may update large parameters first."""
    state_dict = optimizer.state_dict()
    return {**state_dict, "state": dict(sorted(state_dict["state"].items()))}


def grads_of(case: Case) -> list[Any]:
    return [p.grad for model in case.models for p in model.parameters()]


def identity(captured: Captured) -> Captured:
    return captured


def check_exact(make: Callable[[], Case], change: Callable[[Captured], Captured] = identity) -> Replay:
    ours, plain = build_twice(make)
    replay, captured_signature = None, None
    for k in range(STEPS):
        torch.manual_seed(100 + k)
        args = ours.batch()
        torch.manual_seed(100 + k)
        same_args = plain.batch()
        signature = [g is not None for g in grads_of(ours)]
        if signature != captured_signature:  # another signature
            captured = capture_step(ours.step, ours.models, ours.optimizers, args, ours.kwargs)
            replay = Replay(change(captured))
            captured_signature = signature
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
            assert_same(ordered_state(a), ordered_state(b), f"optimizer {index} after step {k}")
    assert replay is not None
    assert replay.mismatches == []
    return replay
