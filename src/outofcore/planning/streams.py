"""The relaxation of planning in which copies are streams beside the ops.

Like ``relaxation``, with two differences. What leaves takes room until it has flowed out, and what comes back
from when it flows in; both links flow only while time passes, be it that an op runs, runs again, or waits. And
a share of a gap may be computed again:

    minimise  sum of waits w_i + sum of seconds_g * again_g + weight * (seconds of copies)
    where     kept_g + away_g + again_g = 1
              out_i  >=  out_{i-1} + (leaving after op i-1) - rate * (seconds of op i-1 + w_i + (run again before i))
              in_{i-1}  >=  in_i + (needed back by op i) - rate * (seconds of op i + w_i + (run again before i))
              sum of bytes_g * kept_g over the gaps g around op i  +  out_i + in_i  <=  free bytes at op i

``out_i`` and ``in_i`` are the bytes on their way while op i runs. A step ends when all has flowed out, and begins with
nothing flowing in. So the solution says what to keep, what to offload and what to compute again all at once, and
when each op starts. In truth a block's room is free when all of its bytes have left, and a chain of runs may be
longer if what it reads is dropped too: both are for others to see to (``timing``, ``chains``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

import highspy
import numpy as np
from numpy.typing import NDArray

from outofcore.graph import StorageKind
from outofcore.planning.model import Ints, Model

_WHOLE = 1 - 1e-6
# What a second of copying counts at least beside a second of the step.
_WEIGHT = 0.002


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


def solve(
    model: Model, again: Mapping[int, float], transit: float = 0.0, fixed: Mapping[int, bool] | None = None
) -> Streams | None:
    """Solve the relaxation; None if there is no home or no solution.

    Args:
        model: the step under its limit.
        again: by gap, for those that may be computed again, the seconds that this takes.
    """
    return None if model.home is None else _Program(model, again).solve()


@dataclass
class _Program:
    model: Model
    again: Mapping[int, float]
    cost: list[float] = field(default_factory=list[float])
    low: list[float] = field(default_factory=list[float])
    high: list[float] = field(default_factory=list[float])
    rows: list[tuple[float, float, dict[int, float]]] = field(
        default_factory=list[tuple[float, float, dict[int, float]]]
    )

    def _column(self, cost: float, low: float = 0.0, high: float = 1.0) -> int:
        self.cost.append(cost)
        self.low.append(low)
        self.high.append(high)
        return len(self.cost) - 1

    def solve(self) -> Streams | None:
        model, home = self.model, self.model.home
        n = len(model.graph.ops)
        if home is None or (n and int(model.free.min()) < 0):
            return None
        infinity = highspy.kHighsInf
        weight = max(home.compute_slowdown, _WEIGHT)
        seconds = [cost.seconds for cost in model.costs.ops]
        waits = [self._column(1.0, high=infinity) for _ in range(n + 1)]
        outs = [self._column(0.0, high=infinity) for _ in range(n)]
        ins = [self._column(0.0, high=infinity) for _ in range(n)]
        # Of that, what is still to leave when the op is done, and what has arrived before it starts.
        after = [self._column(0.0, high=infinity) for _ in range(n)]
        ahead = [self._column(0.0, high=infinity) for _ in range(n)]
        # What flows in time: by op, before which time passes.
        passing: list[dict[int, float]] = [{waits[i]: 1.0} for i in range(n + 1)]
        leaving: list[dict[int, float]] = [{} for _ in range(n)]
        needed: list[dict[int, float]] = [{} for _ in range(n)]
        kept: dict[int, int] = {}
        repeated: dict[int, int] = {}
        sent: dict[tuple[int, int], dict[int, float]] = {}
        arrived = [0.0] * n  # what comes whatever is chosen
        cyclic = {info.gap.storage: g for g, info in enumerate(model.gaps) if info.cyclic}
        order = sorted(range(len(model.gaps)), key=lambda g: (model.gaps[g].gap.storage, not model.gaps[g].cyclic, g))
        for g in order:
            info = model.gaps[g]
            storage, end = info.gap.storage, info.gap.end - (n if info.cyclic else 0)
            count = home.in_seconds(info.bytes) * home.bytes_per_s_in
            if info.arriving:
                arrived[end] += count
                continue
            kept[g] = self._column(-weight * home.in_seconds(info.bytes))
            shares = {kept[g]: 1.0}
            if g in self.again:
                repeated[g] = self._column(self.again[g] - weight * home.in_seconds(info.bytes))
                shares[repeated[g]] = 1.0
                passing[end][repeated[g]] = self.again[g]
                self.rows.append((-infinity, 1.0, shares))
            arrived[end] += count
            for column in shares:
                needed[end][column] = needed[end].get(column, 0.0) - count
            if model.graph.storages[storage].kind is StorageKind.INPUT:
                continue
            if info.cyclic and storage not in model.changed:
                continue
            copy = self._column(weight * home.out_seconds(info.bytes))
            leaving[info.gap.start][copy] = home.out_seconds(info.bytes) * home.bytes_per_s_out
            # All copies of one stretch so far, this one among them, are at least what is away.
            earlier = sent.setdefault((storage, info.segment), {})
            earlier[copy] = 1.0
            terms, bound = earlier | shares, 1.0
            if info.segment == 0 and not info.cyclic and storage in cyclic:
                # A copy is needed only if the storage was resident when the step began.
                bound = 0.0
                terms[kept[cyclic[storage]]] = terms.get(kept[cyclic[storage]], 0.0) - 1.0
            self.rows.append((bound, infinity, terms))
        for i in range(n):
            # While op i runs: what is on its way at its start, less what flows meanwhile.
            for rate, way, rest in ((home.bytes_per_s_out, outs, after), (home.bytes_per_s_in, ins, ahead)):
                self.rows.append((-rate * seconds[i], infinity, {rest[i]: 1.0, way[i]: -1.0}))
        for i in range(n + 1):
            row: dict[int, float] = {c: home.bytes_per_s_out * v for c, v in passing[i].items()}
            if i:
                row[after[i - 1]] = -1.0
                for column, count in leaving[i - 1].items():
                    row[column] = row.get(column, 0.0) - count
            if i < n:
                row[outs[i]] = 1.0
            self.rows.append((0.0, infinity, row))
            if i == n:
                break
            row = {c: home.bytes_per_s_in * v for c, v in passing[i].items()}
            if i:
                row[ins[i - 1]] = 1.0
            row[ahead[i]] = -1.0
            for column, count in needed[i].items():
                row[column] = row.get(column, 0.0) - count
            self.rows.append((arrived[i], infinity, row))
        self._memory(kept, outs, ins)
        values = self._least()
        if values is None:
            return None
        shares_kept, shares_again = np.zeros(len(model.gaps)), np.zeros(len(model.gaps))
        shares_kept[list(kept)] = values[list(kept.values())]
        shares_again[list(repeated)] = values[list(repeated.values())]
        flowing = values[outs] + values[ins]
        late = [float(sum(values[c] * v for c, v in passed.items())) for passed in passing]
        starts = [late[0], *accumulate((s + w for s, w in zip(seconds, late[1:], strict=True)), initial=late[0])][1:]
        return Streams(np.clip(shares_kept, 0, 1), np.clip(shares_again, 0, 1), tuple(starts), flowing)

    def _memory(self, kept: dict[int, int], outs: list[int], ins: list[int]) -> None:
        model = self.model
        around: list[dict[int, float]] = [{} for _ in outs]
        for g, column in kept.items():
            info = model.gaps[g]
            for first, last in model.inside(info):
                for index in range(first, last):
                    around[index][column] = float(info.bytes)
        for index, terms in enumerate(around):
            terms[outs[index]] = 1.0
            terms[ins[index]] = 1.0
            self.rows.append((-highspy.kHighsInf, float(model.free[index]), terms))

    def _least(self) -> NDArray[np.float64] | None:
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.cost), len(self.rows)
        lp.col_cost_ = np.array(self.cost)
        lp.col_lower_, lp.col_upper_ = np.array(self.low), np.array(self.high)
        lp.row_lower_ = np.array([row[0] for row in self.rows])
        lp.row_upper_ = np.array([row[1] for row in self.rows])
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.cumsum([0, *(len(row[2]) for row in self.rows)])
        lp.a_matrix_.index_ = np.array([c for row in self.rows for c in row[2]], dtype=np.int32)
        lp.a_matrix_.value_ = np.array([v for row in self.rows for v in row[2].values()])
        solver = highspy.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("random_seed", 0)
        solver.passModel(lp)
        solver.run()
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        return np.array(solver.getSolution().col_value)
