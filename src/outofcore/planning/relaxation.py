"""The linear relaxation of planning: which gaps to keep, if fractions could be kept.

For each gap g a variable x_g in [0, 1], the share of its bytes that stay; for each op the bytes that
stay over it must fit beside what it touches. What does not stay is copied in, and, once for each
stretch in which it is not written, copied out. The step takes at least as long as its ops, as all
copies out, and as all copies in:

    minimise  T + weight * (seconds of copies)
    where     T >= compute,  T >= sum of seconds out,  T >= sum of seconds in
              sum of bytes_g * x_g over the gaps g around op i  <=  free bytes at op i

With ``transit`` = 0 the least T is a lower bound on the step time of every plan that does not
recompute: each such plan is a point of this polytope. With ``transit`` > 0 gaps are also charged
for the time that their bytes are still (or already) there while they are copied, at that multiple of
the copy's seconds; the bound is lost, but what is chosen can be scheduled with fewer stalls.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import highspy
import numpy as np
from numpy.typing import NDArray

from outofcore.planning.model import GapInfo, Model

_WHOLE = 1 - 1e-6


@dataclass(frozen=True)
class Relaxed:
    """A solution: the share of each gap that stays, and the least step time.

    ``cores`` has for each gap the ops over which it may be away, and ``room`` for each op the bytes that
    are left when no gap is kept over its core.
    """

    shares: NDArray[np.float64]
    step_seconds: float
    cores: tuple[tuple[tuple[int, int], ...], ...]
    room: NDArray[np.int64]

    def rounded(self, model: Model) -> NDArray[np.bool_]:
        """Which gaps to keep: the whole shares, then the fractions that still fit, the largest first."""
        keep = self.shares >= _WHOLE
        room = self.room.copy()
        for g in np.flatnonzero(keep):
            for first, last in self.cores[g]:
                room[first:last] -= model.gaps[g].bytes
        for g in sorted(np.flatnonzero(~keep), key=lambda g: (-self.shares[g], model.gaps[g].bytes, g)):
            info = model.gaps[g]
            if info.arriving or self.shares[g] <= 1 - _WHOLE:
                continue
            if all(np.all(room[a:b] >= info.bytes) for a, b in self.cores[g]):
                keep[g] = True
                for first, last in self.cores[g]:
                    room[first:last] -= info.bytes
        return keep


def core_of(model: Model, info: GapInfo, transit: float) -> tuple[int, int]:
    """The ops over which an offloaded gap's bytes are surely away, in extended indices, half-open."""
    n = len(model.graph.ops)
    start, end = info.gap.start + 1, info.gap.end
    if transit and model.home is not None:
        total = model.times[-1]

        def time(at: int) -> float:
            return model.times[at] if at <= n else model.times[at - n] + total

        def reached(seconds: float) -> int:
            if seconds <= total:
                return bisect_left(model.times, seconds)
            return n + bisect_left(model.times, seconds - total)

        def before(seconds: float) -> int:
            if seconds <= total:
                return max(bisect_right(model.times, seconds) - 1, 0)
            return n + bisect_right(model.times, seconds - total) - 1

        if not info.arriving:
            start = reached(time(start) + transit * model.home.out_seconds(info.bytes))
        end = before(time(end) - transit * model.home.in_seconds(info.bytes))
    return start, end


def relax(model: Model, *, transit: float = 0.0, weight: float = 1e-3) -> Relaxed | None:
    """Solve the relaxation; None if nothing can be offloaded and not all can stay, or charged transit is too much.

    Args:
        model: the step under its limit.
        transit: see the module.
        weight: what a second of copying costs where it is hidden behind compute.
    """
    n = len(model.graph.ops)
    home = model.home
    gaps = [g for g, info in enumerate(model.gaps) if not info.arriving]
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("random_seed", 0)
    shares = np.zeros(len(model.gaps))
    compute = model.costs.compute_seconds
    inf = highspy.kHighsInf

    # Columns: T, then x for each gap, then one for each copy-out of a stretch.
    costs: list[float] = [1.0]
    lower: list[float] = [compute]
    upper: list[float] = [inf]
    column: dict[int, int] = {}
    outs: dict[tuple[int, int], int] = {}
    in_seconds: dict[int, float] = {}
    out_seconds: dict[int, float] = {}
    constant_in = 0.0
    for g in gaps:
        info = model.gaps[g]
        column[g] = len(costs)
        seconds = home.in_seconds(info.bytes) if home else 0.0
        in_seconds[column[g]] = seconds
        constant_in += seconds
        costs.append(-weight * seconds)
        lower.append(0.0 if home else 1.0)
        upper.append(1.0)
    cyclic = {model.gaps[g].gap.storage: column[g] for g in gaps if model.gaps[g].cyclic}
    links: list[tuple[dict[int, float], float]] = []  # rows "sum >= bound"
    for g in gaps:
        info = model.gaps[g]
        storage = info.gap.storage
        if home is None or model.graph.storages[storage].kind.value == "input":
            continue
        key = (storage, info.segment)
        unwritten = info.segment == 0 and not info.cyclic
        if info.cyclic and storage not in model.changed:
            continue  # at home it is up to date, always
        if key not in outs:
            outs[key] = len(costs)
            seconds = home.out_seconds(info.bytes)
            out_seconds[outs[key]] = seconds
            costs.append(weight * seconds)
            lower.append(0.0)
            upper.append(1.0)
        if unwritten and storage in cyclic:
            # A copy is needed only if the storage was resident when the step began.
            links.append(({outs[key]: 1.0, column[g]: 1.0, cyclic[storage]: -1.0}, 0.0))
        else:
            links.append(({outs[key]: 1.0, column[g]: 1.0}, 1.0))

    rows: list[tuple[float, float, list[int], list[float]]] = []
    rows.append((constant_in, inf, [0, *in_seconds], [1.0, *in_seconds.values()]))
    rows.append((0.0, inf, [0, *out_seconds], [1.0, *(-s for s in out_seconds.values())]))
    for terms, bound in links:
        rows.append((bound, inf, list(terms), list(terms.values())))
    cores = _cores(model, transit)
    room, members = _memory(model, gaps, cores)
    previous: frozenset[int] = frozenset()
    for i in range(n):
        free = float(room[i])
        total = sum(model.gaps[g].bytes for g in members[i])
        if total <= free:
            continue
        if free < 0:
            return None
        # Consecutive ops with the same gaps around them differ only in what is free.
        current = frozenset(members[i])
        if current == previous and rows[-1][1] <= free:
            continue
        previous = current
        order = sorted(members[i])
        rows.append((-inf, free, [column[g] for g in order], [float(model.gaps[g].bytes) for g in order]))
    if home is None and len(rows) > 2 + len(links):
        return None
    _fill(solver, costs, lower, upper, rows)
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    values = solver.getSolution().col_value
    for g in gaps:
        shares[g] = min(max(values[column[g]], 0.0), 1.0)
    return Relaxed(shares, values[0], cores, room)


def _cores(model: Model, transit: float) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For each gap the ranges of ops over which it is surely away if it is offloaded."""
    n = len(model.graph.ops)
    found: list[tuple[tuple[int, int], ...]] = []
    for info in model.gaps:
        start, end = core_of(model, info, transit)
        if info.cyclic:  # at home when the step ends
            found.append(((min(start, n), n), (0, max(end - n, 0))))
        else:
            found.append(((start, max(start, end)),))
    return tuple(found)


def _memory(
    model: Model, gaps: list[int], cores: tuple[tuple[tuple[int, int], ...], ...]
) -> tuple[NDArray[np.int64], list[list[int]]]:
    """For each op the bytes left if no gap is kept over its core, and the gaps whose core it is in."""
    room = model.free.copy()
    members: list[list[int]] = [[] for _ in range(len(model.graph.ops))]
    for g in gaps:
        info = model.gaps[g]
        for first, last in model.inside(info):
            room[first:last] -= info.bytes
        for first, last in cores[g]:
            room[first:last] += info.bytes
            for i in range(first, last):
                members[i].append(g)
    return room, members


def _fill(
    solver: highspy.Highs,
    costs: list[float],
    lower: list[float],
    upper: list[float],
    rows: list[tuple[float, float, list[int], list[float]]],
) -> None:
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(costs), len(rows)
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = np.array(costs), np.array(lower), np.array(upper)
    lp.row_lower_ = np.array([row[0] for row in rows])
    lp.row_upper_ = np.array([row[1] for row in rows])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.cumsum([0, *(len(row[2]) for row in rows)])
    lp.a_matrix_.index_ = np.array([c for row in rows for c in row[2]], dtype=np.int32)
    lp.a_matrix_.value_ = np.array([v for row in rows for v in row[3]])
    solver.passModel(lp)
