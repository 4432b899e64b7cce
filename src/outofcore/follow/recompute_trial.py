"""Try once whether recomputing some saved tensors makes a loop's steps faster.

If copies delay planned steps, cheap storages are recomputed (``remaking.py``), and stay so if that plan is faster.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from enum import Enum
from typing import Protocol

from outofcore.follow.remaking import ComputedStorage, choose_recomputed

_log = logging.getLogger("outofcore")

# As shares of the step time: the delay by copies that starts a trial, and the speedup that keeps recomputation on.
MIN_DELAY = 0.03
MIN_SPEEDUP = 0.01


class TrialPhase(Enum):
    UNTRIED = "untried"  # no plan so far has shown that copies delay steps
    NOTING = "noting"  # the current step is recorded
    TRYING = "trying"  # tensors are recomputed, until a plan predicts the time of that
    DECIDED = "settled"  # recomputation stays on or off


class _Recipes(Protocol):
    def switch_off(self) -> None: ...
    def start_noting(self) -> None: ...
    def read_notes(self) -> tuple[ComputedStorage, ...]: ...
    def choose(self, storages: Iterable[int]) -> None: ...


class RecomputeTrial:
    """Tries out whether recomputation makes the planned steps of a loop faster."""

    def __init__(self, recipes: _Recipes) -> None:
        self._recipes = recipes
        self.phase = TrialPhase.UNTRIED
        self._target_bytes = 0
        self._bytes_per_second = 1.0
        self._slowdown = 1.0  # without recomputation

    @property
    def awaits_plan(self) -> bool:
        """Whether steps run on demand until a step with recomputation has a plan."""
        return self.phase is TrialPhase.TRYING

    def on_plan(
        self,
        seconds: float,  # predicted for the step
        compute_seconds: float,  # of all its ops
        bytes_per_second: float,  # of the home, in one direction
        rerun_seconds: float | None,  # of recomputed ops; None if the step recomputes no storage
    ) -> None:
        """Start or decide the trial, given the predicted times of a new plan."""
        slowdown = seconds / max(compute_seconds - (rerun_seconds or 0.0), 1e-9)
        if self.phase is TrialPhase.UNTRIED and rerun_seconds is None:
            delay = seconds - compute_seconds
            if delay <= MIN_DELAY * compute_seconds:
                return
            self._slowdown, self._bytes_per_second = slowdown, bytes_per_second
            self._target_bytes = int(delay * bytes_per_second)
            self._recipes.start_noting()
            self.phase = TrialPhase.NOTING
        elif self.phase is TrialPhase.TRYING and rerun_seconds is not None:
            self.phase = TrialPhase.DECIDED
            is_faster = slowdown < self._slowdown * (1 - MIN_SPEEDUP)
            _log.info(
                "predicted slowdown with recomputation: %.3f, without: %.3f; recomputation is %s",
                slowdown,
                self._slowdown,
                "on" if is_faster else "off",
            )
            if not is_faster:
                self._recipes.switch_off()

    def on_plan_failure(self) -> None:
        """End the trial without recomputation, because a step with it got no plan."""
        if self.phase is TrialPhase.TRYING:
            self._recipes.switch_off()
            self.phase = TrialPhase.DECIDED

    def on_step_end(self) -> None:
        """Choose storages to recompute if the trial recorded this step; end the trial if no storage qualifies."""
        if self.phase is not TrialPhase.NOTING:
            return
        chosen = choose_recomputed(self._recipes.read_notes(), self._bytes_per_second, target_bytes=self._target_bytes)
        if chosen:
            self._recipes.choose(chosen)
            self.phase = TrialPhase.TRYING
        else:
            self._recipes.switch_off()
            self.phase = TrialPhase.DECIDED
