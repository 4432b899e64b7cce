"""Loops trained plain and within a budget: what they read, what they leave, and whether that is the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from loops import Loop, Make, adamw, device_of, tensors_in
from torch import Tensor, nn
from torch.optim import Optimizer

import outofcore
from outofcore.errors import BudgetError
from outofcore.follow.gpu import make_workspaces, shares_of
from outofcore.follow.native import load_paging
from outofcore.follow.user_tensors import parts_of
from outofcore.runtime.native import Flavor
from outofcore.units import MIB, round_up

ROOMY = 1 << 30


@dataclass(frozen=True)
class Trained:
    """What a loop read, what it left, on the CPU, and where it left the generators."""

    read: list[Any]
    left: list[Tensor]
    generators: list[Tensor]

    def differs_from(self, other: Trained) -> str:
        """Where it differs by any bit; empty: nowhere."""
        if self.read != other.read:
            return f"read {self.read} and not {other.read}"
        for what, ours, theirs in (
            ("tensor", self.left, other.left),
            ("generator", self.generators, other.generators),
        ):
            if len(ours) != len(theirs):
                return f"{len(ours)} and not {len(theirs)} of {what}"
            wrong = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not torch.equal(a, b)]
            if wrong:
                return f"{what} {wrong} of {len(theirs)} differ"
        return ""


def trained(
    loop: Loop,
    model_of: Callable[[], nn.Module],
    make: Make = adamw,
    budget: int | None = None,
    *,
    stress: bool = False,
    prepare: Callable[[outofcore.Loop], object] = lambda run: None,
    **options: Any,
) -> tuple[Trained, outofcore.LoopStats | None]:
    """Train plain or, with a budget, followed; then with what happened.

    Args:
        loop: of ``loops`` or like them.
        model_of: makes its model.
        make: makes its optimizer.
        budget: in bytes.
        stress: everything leaves after every op, and is overwritten.
        prepare: is called with what follows the loop before it begins.
        options: of ``outofcore.budget``.
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
    left = [*model.state_dict().values(), *(p.grad for p in model.parameters() if p.grad is not None)]
    values = [value for value in read if not isinstance(value, Tensor | Optimizer)]
    copies = [part.detach().cpu().clone() for t in (*left, *tensors_in(read)) for part in parts_of(t)]
    generators = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if on_gpu else [])]
    return Trained(values, copies, generators), stats


def peak_of(loop: Loop, model_of: Callable[[], nn.Module], share: float = 1.0) -> int:
    """Peak bytes of a loop with ample room and no plan: a share of those in the arena, all of the small tensors'."""
    movable, small = _peaks_of(loop, model_of)
    return int(share * movable) + small


def budget_for(tensors: int, device: torch.device) -> int:
    """The budget on a GPU that leaves room for tensors of so many bytes."""
    make_workspaces(device)
    budget = tensors
    while True:
        try:
            missing = tensors - shares_of(budget, device).room
        except BudgetError as error:
            assert error.smallest_budget is not None
            budget = error.smallest_budget
            continue
        if missing <= 0:
            return budget
        budget += round_up(missing, 2 * MIB)


@functools.cache
def _peaks_of(loop: Loop, model_of: Callable[[], nn.Module]) -> tuple[int, int]:
    stats = trained(loop, model_of, budget=ROOMY, policy=None)[1]
    assert stats is not None
    return stats.peak_bytes, stats.peak_small_bytes
