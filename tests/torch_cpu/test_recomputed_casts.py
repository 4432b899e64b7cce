"""Tests of widening casts that the backward pass recomputes from saved inputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from capture_cases import Case
from exactness import check_exact
from torch import nn

import outofcore
from outofcore.analysis import live_bytes, peak_activation_op
from outofcore.capture import Captured, capture_step
from outofcore.transforms.passes import recompute_casts, rewrite_for_lowest_memory

ROWS, WIDTH, LAYERS = 1024, 128, 5
NARROW, WIDE = ROWS * WIDTH * 2, ROWS * WIDTH * 4


class Block(nn.Module):
    """The second half of a Llama block, with a norm in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x + self.linear(self.scale * wide.to(x.dtype))


def make_case() -> Case:
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Case(step, [model], [optimizer], lambda: (torch.randn(ROWS, WIDTH, dtype=torch.bfloat16),))


def capture(case: Case) -> Captured:
    return capture_step(case.step, case.models, case.optimizers, case.batch(), {})


def count_casts(step: Captured) -> int:
    return sum(op.name.startswith("aten._to_copy") for op in step.graph.ops)


def test_recomputed_casts_keep_the_bits() -> None:
    replay = check_exact(make_case, recompute_casts)
    assert (
        count_casts(replay.captured) == count_casts(capture(make_case())) + LAYERS - 1
    )  # the first cast is of an input


def count_live(step: Captured, size: int) -> int:
    """Count the storages of this size that are live at the fullest op."""
    fullest = peak_activation_op(step.graph)
    uses = [step.graph.uses[storage.id] for storage in step.graph.storages if storage.bytes == size]
    return sum(bool(op_ids) and op_ids[0] < fullest < op_ids[-1] for op_ids in uses)


def test_inputs_of_casts_are_saved_instead_of_results() -> None:
    before = capture(make_case())
    after = recompute_casts(before)
    assert count_live(before, WIDE) - count_live(after, WIDE) == LAYERS - 1
    assert count_live(after, NARROW) - count_live(before, NARROW) == LAYERS - 1


def captures_of(function: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Captured, Captured]:
    """Capture a step whose fullest op follows ``function``, and recompute its casts."""
    layer, head = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16), nn.Linear(WIDTH, 16 * WIDTH, dtype=torch.bfloat16)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = head(function(layer(x))).exp().pow(2).sum()
        loss.backward()
        return loss.detach()

    traced = capture_step(step, [layer, head], [], (torch.randn(ROWS, WIDTH, dtype=torch.bfloat16),), {})
    return traced, recompute_casts(traced)


def square(x: torch.Tensor) -> torch.Tensor:
    return x.float().pow(2).sin().to(x.dtype)


def reuse_input(x: torch.Tensor) -> torch.Tensor:
    """Recompute the cast by itself, since a later op reads its input."""
    early = x * x
    return square(x) + early


def change_input(x: torch.Tensor) -> torch.Tensor:
    wide = x.float().pow(2)
    x.mul_(2)
    return wide.to(x.dtype)


def overwrite_result(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return wide.add_(1).pow(2).to(x.dtype)


def narrow_twice(x: torch.Tensor) -> torch.Tensor:
    """Only the cast to float64 widens."""
    return x.double().sin().float().pow(2).to(x.dtype)


@pytest.mark.parametrize(
    ("function", "extra_casts"),
    [(square, 1), (reuse_input, 0), (change_input, 0), (overwrite_result, 0), (narrow_twice, 1)],
)
def test_casts_are_recomputed_only_when_useful_and_possible(
    function: Callable[[torch.Tensor], torch.Tensor], extra_casts: int
) -> None:
    before, after = captures_of(function)
    assert count_casts(after) - count_casts(before) == extra_casts


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_compiled_step_has_the_bits_of_plain_pytorch(share: float) -> None:
    torch.manual_seed(0)
    ours = make_case()
    torch.manual_seed(0)
    plain = make_case()
    batches = [ours.batch() for _ in range(3)]
    budget = int(share * live_bytes(capture(ours).graph))
    with outofcore.compile(ours.step, ours.models, ours.optimizers, budget=budget, cache=False) as step:
        losses = [step(*batch).item() for batch in batches]
    assert losses == [plain.step(*batch).item() for batch in batches]
    for actual, expected in zip(ours.models[0].parameters(), plain.models[0].parameters(), strict=True):
        assert torch.equal(actual, expected)


def test_lowest_memory_variant_recomputes_casts() -> None:
    traced = capture(make_case())
    assert count_casts(rewrite_for_lowest_memory(traced)) == count_casts(traced) + LAYERS - 1
