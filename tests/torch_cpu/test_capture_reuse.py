"""Elementwise ops write over an argument that nobody needs any more, and over no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from replay import Replay

from outofcore.capture import Captured, capture_step
from outofcore.transforms.passes import reuse

SHAPE = (6, 5)


def captured(step: Callable[..., torch.Tensor], *args: torch.Tensor) -> Captured:
    model = torch.nn.Linear(1, 1)
    return reuse(capture_step(step, [model], [], args, {}), least=1)


def over(step: Callable[..., torch.Tensor], *args: torch.Tensor) -> list[bool]:
    """For each elementwise op whether it writes over an argument; the result is checked as well."""
    given = args or (torch.randn(SHAPE),)
    found = captured(step, *given)
    assert torch.equal(Replay(found)(*(a.clone() for a in given)), step(*(a.clone() for a in given)))
    names = ("add", "mul", "sub", "div", "gelu", "where", "threshold", "sigmoid")
    return [bool(op.mutates) for op in found.graph.ops if op.name.removeprefix("aten.").startswith(names)]


def test_a_chain_needs_one_storage() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        made = torch.mm(x, x.t())
        return (((made + 1) * 2).sigmoid() - 3).sum()

    found = captured(step, torch.randn(SHAPE))
    large = [s for s in found.graph.storages if s.bytes == 6 * 6 * 4]
    assert len(large) == 1
    assert [op.creates for op in found.graph.ops[1:5]] == [()] * 4
    assert all(op.mutates == (large[0].id,) == op.reads for op in found.graph.ops[1:5])
    assert over(step) == [True] * 4


def test_what_is_used_again_is_left_alone() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        made = x.cos()
        more = made * 2
        return (made + more).sum()

    assert over(step) == [False, True]


def test_the_other_argument_may_be_the_one() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        made = x.cos()
        return (x - made).sum()

    assert over(step) == [True]
    op = next(op for op in captured(step, torch.randn(SHAPE)).graph.ops if "sub" in op.name)
    assert op.family.endswith("over argument 1")


def test_inputs_parameters_and_results_are_left_alone() -> None:
    assert over(lambda x: (x + 1).sum()) == [False]
    assert over(lambda x: x.cos() + 1) == [False]  # the result of the step has memory of its own


def test_what_is_laid_out_otherwise_is_left_alone() -> None:
    def broadcast(x: torch.Tensor) -> torch.Tensor:
        return (x[0].cos() + x[:, :1].sin()).sum()

    def turned(x: torch.Tensor) -> torch.Tensor:
        return (torch.mm(x, x.t()).t() + 1).sum()

    def half(x: torch.Tensor) -> torch.Tensor:
        return (x.cos()[:3] + 1).sum()

    def typed(x: torch.Tensor) -> torch.Tensor:
        return (x.cos().to(torch.bfloat16) + x).sum()

    assert over(broadcast) == [False]
    assert over(half) == [False]
    assert over(typed) == [False]
    # The result of a turned tensor is turned as well, so that it fits, element by element.
    assert over(turned) == [True]


def test_an_argument_seen_twice_is_left_alone() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        made = torch.mm(x.t(), x)
        return (made + made.t()).sum()

    assert over(step) == [False]


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_backward_ops_write_over_the_gradient(approximate: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x.detach().requires_grad_()
        torch.nn.functional.gelu(y.sin(), approximate=approximate).square().sum().backward()
        gradient = y.grad
        assert gradient is not None
        return gradient.clone()

    found = captured(step, torch.randn(SHAPE))
    assert [op.mutates != () for op in found.graph.ops if "gelu_backward" in op.name] == [True]
    assert over(step)


def test_scalar_multiples_work_in_place() -> None:
    """``mul.Scalar`` has no native overload that is told where to put its result, but one that works in place."""

    def step(x: torch.Tensor) -> torch.Tensor:
        made = x.cos()
        return torch.ops.aten.mul.Scalar(made, 3.0).sum()

    assert over(step) == [True]


def test_small_results_have_memory_of_their_own() -> None:
    model = torch.nn.Linear(1, 1)
    traced = capture_step(lambda x: (x.cos() + 1).sum(), [model], [], (torch.randn(SHAPE),), {})
    assert reuse(traced) is traced
