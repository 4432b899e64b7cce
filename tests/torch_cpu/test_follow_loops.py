"""Tests of unchanged loops within budgets: the same bits as eager training."""

from __future__ import annotations

import functools

import pytest
import torch
from effort import is_exhaustive, some_of
from following import TrainingResult, peak_of, train_loop
from loops import LOOPS, Language, MakeOptimizer, plain

pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def train_plain(name: str) -> TrainingResult:
    return train_loop(*LOOPS[name])[0]


def peak(name: str, share: float = 1.0) -> int:
    return peak_of(*LOOPS[name], share)


# Loops with ops that other loops cover.
LIKE_OTHERS = {"plain", "rich", "custom_function", "checkpointed_reentrant"}


# Loops that also run with a budget above their peak.
ROOMY = {"branches", "pictures", "adversaries"}


@pytest.mark.parametrize("name", some_of(LOOPS, lambda name: name not in LIKE_OTHERS))
def test_loop_is_exact_within_a_budget(name: str) -> None:
    roomy = is_exhaustive() or name in ROOMY
    for share, stress in (*([(1.5, False)] if roomy else []), (0.3, False), (0.5, True)):
        budget = peak(name, share)
        ours, stats = train_loop(*LOOPS[name], budget=budget, stress=stress)
        assert ours.differs_from(train_plain(name)) == "", (share, stress)
        assert stats is not None
        assert stats.peak_bytes <= budget
        assert (stats.evictions > 0) == (share < 1)


OPTIMIZERS: dict[str, MakeOptimizer] = {
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


@pytest.mark.parametrize("name", some_of(OPTIMIZERS, ["sgd", "adamw_fused", "adafactor", "muon"]))
def test_optimizer_is_exact_within_a_budget(name: str) -> None:
    theirs, _ = train_loop(*LOOPS["plain"], OPTIMIZERS[name])
    ours, stats = train_loop(*LOOPS["plain"], OPTIMIZERS[name], peak("plain", 0.4), policy=None)
    assert ours.differs_from(theirs) == ""
    assert stats is not None
    assert stats.evictions > 0


def test_second_and_later_steps_are_predicted() -> None:
    _, stats = train_loop(functools.partial(plain, steps=15), Language, budget=peak("plain", 0.5))
    assert stats is not None
    # All ops except the first step and the beginning of the second.
    assert stats.expected_ops > 0.9 * stats.ops * 14 / 15
