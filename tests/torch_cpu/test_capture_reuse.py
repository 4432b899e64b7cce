"""Tests of elementwise ops that overwrite an argument after its last use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from replay import Replay

from outofcore.capture import Captured, capture_step
from outofcore.transforms.passes import reuse_arguments

SHAPE = (6, 5)


def capture_reusing(step: Callable[..., torch.Tensor], *args: torch.Tensor) -> Captured:
    model = torch.nn.Linear(1, 1)
    return reuse_arguments(capture_step(step, [model], [], args, {}), min_bytes=1)


def find_overwrites(step: Callable[..., torch.Tensor], *args: torch.Tensor) -> list[bool]:
    """Return whether each elementwise op overwrites an argument; also check the result."""
    inputs = args or (torch.randn(SHAPE),)
    captured = capture_reusing(step, *inputs)
    assert torch.equal(Replay(captured)(*(a.clone() for a in inputs)), step(*(a.clone() for a in inputs)))
    names = ("add", "mul", "sub", "div", "gelu", "where", "threshold", "sigmoid")
    return [bool(op.mutates) for op in captured.graph.ops if op.name.removeprefix("aten.").startswith(names)]


def test_elementwise_chain_needs_one_storage() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        product = torch.mm(x, x.t())
        return (((product + 1) * 2).sigmoid() - 3).sum()

    captured = capture_reusing(step, torch.randn(SHAPE))
    large = [s for s in captured.graph.storages if s.bytes == 6 * 6 * 4]
    assert len(large) == 1
    assert [op.creates for op in captured.graph.ops[1:5]] == [()] * 4
    assert all(op.mutates == (large[0].id,) == op.reads for op in captured.graph.ops[1:5])
    assert find_overwrites(step) == [True] * 4


def test_argument_used_later_is_not_overwritten() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        cosine = x.cos()
        doubled = cosine * 2
        return (cosine + doubled).sum()

    assert find_overwrites(step) == [False, True]


def test_second_argument_is_overwritten_when_the_first_is_an_input() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        cosine = x.cos()
        return (x - cosine).sum()

    assert find_overwrites(step) == [True]
    op = next(op for op in capture_reusing(step, torch.randn(SHAPE)).graph.ops if "sub" in op.name)
    assert op.family.endswith("over argument 1")


def test_inputs_and_step_results_are_not_overwritten() -> None:
    assert find_overwrites(lambda x: (x + 1).sum()) == [False]
    assert find_overwrites(lambda x: x.cos() + 1) == [False]  # the step returns this result, so it needs its own memory


def test_argument_of_another_layout_or_dtype_is_not_overwritten() -> None:
    def broadcast(x: torch.Tensor) -> torch.Tensor:
        return (x[0].cos() + x[:, :1].sin()).sum()

    def transpose(x: torch.Tensor) -> torch.Tensor:
        return (torch.mm(x, x.t()).t() + 1).sum()

    def half(x: torch.Tensor) -> torch.Tensor:
        return (x.cos()[:3] + 1).sum()

    def mixed_dtypes(x: torch.Tensor) -> torch.Tensor:
        return (x.cos().to(torch.bfloat16) + x).sum()

    assert find_overwrites(broadcast) == [False]
    assert find_overwrites(half) == [False]
    assert find_overwrites(mixed_dtypes) == [False]
    # The result of an op on a transposed tensor is transposed too, so their elements match.
    assert find_overwrites(transpose) == [True]


def test_argument_used_twice_by_an_op_is_not_overwritten() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        product = torch.mm(x.t(), x)
        return (product + product.t()).sum()

    assert find_overwrites(step) == [False]


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_backward_op_overwrites_its_gradient(approximate: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x.detach().requires_grad_()
        torch.nn.functional.gelu(y.sin(), approximate=approximate).square().sum().backward()
        gradient = y.grad
        assert gradient is not None
        return gradient.clone()

    captured = capture_reusing(step, torch.randn(SHAPE))
    assert [op.mutates != () for op in captured.graph.ops if "gelu_backward" in op.name] == [True]
    assert find_overwrites(step)


def test_scalar_multiply_runs_in_place() -> None:
    """``mul.Scalar`` has no native out overload, only an in-place one."""

    def step(x: torch.Tensor) -> torch.Tensor:
        cosine = x.cos()
        return torch.ops.aten.mul.Scalar(cosine, 3.0).sum()

    assert find_overwrites(step) == [True]


def test_small_results_are_not_computed_in_place() -> None:
    model = torch.nn.Linear(1, 1)
    traced = capture_step(lambda x: (x.cos() + 1).sum(), [model], [], (torch.randn(SHAPE),), {})
    assert reuse_arguments(traced) is traced
