"""The linear program of planning: which share of each gap to keep, to send to which home, and to compute again.

For each gap g the shares kept_g, away_gh (for each home h) and again_g add up to one. What is kept over an op fits
beside what the op touches. What is away is copied in, and copied out once for each home and stretch in which it is not
written. It is put together in one of two forms.

*Untimed*, it is a relaxation: every plan is a point of it, so its least step time is a bound for all plans:

    minimise  T
    where     T >= compute + sum of again_g * (seconds of its writer / storages that this op writes)
              T >= seconds of copies out to h,  T >= seconds of copies in from h,  for each home

*Timed*, it is a guide for planning: copies flow beside the ops, and hold memory while they do.

    minimise  sum of waits w_i + sum of seconds_g * again_g + weight * (seconds of copies)
    where     out_i  >=  out_{i-1} + (leaving after op i-1) - rate * (seconds of op i-1 + w_i + (run again before i))
              in_{i-1}  >=  in_i + (needed back by op i) - rate * (seconds of op i + w_i + (run again before i))
              held_i + sum of out_i and in_i over all homes  <=  free bytes at op i

``out_i`` and ``in_i`` are the bytes on their way to and from a home while op i runs. A step ends when all has flowed
out and begins with nothing flowing in. The solution says what to keep, what to offload where and what to compute again,
all at once. In truth a block's room is free when all of its bytes have left, and a chain of runs may be longer if what
it reads is dropped too: the schedule (``tuner``) and the search over chains (``remat``) see to these. In long steps
the ops of a *span* share their flows.

Limits: nothing is said about addresses.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outofcore.analysis.gaps import is_large
from outofcore.costs import Costs
from outofcore.graph import Op, StepGraph
from outofcore.planning.linear_program import UNIT, LinearProgram, binding_ops, levels
from outofcore.planning.placing import room_for_large
from outofcore.planning.problem import KEPT, GapInfo, Ints, Problem

Floats = NDArray[np.float64]

# The solver's answer may lie above the true minimum by its tolerance.
_TOLERANCE = 1e-6
# Spans of time that a step of more than three times as many ops is cut into: the program grows with their number.
_SPANS = 100
# A share that is so near to one is one.
_WHOLE = 1 - 1e-6


def lower_bound_seconds(graph: StepGraph, costs: Costs, budget: int) -> float | None:
    """Seconds that a step takes at least under a budget, whatever is kept, offloaded and computed again.

    Args:
        graph: the step.
        costs: measured or assumed.
        budget: bytes of the arena.

    Returns:
        None if no plan can hold the step within the budget.
    """
    problem = Problem.of(graph, costs, room_for_large(graph, costs, budget))
    if not problem.is_feasible:
        return None
    if _copies_can_hide(problem):
        return max(_seconds_of_queues(problem))
    program = Relaxation(problem, least_seconds_again(problem), timed=False)
    if program.program.minimise() is None:
        return None
    return max(*_seconds_of_queues(problem), program.program.least() * (1 - _TOLERANCE))


def _copies_can_hide(problem: Problem) -> bool:
    """Return whether it is plain that copies take no longer than the ops: then nothing needs to be solved.

    The longest gaps leave, until what stays fits: that is a point of the linear program, and none is less.
    """
    if len(problem.homes) != 1 or problem.homes[0].bytes is not None:
        return False
    [home] = problem.homes
    n = len(problem.graph.ops)
    begins = np.concatenate(([0.0], np.cumsum([cost.seconds for cost in problem.costs.ops])))
    idle = {
        g: sum(begins[last] - begins[first] for first, last in problem.inside(problem.gaps[g]) if first < last <= n)
        for g in problem.movable
        if problem.gaps[g].homes
    }
    longest = sorted((g for g in idle if not problem.gaps[g].leaves), key=lambda g: -idle[g])

    def chosen(count: int) -> Ints:
        choice = problem.nothing_leaves()
        choice[longest[:count]] = 0
        return choice

    def fits(count: int) -> bool:
        return bool(np.all(problem.held(chosen(count) == KEPT) <= problem.free))

    count = bisect_left(range(len(longest)), True, key=fits)
    if not fits(count):
        return False
    choice = chosen(count)
    needed = problem.copies_needed(choice)
    out = sum(home.out_seconds(info.copied) for info, copy in zip(problem.gaps, needed, strict=True) if copy)
    back = sum(
        home.in_seconds(problem.gaps[g].copied) for g in np.flatnonzero(choice != KEPT) if problem.gaps[g].fetched
    )
    return max(out, back) <= _seconds_of_queues(problem)[0]


def least_seconds_again(problem: Problem) -> dict[int, float]:
    """For each gap that may be computed again, the seconds that this takes at least.

    One run of the op that wrote the value serves at most one gap of each storage that the op writes.
    """
    found: dict[int, float] = {}
    for g, writer in _writers(problem).items():
        if writer.rerunnable:
            written = dict.fromkeys(writer.mutates + writer.creates)
            served = sum(is_large(problem.graph.storages[s].bytes) for s in written)
            found[g] = problem.costs.ops[writer.id].seconds / max(served, 1)
    return found


def _writers(problem: Problem) -> dict[int, Op]:
    """For each gap of what an op has written in this step, that op."""
    writers: dict[int, list[int]] = {}
    for op in problem.graph.ops:
        for storage in dict.fromkeys(op.mutates + op.creates):
            writers.setdefault(storage, []).append(op.id)
    gaps = {g: problem.gaps[g] for g in problem.movable}
    return {
        g: problem.graph.ops[writers[info.gap.storage][info.segment - 1]]
        for g, info in gaps.items()
        if info.segment != 0 and not info.cyclic and not info.final
    }


def _seconds_of_queues(problem: Problem) -> tuple[float, float]:
    """The seconds of all ops once, and of all collectives, which run beside them."""
    seconds = [0.0, 0.0]
    for op, cost in zip(problem.graph.ops, problem.costs.ops, strict=True):
        seconds[op.communicates] += cost.seconds
    return seconds[0], seconds[1]


@dataclass(frozen=True)
class Shares:
    """A solution of the timed program.

    Attributes:
        kept: shape (gaps,), the share that stays.
        away: shape (gaps, homes), the share that goes to each home.
        again: shape (gaps,), the share that is computed again.
        flowing: shape (ops,), bytes that are on their way.
    """

    kept: Floats
    away: Floats
    again: Floats
    flowing: Floats

    def rounded(self, problem: Problem) -> Ints | None:
        """A choice of shape (gaps,): what is kept whole, then the largest fractions that still fit.

        Returns:
            None if the homes cannot hold what leaves.
        """
        choice = np.where(self.kept >= _WHOLE, KEPT, self.away.argmax(axis=1))
        room: Ints = problem.free - np.ceil(self.flowing).astype(np.int64) - problem.held(choice == KEPT)
        parts = [g for g in problem.movable if choice[g] != KEPT and self.kept[g] > 1 - _WHOLE]
        for g in sorted(parts, key=lambda g: (-self.kept[g], problem.gaps[g].bytes, g)):
            if problem.has_room(room, g):
                choice[g] = KEPT
                problem.take(room, g, problem.gaps[g].bytes)
        return problem.within_homes(choice, self.away)


def solve(problem: Problem, again: Mapping[int, float], margin: float = 0.0, *, weight: float) -> Shares | None:
    """Solve the timed program.

    Args:
        problem: the step under its limit; with a home.
        again: for the gaps that may be computed again, the seconds that this takes.
        margin: share of the limit to leave free.
        weight: what a second of copying costs beside a second of the step.

    Returns:
        None if there is no solution.
    """
    if not problem.homes or not problem.is_feasible:
        return None
    return Relaxation(problem, again, timed=True, weight=weight).solve(margin)


class Relaxation:
    """The linear program, put together.

    Args:
        problem: the step under its limit.
        again: for the gaps that may be computed again, the seconds that this takes.
        timed: which of the two forms.
        weight: what a second of copying costs beside a second of the step.
    """

    def __init__(self, problem: Problem, again: Mapping[int, float], *, timed: bool, weight: float = 0.0) -> None:
        self.problem, self.again, self.timed, self.weight = problem, again, timed, weight
        self.program = LinearProgram()
        seconds = [cost.seconds for cost in problem.costs.ops]
        self.span = _spans(seconds) if timed else [0] * len(seconds)
        count = self.span[-1] + 1 if seconds else 0
        self.seconds = [0.0] * count
        for at, own in zip(self.span, seconds, strict=True):
            self.seconds[at] += own
        # Time that passes before each span, and after the last: waits and what runs again. Untimed, the step as a
        # whole.
        self.waits = [self.program.variable(cost=1.0) for _ in range(count + 1 if timed else 1)]
        self.passing: list[dict[int, float]] = [{wait: 1.0} for wait in self.waits]
        homes = len(problem.homes)
        # For each home and span: what is to leave after it, and what has to be back before it, in units of bytes.
        self.leaving = [[defaultdict[int, float](float) for _ in range(count)] for _ in range(homes)]
        self.due = [[defaultdict[int, float](float) for _ in range(count)] for _ in range(homes)]
        self.due_always = [[0.0] * count for _ in range(homes)]
        self.kept: dict[int, int] = {}
        self.repeated: dict[int, int] = {}
        self.sent: dict[tuple[int, int], int] = {}  # of a gap and a home, where that is a variable of its own
        self.share_rows: dict[int, int] = {}
        self.flows: list[int] = []  # variables of all flows, span by span
        self.memory_rows: list[tuple[int, int]] = []  # each with its op
        for g in range(len(problem.gaps)):
            self._gap(g)
        self._copies_out()
        for home in range(homes):
            if timed:
                self._flows(home)
            else:
                self._busy(home)
        if not timed:
            writers = _writers(problem)
            for communicates, least in enumerate(_seconds_of_queues(problem)):
                terms = {
                    self.repeated[g]: -seconds
                    for g, seconds in again.items()
                    if g in self.repeated and writers[g].communicates == bool(communicates)
                }
                if least > 0 or terms:
                    self.program.row({self.waits[0]: 1.0} | terms, low=least)
        self._memory()
        self._capacities()

    def solve(self, margin: float = 0.0) -> Shares | None:
        """The shares if a share of the limit is left free, as far as possible; None if there are none."""
        problem = self.problem
        free: Ints = np.maximum(problem.free - int(problem.limit * margin), 0)
        for row, op in self.memory_rows:
            self.program.bound_row(row, high=float(free[op]) / UNIT)
        values = self.program.minimise()
        if values is None:
            return None
        kept, again = np.zeros(len(problem.gaps)), np.zeros(len(problem.gaps))
        kept[list(self.kept)] = values[list(self.kept.values())]
        again[list(self.repeated)] = values[list(self.repeated.values())]
        away = np.zeros((len(problem.gaps), len(problem.homes)))
        for g, info in enumerate(problem.gaps):
            for home in info.homes:
                constant, terms = self._away(g, home)
                away[g, home] = constant + sum(values[column] * factor for column, factor in terms.items())
        flowing = values[self.flows].reshape(len(self.seconds), -1).sum(axis=1)[self.span] * UNIT
        return Shares(np.clip(kept, 0, 1), np.clip(away, 0, 1), np.clip(again, 0, 1), flowing)

    # What becomes of a gap

    def _gap(self, g: int) -> None:
        info, n = self.problem.gaps[g], len(self.problem.graph.ops)
        if not info.arriving:
            self.kept[g] = self.program.variable(0.0, 0.0 if info.leaves else 1.0)
            if g in self.again:
                self.repeated[g] = self.program.variable(0.0, 1.0, self.again[g] if self.timed else 0.0)
                if self.timed:
                    self.passing[self.span[info.gap.end]][self.repeated[g]] = self.again[g]
            for home in info.homes[:-1]:
                self.sent[g, home] = self.program.variable(0.0, 1.0)
            own = [self.kept[g], *([self.repeated[g]] if g in self.repeated else [])]
            own += [self.sent[g, home] for home in info.homes[:-1]]
            if len(own) > 1 or not info.homes:
                self.share_rows[g] = self.program.row(dict.fromkeys(own, 1.0), 0.0 if info.homes else 1.0, 1.0)
        if info.fetched:
            at = self.span[info.gap.end % n]
            for home in info.homes:
                count = self._moved(info, home, arriving=True)
                constant, terms = self._away(g, home)
                self.due_always[home][at] += constant * count
                for column, factor in terms.items():
                    self.due[home][at][column] += factor * count
                    self._charge(column, factor * self.problem.homes[home].in_seconds(info.copied))

    def _away(self, g: int, home: int) -> tuple[float, dict[int, float]]:
        """The share of a gap that goes to a home, as a constant and terms; the last home has what nobody else has."""
        info = self.problem.gaps[g]
        if (g, home) in self.sent:
            return 0.0, {self.sent[g, home]: 1.0}
        if info.arriving or home != info.homes[-1]:
            return float(info.arriving and home == info.homes[0]), {}
        others = [self.kept[g], *([self.repeated[g]] if g in self.repeated else [])]
        others += [self.sent[g, other] for other in info.homes[:-1]]
        return 1.0, dict.fromkeys(others, -1.0)

    def _copies_out(self) -> None:
        """A copy out is needed where a gap is away and its home is out of date."""
        problem = self.problem
        cyclic = {problem.gaps[g].gap.storage: g for g in problem.movable if problem.gaps[g].cyclic}
        earlier: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for g in problem.movable:
            info = problem.gaps[g]
            storage = info.gap.storage
            unchanged = (info.cyclic and storage not in problem.changed) or storage in problem.graph.frozen
            if unchanged or (problem.graph.storages[storage].arrives and not info.final):
                continue  # its home is up to date
            for home in info.homes:
                copy = self.program.variable(0.0, 1.0)
                self._charge(copy, problem.homes[home].out_seconds(info.copied))
                self.leaving[home][self.span[info.gap.start]][copy] += self._moved(info, home, arriving=False)
                # All copies to this home in this stretch so far are at least what is away there.
                copies = earlier[storage, info.segment, home]
                copies.append(copy)
                constant, terms = self._away(g, home)
                row = dict.fromkeys(copies, 1.0) | {column: -factor for column, factor in terms.items()}
                if info.segment == 0 and not info.cyclic and storage in cyclic:
                    # A copy is needed only if the storage was not at this home when the step began.
                    held, more = self._away(cyclic[storage], home)
                    constant -= held
                    for column, factor in more.items():
                        row[column] = row.get(column, 0.0) + factor
                self.program.row(row, low=constant)

    def _moved(self, info: GapInfo, home: int, *, arriving: bool) -> float:
        """Units of bytes that the link could move in the time of a copy, latency included."""
        place = self.problem.homes[home]
        if arriving:
            return place.in_seconds(info.copied) * place.bytes_per_s_in / UNIT
        return place.out_seconds(info.copied) * place.bytes_per_s_out / UNIT

    def _charge(self, column: int, seconds: float) -> None:
        if self.timed:
            self.program.charge(column, self.weight * seconds)

    # Links

    def _busy(self, home: int) -> None:
        """Untimed: the step takes at least as long as all copies of a link."""
        place, total = self.problem.homes[home], {self.waits[0]: 1.0}
        low = sum(self.due_always[home]) * UNIT / place.bytes_per_s_in
        for due in self.due[home]:
            for column, count in due.items():
                total[column] = total.get(column, 0.0) - count * UNIT / place.bytes_per_s_in
        self.program.row(total, low=low)
        total = {self.waits[0]: 1.0}
        for leaving in self.leaving[home]:
            for column, count in leaving.items():
                total[column] = total.get(column, 0.0) - count * UNIT / place.bytes_per_s_out
        self.program.row(total, low=0.0)

    def _flows(self, home: int) -> None:
        """Timed: what is on its way while each span lasts."""
        program, count, place = self.program, len(self.seconds), self.problem.homes[home]
        out_rate, in_rate = place.bytes_per_s_out / UNIT, place.bytes_per_s_in / UNIT
        # On its way when a span begins, and of that: still to leave when it is over, arrived before it starts.
        outs, after, ins, ahead = ([program.variable() for _ in range(count)] for _ in range(4))
        for i, seconds in enumerate(self.seconds):
            program.row({after[i]: 1.0, outs[i]: -1.0}, low=-out_rate * seconds)
            program.row({ahead[i]: 1.0, ins[i]: -1.0}, low=-in_rate * seconds)
        for i in range(count + 1):
            row = {column: out_rate * factor for column, factor in self.passing[i].items()}
            if i:
                row[after[i - 1]] = -1.0
                for column, size in self.leaving[home][i - 1].items():
                    row[column] = row.get(column, 0.0) - size
            if i < count:
                row[outs[i]] = 1.0
            program.row(row, low=0.0)
            if i == count:
                break
            row = {column: in_rate * factor for column, factor in self.passing[i].items()}
            if i:
                row[ins[i - 1]] = 1.0
            row[ahead[i]] = -1.0
            for column, size in self.due[home][i].items():
                row[column] = row.get(column, 0.0) - size
            program.row(row, low=self.due_always[home][i])
        homes = len(self.problem.homes)
        if not self.flows:
            self.flows = [0] * (2 * homes * count)
        for i in range(count):
            self.flows[2 * (homes * i + home) : 2 * (homes * i + home) + 2] = outs[i], ins[i]

    # Memory

    def _memory(self) -> None:
        problem = self.problem
        stays = [(column, problem.gaps[g].bytes, problem.inside(problem.gaps[g])) for g, column in self.kept.items()]
        ops = binding_ops(problem.free.tolist(), [stay[1:] for stay in stays], self.span if self.timed else None)
        everything = problem.held(problem.nothing_leaves() == KEPT)
        held = levels(self.program, ops, [(column, size / UNIT, ranges) for column, size, ranges in stays])
        width = len(self.flows) // max(len(self.seconds), 1)
        for i, level in zip(ops, held, strict=True):
            terms = dict.fromkeys(self.flows[width * self.span[i] : width * (self.span[i] + 1)], 1.0)
            if level is not None and (self.timed or everything[i] > problem.free[i]):
                terms[level] = 1.0
            if terms:
                self.memory_rows.append((self.program.row(terms, high=float(problem.free[i]) / UNIT), i))

    def _capacities(self) -> None:
        """What a limited home holds at each op, inputs and outputs included."""
        problem, n = self.problem, len(self.problem.graph.ops)
        for home, place in enumerate(problem.homes):
            if place.bytes is None:
                continue
            stays: list[tuple[int, float, tuple[tuple[int, int], ...]]] = []
            always = problem.lasting_at_first if home == 0 else 0
            for g in problem.movable:
                info = problem.gaps[g]
                if home not in info.homes or problem.is_first_homed(info.gap.storage):
                    continue
                constant, terms = self._away(g, home)
                ranges = ((0, n),) if info.cyclic else ((info.gap.start, info.gap.end + 1),)
                if constant:
                    share = self.program.variable(0.0, 1.0)
                    self.program.row({share: 1.0} | {c: -factor for c, factor in terms.items()}, constant, constant)
                    terms = {share: 1.0}
                stays += [(column, factor * info.bytes / UNIT, ranges) for column, factor in terms.items()]
            for level in dict.fromkeys(levels(self.program, range(n), stays)):
                if level is not None:
                    self.program.row({level: 1.0}, high=max(place.bytes - always, 0) / UNIT)


def _spans(seconds: Sequence[float]) -> list[int]:
    """Return for each op the number of its span of time."""
    if len(seconds) <= 3 * _SPANS:
        return list(range(len(seconds)))
    longest, most = sum(seconds) / _SPANS, -(-len(seconds) // _SPANS)
    found: list[int] = []
    span, passed, ops = -1, 0.0, 0
    for own in seconds:
        if not ops or ops == most or passed + own > longest:
            span, passed, ops = span + 1, 0.0, 0
        passed, ops = passed + own, ops + 1
        found.append(span)
    return found
