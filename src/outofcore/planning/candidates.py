"""Candidate plans: what to keep and what to offload once it is chosen what is computed again.

With the chains of runs fixed (``remat``), the rest of a step is a problem of its own, the *remainder*: its ops take as
long as they and the chains before them, what is held for chains takes room, and the gaps that are computed again are
gone. In it the linear program (``relaxation``) says what to keep and which home the rest goes to, and the schedule of
copies (``schedule``) says what the step takes; candidates are compared by that. *Tuning* changes a candidate at random
and keeps what is no slower.

A chain reads its inputs when it runs, not at the next use in the step. So an offloaded gap has to be back when the
first chain reads it: in the remainder it ends there.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np

from outofcore.costs import Costs
from outofcore.plan import Decision, Gap, Plan, Residency
from outofcore.planning.parameters import SearchParams
from outofcore.planning.problem import KEPT, GapInfo, Ints, Problem
from outofcore.planning.relaxation import solve
from outofcore.planning.remat.chains import AGAIN, AWAY, Choices, Snapshot
from outofcore.planning.remat.chains import KEPT as STAYS
from outofcore.planning.remat.contents import AT_HOME
from outofcore.planning.schedule import Schedule, schedule, settled

# How often a gap to change is drawn from those that ops waited for.
_WAITED = 0.6
# How often what is away goes to another home, where there are several, rather than being kept.
_ELSEWHERE = 0.3
# How often choices are changed because chains and what they read take too much room.
_EASINGS = 60
# Of the ops that the schedules of one tuning may run through, the share for a candidate that has to leave bytes free.
_RETUNED = 0.4
# Seconds of a step that a second of copying counts for at least: of plans that are equally quick, the one that moves
# less wins.
_COPY_WEIGHT = 0.002
# Ops that the schedules of one tuning may run through.
_TUNING_OPS = 30_000
# The same of further tuning; and how many runs of the step it may take as long as, since the plan has to win that back.
_FURTHER_OPS, _FURTHER_RUNS = 150_000, 20
# What it takes to schedule an op, about.
_OP_SECONDS = 3.5e-6


@dataclass(frozen=True)
class Remainder:
    """The problem that remains once it is chosen what is computed again.

    Attributes:
        problem: without the gaps that are computed again.
        gaps: shape (gaps of the remainder,), the index of each in the problem of the whole step.
        whole: by a gap of the remainder, the gap of the step where that is longer.
        again: the decisions of what is computed again.
    """

    problem: Problem
    gaps: Ints
    whole: dict[Gap, Gap]
    again: tuple[Decision, ...]

    @staticmethod
    def of(choices: Choices, problem: Problem) -> Remainder:
        """The remainder of a step.

        Args:
            choices: what is computed again.
            problem: the step under its true limit.
        """
        n = len(problem.graph.ops)
        free: Ints = problem.limit - choices.need
        ops = list(problem.costs.ops)
        for at, chain in choices.chains.items():
            seconds = ops[at].seconds + chain.seconds
            if problem.homes:
                seconds += sum(problem.homes[-1].in_seconds(count) for count in chain.links.copied)
            ops[at] = replace(ops[at], seconds=seconds)
        left: list[GapInfo] = []
        index: list[int] = []
        whole: dict[Gap, Gap] = {}
        for g, info in enumerate(problem.gaps):
            gap = info.gap
            is_read = choices.kind[g] != AWAY and choices.lookers.get(choices.content[g])
            readers = _readers(choices, choices.content[g]) if is_read else []
            if choices.kind[g] == AGAIN:
                free[choices.fetch[g] : gap.end] -= info.bytes
            elif info.arriving:
                left.append(info)
                index.append(g)
            elif info.cyclic:
                at_first = choices.contents.first[gap.storage]
                if any(at > gap.start for at in readers) or any(at < gap.end - n for at in _readers(choices, at_first)):
                    problem.take(free, g, info.bytes)
                else:
                    left.append(info)
                    index.append(g)
            else:
                first = min((at for at in readers if gap.start < at < gap.end), default=gap.end)
                shorter = info
                if first < gap.end:
                    free[first : gap.end] -= info.bytes
                    shorter = replace(info, gap=Gap(gap.storage, gap.start, first))
                    whole[shorter.gap] = gap
                if first > gap.start + 1:
                    left.append(shorter)
                    index.append(g)
        rest = replace(problem, costs=Costs(tuple(ops), problem.homes), gaps=tuple(left), free=free)
        return Remainder(rest, np.array(index, dtype=np.int64), whole, decisions_again(choices))

    def plan(self, found: Schedule) -> Plan:
        """The plan of the whole step that follows a schedule of the remainder."""
        decisions = (replace(d, gap=self.whole.get(d.gap, d.gap)) for d in found.decisions)
        return Plan("auto", self.problem.limit, tuple(sorted((*self.again, *decisions), key=lambda d: d.gap)))


def eased(choices: Choices, problem: Problem, spared: Ints | None = None) -> Remainder | None:
    """The remainder of a step, with less computed again where that takes too much room; None if it always does.

    What a chain reads need not be back by then: the chain can copy it in for itself. What is computed again early can
    be computed later. And what takes too long a chain can be offloaded after all.

    Args:
        choices: what is computed again; changed where that takes too much room.
        problem: the step under its true limit.
        spared: shape (ops,), bytes to leave free at each op, as far as the op by itself does.
    """
    least: Ints | int = 0 if spared is None else np.clip(problem.free, 0, spared)
    for _ in range(_EASINGS):
        remainder = Remainder.of(choices, problem)
        short = np.flatnonzero(remainder.problem.free < least)
        if not len(short):
            return remainder
        changed: set[int] = set()
        for at in short.tolist():
            if not any(choices.start[g] < at <= choices.end[g] for g in changed):
                g = _ease(choices, at)
                if g is None:
                    return None
                changed.add(g)
    return None


def _ease(choices: Choices, at: int) -> int | None:
    """Free room before an op by changing one gap. Returns that gap, or None if no change helps."""
    gaps = choices.problem.gaps
    over = [g for g, info in enumerate(gaps) if info.gap.start < at < info.gap.end and not info.arriving]
    over = [g for g in over if not gaps[g].cyclic]
    read = [g for g in over if choices.kind[g] == STAYS and _readers(choices, choices.content[g])]
    read = [g for g in read if min(_readers(choices, choices.content[g])) <= at]
    early = [g for g in over if choices.kind[g] == AGAIN and choices.fetch[g] <= at]
    for options, kind in ((early, AGAIN), (read, AWAY)):
        for g in sorted(options, key=lambda g: (-choices.bytes[g], g)):
            if choices.set(g, kind, choices.end[g]) is not None:
                return g
    for g in sorted(choices.targets.get(at, ())):
        if choices.set(g, STAYS, choices.end[g]) is not None:
            return g
    return None


def decisions_again(choices: Choices) -> tuple[Decision, ...]:
    """The decisions of what is computed again."""
    gaps = choices.problem.gaps
    return tuple(
        Decision(gaps[g].gap, Residency.RECOMPUTE, choices.start[g] + 1, choices.fetch[g])
        for g in choices.free
        if choices.kind[g] == AGAIN
    )


def arrivals(choices: Choices) -> tuple[Decision, ...]:
    """When inputs come that cannot be there from the start of the step: as early as there is room for them.

    Inputs about which nothing is said come before the first op.
    """
    room = choices.limit - (choices.held + choices.need)
    found: list[Decision] = []
    for info in choices.problem.gaps:
        if not info.arriving:
            continue
        first = info.gap.end
        while first > 0 and room[first - 1] >= info.bytes:
            first -= 1
        room[first : info.gap.end] -= info.bytes
        if first:
            found.append(Decision(info.gap, Residency.OFFLOAD, 0, first))
    return tuple(found)


def _readers(choices: Choices, content: int) -> list[int]:
    """Ops before which chains read a content that they do not make."""
    if choices.contents.lasting[content] == AT_HOME:
        return []
    return sorted(at for at in choices.lookers.get(content, ()) if content not in choices.chains[at].links.made)


@dataclass(frozen=True)
class Candidate:
    """What to compute again and where everything else is, with the schedule of the copies.

    Attributes:
        how: how it was found, for logs and reports.
        kept: choices in which nothing is computed again, of the problem of the whole step.
        again: what is computed again, as a change to those.
        remainder: what else there is to choose.
        choice: shape (gaps of the remainder,), where each is.
        schedule: of the copies.
        slack: with which they are scheduled.
        params: of the search.
    """

    how: str
    kept: Choices
    again: Snapshot
    remainder: Remainder
    choice: Ints
    schedule: Schedule
    slack: float
    params: SearchParams

    @property
    def value(self) -> float:
        """Seconds by which candidates are compared: of the step, and a little for copies."""
        return self.schedule.seconds + copy_weight(self.remainder.problem.costs) * self.schedule.copied

    @property
    def plan(self) -> Plan:
        """What it comes to for the whole step."""
        return self.remainder.plan(self.schedule)

    def is_same(self, other: Candidate) -> bool:
        """Whether another candidate does the same."""
        return self.again == other.again and np.array_equal(self.choice, other.choice)

    @staticmethod
    def of(how: str, choices: Choices, params: SearchParams, kept: Choices) -> Candidate | None:
        """The candidate that the linear program suggests; None if nothing fits.

        Args:
            how: how what is computed again was found.
            choices: of what is computed again; may be changed where that takes too much room.
            params: of the search.
            kept: choices for the same step in which nothing is computed again.
        """
        remainder = eased(choices, kept.problem)
        if remainder is None:
            return None
        problem, found = remainder.problem, list[Candidate]()
        passes = min(tuning_tries(problem, params), params.passes)
        for shares in solve(problem, {}, params.margins, weight=copy_weight(problem.costs)):
            choice = shares.rounded(problem)
            choice = None if choice is None else _lightened(problem, choice, random.Random(0))
            if choice is None:
                continue
            for slack in params.slacks:
                laid = settled(problem, choice, slack, passes)
                if laid is not None:
                    found.append(Candidate(how, kept, choices.snapshot(), remainder, choice, laid, slack, params))
        return min(found, key=lambda candidate: candidate.value, default=None)

    def tuned(self, tries: int, seed: int = 0) -> Candidate:
        """The candidate after some random changes, of which those are kept that are no slower.

        What an op waited for is kept, and what then is too much leaves instead; or what is kept leaves, so that copies
        in have room to run ahead; or what is away goes to another home; or what an op waited for is computed again, or
        the other way round.
        """
        return _Tuning(self, seed=seed).run(tries)

    def sparing(self, spared: Ints) -> Candidate | None:
        """The candidate with bytes left free at each op, of shape (ops,), where possible; None if it never is."""
        if not spared.any():
            return self
        start = self._with_less_again(spared)
        problem = start.remainder.problem
        free: Ints = np.where(problem.free > 0, np.maximum(problem.free - spared, 0), problem.free)
        remainder = replace(start.remainder, problem=replace(problem, free=free))
        choice = _lightened(remainder.problem, start.choice, random.Random(0))
        if choice is None:
            return None
        tries = int(_RETUNED * tuning_tries(problem, self.params))
        found = settled(remainder.problem, choice, self.slack, min(tries, self.params.passes))
        if found is None:
            return None
        found = replace(start, remainder=remainder, choice=choice, schedule=found)
        return _Tuning(found, may_recompute=False).run(tries)

    def _with_less_again(self, spared: Ints) -> Candidate:
        """The candidate with less computed again where too few bytes are left free; its schedule is the old one."""
        whole = self.kept.problem
        if not self.again or not bool((self.remainder.problem.free < np.clip(whole.free, 0, spared)).any()):
            return self
        choices = Choices(whole, self.kept.contents, like=self.kept)
        choices.restore(self.again)
        remainder = eased(choices, whole, spared)
        if remainder is None:
            return self
        full = np.array([info.homes[0] if info.homes else KEPT for info in whole.gaps], dtype=np.int64)
        full[self.remainder.gaps] = self.choice
        return replace(self, again=choices.snapshot(), remainder=remainder, choice=full[remainder.gaps])


class _Tuning:
    """Random changes to a candidate."""

    def __init__(self, start: Candidate, *, may_recompute: bool = True, seed: int = 0) -> None:
        self.best, self.draw = start, random.Random(seed)
        self.weight = copy_weight(start.remainder.problem.costs)
        self.choices = Choices(start.kept.problem, start.kept.contents, like=start.kept)
        self.may_recompute = may_recompute and bool(self.choices.free)
        if self.may_recompute:
            self.choices.restore(start.again)
            self.full = start.kept.problem.nothing_leaves()
            self.full[start.remainder.gaps] = start.choice

    def run(self, tries: int) -> Candidate:
        """The best candidate after so many changes."""
        for _ in range(tries):
            if self.may_recompute and self.draw.random() < self.best.params.recompute_changes:
                self._change_recompute()
            elif self.best.remainder.problem.movable:
                self._change_offload()
        return self.best

    def _waited(self, gaps: dict[int, float]) -> int | None:
        """One of the gaps that ops waited for, the likelier the longer."""
        waited = sorted(gaps)
        if not waited or self.draw.random() >= _WAITED:
            return None
        return self.draw.choices(waited, [gaps[g] for g in waited])[0]

    def _change_offload(self) -> None:
        best, problem = self.best, self.best.remainder.problem
        g = self._waited({w: s for w, s in best.schedule.waited.items() if not problem.gaps[w].arriving})
        g = self.draw.choice(problem.movable) if g is None else g
        changed = _changed(problem, best.choice, g, self.draw)
        if changed is None:
            return
        found = schedule(problem, changed, best.slack, best.schedule, best.value, self.weight)
        if found is not None:
            self.best = replace(best, choice=changed, schedule=found)
            if self.may_recompute:
                self.full[best.remainder.gaps] = changed

    def _change_recompute(self) -> None:
        best, choices, draw = self.best, self.choices, self.draw
        index = best.remainder.gaps
        whole = {int(index[w]): s for w, s in best.schedule.waited.items()}
        g = self._waited({w: s for w, s in whole.items() if choices.can[w]})
        g = draw.choice(choices.free) if g is None else g
        full = self.full
        if choices.kind[g] == AGAIN:
            full = full.copy()
            options = [(STAYS, choices.end[g])]
            options += [(AGAIN, at) for at in (*choices.meetings(g), choices.end[g]) if at != choices.fetch[g]]
            kind, fetch = draw.choice(options)
            full[g] = draw.choice((KEPT, choices.problem.gaps[g].homes[0]))
        else:
            kind, fetch = AGAIN, draw.choice((choices.end[g], *choices.meetings(g)))
        change = choices.set(g, kind, fetch)
        if change is None:
            return
        remainder = Remainder.of(choices, choices.problem)
        changed = _lightened(remainder.problem, full[remainder.gaps], draw) if remainder.problem.is_feasible else None
        found = None
        if changed is not None:
            found = schedule(remainder.problem, changed, best.slack, best.schedule, best.value, self.weight)
        if changed is None or found is None:
            choices.undo(change)
            return
        self.best = replace(best, again=choices.snapshot(), remainder=remainder, choice=changed, schedule=found)
        self.full = full
        self.full[remainder.gaps] = changed


def copy_weight(costs: Costs) -> float:
    """Return the seconds of a step that a second of copying counts for."""
    return max(_COPY_WEIGHT, *(home.compute_slowdown for home in costs.homes))


def tuning_tries(problem: Problem, params: SearchParams) -> int:
    """How many schedules one tuning may make."""
    return min(_TUNING_OPS // max(len(problem.graph.ops), 1), params.tunings)


def further_tries(problem: Problem) -> int:
    """Return how many schedules the further tuning of one of the best candidates may make."""
    worthwhile = _FURTHER_RUNS * problem.costs.compute_seconds / _OP_SECONDS
    return int(min(_FURTHER_OPS, worthwhile) // max(len(problem.graph.ops), 1))


def _changed(problem: Problem, choice: Ints, g: int, draw: random.Random) -> Ints | None:
    changed, homes = choice.copy(), problem.gaps[g].homes
    if changed[g] != KEPT and homes[1:] and draw.random() < _ELSEWHERE:
        changed[g] = draw.choice([home for home in homes if home != changed[g]])
        return problem.within_homes(changed, but=g)
    if changed[g] != KEPT:
        changed[g] = KEPT
        return _lightened(problem, changed, draw, g)
    changed[g] = draw.choice(homes) if homes[1:] else homes[0]
    return problem.within_homes(changed)


def _lightened(problem: Problem, choice: Ints, draw: random.Random, but: int = -1) -> Ints | None:
    """The choice with less kept, until it fits at every op; gap ``but`` stays. None if it cannot."""
    choice, keep = choice.copy(), choice == KEPT
    free: Ints = problem.free - problem.held(keep)
    while len(free):
        worst = int(free.argmin())
        if free[worst] >= 0:
            break
        around = [g for g in np.flatnonzero(keep & problem.around(worst)).tolist() if g != but]
        around = [g for g in around if problem.gaps[g].homes]
        if not around:
            return None
        enough = [g for g in around if problem.gaps[g].bytes >= -free[worst]]
        g = draw.choice(enough or around)
        keep[g], choice[g] = False, problem.gaps[g].homes[-1]
        problem.take(free, g, -problem.gaps[g].bytes)
    return problem.within_homes(choice)
