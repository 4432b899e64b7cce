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

from outofcore.planning.linear_program import UNIT, add_levels, binding_ops
from outofcore.planning.problem import ON_DEVICE, GapInfo, Ints, Problem
from outofcore.planning.relaxation import Relaxation

Floats = NDArray[np.float64]

# Number of spans in steps of more than three times this many ops. The program grows with it.
_SPANS = 100
# Shares at least this large count as one.
_WHOLE = 1 - 1e-6


@dataclass(frozen=True)
class GapShares:
    """A solution of the linear program: the resident, offloaded and recomputed share of each gap."""

    resident: Floats  # shape (gaps,), the resident share
    offloaded: Floats  # shape (gaps, homes), the share at each home
    recomputed: Floats  # shape (gaps,), the recomputed share
    in_flight: Floats  # shape (ops,), bytes in flight

    def round_to_choice(self, problem: Problem) -> Ints | None:
        """Round the shares: choose the device or a home for each gap; None if the homes are too small."""
        choice = np.where(self.resident >= _WHOLE, ON_DEVICE, self.offloaded.argmax(axis=1))
        room: Ints = (
            problem.free_bytes - np.ceil(self.in_flight).astype(np.int64) - problem.resident_bytes(choice == ON_DEVICE)
        )
        parts = [g for g in problem.movable if choice[g] != ON_DEVICE and self.resident[g] > 1 - _WHOLE]
        for g in sorted(parts, key=lambda g: (-self.resident[g], problem.gaps[g].bytes, g)):
            if problem.has_room(room, g):
                choice[g] = ON_DEVICE
                problem.reserve(room, g, problem.gaps[g].bytes)
        return problem.fit_homes(choice, self.offloaded)


def solve(
    problem: Problem, recompute_seconds: Mapping[int, float], margin: float = 0.0, *, weight: float
) -> GapShares | None:
    """Solve the linear program of a step for the share of each gap; None if there is no solution."""
    if not problem.homes or not problem.is_feasible:
        return None
    return _Guide(problem, recompute_seconds, margin, weight).solve()


class _Guide(Relaxation):
    """A linear program that estimates the best share of each gap: resident, at each home, recomputed."""

    def __init__(self, problem: Problem, recompute_seconds: Mapping[int, float], margin: float, weight: float) -> None:
        super().__init__(problem, recompute_seconds, _spans([cost.seconds for cost in problem.costs.ops]))
        self.weight = weight  # the cost of a second of copying, in seconds of the step
        # Time that passes before each span, and after the last: waits and recomputation.
        self.passing: list[dict[int, float]] = [{wait: 1.0} for wait in self.waits]
        for g, column in self.recomputed.items():
            self.program.add_cost(column, recompute_seconds[g])
            self.passing[self.spans[problem.gaps[g].gap.end]][column] = recompute_seconds[g]
        self.flows: list[int] = []  # variables of all flows, span by span
        for home in range(len(problem.homes)):
            self._add_flows(home)
        self._limit_memory(np.maximum(problem.free_bytes - int(problem.limit * margin), 0))
        self.limit_homes()

    def solve(self) -> GapShares | None:
        """Solve the linear program and return the shares of each gap; None if there is no optimum."""
        problem = self.problem
        values = self.program.minimise()
        if values is None:
            return None
        resident, recomputed = np.zeros(len(problem.gaps)), np.zeros(len(problem.gaps))
        resident[list(self.resident)] = values[list(self.resident.values())]
        recomputed[list(self.recomputed)] = values[list(self.recomputed.values())]
        offloaded = np.zeros((len(problem.gaps), len(problem.homes)))
        for g, info in enumerate(problem.gaps):
            for home in info.homes:
                constant, terms = self.share_at_home(g, home)
                offloaded[g, home] = constant + sum(values[column] * factor for column, factor in terms.items())
        flowing = values[self.flows].reshape(len(self.seconds), -1).sum(axis=1)[self.spans] * UNIT
        return GapShares(np.clip(resident, 0, 1), np.clip(offloaded, 0, 1), np.clip(recomputed, 0, 1), flowing)

    def _link_units(self, info: GapInfo, home: int, *, arriving: bool) -> float:
        """Return the bytes (in ``UNIT``) for which a copy keeps its link busy, latency included."""
        place = self.problem.homes[home]
        if arriving:
            return place.in_seconds(info.copied_bytes) * place.bytes_per_s_in / UNIT
        return place.out_seconds(info.copied_bytes) * place.bytes_per_s_out / UNIT

    def _add_flows(self, home: int) -> None:
        """Add variables and constraints for the bytes copied to and from a home in each span of time."""
        program, count, place, n = self.program, len(self.seconds), self.problem.homes[home], len(self.spans)
        # Bytes evicted after each span, and bytes needed back before it, in units.
        leaving, due = ([defaultdict[int, float](float) for _ in range(count)] for _ in range(2))
        due_always = [0.0] * count
        for g, info in enumerate(self.problem.gaps):
            if home not in info.homes:
                continue
            if (g, home) in self.copied_out:
                copy = self.copied_out[g, home]
                program.add_cost(copy, self.weight * place.out_seconds(info.copied_bytes))
                leaving[self.spans[info.gap.start]][copy] += self._link_units(info, home, arriving=False)
            if info.fetched:
                at, moved = self.spans[info.gap.end % n], self._link_units(info, home, arriving=True)
                constant, terms = self.share_at_home(g, home)
                due_always[at] += constant * moved
                for column, factor in terms.items():
                    due[at][column] += factor * moved
                    program.add_cost(column, self.weight * factor * place.in_seconds(info.copied_bytes))
        out_rate, in_rate = place.bytes_per_s_out / UNIT, place.bytes_per_s_in / UNIT
        # Bytes in flight while a span runs, and of these: not yet out when it ends, already in when it starts.
        outs, after, ins, ahead = ([program.add_variable() for _ in range(count)] for _ in range(4))
        for i, seconds in enumerate(self.seconds):
            program.add_row({after[i]: 1.0, outs[i]: -1.0}, low=-out_rate * seconds)
            program.add_row({ahead[i]: 1.0, ins[i]: -1.0}, low=-in_rate * seconds)
        for i in range(count + 1):
            row = {column: out_rate * factor for column, factor in self.passing[i].items()}
            if i:
                row[after[i - 1]] = -1.0
                for column, size in leaving[i - 1].items():
                    row[column] = row.get(column, 0.0) - size
            if i < count:
                row[outs[i]] = 1.0
            program.add_row(row, low=0.0)
            if i == count:
                break
            row = {column: in_rate * factor for column, factor in self.passing[i].items()}
            if i:
                row[ins[i - 1]] = 1.0
            row[ahead[i]] = -1.0
            for column, size in due[i].items():
                row[column] = row.get(column, 0.0) - size
            program.add_row(row, low=due_always[i])
        homes = len(self.problem.homes)
        self.flows = self.flows or [0] * (2 * homes * count)
        for i in range(count):
            self.flows[2 * (homes * i + home) : 2 * (homes * i + home) + 2] = outs[i], ins[i]

    def _limit_memory(self, free: Ints) -> None:
        """Require at each op that bytes that are resident or being copied fit the ``free`` bytes."""
        stays = self.resident_terms()
        ops = binding_ops(self.problem.free_bytes.tolist(), [stay[1:] for stay in stays], self.spans)
        resident = add_levels(self.program, ops, [(column, size / UNIT, ranges) for column, size, ranges in stays])
        width = 2 * len(self.problem.homes)
        for i, level in zip(ops, resident, strict=True):
            terms = dict.fromkeys(self.flows[width * self.spans[i] : width * (self.spans[i] + 1)], 1.0)
            if level is not None:
                terms[level] = 1.0
            self.program.add_row(terms, high=float(free[i]) / UNIT)


def _spans(seconds: Sequence[float]) -> list[int]:
    """Divide the step into spans of about equal seconds; return the number of each op's span."""
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
