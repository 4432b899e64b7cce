"""Loops that nobody changed, within budgets: each number that they read, and all that they leave, is that of eager."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import LOOPS, adamw, plain, tensors_in
from torch import Tensor, nn
from torch.optim import Optimizer

import outofcore
from outofcore.follow.native import load_paging

Trained = tuple[list[Any], list[Tensor], Tensor]

ROOMY = 1 << 30


pytestmark = pytest.mark.usefixtures("one_thread")


def trained(
    name: str,
    make: Callable[[nn.Module], Optimizer] = adamw,
    budget: int | None = None,
    *,
    stress: bool = False,
    policy: str | None = "auto",
) -> tuple[Trained, outofcore.LoopStats | None]:
    """What a loop read, what it left, and where it left the generator; with a budget, also what happened."""
    loop, model_of = LOOPS[name]
    torch.manual_seed(0)
    model = model_of()
    torch.manual_seed(1)
    stats = None
    if budget is None:
        seen = loop(model, make)
    else:
        with outofcore.budget(budget, model, policy=policy) as run:
            load_paging().follow_stress(run._space, int(stress))
            seen = loop(model, make)
            stats = run.stats
    left = [*model.state_dict().values(), *(p.grad for p in model.parameters() if p.grad is not None)]
    values = [value for value in seen if not isinstance(value, Tensor | Optimizer)]
    return (values, [t.clone() for t in (*left, *tensors_in(seen))], torch.get_rng_state()), stats


def assert_same(ours: Trained, theirs: Trained) -> None:
    assert ours[0] == theirs[0]
    assert len(ours[1]) == len(theirs[1])
    for number, (left, right) in enumerate(zip(ours[1], theirs[1], strict=True)):
        assert torch.equal(left, right), f"tensor {number} of {len(theirs[1])} differs"
    assert torch.equal(ours[2], theirs[2])


@functools.cache
def peak_of(name: str) -> int:
    stats = trained(name, budget=ROOMY, policy=None)[1]
    assert stats is not None
    return stats.peak_bytes


@pytest.mark.parametrize("name", LOOPS)
def test_loops_run_unchanged_with_the_same_numbers(name: str) -> None:
    theirs, _ = trained(name)
    peak = peak_of(name)
    for share, stress in ((1.5, False), (0.3, False), (0.5, True)):
        budget = int(share * peak)
        ours, stats = trained(name, budget=budget, stress=stress)
        assert_same(ours, theirs)
        assert stats is not None
        assert stats.peak_bytes <= budget
        assert (stats.evictions > 0) == (share < 1)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, nesterov=True),
    "adam_foreach": lambda m: torch.optim.Adam(m.parameters(), foreach=True, amsgrad=True),
    "adamw_fused": lambda m: torch.optim.AdamW(m.parameters(), 1e-3, fused=True),
    "sgd_fused": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, fused=True),
    "adagrad_fused": lambda m: torch.optim.Adagrad(m.parameters(), fused=True),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters()),
    "adamax": lambda m: torch.optim.Adamax(m.parameters()),
    "asgd": lambda m: torch.optim.ASGD(m.parameters()),
    "muon": lambda m: torch.optim.Muon([p for p in m.parameters() if p.ndim == 2]),
    "nadam": lambda m: torch.optim.NAdam(m.parameters()),
    "radam": lambda m: torch.optim.RAdam(m.parameters()),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), momentum=0.9),
    "rprop": lambda m: torch.optim.Rprop(m.parameters()),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str) -> None:
    theirs, _ = trained("plain", OPTIMIZERS[name])
    ours, stats = trained("plain", OPTIMIZERS[name], int(0.4 * peak_of("plain")), policy=None)
    assert_same(ours, theirs)
    assert stats is not None
    assert stats.evictions > 0


def test_a_loop_is_known_from_its_second_step_on() -> None:
    _, short = trained("plain", budget=int(0.5 * peak_of("plain")))
    assert short is not None
    torch.manual_seed(0)
    model = LOOPS["plain"][1]()
    with outofcore.budget(int(0.5 * peak_of("plain")), model) as run:
        plain(model, adamw, 15)
    # All but the first step, and what begins the second.
    assert run.stats.expected_ops > 0.9 * run.stats.ops * 14 / 15
