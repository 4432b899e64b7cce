"""Training loops run in plain PyTorch and within a budget, and the comparison of their results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from loops import Loop, MakeOptimizer, adamw, device_of, tensors_in
from torch import Tensor, nn
from torch.optim import Optimizer

import outofcore
from outofcore.errors import BudgetError
from outofcore.follow.gpu import make_workspaces, measure_shares
from outofcore.follow.native import load_paging
from outofcore.follow.user_tensors import inner_tensors_of
from outofcore.runtime.native import Flavor
from outofcore.units import MIB, round_up

AMPLE_BYTES = 1 << 30


@dataclass(frozen=True)
class TrainingResult:
    """The values that a loop read, and copies on the CPU of its final tensors and generator states."""

    read_values: list[Any]
    final_tensors: list[Tensor]
    generators: list[Tensor]

    def differs_from(self, other: TrainingResult) -> str:
        """Return a description of the first difference in any bit; empty if all are equal."""
        if self.read_values != other.read_values:
            return f"read {self.read_values} and not {other.read_values}"
        for kind, ours, theirs in (
            ("tensor", self.final_tensors, other.final_tensors),
            ("generator", self.generators, other.generators),
        ):
            if len(ours) != len(theirs):
                return f"{len(ours)} and not {len(theirs)} of {kind}"
            different = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not torch.equal(a, b)]
            if different:
                return f"{kind} {different} of {len(theirs)} differ"
        return ""


def train_loop(
    loop: Loop,
    model_of: Callable[[], nn.Module],
    make: MakeOptimizer = adamw,
    budget: int | None = None,
    *,
    stress: bool = False,
    prepare: Callable[[outofcore.Loop], object] = lambda run: None,
    **options: Any,
) -> tuple[TrainingResult, outofcore.LoopStats | None]:
    """Train in plain PyTorch (``budget`` None) or within a budget in bytes; return results and statistics.

    ``stress`` evicts and overwrites all tensors after every op. ``prepare`` is called before training starts.
    """
    torch.manual_seed(0)
    model = model_of()
    on_gpu = device_of(model).type == "cuda"
    torch.manual_seed(1)
    stats = None
    if budget is None:
        read = loop(model, make)
    else:
        with outofcore.budget(budget, model, **options) as run:
            (load_paging(Flavor.CUDA) if on_gpu else load_paging()).follow_stress(run._space, int(stress))
            prepare(run)
            read = loop(model, make)
            stats = run.stats
    final_tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters() if p.grad is not None)]
    values = [value for value in read if not isinstance(value, Tensor | Optimizer)]
    copies = [part.detach().cpu().clone() for t in (*final_tensors, *tensors_in(read)) for part in inner_tensors_of(t)]
    generators = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if on_gpu else [])]
    return TrainingResult(values, copies, generators), stats


def peak_of(loop: Loop, model_of: Callable[[], nn.Module], share: float = 1.0) -> int:
    """Return the peak bytes without a plan: a share of the movable ones plus all small tensors'."""
    movable, small = _peaks_of(loop, model_of)
    return int(share * movable) + small


def budget_for(tensor_bytes: int, device: torch.device) -> int:
    """Return the smallest budget on a GPU with at least ``tensor_bytes`` of room for tensors."""
    make_workspaces(device)
    budget = tensor_bytes
    while True:
        try:
            missing = tensor_bytes - measure_shares(budget, device).room
        except BudgetError as error:
            assert error.smallest_budget is not None
            budget = error.smallest_budget
            continue
        if missing <= 0:
            return budget
        budget += round_up(missing, 2 * MIB)


@functools.cache
def _peaks_of(loop: Loop, model_of: Callable[[], nn.Module]) -> tuple[int, int]:
    stats = train_loop(loop, model_of, budget=AMPLE_BYTES, policy=None)[1]
    assert stats is not None
    return stats.peak_bytes, stats.peak_small_bytes
