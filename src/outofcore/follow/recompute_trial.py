"""Whether a loop makes some of what autograd saves again, where copies are what its steps wait for: tried once.

A plan of the step as it is tells how long copies hold it up. If they do, one step is noted, what is cheap to make again
is chosen (``remaking.py``), and the step that comes of it is recorded and planned like any other. Recomputation stays
if its plan takes less time by prediction. The two steps may be of different lengths, so each plan's time is divided by
that of the step's own ops.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from enum import Enum
from typing import Protocol

from outofcore.follow.remaking import Made, worth_making_again

_log = logging.getLogger("outofcore")

# Steps that copies hold up by less are left as they are, and so are those that it does not make so much quicker.
WORTH_TRYING = 0.03
WORTH_KEEPING = 0.01


class Phase(Enum):
    """How far the trial is."""

    UNTRIED = "untried"  # no plan has shown yet that copies hold steps up
    NOTING = "noting"  # the step that runs is noted
    TRYING = "trying"  # it is done, until a plan tells how quick that is
    SETTLED = "settled"  # for good, one way or the other


class _Recipes(Protocol):
    def off(self) -> None: ...
    def note(self) -> None: ...
    def noted(self) -> tuple[Made, ...]: ...
    def choose(self, storages: Iterable[int]) -> None: ...


class RecomputeTrial:
    """Decides from plans of a loop's steps.

    Args:
        recipes: of the loop.

    Attributes:
        phase: how far it is.
    """

    def __init__(self, recipes: _Recipes) -> None:
        self._recipes = recipes
        self.phase = Phase.UNTRIED
        self._enough = 0
        self._rate = 1.0
        self._slowdown = 1.0  # without recomputation

    @property
    def awaits_plan(self) -> bool:
        """Whether steps run on demand until one with recomputation has a plan."""
        return self.phase is Phase.TRYING

    def plan_made(
        self, seconds: float, compute_seconds: float, bytes_per_second: float, rerun_seconds: float | None
    ) -> None:
        """A step has a plan.

        Args:
            seconds: of the step, as predicted.
            compute_seconds: of all its ops, recomputation included.
            bytes_per_second: of the home, in one direction.
            rerun_seconds: of the ops that ran again in the step that was planned; None: none did.
        """
        slowdown = seconds / max(compute_seconds - (rerun_seconds or 0.0), 1e-9)
        if self.phase is Phase.UNTRIED and rerun_seconds is None:
            held_up = seconds - compute_seconds
            if held_up <= WORTH_TRYING * compute_seconds:
                return
            self._slowdown, self._rate = slowdown, bytes_per_second
            self._enough = int(held_up * bytes_per_second)
            self._recipes.note()
            self.phase = Phase.NOTING
        elif self.phase is Phase.TRYING and rerun_seconds is not None:
            self.phase = Phase.SETTLED
            kept = slowdown < self._slowdown * (1 - WORTH_KEEPING)
            _log.info(
                "predicted slowdown with recomputation: %.3f, without: %.3f; recomputation is %s",
                slowdown,
                self._slowdown,
                "on" if kept else "off",
            )
            if not kept:
                self._recipes.off()

    def plan_failed(self) -> None:
        """A step with recomputation has no plan."""
        if self.phase is Phase.TRYING:
            self._recipes.off()
            self.phase = Phase.SETTLED

    def step_ended(self) -> None:
        """A step of the loop has ended."""
        if self.phase is not Phase.NOTING:
            return
        chosen = worth_making_again(self._recipes.noted(), self._rate, enough=self._enough)
        if chosen:
            self._recipes.choose(chosen)
            self.phase = Phase.TRYING
        else:
            self._recipes.off()
            self.phase = Phase.SETTLED
