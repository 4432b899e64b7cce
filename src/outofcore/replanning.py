"""Decide when a step is planned again with measured times, from the seconds of its steps alone.

    phase      event                                          next phase  ``plan_updates.PlanKeeper``
    ---------  ---------------------------------------------  ----------  ------------------------------------
    MEASURING  ran: the plan is good, and as predicted        SETTLED     stores the plan for later processes
    MEASURING  ran: another is wanted, affordable (``asks``)  MEASURING   starts to plan
    MEASURING  asked: planning has started                    WAITING
    MEASURING  kept: planning is impossible, or too long      SETTLED
    WAITING    kept: no plan is better                        SETTLED     may correct the prediction
    WAITING    exchanged: a better plan has come              SETTLED     stores it, and goes on with it
    SETTLED    ran: steps are no longer what they were        MEASURING

No other event changes the phase. A plan that begins to run is in MEASURING; the first step of a program does not count
(``warmed``).

Some quiet steps are *measured*: those within a few hundredths of the quickest. If a quick search has found the plan, or
its prediction was off, the full search then makes another; but only where a step takes longer than its ops alone. If
steps later differ by a tenth, for a while, it all begins again, so that corrections made while the machine was busy are
corrected in turn.

The seconds for which training stands still, to start a planning process or to exchange programs, stay below a small
share of the first hundred steps, or of all so far; what would exceed that waits. Nothing here runs anything, or looks
at a clock: ``plan_updates`` asks after each step, and ``background`` makes the plan.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from outofcore.program import Program, Run, Timeline
from outofcore.refine import is_off
from outofcore.undisturbed import DISTURBED

# Calm steps that are measured, and how many there may be to find them.
MEASURED_STEPS = 3
_LONGEST = 9
# The share of the time of so many first steps, or of all so far, for which training may stand still.
SHARE, FIRST_STEPS = 0.03, 100
# A step that takes no longer than its ops, divided by this, cannot be quicker.
_COULD_BE_QUICKER = 0.99
# What starting a process takes, and exchanging a program for each of its instructions, before it is known.
_START_SECONDS, _EXCHANGE_SECONDS = 0.01, 50e-6
# Steps after which a settled step is looked at, and how far from what it was it has to be.
_LOOK, _OTHERWISE = 12, 0.1


class Phase(Enum):
    MEASURING = "measuring"
    WAITING = "waiting"
    SETTLED = "settled"


@dataclass(frozen=True)
class Watch:
    """What is known of the steps of one plan.

    Attributes:
        predicted: seconds of a step.
        exchange: approximate seconds to exchange a program.
        is_quick: whether the plan was found by a quick search.
        steps: so far, by any plan.
        usual: seconds of a step; 0 if not yet known.
        measured: timelines of the last steps, in the phase ``MEASURING`` and where it has just ended.
        recent: seconds of the last steps, in the phase ``SETTLED``.
        is_wanted: whether another plan is wanted, as soon as it is worth it.
        start: seconds to start planning elsewhere.
        spent: seconds for which training stood still.
    """

    predicted: float
    exchange: float
    is_quick: bool
    phase: Phase = Phase.MEASURING
    steps: int = 0
    usual: float = 0.0
    measured: tuple[Timeline, ...] = ()
    recent: tuple[float, ...] = ()
    is_wanted: bool = False
    start: float = _START_SECONDS
    spent: float = 0.0

    @staticmethod
    def of(program: Program, predicted: float, *, is_quick: bool) -> Watch:
        """Start to watch a plan that begins to run."""
        return Watch(predicted, _EXCHANGE_SECONDS * len(program.instructions), is_quick)

    @property
    def allowed(self) -> float:
        """Seconds for which training may have stood still by now."""
        return SHARE * max(self.steps, FIRST_STEPS) * self.usual

    def affords(self, seconds: float) -> bool:
        """Return whether training may stand still for so many more seconds."""
        return self.spent + seconds <= self.allowed

    @property
    def has_settled(self) -> bool:
        """Whether the last measured step has shown that the plan may stay."""
        return self.phase is Phase.SETTLED and bool(self.measured)

    @property
    def asks(self) -> bool:
        """Whether another plan should be made now."""
        return self.phase is Phase.MEASURING and self.is_wanted and self.affords(self.start + self.exchange)

    # What happens

    def ran(self, program: Program, timeline: Timeline) -> Watch:
        """Record a step of the plan; not the first of its program, which warms up."""
        seconds = timeline.step_seconds
        now = replace(self, steps=self.steps + 1)
        if self.phase is Phase.SETTLED:
            return replace(now, measured=())._looked(seconds)
        if self.phase is Phase.WAITING or self.is_wanted:
            return now
        now = replace(now, measured=(*now.measured, timeline))
        calm = calm_of(now.measured)
        if len(calm) < MEASURED_STEPS and len(now.measured) < _LONGEST:
            return now
        now = replace(now, usual=statistics.median(one.step_seconds for one in calm))
        ops = min(_ops_seconds(program, one) for one in calm)
        if ops < _COULD_BE_QUICKER * now.usual and (now.is_quick or is_off(now.predicted, calm)):
            return replace(now, is_wanted=True)
        return replace(now._settled(), measured=now.measured)

    def warmed(self) -> Watch:
        """Record the first step of a program, whose time means nothing."""
        return replace(self, steps=self.steps + 1)

    def asked(self, seconds: float) -> Watch:
        """Record that another plan is being made, for which training stood still for ``seconds``."""
        return replace(self, phase=Phase.WAITING, is_wanted=False, start=seconds, spent=self.spent + seconds)

    def kept(self, predicted: float | None = None) -> Watch:
        """Record that there is no better plan; ``predicted`` is a new prediction of the running one."""
        return replace(self, predicted=self.predicted if predicted is None else predicted)._settled()

    def exchanged(self, predicted: float, seconds: float) -> Watch:
        """Record that another plan has replaced this one, for which training stood still for ``seconds``."""
        now = replace(self, predicted=predicted, exchange=seconds, spent=self.spent + seconds, usual=0.0)
        return now._settled()

    def _settled(self) -> Watch:
        return replace(self, phase=Phase.SETTLED, is_quick=False, is_wanted=False, measured=(), recent=())

    def _looked(self, seconds: float) -> Watch:
        recent = (*self.recent, seconds)
        if len(recent) < _LOOK:
            return replace(self, recent=recent)
        quick = sorted(recent)[_LOOK // 4]
        now = replace(self, recent=())
        if not self.usual:
            return replace(now, usual=quick)
        if abs(quick - self.usual) <= _OTHERWISE * self.usual or not self.affords(self.start + self.exchange):
            return now
        return replace(now, phase=Phase.MEASURING)


def calm_of(measured: Sequence[Timeline]) -> list[Timeline]:
    """Return the steps of one program within a few hundredths of the quickest."""
    least = min((one.step_seconds for one in measured), default=0.0)
    return [one for one in measured if one.step_seconds <= least * DISTURBED]


def _ops_seconds(program: Program, timeline: Timeline) -> float:
    """Return the seconds of a step's ops, without recomputed ones."""
    runs = zip(program.instructions, timeline.starts, timeline.ends, strict=True)
    return sum(end - start for one, start, end in runs if isinstance(one, Run) and not one.again)
