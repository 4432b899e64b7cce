"""What to keep and where the rest goes, by a linear program in which bytes flow over links in time.

A relaxation that knows how much has to move, but not when (``relaxation``), finds nothing amiss where all
copies crowd into the same tenth of a second. Here time is cut into spans of ops. For each home and
direction the bytes that wait are a state: bytes that may leave but have not left are still on the device,
and so are those that had to come early because the link would not bring them in time. A link works off its
rate times the seconds of each span; where that is not enough the span begins with a stall, whose seconds are
what the program minimises:

    minimise  sum of stalls + weight * (seconds of copies)
    where     waiting(after) >= waiting(before) + bytes set free - rate * (seconds of the span + its stall)
              (backwards in time for what comes in)
              bytes kept + waiting to leave + come early  <=  free bytes, at each op
              bytes in slots of a home  <=  its capacity, at each op

The variables are, for each gap and home, the share of its bytes that goes there. Copies out are counted once
for each home and stretch in which a storage is not written. Where a gap is too short for its two copies the
home is not offered.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outofcore.graph import StorageKind
from outofcore.planning.linear import INFINITY, Linear
from outofcore.planning.model import GapInfo, Model

# Bytes are counted in these, so that the solver meets numbers near one.
_UNIT = float(1 << 30)
# What a second of copying costs, in seconds of stall: of two ways without stalls, the one that copies less.
_WEIGHT = 1e-4
# How often shares are fixed and the rest is found anew.
_ROUNDS = 24
_TINY = 1e-6


@dataclass(frozen=True)
class Flow:
    """A solution.

    Attributes:
        shares: for each gap and home the share of its bytes that goes there.
        stall_seconds: that the step takes beyond its ops, as the program sees it.
        waiting: for each op the bytes in transit that are on the device all the same.
        early: of these, for each op those that come in.
    """

    shares: NDArray[np.float64]
    stall_seconds: float
    waiting: NDArray[np.float64]
    early: NDArray[np.float64]


@dataclass(frozen=True)
class _Spans:
    """Ops in a row, taken together: of each op its span, and of each span its seconds."""

    of: list[int]
    seconds: list[float]

    @staticmethod
    def cut(model: Model, count: int) -> _Spans:
        longest = model.costs.compute_seconds / count
        of: list[int] = []
        seconds: list[float] = []
        for cost in model.costs.ops:
            if not seconds or (seconds[-1] + cost.seconds > longest and seconds[-1] > 0):
                seconds.append(0.0)
            seconds[-1] += cost.seconds
            of.append(len(seconds) - 1)
        return _Spans(of, seconds)


def flow(model: Model, *, spans: int = 400, transit: float = 1.0, whole: bool = True) -> Flow | None:
    """Solve the program; None if it has no solution.

    Args:
        model: the step under its limit.
        spans: into how many spans time is cut.
        transit: a home is offered where a gap lasts so many times the seconds of its two copies.
        whole: bring the shares to 0 or 1, as far as that is possible.
    """
    return _Program(model, _Spans.cut(model, spans), transit).solve(whole)


class _Program:
    """The linear program while it is being put together."""

    def __init__(self, model: Model, spans: _Spans, transit: float) -> None:
        self.model, self.spans, self.transit = model, spans, transit
        self.homes = model.costs.homes
        self.linear = Linear()
        self.go: dict[tuple[int, int], int] = {}  # (gap, home) -> its column
        # For each home and span: what may leave after it, and what must be there before it.
        self.ready = [[defaultdict[int, float](float) for _ in spans.seconds] for _ in self.homes]
        self.due = [[defaultdict[int, float](float) for _ in spans.seconds] for _ in self.homes]
        self.arriving = [0.0] * len(spans.seconds)
        self.away = [defaultdict[int, float](float) for _ in range(len(model.graph.ops) + 1)]
        self.slots = [[defaultdict[int, float](float) for _ in range(len(model.graph.ops) + 1)] for _ in self.homes]

    def solve(self, whole: bool) -> Flow | None:
        """The shares; ``whole``: made whole one after the other, the rest adapting to each."""
        model, linear = self.model, self.linear
        over = model.held(np.ones(len(model.gaps), dtype=np.bool_)) - model.free
        stalls = [linear.column(cost=1.0) for _ in range(len(self.spans.seconds) + 1)]
        for g, info in enumerate(model.gaps):
            if info.arriving:
                self.arriving[self.spans.of[info.gap.end]] += info.bytes / _UNIT
            else:
                self._gap(g, info)
        self._copies()
        waits = [self._links(home, stalls) for home in range(len(self.homes))]
        self._memory(over, waits)
        self._capacities()
        values = linear.minimise()
        if values is not None and whole:
            values = self._made_whole(values)
        if values is None:
            return None
        shares = np.zeros((len(model.gaps), len(self.homes)))
        for (g, home), column in self.go.items():
            shares[g, home] = min(max(values[column], 0.0), 1.0)
        leaving, early = (
            np.array([sum(values[pair[way][span]] for pair in waits) * _UNIT for span in self.spans.of])
            for way in (0, 1)
        )
        return Flow(shares, float(sum(values[s] for s in stalls)), leaving + early, early)

    def _made_whole(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Fix what is whole, then the larger shares of the rest, and solve again, until nothing is left to fix."""
        fixed: set[int] = set()
        for _ in range(_ROUNDS):
            chosen: dict[int, float] = {}
            parts: dict[int, int] = {}  # of each gap that is in parts, the column of the largest
            for (g, _), column in self.go.items():
                if column in fixed:
                    continue
                if not _TINY < values[column] < 1 - _TINY:
                    chosen[column] = float(round(values[column]))
                elif g not in parts or values[column] > values[parts[g]]:
                    parts[g] = column
            if not parts:
                break
            order = sorted(parts.values(), key=lambda c: (-values[c], c))
            chosen |= dict.fromkeys(order[: max(len(order) // 4, 1)], 1.0)
            for column, value in chosen.items():
                self.linear.bound(column, value, value)
            found = self.linear.minimise()
            if found is None:
                break
            values = found
            fixed |= chosen.keys()
        return values

    def _gap(self, g: int, info: GapInfo) -> None:
        model, spans, n = self.model, self.spans, len(self.model.graph.ops)
        start, end = info.gap.start, info.gap.end
        size = info.bytes / _UNIT
        columns: list[int] = []
        for home, place in enumerate(self.homes):
            seconds = self.transit * (place.out_seconds(info.bytes) + place.in_seconds(info.bytes))
            if model.seconds_inside(info) < seconds:
                continue
            column = self.linear.column(0.0, 1.0, _WEIGHT * place.in_seconds(info.bytes))
            columns.append(column)
            self.go[g, home] = column
            self.due[home][spans.of[end % n]][column] += size
            self.slots[home][start][column] += size
            self.slots[home][end % n][column] -= size
        if len(columns) > 1:
            self.linear.row(dict.fromkeys(columns, 1.0), high=1.0)
        for first, last in model.inside(info):
            if first < last:
                for column in columns:
                    self.away[first][column] += size
                    self.away[last][column] -= size

    def _copies(self) -> None:
        """Copies out, once for each home and stretch without writes, and none where the home is up to date."""
        model = self.model
        stretches: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        cyclic: dict[tuple[int, int], int] = {}
        for (g, home), column in self.go.items():
            info = model.gaps[g]
            if info.cyclic:
                cyclic[info.gap.storage, home] = column
                if info.gap.storage not in model.changed:
                    continue
            if model.graph.storages[info.gap.storage].kind is not StorageKind.INPUT:
                stretches[info.gap.storage, info.segment, home].append(g)
        for (storage, segment, home), gaps in stretches.items():
            copied: dict[int, float] = {}
            for g in sorted(gaps, key=lambda g: model.gaps[g].gap):
                info = model.gaps[g]
                column = self.linear.column(0.0, 1.0, _WEIGHT * self.homes[home].out_seconds(info.bytes))
                copied[column] = 1.0
                self.ready[home][self.spans.of[info.gap.start]][column] += info.bytes / _UNIT
                terms = {**copied, self.go[g, home]: -1.0}
                if segment == 0 and not info.cyclic and (storage, home) in cyclic:
                    # Where it was at home when the step began, it still is.
                    terms[cyclic[storage, home]] = 1.0
                self.linear.row(terms, low=0.0)

    def _links(self, home: int, stalls: list[int]) -> tuple[list[int], list[int]]:
        """What waits on the device for a link at the start of each span, and what is there early at its end."""
        linear, count = self.linear, len(self.spans.seconds)
        out_rate = self.homes[home].bytes_per_s_out / _UNIT
        in_rate = self.homes[home].bytes_per_s_in / _UNIT
        leaving = [(linear.column(), linear.column()) for _ in range(count)]
        early = [(linear.column(), linear.column()) for _ in range(count)]
        for k, seconds in enumerate(self.spans.seconds):
            linear.row({leaving[k][1]: 1.0, leaving[k][0]: -1.0}, low=-out_rate * seconds)
            linear.row({early[k][0]: 1.0, early[k][1]: -1.0}, low=-in_rate * seconds)
            after = {leaving[k + 1][0]: 1.0} if k + 1 < count else {}
            ready = {column: -size for column, size in self.ready[home][k].items()}
            linear.row({**after, leaving[k][1]: -1.0, stalls[k + 1]: out_rate, **ready}, low=0.0)
            before = {early[k - 1][1]: 1.0} if k else {}
            due = {column: -size for column, size in self.due[home][k].items()}
            linear.row({**before, early[k][0]: -1.0, stalls[k]: in_rate, **due}, low=0.0 if home else self.arriving[k])
        # What leaves in the course of a span has its room until the span ends, what comes in from its start.
        return [pair[0] for pair in leaving], [pair[1] for pair in early]

    def _memory(self, over: NDArray[np.int64], waits: list[tuple[list[int], list[int]]]) -> None:
        """Where not everything can be kept, enough is away."""
        linear = self.linear
        former: int | None = None
        for i, lacking in enumerate(over):
            away = linear.column()
            changes = {column: -size for column, size in self.away[i].items() if size}
            linear.row({away: 1.0, **({} if former is None else {former: -1.0}), **changes}, low=0.0, high=0.0)
            former = away
            if lacking > 0:
                transit = {column[self.spans.of[i]]: -1.0 for pair in waits for column in pair}
                linear.row({away: 1.0, **transit}, low=float(lacking) / _UNIT)

    def _capacities(self) -> None:
        linear, model = self.linear, self.model
        lasting = sum(s.bytes for s in model.graph.storages if s.kind is StorageKind.INPUT)
        cyclic = {(g, home): column for (g, home), column in self.go.items() if model.gaps[g].cyclic}
        for home, place in enumerate(self.homes):
            if place.bytes is None:
                continue
            most = (place.bytes - (lasting if home == 0 else 0)) / _UNIT
            permanent = {c: model.gaps[g].bytes / _UNIT for (g, at), c in cyclic.items() if at == home}
            former: int | None = None
            for changes in self.slots[home][:-1]:
                moving = {c: -size for c, size in changes.items() if size and c not in permanent}
                if former is not None and not moving:
                    continue
                held = linear.column()
                linear.row({held: 1.0, **({} if former is None else {former: -1.0}), **moving}, low=0.0, high=0.0)
                linear.row({held: 1.0, **permanent}, low=-INFINITY, high=most)
                former = held
