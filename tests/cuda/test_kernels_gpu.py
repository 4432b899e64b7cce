"""Tests of fused ops compiled by Triton: the same bits at every budget, without autotuning or copies."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._triton import has_triton
from worlds import CPU, WORLDS, World, differing_tensors

import outofcore
from outofcore._torch_internals import compile_traced
from outofcore.errors import BudgetError
from outofcore.execution.cuda.backend import CudaBackend
from outofcore.transforms.kernels import Kernel
from outofcore.units import GIB, KIB, MIB

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available() or not has_triton(), reason="Triton supports no GPU here"),
]
STEPS = 4


@pytest.fixture(autouse=True)
def _compiled_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use an own cache, since other processes may have compiled with other settings."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def _no_autotuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a kernel is tuned by measuring, which is not deterministic."""
    tuner: Any = pytest.importorskip("torch._inductor.runtime.triton_heuristics").CachingAutotuner
    monkeypatch.setattr(tuner, "autotune_to_one_config", lambda *_, **__: pytest.fail("a kernel is tuned by measuring"))


def train(world: World, budget: int, policy: str, kernels: Any = "inductor") -> tuple[list[float], Any, Any]:
    with outofcore.compile(
        world.step, world.model, world.optimizer, budget=budget, device="cuda", home="host", policy=policy,
        kernels=kernels, cache=False,
    ) as step:  # fmt: skip
        torch.manual_seed(1)
        losses = [step(*world.batch(index)).item() for index in range(STEPS)]
    return losses, world.state(), step


def smallest(make: Callable[[torch.device], World]) -> int:
    budget = CudaBackend(torch.device("cuda")).unavailable_bytes(128 * MIB, 4, 0) + 256 * KIB
    with pytest.raises(BudgetError) as caught:
        train(make(CPU), budget, "offload-all")
    assert caught.value.smallest_budget is not None
    return caught.value.smallest_budget + 512 * KIB


@pytest.mark.usefixtures("_no_autotuning")
@pytest.mark.parametrize("name", list(WORLDS))
def test_compiled_kernels_give_the_same_bits_at_every_budget(name: str) -> None:
    make = WORLDS[name]
    losses, state, step = train(make(CPU), GIB, "keep-all")
    assert sum(isinstance(call.func, Kernel) for call in step.captured.calls) > 0
    assert step.stats.off_plan == 0
    small_losses, small_state, step = train(make(CPU), smallest(make), "offload-all")
    assert step.stats.off_plan == 0
    assert small_losses == losses
    assert differing_tensors(small_state, state) == []
    assert losses == pytest.approx(train(make(CPU), GIB, "keep-all", "eager")[0], rel=1e-4)


@pytest.mark.usefixtures("_no_autotuning")
def test_unaligned_argument_is_not_copied() -> None:
    device, offset = torch.device("cuda", torch.cuda.current_device()), 3
    layout = ((4096,), (1,), offset, torch.float32, device)
    run = compile_traced(lambda x: (torch.ops.aten.add.Tensor(torch.ops.aten.relu.default(x), 1),), [layout], 1)
    argument = torch.randn(8192, device=device)[offset : offset + 4096]
    run([argument])
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    (result,) = run([argument])
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 1
    assert torch.equal(result.cpu(), argument.cpu().relu() + 1)
