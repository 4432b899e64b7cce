"""Tests of higher-order operators such as ``torch.cond`` in an eager loop within a budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_op
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch._ops import HigherOrderOperator
from torch.nn.attention.flex_attention import flex_attention

import outofcore
from outofcore.follow.native import load_paging

WIDTH = 192  # a square matrix has 144 KiB


class Doubled(HigherOrderOperator):
    """A user's operator, defined before the loop or while it runs."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)(lambda x: x.sin() * 2)
        self.py_impl(torch._C.DispatchKey.Autograd)(lambda x: _Doubling.apply(self, x))

    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x)


class _Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Doubled, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        with torch._C._AutoDispatchBelowAutograd():
            return op(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient * 2 * ctx.saved_tensors[0].cos()


EARLIER = Doubled("outofcore_test_doubled_earlier")
Doubled(EARLIER.name())  # replaces the first one in PyTorch's registry


def use_cond(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: model(y).sin(), lambda y: model(y).cos(), (x,))


def use_map(model: nn.Module, x: Tensor) -> Tensor:
    return map_op(lambda row: row.sin() @ row.T, model(x).unflatten(0, (2, -1)))


def use_scan(model: nn.Module, x: Tensor) -> Tensor:
    first = torch.zeros(x.shape[1:])
    return scan(lambda carry, row: (carry + row, (carry * row).sin()), first, model(x))[1]


def use_associative_scan(model: nn.Module, x: Tensor) -> Tensor:
    return associative_scan(torch.add, model(x), dim=0, combine_mode="generic")


def use_earlier_operator(model: nn.Module, x: Tensor) -> Tensor:
    return EARLIER(model(x))


def use_later_operator(model: nn.Module, x: Tensor) -> Tensor:
    return Doubled("outofcore_test_doubled_later")(model(x))


DIFFERENTIABLE = [use_cond, use_map, use_scan, use_associative_scan, use_earlier_operator, use_later_operator]


def train(use: Callable[[nn.Module, Tensor], Tensor], budget: str | None) -> tuple[list[Tensor], Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(WIDTH, WIDTH) for _ in range(2)]
    results: list[Tensor] = []

    def loop() -> None:
        for x in batches:
            result = use(model, x)
            result.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            results.append(result.detach())

    if budget is None:
        loop()
        return [*results, *model.parameters()], None
    with outofcore.budget(budget, model, policy=None) as run:
        load_paging().follow_stress(run._space, 1)
        loop()
    return [t.clone() for t in (*results, *model.parameters())], run.stats


@pytest.mark.parametrize("use", DIFFERENTIABLE)
def test_operators_in_python_have_the_bits_of_pytorch(use: Callable[[nn.Module, Tensor], Tensor]) -> None:
    theirs, _ = train(use, None)
    ours, stats = train(use, "64MiB")
    assert all(map(torch.equal, ours, theirs))
    assert stats.evictions > 10  # the inner ops are seen, and their tensors are moved
    assert sum(t.numel() for t in ours) > WIDTH * WIDTH


def use_while_loop(x: Tensor) -> Tensor:
    return while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y.sin() @ x), (torch.tensor(0), x))[1]


def use_flex_attention(x: Tensor) -> Tensor:
    heads = x.unflatten(1, (4, -1)).transpose(0, 1)[None]
    return flex_attention(heads, heads, heads, score_mod=lambda score, b, h, q, k: score + (q - k))


@pytest.mark.parametrize("use", [use_while_loop, use_flex_attention])  # without a backward pass here
def test_operators_in_python_have_the_bits_of_pytorch_without_gradients(use: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x = torch.randn(WIDTH, WIDTH)
    theirs = use(x)
    torch._dynamo.reset()
    with outofcore.budget("8MiB", policy=None) as run:
        load_paging().follow_stress(run._space, 1)
        ours = use(x)
    assert torch.equal(ours, theirs)
    assert run.stats.evictions > 3


def test_operators_in_python_dispatch_as_before_when_a_loop_has_ended() -> None:
    before = torch._ops._compute_keyset
    with outofcore.budget("8MiB"):
        assert torch._ops._compute_keyset is not before
    assert torch._ops._compute_keyset is before
