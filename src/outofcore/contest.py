"""Plans of one step, compared by running them: in turn, a few steps each, decided by medians of pairs.

A *turn* is some steps of one plan in a row; a *round* is a turn of each plan that is still in. What slows the machine
down for a while slows the turns of a round alike, so plans are compared within rounds: the verdict is the median, over
rounds, of a plan's seconds over those of the first, and the first stays unless another is clearly quicker. A
round whose machine was twice as slow throughout so says the same. Within a turn, steps that were disturbed do not
count, and the turn goes on for some more steps instead; a turn that never saw a calm step is not compared with others
as long as there are rounds that can be.

All of this is arithmetic on samples; nothing here runs anything.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from outofcore.profiling.undisturbed import Pace, alike, undisturbed

# Calm steps of a turn, and how many steps it may take to find them.
_COUNTED, _LONGEST = 3, 7
# Rounds that have to be comparable, and how many there may be to find them.
_ROUNDS, _MOST_ROUNDS = 2, 4
# A plan that is slower than the first by so much after a round is out; and a turn ends early that is so much slower.
_OUT, _HOPELESS = 1.05, 1.25
# A plan takes the place of the first where it is quicker by so much.
_CLEARLY = 0.01


@dataclass(frozen=True, slots=True)
class Sample:
    """A step that ran.

    Attributes:
        seconds: of the step.
        pace: how calm the machine was.
    """

    seconds: float
    pace: Pace


@dataclass(frozen=True, slots=True)
class Turn:
    """Steps of one plan in a row.

    Attributes:
        plan: its number.
        samples: in order.
    """

    plan: int
    samples: tuple[Sample, ...] = ()

    @property
    def calm(self) -> tuple[Sample, ...]:
        """Its undisturbed steps, as far as steps of one turn tell."""
        flags = undisturbed([sample.pace for sample in self.samples])
        return tuple(sample for sample, is_calm in zip(self.samples, flags, strict=True) if is_calm)

    @property
    def seconds(self) -> float:
        """The median of its undisturbed steps."""
        return statistics.median(sample.seconds for sample in self.calm)

    @property
    def is_over(self) -> bool:
        """Whether it has as many calm steps as count, or has looked for them long enough."""
        return len(self.calm) >= _COUNTED or len(self.samples) >= _LONGEST


@dataclass(frozen=True)
class Contest:
    """What has been run so far.

    Attributes:
        plans: how many there are; the first is the one to beat.
        turns: in order; the last may be under way.
    """

    plans: int
    turns: tuple[Turn, ...] = ()

    def after(self, plan: int, sample: Sample) -> Contest:
        """With one more step.

        Args:
            plan: that ran.
            sample: of its step.
        """
        last = self.turns[-1] if self.turns else None
        if last is None or last.plan != plan or self._is_over(last):
            return replace(self, turns=(*self.turns, Turn(plan, (sample,))))
        grown = replace(last, samples=(*last.samples, sample))
        return replace(self, turns=(*self.turns[:-1], grown))

    def next(self) -> int | None:
        """The number of the plan that is to run the next step; None: it is decided."""
        if self.turns and not self._is_over(self.turns[-1]):
            return self.turns[-1].plan
        made = [len(self.turns_of(plan)) for plan in range(self.plans)]
        left = [plan for plan in range(self.plans) if plan == 0 or self._is_in(plan)]
        if left == [0]:
            return None
        round_now = min(made[plan] for plan in left)
        if round_now >= _ROUNDS and (
            round_now >= _MOST_ROUNDS or all(len(self._pairs(plan)) >= _ROUNDS for plan in left[1:])
        ):
            return None
        waiting = [plan for plan in left if made[plan] == round_now]
        # The order turns from round to round, so that the plan that ends one begins the next and nothing is exchanged.
        return waiting[0] if round_now % 2 == 0 else waiting[-1]

    def winner(self) -> int:
        """The number of the plan that stays, by what has been run so far.

        A plan takes the place of the first only if it was clearly slower in none of the rounds that count, and if its
        steps stand out from those of the first in half of them; and one that was never run while the machine was as
        calm as for the first only after all rounds.
        """
        told = [p for p in range(1, self.plans) if self._pairs(p) or len(list(self._rounds(p))) >= _MOST_ROUNDS]
        most = 1 + _CLEARLY
        told = [p for p in told if all(mine.seconds <= most * first.seconds for mine, first in self._counted(p))]
        told = [p for p in told if statistics.mean(_stands_out(*pair) for pair in self._counted(p)) >= 0.5]
        ran = {plan: quotient for plan in told if (quotient := self.quotient(plan)) is not None}
        best = min(ran, key=lambda plan: (ran[plan], plan), default=0)
        return best if best and ran[best] < 1 - _CLEARLY else 0

    def quotient(self, plan: int) -> float | None:
        """A plan's seconds over those of the first: the median over rounds; None: it did not run."""
        if plan == 0:
            return 1.0
        pairs = self._counted(plan)
        return statistics.median(mine.seconds / first.seconds for mine, first in pairs) if pairs else None

    def seconds(self, plan: int) -> float | None:
        """The median of a plan's calm steps; None: it did not run."""
        found = [sample.seconds for turn in self.turns_of(plan) for sample in turn.calm]
        return statistics.median(found) if found else None

    def turns_of(self, plan: int) -> list[Turn]:
        """Of one plan, by round."""
        return [turn for turn in self.turns if turn.plan == plan]

    def _rounds(self, plan: int) -> zip[tuple[Turn, Turn]]:
        return zip(self.turns_of(plan), self.turns_of(0), strict=False)

    def _counted(self, plan: int) -> list[tuple[Turn, Turn]]:
        """The rounds that count: those that can be compared, or all if there are none."""
        return self._pairs(plan) or list(self._rounds(plan))

    def _pairs(self, plan: int) -> list[tuple[Turn, Turn]]:
        """By round a plan's turn and that of the first, of rounds in which the machine was as calm for either."""
        return [
            (mine, first)
            for mine, first in self._rounds(plan)
            if alike([sample.pace for sample in mine.calm], [sample.pace for sample in first.calm])
        ]

    def _is_over(self, turn: Turn) -> bool:
        """Whether the last turn is."""
        if turn.is_over:
            return True
        firsts = self.turns_of(0)
        at = len(self.turns_of(turn.plan)) - 1
        if turn.plan == 0 or at >= len(firsts) or not turn.samples:
            return False
        first = firsts[at]
        calm = alike([sample.pace for sample in turn.calm], [sample.pace for sample in first.calm])
        return calm and turn.seconds > first.seconds * _HOPELESS

    def _is_in(self, plan: int) -> bool:
        pairs = self._pairs(plan)
        return not pairs or statistics.median(mine.seconds / first.seconds for mine, first in pairs) <= _OUT


def _stands_out(mine: Turn, first: Turn) -> bool:
    """Whether the median of a turn is below the quickest step of the first plan's.

    Of two equal plans one often seems quicker by a few hundredths, but with three steps each its median is below all
    steps of the other in only a fifth of the rounds.
    """
    own = [sample.seconds for sample in mine.calm or mine.samples]
    others = [sample.seconds for sample in first.calm or first.samples]
    return statistics.median(own) < min(others)
