"""The linear program that guides planning: what to keep, offload (to which home) and recompute.

Copies overlap the ops, and hold memory while they run:

    minimise  sum of waits w_i + sum of seconds_g * recomputed_g + weight * (seconds of copies)
    where     out_i  >=  out_{i-1} + (evicted after op i-1) - rate * (seconds of op i-1 + w_i + (recomputed before i))
              in_{i-1}  >=  in_i + (needed back by op i) - rate * (seconds of op i + w_i + (recomputed before i))
              resident_i + sum of out_i and in_i over all homes  <=  free bytes at op i

``out_i`` and ``in_i`` are the bytes in flight to and from a home while op i runs. No copy crosses the end of a step. In
long steps the ops of a *span* share their flows. Not modelled: a block's room is free only when all of its bytes are
copied out (see ``tuner``). A chain gets longer if its inputs are dropped, too (see ``remat``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outofcore.planning.linear_program import UNIT, binding_ops, levels
from outofcore.planning.problem import KEPT, GapInfo, Ints, Problem
from outofcore.planning.relaxation import Relaxation

Floats = NDArray[np.float64]

# Number of spans in steps of more than three times this many ops. The program grows with it.
_SPANS = 100
# Shares at least this large count as one.
_WHOLE = 1 - 1e-6


@dataclass(frozen=True)
class Shares:
    """A solution of the linear program."""

    kept: Floats  # shape (gaps,), the resident share
    away: Floats  # shape (gaps, homes), the share at each home
    again: Floats  # shape (gaps,), the recomputed share
    flowing: Floats  # shape (ops,), bytes in flight

    def rounded(self, problem: Problem) -> Ints | None:
        """Return a choice: whole resident gaps, then the largest fractions that fit; None if homes overflow."""
        choice = np.where(self.kept >= _WHOLE, KEPT, self.away.argmax(axis=1))
        room: Ints = problem.free - np.ceil(self.flowing).astype(np.int64) - problem.held(choice == KEPT)
        parts = [g for g in problem.movable if choice[g] != KEPT and self.kept[g] > 1 - _WHOLE]
        for g in sorted(parts, key=lambda g: (-self.kept[g], problem.gaps[g].bytes, g)):
            if problem.has_room(room, g):
                choice[g] = KEPT
                problem.take(room, g, problem.gaps[g].bytes)
        return problem.within_homes(choice, self.away)


def solve(
    problem: Problem, recompute_seconds: Mapping[int, float], margin: float = 0.0, *, weight: float
) -> Shares | None:
    """Solve the linear program; return None if it has no solution.

    ``margin`` is the share of the limit to leave free, ``weight`` the cost of a second of copying in seconds of the
    step.
    """
    if not problem.homes or not problem.is_feasible:
        return None
    return _Guide(problem, recompute_seconds, margin, weight).shares()


class _Guide(Relaxation):
    def __init__(self, problem: Problem, recompute_seconds: Mapping[int, float], margin: float, weight: float) -> None:
        super().__init__(problem, recompute_seconds, _spans([cost.seconds for cost in problem.costs.ops]))
        self.weight = weight
        # Time that passes before each span, and after the last: waits and recomputation.
        self.passing: list[dict[int, float]] = [{wait: 1.0} for wait in self.waits]
        for g, column in self.repeated.items():
            self.program.charge(column, recompute_seconds[g])
            self.passing[self.spans[problem.gaps[g].gap.end]][column] = recompute_seconds[g]
        self.flows: list[int] = []  # variables of all flows, span by span
        for home in range(len(problem.homes)):
            self._flows(home)
        self._memory(np.maximum(problem.free - int(problem.limit * margin), 0))
        self.limit_homes()

    def shares(self) -> Shares | None:
        problem = self.problem
        values = self.program.minimise()
        if values is None:
            return None
        resident, recomputed = np.zeros(len(problem.gaps)), np.zeros(len(problem.gaps))
        resident[list(self.kept)] = values[list(self.kept.values())]
        recomputed[list(self.repeated)] = values[list(self.repeated.values())]
        offloaded = np.zeros((len(problem.gaps), len(problem.homes)))
        for g, info in enumerate(problem.gaps):
            for home in info.homes:
                constant, terms = self.away(g, home)
                offloaded[g, home] = constant + sum(values[column] * factor for column, factor in terms.items())
        flowing = values[self.flows].reshape(len(self.seconds), -1).sum(axis=1)[self.spans] * UNIT
        return Shares(np.clip(resident, 0, 1), np.clip(offloaded, 0, 1), np.clip(recomputed, 0, 1), flowing)

    def _moved(self, info: GapInfo, home: int, *, arriving: bool) -> float:
        """Return the bytes, in units, that the link could move in the time of a copy with its latency."""
        place = self.problem.homes[home]
        if arriving:
            return place.in_seconds(info.copied) * place.bytes_per_s_in / UNIT
        return place.out_seconds(info.copied) * place.bytes_per_s_out / UNIT

    def _flows(self, home: int) -> None:
        """Add the flow of copies to and from a home over the spans."""
        program, count, place, n = self.program, len(self.seconds), self.problem.homes[home], len(self.spans)
        # Bytes evicted after each span, and bytes needed back before it, in units.
        leaving, due = ([defaultdict[int, float](float) for _ in range(count)] for _ in range(2))
        due_always = [0.0] * count
        for g, info in enumerate(self.problem.gaps):
            if home not in info.homes:
                continue
            if (g, home) in self.copied:
                copy = self.copied[g, home]
                program.charge(copy, self.weight * place.out_seconds(info.copied))
                leaving[self.spans[info.gap.start]][copy] += self._moved(info, home, arriving=False)
            if info.fetched:
                at, moved = self.spans[info.gap.end % n], self._moved(info, home, arriving=True)
                constant, terms = self.away(g, home)
                due_always[at] += constant * moved
                for column, factor in terms.items():
                    due[at][column] += factor * moved
                    program.charge(column, self.weight * factor * place.in_seconds(info.copied))
        out_rate, in_rate = place.bytes_per_s_out / UNIT, place.bytes_per_s_in / UNIT
        # Bytes in flight while a span runs, and of these: not yet out when it ends, already in when it starts.
        outs, after, ins, ahead = ([program.variable() for _ in range(count)] for _ in range(4))
        for i, seconds in enumerate(self.seconds):
            program.row({after[i]: 1.0, outs[i]: -1.0}, low=-out_rate * seconds)
            program.row({ahead[i]: 1.0, ins[i]: -1.0}, low=-in_rate * seconds)
        for i in range(count + 1):
            row = {column: out_rate * factor for column, factor in self.passing[i].items()}
            if i:
                row[after[i - 1]] = -1.0
                for column, size in leaving[i - 1].items():
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
            for column, size in due[i].items():
                row[column] = row.get(column, 0.0) - size
            program.row(row, low=due_always[i])
        homes = len(self.problem.homes)
        self.flows = self.flows or [0] * (2 * homes * count)
        for i in range(count):
            self.flows[2 * (homes * i + home) : 2 * (homes * i + home) + 2] = outs[i], ins[i]

    def _memory(self, free: Ints) -> None:
        """Limit resident bytes and bytes in flight at each op."""
        stays = self.stays()
        ops = binding_ops(self.problem.free.tolist(), [stay[1:] for stay in stays], self.spans)
        resident = levels(self.program, ops, [(column, size / UNIT, ranges) for column, size, ranges in stays])
        width = 2 * len(self.problem.homes)
        for i, level in zip(ops, resident, strict=True):
            terms = dict.fromkeys(self.flows[width * self.spans[i] : width * (self.spans[i] + 1)], 1.0)
            if level is not None:
                terms[level] = 1.0
            self.program.row(terms, high=float(free[i]) / UNIT)


def _spans(seconds: Sequence[float]) -> list[int]:
    if len(seconds) <= 3 * _SPANS:
        return list(range(len(seconds)))
    longest, max_ops = sum(seconds) / _SPANS, -(-len(seconds) // _SPANS)
    spans: list[int] = []
    span, passed, ops = -1, 0.0, 0
    for op_seconds in seconds:
        if not ops or ops == max_ops or passed + op_seconds > longest:
            span, passed, ops = span + 1, 0.0, 0
        passed, ops = passed + op_seconds, ops + 1
        spans.append(span)
    return spans
