"""When a step is planned with the times that its steps took: decided from their seconds alone.

    MEASURING ---- the plan is as good as can be, and as foretold ----------> SETTLED
        |  ^                                                                  |  ^
        |  `------------- steps are no longer what they were -----------------'  |
        `-- else --> WAITING for a plan -- it came, or there is none ------------'

Some calm steps are *measured*: those that take no longer than the quickest of them, by a few hundredths. If a quick
search has found the plan, or its prediction was off, another is then made by the whole search; but only where a step
takes longer than its ops alone. Where steps are later quicker or slower by a tenth, for a while, it all begins again: a
correction made while the machine was busy is corrected in its turn.

Nothing of this is to be in the way: the seconds for which training stands still, because a process is started that
plans or because programs are exchanged, stay below a small share of the time of the first hundred steps, or of all so
far. What would exceed that waits. Nothing here runs anything, or looks at a clock.
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
    """How far it is."""

    MEASURING = "measuring"
    WAITING = "waiting"
    SETTLED = "settled"


@dataclass(frozen=True)
class Watch:
    """What is known of the steps of one plan.

    Attributes:
        predicted: seconds of a step.
        exchange: seconds that the exchange of a program takes, about.
        is_quick: whether the plan was found by a quick search.
        phase: how far it is.
        steps: so far, by any plan.
        usual: seconds of a step; 0: not known yet.
        measured: timelines of the last steps, in the phase ``MEASURING`` and where it has just ended.
        recent: seconds of the last steps, in the phase ``SETTLED``.
        is_wanted: whether another plan is wanted, as soon as it is worth it.
        start: seconds that it takes to have a plan made elsewhere.
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
        """Of a plan that begins to run.

        Args:
            program: of the plan.
            predicted: seconds of a step.
            is_quick: whether it was found by a quick search.
        """
        return Watch(predicted, _EXCHANGE_SECONDS * len(program.instructions), is_quick)

    @property
    def allowed(self) -> float:
        """Seconds for which training may have stood still by now."""
        return SHARE * max(self.steps, FIRST_STEPS) * self.usual

    def affords(self, seconds: float) -> bool:
        """Whether training may stand still for so many more seconds."""
        return self.spent + seconds <= self.allowed

    @property
    def has_settled(self) -> bool:
        """Whether the last step that was measured has shown that the plan may stay."""
        return self.phase is Phase.SETTLED and bool(self.measured)

    @property
    def asks(self) -> bool:
        """Whether another plan is to be made now."""
        return self.phase is Phase.MEASURING and self.is_wanted and self.affords(self.start + self.exchange)

    # What happens

    def ran(self, program: Program, timeline: Timeline) -> Watch:
        """A step was run by the plan; not the first of its program, which warms up.

        Args:
            program: of the plan.
            timeline: of the step.
        """
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
        """The first step of a program was run, whose time says nothing."""
        return replace(self, steps=self.steps + 1)

    def asked(self, seconds: float) -> Watch:
        """Another plan is being made, for which training stood still for so long."""
        return replace(self, phase=Phase.WAITING, is_wanted=False, start=seconds, spent=self.spent + seconds)

    def kept(self, predicted: float | None = None) -> Watch:
        """There is no better plan; the one that runs is foretold to take so long, if that is known anew."""
        return replace(self, predicted=self.predicted if predicted is None else predicted)._settled()

    def exchanged(self, predicted: float, seconds: float) -> Watch:
        """Another plan has taken the place of this one.

        Args:
            predicted: seconds of a step by it.
            seconds: for which training stood still.
        """
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
    """The steps of one program that take no longer than the quickest, by a few hundredths."""
    least = min((one.step_seconds for one in measured), default=0.0)
    return [one for one in measured if one.step_seconds <= least * DISTURBED]


def _ops_seconds(program: Program, timeline: Timeline) -> float:
    """Seconds of the ops of a step, without those that were run again."""
    runs = zip(program.instructions, timeline.starts, timeline.ends, strict=True)
    return sum(end - start for one, start, end in runs if isinstance(one, Run) and not one.again)
