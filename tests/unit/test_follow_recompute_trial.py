"""Whether some of a loop is made again: by what plans predict."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from outofcore.follow.recompute_trial import RecomputeTrial, TrialPhase
from outofcore.follow.remaking import ComputedStorage

HIDDEN, ACTIVE = ComputedStorage(1, 1 << 20, 0.5, (0,), True), ComputedStorage(2, 1 << 20, 0.0001, (1,), True)


class Recipes:
    def __init__(self, *made: ComputedStorage) -> None:
        self.made, self.said = made, list[object]()

    def switch_off(self) -> None:
        self.said.append("off")

    def start_noting(self) -> None:
        self.said.append("note")

    def read_notes(self) -> tuple[ComputedStorage, ...]:
        return self.made

    def choose(self, storages: Iterable[int]) -> None:
        self.said.append(tuple(storages))


def test_steps_that_no_copy_holds_up_are_left_alone() -> None:
    recipes = Recipes(HIDDEN, ACTIVE)
    trial = RecomputeTrial(recipes)
    trial.on_plan(1.02, 1.0, 1e9, None)
    trial.on_step_end()
    assert (trial.phase, recipes.said) == (TrialPhase.UNTRIED, [])


@pytest.mark.parametrize(
    ("seconds", "compute", "rerun", "said"),
    [
        (1.2, 1.1, 0.1, []),
        (1.5, 1.1, 0.1, ["off"]),
        (1.6, 1.1, 0.1, ["off"]),
        (2.4, 2.2, 0.2, []),  # a batch of twice the length
        (1.2, 0.8, 0.1, ["off"]),  # a shorter one
    ],
)
def test_the_quicker_plan_stays(seconds: float, compute: float, rerun: float, said: list[str]) -> None:
    recipes = Recipes(HIDDEN, ACTIVE)
    trial = RecomputeTrial(recipes)
    trial.on_step_end()
    trial.on_plan(1.5, 1.0, 1e9, None)
    assert (trial.phase, recipes.said) == (TrialPhase.NOTING, ["note"])
    trial.on_step_end()
    assert (trial.phase, recipes.said) == (TrialPhase.TRYING, ["note", (2,)])
    assert trial.awaits_plan
    trial.on_plan(9.0, 1.0, 1e9, None)  # of another kind of step
    trial.on_plan(seconds, compute, 1e9, rerun)
    assert not trial.awaits_plan
    assert (trial.phase, recipes.said[2:]) == (TrialPhase.DECIDED, said)
    trial.on_plan(9.0, 1.0, 1e9, None)
    assert trial.phase is TrialPhase.DECIDED


def test_nothing_cheap_ends_it() -> None:
    recipes = Recipes(HIDDEN)
    trial = RecomputeTrial(recipes)
    trial.on_plan(1.5, 1.0, 1e9, None)
    trial.on_step_end()
    assert (trial.phase, recipes.said) == (TrialPhase.DECIDED, ["note", "off"])


def test_a_step_without_a_plan_ends_it() -> None:
    recipes = Recipes(HIDDEN, ACTIVE)
    trial = RecomputeTrial(recipes)
    trial.on_plan_failure()
    assert trial.phase is TrialPhase.UNTRIED
    trial.on_plan(1.5, 1.0, 1e9, None)
    trial.on_step_end()
    trial.on_plan_failure()
    assert (trial.phase, recipes.said) == (TrialPhase.DECIDED, ["note", (2,), "off"])
