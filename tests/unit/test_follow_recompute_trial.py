"""Tests of the recomputation trial of an eager loop, driven by predicted plans."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from outofcore.follow.recompute_trial import RecomputeTrial, TrialPhase
from outofcore.follow.remaking import ComputedStorage

HIDDEN, ACTIVE = ComputedStorage(1, 1 << 20, 0.5, (0,), True), ComputedStorage(2, 1 << 20, 0.0001, (1,), True)


class Recipes:
    def __init__(self, *tensors: ComputedStorage) -> None:
        self.made, self.calls = tensors, list[object]()

    def switch_off(self) -> None:
        self.calls.append("off")

    def start_noting(self) -> None:
        self.calls.append("note")

    def read_notes(self) -> tuple[ComputedStorage, ...]:
        return self.made

    def choose(self, storages: Iterable[int]) -> None:
        self.calls.append(tuple(storages))


def test_loop_without_copy_stalls_stays_untried() -> None:
    recipes = Recipes(HIDDEN, ACTIVE)
    trial = RecomputeTrial(recipes)
    trial.on_plan(1.02, 1.0, 1e9, None)
    trial.on_step_end()
    assert (trial.phase, recipes.calls) == (TrialPhase.UNTRIED, [])


@pytest.mark.parametrize(
    ("seconds", "compute", "rerun", "calls"),
    [
        (1.2, 1.1, 0.1, []),
        (1.5, 1.1, 0.1, ["off"]),
        (1.6, 1.1, 0.1, ["off"]),
        (2.4, 2.2, 0.2, []),  # a batch of twice the length
        (1.2, 0.8, 0.1, ["off"]),  # a shorter batch
    ],
)
def test_trial_keeps_the_quicker_plan(seconds: float, compute: float, rerun: float, calls: list[str]) -> None:
    recipes = Recipes(HIDDEN, ACTIVE)
    trial = RecomputeTrial(recipes)
    trial.on_step_end()
    trial.on_plan(1.5, 1.0, 1e9, None)
    assert (trial.phase, recipes.calls) == (TrialPhase.NOTING, ["note"])
    trial.on_step_end()
    assert (trial.phase, recipes.calls) == (TrialPhase.TRYING, ["note", (2,)])
    assert trial.awaits_plan
    trial.on_plan(9.0, 1.0, 1e9, None)  # of another input signature
    trial.on_plan(seconds, compute, 1e9, rerun)
    assert not trial.awaits_plan
    assert (trial.phase, recipes.calls[2:]) == (TrialPhase.DECIDED, calls)
    trial.on_plan(9.0, 1.0, 1e9, None)
    assert trial.phase is TrialPhase.DECIDED


def test_trial_ends_when_no_op_is_cheap() -> None:
    recipes = Recipes(HIDDEN)
    trial = RecomputeTrial(recipes)
    trial.on_plan(1.5, 1.0, 1e9, None)
    trial.on_step_end()
    assert (trial.phase, recipes.calls) == (TrialPhase.DECIDED, ["note", "off"])


def test_trial_ends_when_a_step_has_no_plan() -> None:
    recipes = Recipes(HIDDEN, ACTIVE)
    trial = RecomputeTrial(recipes)
    trial.on_plan_failure()
    assert trial.phase is TrialPhase.UNTRIED
    trial.on_plan(1.5, 1.0, 1e9, None)
    trial.on_step_end()
    trial.on_plan_failure()
    assert (trial.phase, recipes.calls) == (TrialPhase.DECIDED, ["note", (2,), "off"])
