"""Tests of ``split="close"``: partial sums stay close to plain PyTorch, with the same bits at every budget."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capture_cases import Case
from exactness import build_twice
from replay import Replay
from torch import nn

import outofcore
from outofcore.capture import Captured, capture_step
from outofcore.errors import InputError
from outofcore.transforms.partial_sums import split_sums
from outofcore.zoo.gpt import GPT, GPTShape


def split_sums_finely(captured: Captured) -> Captured:
    """Split sums into as many parts as possible, however small they are."""
    return split_sums(captured, part_bytes=1)


def case(model: nn.Module, batch: Callable[[], tuple[torch.Tensor, ...]], loss: Callable[..., torch.Tensor]) -> Case:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(*inputs: torch.Tensor) -> torch.Tensor:
        loss_value = loss(model, *inputs)
        loss_value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss_value

    return Case(step, [model], [optimizer], batch)


def norms() -> Case:
    model = nn.Sequential(nn.Linear(24, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8))
    return case(model, lambda: (torch.randn(4, 96, 24),), lambda m, x: m(x).square().mean())


def convolutions() -> Case:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, stride=2),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 6, 2, stride=2),
        nn.Conv2d(6, 6, 3, groups=3, bias=False),
        nn.Flatten(),
        nn.LazyLinear(5),
    )
    model(torch.zeros(1, 3, 10, 10))
    return case(model, lambda: (torch.randn(7, 3, 10, 10),), lambda m, x: m(x).square().mean())


def language() -> Case:
    model = GPT(GPTShape(layers=2, width=32, heads=2, context=64, vocab=100))

    def batch() -> tuple[torch.Tensor, ...]:
        return torch.randint(100, (4, 64)), torch.randint(100, (4, 64))

    return case(model, batch, lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y.flatten()))


SUMS = ("convolution_backward", "native_layer_norm_backward", "native_group_norm_backward", "mm", "sum")


@pytest.mark.parametrize(
    ("make", "split_ops"),
    [
        (norms, {"mm", "sum", "native_layer_norm_backward"}),
        (convolutions, {"convolution_backward", "native_group_norm_backward"}),
        (language, {"mm", "native_layer_norm_backward"}),
    ],
)
def test_step_with_partial_sums_is_close_to_plain_pytorch(make: Callable[[], Case], split_ops: set[str]) -> None:
    ours, plain = build_twice(make)
    torch.manual_seed(5)
    args = ours.batch()
    captured = capture_step(ours.step, ours.models, ours.optimizers, args, {})
    split = split_sums_finely(captured)
    before, after = (Counter(op.name.split(".")[1] for op in capture.graph.ops) for capture in (captured, split))
    assert {name for name in SUMS if after[name] > before[name] + 1} >= split_ops
    replay = Replay(split)
    for number in range(3):
        losses = []
        for run in (replay, plain.step):
            torch.manual_seed(number)
            losses.append(run(*args))
        assert torch.allclose(*losses, rtol=1e-5)
    for ours_parameter, plain_parameter in zip(ours.models[0].parameters(), plain.models[0].parameters(), strict=True):
        assert torch.allclose(ours_parameter, plain_parameter, rtol=1e-3, atol=1e-4)
    assert replay.mismatches == []


def test_sums_of_one_row_or_in_16_bits_are_not_split() -> None:
    def capture_both(rows: int, dtype: torch.dtype) -> tuple[Captured, Captured]:
        model = nn.Linear(8, 8).to(dtype)
        workload = case(model, lambda: (torch.randn(rows, 8, dtype=dtype),), lambda m, x: m(x).square().mean())
        captured = capture_step(workload.step, workload.models, workload.optimizers, workload.batch(), {})
        return captured, split_sums_finely(captured)

    whole, split = capture_both(256, torch.float32)
    assert len(split.graph.ops) > len(whole.graph.ops)
    for rows, dtype in ((1, torch.float32), (256, torch.bfloat16)):
        whole, split = capture_both(rows, dtype)
        assert split.graph == whole.graph


def test_products_with_weights_are_not_split() -> None:
    """Their rows can be split without changing the order of additions."""
    model = nn.Linear(64, 512, bias=False)

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return torch.mm(model(x), model.weight * 2.0)

    captured = capture_step(step, [model], [], (torch.randn(256, 64),), {})
    assert split_sums_finely(captured).graph == captured.graph


ROWS = 4096


class Wide(nn.Module):
    """A model with activations far larger than its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 256), nn.LayerNorm(256), nn.Linear(256, 64)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def make_wide(model: nn.Module) -> Case:
    return case(model, lambda: (torch.randn(ROWS, 128),), lambda m, x: m(x))


def train(model: nn.Module, budget: int | None, *, steps: int = 4, **options: Any) -> tuple[list[float], Any]:
    trained_model = copy.deepcopy(model)
    workload = make_wide(trained_model)
    draw = torch.Generator().manual_seed(3)
    batches = [torch.randn(ROWS, 128, generator=draw) for _ in range(steps)]
    if budget is None:
        return [workload.step(x).item() for x in batches], [p.detach() for p in trained_model.parameters()]
    with outofcore.compile(workload.step, trained_model, *workload.optimizers, budget=budget, **options) as compiled:
        losses = [compiled(x).item() for x in batches]
    return losses, [p.detach() for p in trained_model.parameters()]


def find_smallest_budget(model: nn.Module, **options: Any) -> int:
    workload = make_wide(copy.deepcopy(model))
    return outofcore.smallest_budget(
        workload.step, *workload.models, *workload.optimizers, inputs=workload.batch(), **options
    )


def test_bits_are_the_same_at_every_budget() -> None:
    torch.manual_seed(0)
    model = Wide()
    smallest = find_smallest_budget(model, split="close")
    assert smallest < find_smallest_budget(model, split="exact")
    in_core, *results = (train(model, budget, split="close") for budget in (1 << 30, 3 * smallest, smallest))
    plain = train(model, None)
    for losses, weights in results:
        assert losses == in_core[0]
        assert all(map(torch.equal, weights, in_core[1]))
    assert in_core[0] == pytest.approx(plain[0], rel=1e-5)
    assert not all(map(torch.equal, in_core[1], plain[1]))  # else no sum was split


@pytest.mark.exhaustive
def test_estimate_for_close_needs_less_than_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROWS", 16384)
    workload = make_wide(Wide())
    options = {"inputs": workload.batch(), "device": "h100"}
    exact, close = (
        outofcore.estimate(workload.step, *workload.models, *workload.optimizers, split=split, **options)
        for split in ("exact", "close")
    )
    assert close.smallest_budget < exact.smallest_budget


def test_dynamic_step_is_refused() -> None:
    model = Wide()
    with pytest.raises(InputError, match="close"):
        outofcore.compile(functools.partial(model), model, budget="1GiB", split="close", dynamic=True)
