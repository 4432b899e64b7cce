"""Try once whether recomputing some saved tensors makes a loop's steps faster.

If copies delay a planned step, the trial records how the storages of one step were computed, and chooses cheap ones
(``remaking.py``). Recomputation stays on if the plan of a step with it is predicted to be faster. Steps may differ in
length, so predictions are relative to the time of the step's own ops.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from enum import Enum
from typing import Protocol

from outofcore.follow.remaking import Made, worth_making_again

_log = logging.getLogger("outofcore")

# As shares of the step time: the delay by copies that starts a trial, and the speedup that keeps recomputation on.
WORTH_TRYING = 0.03
WORTH_KEEPING = 0.01


class Phase(Enum):
    UNTRIED = "untried"  # no plan so far has shown that copies delay steps
    NOTING = "noting"  # the current step is recorded
    TRYING = "trying"  # tensors are recomputed, until a plan predicts the time of that
    SETTLED = "settled"  # recomputation stays on or off


class _Recipes(Protocol):
    def off(self) -> None: ...
    def note(self) -> None: ...
    def noted(self) -> tuple[Made, ...]: ...
    def choose(self, storages: Iterable[int]) -> None: ...


class RecomputeTrial:
    """A trial of recomputation, driven by the plans of a loop's steps."""

    def __init__(self, recipes: _Recipes) -> None:
        self._recipes = recipes
        self.phase = Phase.UNTRIED
        self._enough = 0
        self._rate = 1.0
        self._slowdown = 1.0  # without recomputation

    @property
    def awaits_plan(self) -> bool:
        """Whether steps run on demand until a step with recomputation has a plan."""
        return self.phase is Phase.TRYING

    def plan_made(
        self,
        seconds: float,  # predicted for the step
        compute_seconds: float,  # of all its ops
        bytes_per_second: float,  # of the home, in one direction
        rerun_seconds: float | None,  # of recomputed ops; None if the step recomputes no storage
    ) -> None:
        """Advance the trial with a new plan of a step."""
        slowdown = seconds / max(compute_seconds - (rerun_seconds or 0.0), 1e-9)
        if self.phase is Phase.UNTRIED and rerun_seconds is None:
            delay = seconds - compute_seconds
            if delay <= WORTH_TRYING * compute_seconds:
                return
            self._slowdown, self._rate = slowdown, bytes_per_second
            self._enough = int(delay * bytes_per_second)
            self._recipes.note()
            self.phase = Phase.NOTING
        elif self.phase is Phase.TRYING and rerun_seconds is not None:
            self.phase = Phase.SETTLED
            is_faster = slowdown < self._slowdown * (1 - WORTH_KEEPING)
            _log.info(
                "predicted slowdown with recomputation: %.3f, without: %.3f; recomputation is %s",
                slowdown,
                self._slowdown,
                "on" if is_faster else "off",
            )
            if not is_faster:
                self._recipes.off()

    def plan_failed(self) -> None:
        """End the trial if a step with recomputation got no plan."""
        if self.phase is Phase.TRYING:
            self._recipes.off()
            self.phase = Phase.SETTLED

    def step_ended(self) -> None:
        """Choose the storages to recompute, if a step was just recorded for that."""
        if self.phase is not Phase.NOTING:
            return
        chosen = worth_making_again(self._recipes.noted(), self._rate, enough=self._enough)
        if chosen:
            self._recipes.choose(chosen)
            self.phase = Phase.TRYING
        else:
            self._recipes.off()
            self.phase = Phase.SETTLED
