"""Decide from step times when a step is planned again with measured costs.

    phase      event                                                  next phase  ``PlanUpdater``
    ---------  -----------------------------------------------------  ----------  -----------------------------------
    MEASURING  record_step: the plan is good and runs as predicted    STEADY      stores the plan for later processes
    MEASURING  record_step: a better plan is likely and affordable    MEASURING   starts to plan (``needs_plan``)
    MEASURING  record_planning: planning has started                  WAITING
    MEASURING  keep_plan: planning is impossible, or takes too long   STEADY
    WAITING    keep_plan: no plan is better                           STEADY      may correct the prediction
    WAITING    record_exchange: a better plan has been found          STEADY      stores and runs it
    STEADY     record_step: step times have changed                   MEASURING

No other event changes the phase. A new plan starts in MEASURING; the first step of a program does not count
(``record_warmup``).

Measured are quiet steps: those within a few hundredths of the fastest. The full search runs if a quick search found the
plan or its prediction was off, and steps take longer than their ops alone. When step times later drift by a tenth,
measuring starts again, so that corrections from a busy machine are corrected in turn.

Training stands still to start a planning process and to exchange programs: for at most a small share of the first
hundred steps, or of all steps. This module has no side effects and reads no clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from outofcore.program import Program, Run, Timeline
from outofcore.refine import is_off
from outofcore.undisturbed import DISTURBED

# The number of quiet steps to measure, and the most steps to run for them.
MEASURED_STEPS = 3
_MAX_MEASURED_STEPS = 9
# Training may stand still for this share of the time of the first steps, or of all steps so far if that is more.
SHARE, FIRST_STEPS = 0.03, 100
# A step cannot become faster if its ops take at least this share of its time.
_MAX_OPS_SHARE = 0.99
# Assumed seconds to start a process, and to exchange a program (per instruction), until they are measured.
_START_SECONDS, _EXCHANGE_SECONDS = 0.01, 50e-6
# The interval of checks for drift, in steps, and the relative drift that starts measuring again.
_DRIFT_INTERVAL, _MAX_DRIFT = 12, 0.1


class WatchPhase(Enum):
    """The phase of comparing a plan with its measured steps; see the table above."""

    MEASURING = "measuring"
    WAITING = "waiting"
    STEADY = "settled"


@dataclass(frozen=True)
class PlanWatch:
    """The comparison of a plan with its measured steps, and the time spent on planning; times are in seconds."""

    predicted_seconds: float
    exchange_seconds: float  # approximate time to exchange a program
    is_quick: bool
    phase: WatchPhase = WatchPhase.MEASURING
    steps: int = 0  # by all plans so far
    step_seconds: float = 0.0  # time of a step; 0 if unknown
    measured: tuple[Timeline, ...] = ()  # the last steps in the phase ``MEASURING``, until one step after it
    recent: tuple[float, ...] = ()  # times of the last steps in the phase ``STEADY``
    is_plan_wanted: bool = False  # a better plan is likely; it is made once it is affordable
    start_seconds: float = _START_SECONDS
    spent_seconds: float = 0.0  # time for which training stood still

    @staticmethod
    def of(program: Program, predicted: float, *, is_quick: bool) -> PlanWatch:
        """Return the record of a plan that starts to run."""
        return PlanWatch(predicted, _EXCHANGE_SECONDS * len(program.instructions), is_quick)

    @property
    def allowed_seconds(self) -> float:
        """Seconds for which training may have stood still so far."""
        return SHARE * max(self.steps, FIRST_STEPS) * self.step_seconds

    def can_afford(self, seconds: float) -> bool:
        """Return whether planning may stop training for ``seconds`` more."""
        return self.spent_seconds + seconds <= self.allowed_seconds

    @property
    def is_plan_confirmed(self) -> bool:
        """Whether the last measured step has confirmed the plan."""
        return self.phase is WatchPhase.STEADY and bool(self.measured)

    @property
    def needs_plan(self) -> bool:
        """Whether another plan should be made now."""
        return (
            self.phase is WatchPhase.MEASURING
            and self.is_plan_wanted
            and self.can_afford(self.start_seconds + self.exchange_seconds)
        )

    # Events

    def record_step(self, program: Program, timeline: Timeline) -> PlanWatch:
        """Add a measured step, and decide whether a better plan is wanted."""
        seconds = timeline.step_seconds
        now = replace(self, steps=self.steps + 1)
        if self.phase is WatchPhase.STEADY:
            return replace(now, measured=())._check_drift(seconds)
        if self.phase is WatchPhase.WAITING or self.is_plan_wanted:
            return now
        now = replace(now, measured=(*now.measured, timeline))
        quiet = select_quiet_steps(now.measured)
        if len(quiet) < MEASURED_STEPS and len(now.measured) < _MAX_MEASURED_STEPS:
            return now
        now = replace(now, step_seconds=statistics.median(step.step_seconds for step in quiet))
        ops = min(_ops_seconds(program, step) for step in quiet)
        if ops < _MAX_OPS_SHARE * now.step_seconds and (now.is_quick or is_off(now.predicted_seconds, quiet)):
            return replace(now, is_plan_wanted=True)
        return replace(now._enter_steady(), measured=now.measured)

    def record_warmup(self) -> PlanWatch:
        """Record the first step of a program, without its time."""
        return replace(self, steps=self.steps + 1)

    def record_planning(self, seconds: float) -> PlanWatch:
        """Record the start of planning, which paused training for ``seconds``."""
        return replace(
            self,
            phase=WatchPhase.WAITING,
            is_plan_wanted=False,
            start_seconds=seconds,
            spent_seconds=self.spent_seconds + seconds,
        )

    def keep_plan(self, predicted: float | None = None) -> PlanWatch:
        """Record that the plan stays, with a corrected prediction of the step time if there is one."""
        return replace(
            self, predicted_seconds=self.predicted_seconds if predicted is None else predicted
        )._enter_steady()

    def record_exchange(self, predicted: float, seconds: float) -> PlanWatch:
        """Record that a new plan was adopted: its predicted step time, and the seconds that the exchange took."""
        now = replace(
            self,
            predicted_seconds=predicted,
            exchange_seconds=seconds,
            spent_seconds=self.spent_seconds + seconds,
            step_seconds=0.0,
        )
        return now._enter_steady()

    def _enter_steady(self) -> PlanWatch:
        return replace(self, phase=WatchPhase.STEADY, is_quick=False, is_plan_wanted=False, measured=(), recent=())

    def _check_drift(self, seconds: float) -> PlanWatch:
        """Add a step time; start to measure again if the last twelve step times have drifted."""
        recent = (*self.recent, seconds)
        if len(recent) < _DRIFT_INTERVAL:
            return replace(self, recent=recent)
        quick = sorted(recent)[_DRIFT_INTERVAL // 4]
        now = replace(self, recent=())
        if not self.step_seconds:
            return replace(now, step_seconds=quick)
        if abs(quick - self.step_seconds) <= _MAX_DRIFT * self.step_seconds or not self.can_afford(
            self.start_seconds + self.exchange_seconds
        ):
            return now
        return replace(now, phase=WatchPhase.MEASURING)


def select_quiet_steps(measured: Sequence[Timeline]) -> list[Timeline]:
    """Return the quiet steps of one program: those within a few hundredths of the fastest."""
    min_seconds = min((step.step_seconds for step in measured), default=0.0)
    return [step for step in measured if step.step_seconds <= min_seconds * DISTURBED]


def _ops_seconds(program: Program, timeline: Timeline) -> float:
    """Return the seconds of a step's ops, without recomputed ones."""
    runs = zip(program.instructions, timeline.starts, timeline.ends, strict=True)
    return sum(end - start for op, start, end in runs if isinstance(op, Run) and not op.again)
