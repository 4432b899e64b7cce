"""Which plan a step runs, as its steps tell: costs are corrected, and plans of several kinds are run in turn.

    measuring ---- as foretold ----> comparing ----> settled
        |                                ^              |
        `-- off --> planned again -------'              |
        ^                                               |
        `------- steps are no longer what they were ----'

*Measuring*: some calm steps say what ops and copies cost. Where the plan's prediction was off, and steps take longer
than their ops alone would, the step is planned again with that. *Comparing*: the plan, the one before it and those of
other kinds that could be quicker are run in turn (``contest``), and the quickest stays. Plans of other kinds are made
only now, and only where a step takes longer than its ops alone would. *Settled*: where steps are later quicker or
slower than they were, by a tenth and for a while, it all begins again, so that a correction made while the machine was
busy is corrected in its turn. What this takes beyond training is no more than a small share of the time: of the first
hundred steps, or of all so far. (What is planned for the first time is not counted: the step with measured costs, and
plans of other kinds.)

Which plan stays depends on times, and so is not the same on every day; which plans there are follows from graph,
costs and budget alone. Nothing here runs anything: whoever does tells how long it took.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum

from outofcore.contest import Contest, Sample, Turn
from outofcore.costs import Costs
from outofcore.graph import StepGraph
from outofcore.planning import Alternative, Planned, resimulated
from outofcore.profiling.refine import is_off, refined
from outofcore.profiling.undisturbed import Pace, pace, step_times, undisturbed
from outofcore.program import CopyIn, CopyOut, Program, Timeline
from outofcore.simulator import recompute_seconds
from outofcore.units import format_seconds

_log = logging.getLogger("outofcore")

# Calm steps that are measured, and how many there may be to find them.
MEASURED_STEPS = 3
_LONGEST = 9
# The share of the time of so many first steps, or of all so far, that trials may cost.
_SHARE, _FIRST_STEPS = 0.03, 100
# Plans that are foretold to take so many times as long as the one that runs are not run.
_WORTH_RUNNING = 1.15
# A plan whose ops alone take no less than this share of a step that runs cannot be quicker.
_COULD_BE_QUICKER = 0.99
# What exchanging a program takes for each of its instructions, before it is known.
_EXCHANGE_SECONDS = 50e-6
# Said of a plan that another was made in place of.
_BEFORE = ", as it was before"
# Steps after which a settled step is looked at, and how far from what it was it has to be.
_LOOK, _OTHERWISE = 12, 0.1


class Phase(Enum):
    """How far the trial is."""

    MEASURING = "measuring"
    PLANNING = "planning"
    COMPARING = "comparing"
    SETTLED = "settled"


@dataclass(frozen=True)
class PlanAgain:
    """The step is to be planned with other costs.

    Attributes:
        costs: as measured.
        seconds: of a step.
    """

    costs: Costs
    seconds: float


@dataclass(frozen=True)
class PlanOthers:
    """Plans of other kinds are to be made, to be compared with the one that runs.

    Attributes:
        costs: as measured.
    """

    costs: Costs


@dataclass(frozen=True)
class Exchange:
    """Another plan is to run from the next step on.

    Attributes:
        plan: its number in ``PlanTrial.plans``.
    """

    plan: int


@dataclass(frozen=True, slots=True)
class Tried:
    """A plan that was run in a comparison.

    Attributes:
        how: it was made, in words.
        predicted_seconds: of a step, as simulated with measured costs.
        seconds: of a step: the median of calm ones; 0: there was none.
        steps: that were run.
        quotient: its seconds over those of the first plan: the median over rounds; 0: it did not run.
        stays: whether it was chosen.
    """

    how: str
    predicted_seconds: float
    seconds: float
    steps: int
    quotient: float
    stays: bool

    def __str__(self) -> str:
        """In a line."""
        ran = "not run" if not self.seconds else f"{format_seconds(self.seconds)} (median of {self.steps} steps)"
        return f"{self.how}: {ran}, {format_seconds(self.predicted_seconds)} predicted{', stays' if self.stays else ''}"


class PlanTrial:
    """Decides from the steps of one graph which of its plans runs.

    Args:
        graph: the step.
        costs: that it was planned with.
        planned: the plan that runs.
        ported: storages whose copies go to the caller's memory and not to a home.
        most: how many others are run beside the one that runs; 0: none, and costs are corrected once.

    Attributes:
        costs: as believed now.
        plans: that there are, with timelines by these costs.
        current: the number of the one that runs.
        phase: how far the trial is.
        tried: what the last comparison was between; empty: there was none.
        why: the one that stays does, in words.
    """

    def __init__(self, graph: StepGraph, costs: Costs, planned: Planned, ported: Set[int], *, most: int) -> None:
        self._graph, self._ported, self._most = graph, frozenset(ported), most
        self._families = [op.family for op in graph.ops]
        self.costs = costs
        self.plans = [_best(planned)]
        self.current = 0
        self.phase = Phase.MEASURING
        self.tried: tuple[Tried, ...] = ()
        self.why = ""
        self._measured: list[Timeline] = []
        self._paces: list[Pace] = []  # of these
        self._contest: Contest | None = None
        self._order: list[int] = []  # the plans of the contest
        self._measured_plan = 0  # the number of the plan that was measured
        self._steps = 0
        self._usual = 0.0  # seconds of a step
        self._least = 0.0  # seconds of its ops alone, which no plan can do without
        self._spent = 0.0  # seconds that no training was worth
        self._exchanging: float | None = None  # seconds
        self._planning = 0.0  # seconds, the last time
        self._replanned = 0
        self._has_others = False  # whether plans of other kinds were made since the step was planned
        self._seconds_of_others: float | None = None  # that this took, the last time
        self._is_uncounted = False  # whether the next exchange belongs to the first planning again
        self._recent: deque[float] = deque(maxlen=_LOOK)
        self._is_due = False  # a comparison waits until it costs no more than it may

    @property
    def planned(self) -> Planned:
        """The plan that runs."""
        return self.plans[self.current].planned

    @property
    def arena_bytes(self) -> int:
        """What the largest of the plans needs."""
        return max(plan.planned.program.arena_bytes for plan in self.plans)

    def ran(self, timeline: Timeline, *, warming: bool) -> PlanAgain | PlanOthers | Exchange | None:
        """A step has been run by the current plan.

        Args:
            timeline: of the step.
            warming: whether it is the first since its program came into the arena, so that its time says nothing.

        Returns:
            what is to be done before the next; None: nothing.
        """
        self._steps += 1
        if warming or self.planned.plan.policy == "keep-all":
            return None
        if self.phase is Phase.MEASURING:
            return self._measure(timeline)
        if self.phase is Phase.COMPARING:
            return self._compare(timeline)
        return self._look(timeline.step_seconds) if self._most else None

    def exchanged(self, seconds: float) -> None:
        """A program has taken the place of another in the arena, which took so long."""
        if self._is_uncounted:
            self._is_uncounted = False
            return
        self._spent += seconds
        self._exchanging = seconds if self._exchanging is None else (self._exchanging + seconds) / 2

    def planned_again(self, planned: Planned | None, seconds: float) -> PlanOthers | Exchange | None:
        """The step was planned with the costs that were asked for.

        Args:
            planned: which runs from now on; None: there is no plan with these, and the old one stays.
            seconds: that this took.

        Returns:
            as ``ran``.
        """
        if self._replanned:
            self._spent += seconds
        self._is_uncounted = not self._replanned and planned is not None
        self._replanned += 1
        self._planning = seconds
        if planned is None:
            return self._consider()
        before = self.plans[self.current]
        self.plans, self.current, self._has_others = [_best(planned)], 0, False
        self._measured_plan = 0
        if _said(planned) != _said(before.planned) and self._most:
            self.plans.append(replace(before, how=f"{before.how.removesuffix(_BEFORE)}{_BEFORE}"))
            self._measured_plan = 1
        return self._consider()

    def others_made(self, others: Sequence[Alternative], seconds: float) -> Exchange | None:
        """Plans of other kinds were made, as was asked for.

        Args:
            others: the plans; that which runs before them, and each other, they are not.
            seconds: that this took.

        Returns:
            as ``ran``.
        """
        if self._seconds_of_others is None:
            self._is_uncounted = True
        else:
            self._spent += seconds
        self._seconds_of_others = seconds
        self._has_others = True
        known = [_said(plan.planned) for plan in self.plans]
        self.plans += [plan for plan in others if _said(plan.planned) not in known]
        return self._compared()

    # Measuring

    def _measure(self, timeline: Timeline) -> PlanAgain | PlanOthers | Exchange | None:
        program = self.planned.program
        self._measured.append(timeline)
        self._paces.append(self._pace(program, timeline))
        flags = undisturbed(self._paces)
        calm = [one for one, is_calm in zip(self._measured, flags, strict=True) if is_calm]
        if len(calm) < MEASURED_STEPS and len(self._measured) < _LONGEST:
            return None
        self._usual = statistics.median(one.step_seconds for one in calm)
        believed = self.costs
        self.costs = refined(believed, program, self._measured, self._moved(program), self._families)
        quiet = [
            one.quiet for one, is_calm in zip(self._paces, flags, strict=True) if is_calm and one.quiet is not None
        ]
        # All ops once: as they were measured, or as slow as those were beside which nothing was copied.
        at_quiet_pace = believed.compute_seconds * statistics.median(quiet) if quiet else math.inf
        self._least = min(self.costs.compute_seconds, at_quiet_pace)
        self._measured_plan = self.current
        if self._could_be_quicker and is_off(self.planned.timeline.step_seconds, calm) and self._may_plan():
            self.phase = Phase.PLANNING
            return PlanAgain(self.costs, self._usual)
        return self._consider()

    def _moved(self, program: Program) -> frozenset[int]:
        found = {program.blocks[i.block].storage for i in program.instructions if isinstance(i, CopyOut | CopyIn)}
        return frozenset(storage for storage in found if storage is not None and storage not in self._ported)

    @property
    def _could_be_quicker(self) -> bool:
        return self._least < self._usual * _COULD_BE_QUICKER

    def _may_plan(self) -> bool:
        return not self._replanned or (bool(self._most) and self._spent + self._planning <= self._allowed)

    def _may_make_others(self) -> bool:
        took = self._seconds_of_others
        return took is None or self._spent + took <= self._allowed

    @property
    def _allowed(self) -> float:
        """Seconds that trials may have cost by now."""
        return _SHARE * max(self._steps, _FIRST_STEPS) * self._usual

    # Comparing

    def _consider(self) -> PlanOthers | Exchange | None:
        """Begin a comparison, if some other plan could be quicker, or ask for plans to compare."""
        if self._most and not self._has_others and self._could_be_quicker and self._may_make_others():
            self.phase = Phase.PLANNING
            return PlanOthers(self.costs)
        return self._compared()

    def _compared(self) -> Exchange | None:
        """Begin a comparison between the plans that there are, if one could be quicker."""
        measured = self._measured_plan
        if self._most and len(self.plans) > 1:
            self.plans = [
                replace(plan, planned=resimulated(self._graph, self.costs, plan.planned)) for plan in self.plans
            ]
            others = self._promising(measured)
            while others and self._spent + self._cost(others) > self._allowed:
                others.pop()
            self._is_due = not others and bool(self._promising(measured))
            if others:
                return self._begin([self.current, *others], measured)
        self._settle()
        return None

    def _promising(self, measured: int) -> list[int]:
        """The plans that could be quicker, the best first; the one that was measured is known, and counts as such."""
        found: list[tuple[float, int]] = []
        for number, plan in enumerate(self.plans):
            seconds = plan.planned.timeline.step_seconds
            ops = self._least + recompute_seconds(self.costs, plan.planned.program)
            if number == self.current:
                continue
            if number == measured:
                found.append((self._usual, number))
            elif seconds <= self._usual * _WORTH_RUNNING and ops <= self._usual * _COULD_BE_QUICKER:
                found.append((seconds, number))
        # What was replaced is run in any case: a new plan is not to be worse.
        found.sort(key=lambda one: (one[1] != measured, one))
        return [number for _, number in found[: self._most]]

    def _cost(self, others: Sequence[int]) -> float:
        """Seconds that a comparison with some plans would cost beyond training, about."""
        exchanging = self._exchanging
        if exchanging is None:
            exchanging = _EXCHANGE_SECONDS * len(self.planned.program.instructions)
        slower = [self.plans[plan].planned.timeline.step_seconds - self._usual for plan in others]
        steps = 2 * (MEASURED_STEPS + 1)
        return 2 * (len(others) + 1) * exchanging + sum(steps * max(one, 0.0) for one in slower)

    def _begin(self, order: list[int], measured: int) -> Exchange | None:
        self.phase, self._order, self._is_due = Phase.COMPARING, order, False
        known: tuple[Turn, ...] = ()
        if measured in order and self._measured:
            program = self.plans[measured].planned.program
            samples = tuple(Sample(one.step_seconds, self._pace(program, one)) for one in self._measured)
            known = (Turn(order.index(measured), samples),)
        self._contest = Contest(len(order), known)
        self._measured, self._paces = [], []
        _log.info(
            "plans are compared by running them in turn: %s",
            "; ".join(
                f"{self.plans[plan].how} ({format_seconds(self.plans[plan].planned.timeline.step_seconds)} predicted)"
                for plan in order
            ),
        )
        return self._next(self._contest)

    def _pace(self, program: Program, timeline: Timeline) -> Pace:
        return pace(program, step_times(program, timeline, ()), self.costs.ops)

    def _compare(self, timeline: Timeline) -> Exchange | None:
        contest = self._contest
        if contest is None:
            raise RuntimeError("a comparison of plans goes on that was not begun; please report it")
        sample = Sample(timeline.step_seconds, self._pace(self.planned.program, timeline))
        # What a slower plan costs, and not what something else takes from its steps.
        slower = 1.0 if sample.pace.quiet is None else max(sample.pace.quiet, 1.0)
        self._spent += max(sample.seconds - self._usual * slower, 0.0)
        self._contest = contest.after(self._order.index(self.current), sample)
        return self._next(self._contest)

    def _next(self, contest: Contest) -> Exchange | None:
        number = contest.next()
        if number is not None and self._spent > 2 * self._allowed:
            number = None  # it costs more than was thought
        if number is None:
            return self._decide(contest)
        return self._exchange(self._order[number])

    def _exchange(self, plan: int) -> Exchange | None:
        if plan == self.current:
            return None
        self.current = plan
        return Exchange(plan)

    def _decide(self, contest: Contest) -> Exchange | None:
        winner = contest.winner()
        self.tried = tuple(
            Tried(
                self.plans[plan].how,
                self.plans[plan].planned.timeline.step_seconds,
                contest.seconds(number) or 0.0,
                sum(len(turn.samples) for turn in contest.turns_of(number)),
                contest.quotient(number) or 0.0,
                number == winner,
            )
            for number, plan in enumerate(self._order)
        )
        quotient = contest.quotient(winner) or 1.0
        first = self.tried[0].how
        self.why = (
            f"no other was quicker than the plan {first} by more than a hundredth, and slower by as much in no round"
            if winner == 0
            else f"it takes {quotient:.3f} of the time of the plan {first}, by the median over rounds"
        )
        _log.info("compared plans: %s; %s", "; ".join(map(str, self.tried)), self.why)
        self._contest = None
        self._usual = contest.seconds(winner) or self._usual
        self._settle()
        return self._exchange(self._order[winner])

    # Settled

    def _settle(self) -> None:
        self.phase = Phase.SETTLED
        self._measured, self._paces = [], []
        self._recent.clear()

    def _look(self, seconds: float) -> Exchange | None:
        """See whether steps are still what they were, and whether a comparison has become cheap enough."""
        self._recent.append(seconds)
        if len(self._recent) < _LOOK:
            return None
        quick = sorted(self._recent)[_LOOK // 4]
        self._recent.clear()
        otherwise = abs(quick - self._usual) > _OTHERWISE * self._usual
        cost = self._planning if otherwise else self._cost(range(len(self.plans))[: self._most])
        if (otherwise or self._is_due) and self._spent + cost <= self._allowed:
            self.phase = Phase.MEASURING
        return None


def _said(planned: Planned) -> object:
    """What makes a plan another than one that decides otherwise; how it was found, and for what budget, does not."""
    return planned.plan.decisions, planned.plan.chains


def _best(planned: Planned) -> Alternative:
    return Alternative(f"by {planned.plan.policy}", planned)
