"""The common part of the linear programs of planning: shares of gaps, copies, and capacities of homes.

The shares of a gap that are resident, at each home, and recomputed add up to one. An offloaded share is copied out once
for each home and each interval without writes. ``guide`` and ``bound`` add the flow of copies and the memory of each
op. Addresses are not modelled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from outofcore.planning.linear_program import UNIT, LinearProgram, add_levels
from outofcore.planning.problem import Problem


class Relaxation:
    """A linear program in which every plan is feasible; ``spans`` has the number of each op's span of time."""

    def __init__(
        self, problem: Problem, recomputable: Iterable[int], spans: Sequence[int], *, interior: bool = False
    ) -> None:
        self.problem, self.spans = problem, spans
        self.program = LinearProgram(interior=interior)
        self.seconds = [0.0] * (spans[-1] + 1 if spans else 0)  # by span, of its ops
        for at, cost in zip(spans, problem.costs.ops, strict=True):
            self.seconds[at] += cost.seconds
        # Variables: seconds of waiting before each span and after the last.
        self.waits = [self.program.add_variable(cost=1.0) for _ in range(len(self.seconds) + 1)]
        self.resident: dict[int, int] = {}  # by gap that may be resident, the variable of its resident share
        self.recomputed: dict[int, int] = {}  # by gap that may be recomputed, the variable of its recomputed share
        self.copied_out: dict[
            tuple[int, int], int
        ] = {}  # the variable of the share that is copied out, by gap and home
        self.share_rows: dict[int, int] = {}  # the sum of the shares, by gap with more than one variable
        self._offloaded: dict[tuple[int, int], int] = {}  # share at a home, by gap and home, if it has a variable
        recomputable = set(recomputable)
        for g in problem.movable:
            info = problem.gaps[g]
            self.resident[g] = self.program.add_variable(0.0, 0.0 if info.must_leave else 1.0)
            if g in recomputable:
                self.recomputed[g] = self.program.add_variable(0.0, 1.0)
            for home in info.homes[:-1]:
                self._offloaded[g, home] = self.program.add_variable(0.0, 1.0)
            shares = self._share_variables(g)
            if len(shares) > 1 or not info.homes:
                self.share_rows[g] = self.program.add_row(dict.fromkeys(shares, 1.0), 0.0 if info.homes else 1.0, 1.0)
        self._require_copies_out()

    def _share_variables(self, g: int) -> list[int]:
        """Return the variables of a gap's shares: resident, recomputed, and at each home but the last."""
        sent = [self._offloaded[g, home] for home in self.problem.gaps[g].homes[:-1]]
        return [self.resident[g], *([self.recomputed[g]] if g in self.recomputed else []), *sent]

    def share_at_home(self, g: int, home: int) -> tuple[float, dict[int, float]]:
        """Return a gap's share at a home as a linear expression: a constant, and a factor for each variable."""
        info = self.problem.gaps[g]
        if (g, home) in self._offloaded:
            return 0.0, {self._offloaded[g, home]: 1.0}
        if info.arriving or home != info.homes[-1]:
            return float(info.arriving and home == info.homes[0]), {}
        return 1.0, dict.fromkeys(self._share_variables(g), -1.0)

    def _require_copies_out(self) -> None:
        """Require a copy out for an offloaded gap if the copy at its home is out of date."""
        problem = self.problem
        cyclic = {problem.gaps[g].gap.storage: g for g in problem.movable if problem.gaps[g].cyclic}
        earlier: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for g in problem.movable:
            info = problem.gaps[g]
            storage = info.gap.storage
            unchanged = (info.cyclic and storage not in problem.written) or storage in problem.graph.frozen
            if unchanged or (problem.graph.storages[storage].arrives and not info.final):
                continue  # its home is up to date
            for home in info.homes:
                self.copied_out[g, home] = self.program.add_variable(0.0, 1.0)
                # All copies to this home in this segment so far add up to at least the share that is there.
                copies = earlier[storage, info.segment, home]
                copies.append(self.copied_out[g, home])
                constant, terms = self.share_at_home(g, home)
                row = dict.fromkeys(copies, 1.0) | {column: -factor for column, factor in terms.items()}
                if info.segment == 0 and not info.cyclic and storage in cyclic:
                    # A copy is needed only if the storage was not at this home when the step began.
                    earlier_share, more = self.share_at_home(cyclic[storage], home)
                    constant -= earlier_share
                    for column, factor in more.items():
                        row[column] = row.get(column, 0.0) + factor
                self.program.add_row(row, low=constant)

    def resident_terms(self) -> list[tuple[int, int, tuple[tuple[int, int], ...]]]:
        """Return for each gap that may be resident its variable, bytes, and half-open ranges of ops."""
        gaps = self.problem.gaps
        return [(column, gaps[g].bytes, self.problem.ops_inside(gaps[g])) for g, column in self.resident.items()]

    def limit_homes(self) -> None:
        """Require at each op that no home holds more than its capacity, inputs and outputs included."""
        problem, n = self.problem, len(self.problem.graph.ops)
        for home, place in enumerate(problem.homes):
            if place.bytes is None:
                continue
            stays: list[tuple[int, float, tuple[tuple[int, int], ...]]] = []
            always = problem.first_home_bytes if home == 0 else 0
            for g in problem.movable:
                info = problem.gaps[g]
                if home not in info.homes or problem.is_at_first_home(info.gap.storage):
                    continue
                constant, terms = self.share_at_home(g, home)
                ranges = ((0, n),) if info.cyclic else ((info.gap.start, info.gap.end + 1),)
                if constant:
                    share = self.program.add_variable(0.0, 1.0)
                    self.program.add_row({share: 1.0} | {c: -factor for c, factor in terms.items()}, constant, constant)
                    terms = {share: 1.0}
                stays += [(column, factor * info.bytes / UNIT, ranges) for column, factor in terms.items()]
            for level in dict.fromkeys(add_levels(self.program, range(n), stays)):
                if level is not None:
                    self.program.add_row({level: 1.0}, high=max(place.bytes - always, 0) / UNIT)
