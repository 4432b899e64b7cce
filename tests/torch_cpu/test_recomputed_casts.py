"""Widening casts are recomputed in the backward pass, and their inputs saved instead of their results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from capture_cases import Case
from exactness import check_exact
from torch import nn

import outofcore
from outofcore.analysis import fullest_op, live_bytes
from outofcore.capture import Captured, capture_step
from outofcore.transforms.passes import leanest, recompute_casts

ROWS, WIDTH, LAYERS = 1024, 128, 5
NARROW, WIDE = ROWS * WIDTH * 2, ROWS * WIDTH * 4


class Block(nn.Module):
    """The second half of a block of Llama: its norm works in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x + self.linear(self.scale * wide.to(x.dtype))


def trained() -> Case:
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Case(step, [model], [optimizer], lambda: (torch.randn(ROWS, WIDTH, dtype=torch.bfloat16),))


def captured(case: Case) -> Captured:
    return capture_step(case.step, case.models, case.optimizers, case.batch(), {})


def casts(found: Captured) -> int:
    return sum(op.name.startswith("aten._to_copy") for op in found.graph.ops)


def test_recomputed_casts_keep_the_bits() -> None:
    replay = check_exact(trained, recompute_casts)
    assert casts(replay.captured) == casts(captured(trained())) + LAYERS - 1  # the first casts an input


def count_live(found: Captured, size: int) -> int:
    """Count the storages of this size that are live at the fullest op."""
    turn = fullest_op(found.graph)
    uses = [found.graph.uses[storage.id] for storage in found.graph.storages if storage.bytes == size]
    return sum(bool(each) and each[0] < turn < each[-1] for each in uses)


def test_inputs_of_casts_are_saved_instead_of_results() -> None:
    traced = captured(trained())
    found = recompute_casts(traced)
    assert count_live(traced, WIDE) - count_live(found, WIDE) == LAYERS - 1
    assert count_live(found, NARROW) - count_live(traced, NARROW) == LAYERS - 1


def captures_of(function: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Captured, Captured]:
    """Capture a step whose fullest op lies between a function and its backward pass; before and after the pass."""
    layer, head = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16), nn.Linear(WIDTH, 16 * WIDTH, dtype=torch.bfloat16)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = head(function(layer(x))).exp().pow(2).sum()
        loss.backward()
        return loss.detach()

    traced = capture_step(step, [layer, head], [], (torch.randn(ROWS, WIDTH, dtype=torch.bfloat16),), {})
    return traced, recompute_casts(traced)


def square(x: torch.Tensor) -> torch.Tensor:
    return x.float().pow(2).sin().to(x.dtype)


def saved_too(x: torch.Tensor) -> torch.Tensor:
    """The backward pass reads the input of the cast later still, so a plan can recompute the cast by itself."""
    early = x * x
    return square(x) + early


def changed(x: torch.Tensor) -> torch.Tensor:
    wide = x.float().pow(2)
    x.mul_(2)
    return wide.to(x.dtype)


def overwritten(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return wide.add_(1).pow(2).to(x.dtype)


def narrowed(x: torch.Tensor) -> torch.Tensor:
    """Only the cast to float64 widens."""
    return x.double().sin().float().pow(2).to(x.dtype)


@pytest.mark.parametrize(
    ("function", "more"), [(square, 1), (saved_too, 0), (changed, 0), (overwritten, 0), (narrowed, 1)]
)
def test_only_what_can_be_recompute_casts_is(function: Callable[[torch.Tensor], torch.Tensor], more: int) -> None:
    before, after = captures_of(function)
    assert casts(after) - casts(before) == more


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_compiled_step_has_the_bits_of_plain_pytorch(share: float) -> None:
    torch.manual_seed(0)
    ours = trained()
    torch.manual_seed(0)
    plain = trained()
    batches = [ours.batch() for _ in range(3)]
    budget = int(share * live_bytes(captured(ours).graph))
    with outofcore.compile(ours.step, ours.models, ours.optimizers, budget=budget, cache=False) as step:
        losses = [step(*batch).item() for batch in batches]
    assert losses == [plain.step(*batch).item() for batch in batches]
    for one, other in zip(ours.models[0].parameters(), plain.models[0].parameters(), strict=True):
        assert torch.equal(one, other)


def test_leanest_form_recomputes_casts() -> None:
    traced = captured(trained())
    assert casts(leanest(traced)) == casts(traced) + LAYERS - 1
