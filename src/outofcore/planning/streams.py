"""The relaxation of planning in which copies are streams beside the ops.

Like ``relaxation``, with two differences. What leaves takes room until it has flowed out, and what comes back
from when it flows in; both links flow only while time passes, be it that an op runs, runs again, or waits. And
a share of a gap may be computed again:

    minimise  sum of waits w_i + sum of seconds_g * again_g + weight * (seconds of copies)
    where     kept_g + away_g + again_g = 1
              out_i  >=  out_{i-1} + (leaving after op i-1) - rate * (seconds of op i-1 + w_i + (run again before i))
              in_{i-1}  >=  in_i + (needed back by op i) - rate * (seconds of op i + w_i + (run again before i))
              held_i  =  held_{i-1} + sum of bytes_g * kept_g over what begins at op i, less what ends there
              held_i + out_i + in_i  <=  free bytes at op i

``out_i`` and ``in_i`` are the bytes on their way while op i runs. A step ends when all has flowed out, and begins with
nothing flowing in. So the solution says what to keep, what to offload and what to compute again all at once, and
when each op starts. In truth a block's room is free when all of its bytes have left, and a chain of runs may be
longer if what it reads is dropped too: both are for others to see to (``timing``, ``chains``).

In long steps ops in a row share their flows: time passes in spans of ops, and what leaves or is needed within
one does so at its end, or at its start.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outofcore.costs import Home
from outofcore.graph import StorageKind
from outofcore.planning.linear import UNIT, Linear, levels
from outofcore.planning.model import Ints, Model
from outofcore.planning.tight import tight_ops

_WHOLE = 1 - 1e-6
# What a second of copying counts at least beside a second of the step.
_WEIGHT = 0.002
# Steps of so many ops are long, and their time is cut into about so many spans.
_LONG, _SPANS = 1600, 500


@dataclass(frozen=True)
class Streams:
    """A solution.

    Attributes:
        kept: for each gap the share that stays.
        again: for each gap the share that is computed again.
        times: when each op starts, and when the step ends.
        flowing: for each op the bytes that are on their way.
    """

    kept: NDArray[np.float64]
    again: NDArray[np.float64]
    times: tuple[float, ...]
    flowing: NDArray[np.float64]

    def rounded(self, model: Model) -> NDArray[np.bool_]:
        """Which gaps to keep: the whole shares, then the fractions that still fit, the largest first."""
        keep = self.kept >= _WHOLE
        free: Ints = model.free - np.ceil(self.flowing).astype(np.int64) - model.held(keep)
        for g in sorted(np.flatnonzero(~keep).tolist(), key=lambda g: (-self.kept[g], model.gaps[g].bytes, g)):
            info = model.gaps[g]
            if info.arriving or self.kept[g] <= 1 - _WHOLE:
                continue
            if all(np.all(free[a:b] >= info.bytes) for a, b in model.inside(info)):
                keep[g] = True
                for first, last in model.inside(info):
                    free[first:last] -= info.bytes
        return keep


def solve(model: Model, again: Mapping[int, float]) -> Streams | None:
    """Solve the relaxation; None if there is no home or no solution.

    Args:
        model: the step under its limit.
        again: by gap, for those that may be computed again, the seconds that this takes.
    """
    if model.home is None or (len(model.free) and int(model.free.min()) < 0):
        return None
    return _Program(model, model.home, again).solve()


def _spans(seconds: Sequence[float]) -> list[int]:
    """For each op the number of its span."""
    if len(seconds) <= _LONG:
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


class _Program:
    """The linear program while it is being put together."""

    def __init__(self, model: Model, home: Home, again: Mapping[int, float]) -> None:
        self.model, self.home, self.again = model, home, again
        self.linear = Linear()
        self.out_rate, self.in_rate = home.bytes_per_s_out / UNIT, home.bytes_per_s_in / UNIT
        seconds = [cost.seconds for cost in model.costs.ops]
        self.span = _spans(seconds)
        count = self.span[-1] + 1 if seconds else 0
        self.seconds = [0.0] * count
        for at, own in zip(self.span, seconds, strict=True):
            self.seconds[at] += own
        self.waits = [self.linear.column(cost=1.0) for _ in range(count + 1)]
        # What is on its way when a span begins.
        self.outs = [self.linear.column() for _ in range(count)]
        self.ins = [self.linear.column() for _ in range(count)]
        # Of that, what is still to leave when the span is over, and what has arrived before it starts.
        self.after = [self.linear.column() for _ in range(count)]
        self.ahead = [self.linear.column() for _ in range(count)]
        # What flows in time: by span, before which time passes.
        self.passing: list[dict[int, float]] = [{wait: 1.0} for wait in self.waits]
        self.leaving = [defaultdict[int, float](float) for _ in range(count)]
        self.arrived = [0.0] * count  # what would come if nothing stayed, and what of it does not have to
        self.spared = [defaultdict[int, float](float) for _ in range(count)]
        self.kept: dict[int, int] = {}
        self.repeated: dict[int, int] = {}

    def solve(self) -> Streams | None:
        """The shares; None if there are none."""
        model = self.model
        self._gaps()
        self._links()
        self._memory()
        values = self.linear.minimise()
        if values is None:
            return None
        shares_kept, shares_again = np.zeros(len(model.gaps)), np.zeros(len(model.gaps))
        shares_kept[list(self.kept)] = values[list(self.kept.values())]
        shares_again[list(self.repeated)] = values[list(self.repeated.values())]
        flowing = (values[self.outs] + values[self.ins])[self.span] * UNIT
        return Streams(np.clip(shares_kept, 0, 1), np.clip(shares_again, 0, 1), self._times(values), flowing)

    def _times(self, values: NDArray[np.float64]) -> tuple[float, ...]:
        late = [float(sum(values[c] * v for c, v in passed.items())) for passed in self.passing]
        times: list[float] = []
        now, former = 0.0, -1
        for span, cost in zip(self.span, self.model.costs.ops, strict=True):
            now += late[span] if span != former else 0.0
            times.append(now)
            now, former = now + cost.seconds, span
        return (*times, now + late[-1])

    def _gaps(self) -> None:
        model, home, linear = self.model, self.home, self.linear
        n, weight = len(model.graph.ops), max(home.compute_slowdown, _WEIGHT)
        sent: dict[tuple[int, int], dict[int, float]] = {}
        cyclic = {info.gap.storage: g for g, info in enumerate(model.gaps) if info.cyclic}
        order = sorted(range(len(model.gaps)), key=lambda g: (model.gaps[g].gap.storage, not model.gaps[g].cyclic, g))
        for g in order:
            info = model.gaps[g]
            storage, end = info.gap.storage, self.span[info.gap.end % n]
            count = home.in_seconds(info.bytes) * self.in_rate
            self.arrived[end] += count
            if info.arriving:
                continue
            self.kept[g] = linear.column(0.0, 1.0, -weight * home.in_seconds(info.bytes))
            shares = {self.kept[g]: 1.0}
            if g in self.again:
                self.repeated[g] = linear.column(0.0, 1.0, self.again[g] - weight * home.in_seconds(info.bytes))
                shares[self.repeated[g]] = 1.0
                self.passing[end][self.repeated[g]] = self.again[g]
                linear.row(shares, high=1.0)
            for column in shares:
                self.spared[end][column] += count
            if model.graph.storages[storage].kind is StorageKind.INPUT:
                continue
            if info.cyclic and storage not in model.changed:
                continue
            copy = linear.column(0.0, 1.0, weight * home.out_seconds(info.bytes))
            self.leaving[self.span[info.gap.start]][copy] = home.out_seconds(info.bytes) * self.out_rate
            # All copies of one stretch so far, this one among them, are at least what is away.
            earlier = sent.setdefault((storage, info.segment), {})
            earlier[copy] = 1.0
            terms, bound = earlier | shares, 1.0
            if info.segment == 0 and not info.cyclic and storage in cyclic:
                # A copy is needed only if the storage was resident when the step began.
                bound = 0.0
                terms[self.kept[cyclic[storage]]] = terms.get(self.kept[cyclic[storage]], 0.0) - 1.0
            linear.row(terms, low=bound)

    def _links(self) -> None:
        linear, count = self.linear, len(self.seconds)
        for i, seconds in enumerate(self.seconds):
            linear.row({self.after[i]: 1.0, self.outs[i]: -1.0}, low=-self.out_rate * seconds)
            linear.row({self.ahead[i]: 1.0, self.ins[i]: -1.0}, low=-self.in_rate * seconds)
        for i in range(count + 1):
            row = {c: self.out_rate * v for c, v in self.passing[i].items()}
            if i:
                row[self.after[i - 1]] = -1.0
                for column, size in self.leaving[i - 1].items():
                    row[column] = row.get(column, 0.0) - size
            if i < count:
                row[self.outs[i]] = 1.0
            linear.row(row, low=0.0)
            if i == count:
                break
            row = {c: self.in_rate * v for c, v in self.passing[i].items()}
            if i:
                row[self.ins[i - 1]] = 1.0
            row[self.ahead[i]] = -1.0
            for column, size in self.spared[i].items():
                row[column] = row.get(column, 0.0) + size
            linear.row(row, low=self.arrived[i])

    def _memory(self) -> None:
        model = self.model
        stays = [(column, model.gaps[g].bytes, model.inside(model.gaps[g])) for g, column in self.kept.items()]
        ops = tight_ops(model.free.tolist(), [stay[1:] for stay in stays], self.span)
        scaled = [(column, size / UNIT, ranges) for column, size, ranges in stays]
        for i, held in zip(ops, levels(self.linear, ops, scaled), strict=True):
            terms = {self.outs[self.span[i]]: 1.0, self.ins[self.span[i]]: 1.0}
            if held is not None:
                terms[held] = 1.0
            self.linear.row(terms, high=float(model.free[i]) / UNIT)
