"""Tests of ops on small tensors, which an eager loop tracks only if they create a large one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import outofcore
from outofcore.errors import BudgetError

MIB = 1 << 20
# One op for each kernel signature, and one without such a kernel (``cumprod``).
SMALL = {
    "pointwise": lambda x: x * 2 + x,
    "in place": lambda x: x.mul_(0.5).add_(x),
    "reduction": lambda x: x.sum(0).mean(),
    "several results": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]).max(1),
    "list": lambda x: torch.cat([x, x])[3:],
    "list in place": lambda x: torch._foreach_mul_([x, x.clone()], 0.5),
    "list of results": lambda x: torch._foreach_sqrt([x, x]),
    "optional": lambda x: torch.clamp(x, min=0.25),
    "number": lambda x: x.sum().item(),
    "factory": lambda _: torch.zeros(4).fill_(3.0),
    "no signature": lambda x: torch.cumprod(x, 0),
    "composite": lambda x: torch.addbmm(x[0, :1, None], x[:, :2, None], x[:, None, :2]),
}


def _loop(budget: int = 4 * MIB) -> outofcore.Loop:
    return outofcore.budget(budget, nn.Linear(4, 4), cache=False, policy=None)


@pytest.mark.parametrize("name", list(SMALL))
@pytest.mark.parametrize("inference", [False, True])
def test_small_ops_are_untracked_and_exact(name: str, inference: bool) -> None:
    def results() -> object:
        torch.manual_seed(0)
        with torch.inference_mode(inference):
            return SMALL[name](torch.rand(6, 8))

    theirs = results()
    with _loop() as run:
        ours = results()
        assert run.stats.ops == 0
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def _large_results(small: torch.Tensor) -> list[torch.Tensor]:
    row = torch.ones(512) * small.sum()
    out = torch.empty(0)
    torch.maximum(row[:, None], row, out=out)  # a small tensor that becomes large
    return [row[:, None] * row, out, torch.zeros(512, 512) + 1, torch.cumsum(row[:, None].expand(512, 512), 0)]


def test_large_results_of_small_ops_are_tracked() -> None:
    """Each op makes 1 MiB from small inputs; the results are in the arena and can be evicted."""
    small = torch.rand(8)
    theirs = _large_results(small)
    with _loop(5 * MIB) as run:
        for turn in range(3):
            ours = _large_results(small)
            fillers = [torch.full((512, 512), float(turn)) for _ in range(4)]
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
            assert [filler[0, 0].item() for filler in fillers] == [turn] * 4
            del fillers
        stats = run.stats
        assert stats.evictions > 0
        assert 4 * MIB <= stats.peak_bytes <= 5 * MIB
        del ours, theirs
        run.evict_all()  # waits for the copies
        assert run.stats.bytes_in_use + run.stats.bytes_evicted == 0


def test_small_backward_op_beyond_the_budget_is_refused() -> None:
    wide = torch.rand(4, 1, requires_grad=True)
    with pytest.raises(BudgetError, match=r"select_backward .*test_follow_small_ops.* needs 16\.0 MiB"), _loop(MIB):
        wide.expand(4, 1 << 20)[0].sum().backward()
    assert wide.grad is None


def test_small_ops_run_after_a_loop_and_under_a_profiler() -> None:
    small = torch.rand(6)
    with _loop() as run:
        small.mul_(2)
    small.add_(1)
    assert run.stats.ops == 0
    with torch.autograd.profiler.profile() as profile, _loop():
        small.mul(2)
    assert any(event.name == "aten::mul" for event in profile.function_events)
