"""The common part of the linear programs of planning: shares of gaps, copies, and capacities of homes.

The shares of a gap that are resident, at each home, and recomputed add up to one. An offloaded share is copied out once
for each home and each interval without writes. ``guide`` and ``bound`` add the flow of copies and the memory of each
op. Addresses are not modelled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from outofcore.planning.linear_program import UNIT, LinearProgram, levels
from outofcore.planning.problem import Problem


class Relaxation:
    """A linear program of which every plan is a feasible point, as far as shares, copies and homes go.

    ``recomputable`` are gaps that may be recomputed, and ``spans`` the number of each op's span of time.
    """

    def __init__(
        self, problem: Problem, recomputable: Iterable[int], spans: Sequence[int], *, interior: bool = False
    ) -> None:
        self.problem, self.spans = problem, spans
        self.program = LinearProgram(interior=interior)
        self.seconds = [0.0] * (spans[-1] + 1 if spans else 0)  # by span, of its ops
        for at, cost in zip(spans, problem.costs.ops, strict=True):
            self.seconds[at] += cost.seconds
        # Variables: seconds of waiting before each span and after the last.
        self.waits = [self.program.variable(cost=1.0) for _ in range(len(self.seconds) + 1)]
        self.kept: dict[int, int] = {}  # by gap that may be resident, the variable of its resident share
        self.repeated: dict[int, int] = {}  # by gap that may be recomputed, the variable of its recomputed share
        self.copied: dict[tuple[int, int], int] = {}  # the variable of the share that is copied out, by gap and home
        self.share_rows: dict[int, int] = {}  # the sum of the shares, by gap with more than one variable
        self._sent: dict[tuple[int, int], int] = {}  # share at a home, by gap and home, if it has a variable
        recomputable = set(recomputable)
        for g in problem.movable:
            info = problem.gaps[g]
            self.kept[g] = self.program.variable(0.0, 0.0 if info.leaves else 1.0)
            if g in recomputable:
                self.repeated[g] = self.program.variable(0.0, 1.0)
            for home in info.homes[:-1]:
                self._sent[g, home] = self.program.variable(0.0, 1.0)
            shares = self._own(g)
            if len(shares) > 1 or not info.homes:
                self.share_rows[g] = self.program.row(dict.fromkeys(shares, 1.0), 0.0 if info.homes else 1.0, 1.0)
        self._copies_out()

    def _own(self, g: int) -> list[int]:
        sent = [self._sent[g, home] for home in self.problem.gaps[g].homes[:-1]]
        return [self.kept[g], *([self.repeated[g]] if g in self.repeated else []), *sent]

    def away(self, g: int, home: int) -> tuple[float, dict[int, float]]:
        """Return the share of a gap at a home, as a constant and terms; the last home has the remainder."""
        info = self.problem.gaps[g]
        if (g, home) in self._sent:
            return 0.0, {self._sent[g, home]: 1.0}
        if info.arriving or home != info.homes[-1]:
            return float(info.arriving and home == info.homes[0]), {}
        return 1.0, dict.fromkeys(self._own(g), -1.0)

    def _copies_out(self) -> None:
        """Require a copy out for an offloaded gap if the copy at its home is out of date."""
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
                self.copied[g, home] = self.program.variable(0.0, 1.0)
                # All copies to this home in this segment so far add up to at least the share that is there.
                copies = earlier[storage, info.segment, home]
                copies.append(self.copied[g, home])
                constant, terms = self.away(g, home)
                row = dict.fromkeys(copies, 1.0) | {column: -factor for column, factor in terms.items()}
                if info.segment == 0 and not info.cyclic and storage in cyclic:
                    # A copy is needed only if the storage was not at this home when the step began.
                    earlier_share, more = self.away(cyclic[storage], home)
                    constant -= earlier_share
                    for column, factor in more.items():
                        row[column] = row.get(column, 0.0) + factor
                self.program.row(row, low=constant)

    def stays(self) -> list[tuple[int, int, tuple[tuple[int, int], ...]]]:
        """Return for each gap that may be resident its variable, bytes, and half-open ranges of ops."""
        gaps = self.problem.gaps
        return [(column, gaps[g].bytes, self.problem.inside(gaps[g])) for g, column in self.kept.items()]

    def limit_homes(self) -> None:
        """Limit the bytes at each op in homes of limited capacity, inputs and outputs included."""
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
                constant, terms = self.away(g, home)
                ranges = ((0, n),) if info.cyclic else ((info.gap.start, info.gap.end + 1),)
                if constant:
                    share = self.program.variable(0.0, 1.0)
                    self.program.row({share: 1.0} | {c: -factor for c, factor in terms.items()}, constant, constant)
                    terms = {share: 1.0}
                stays += [(column, factor * info.bytes / UNIT, ranges) for column, factor in terms.items()]
            for level in dict.fromkeys(levels(self.program, range(n), stays)):
                if level is not None:
                    self.program.row({level: 1.0}, high=max(place.bytes - always, 0) / UNIT)
