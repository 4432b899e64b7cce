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

import numpy as np
from numpy.typing import NDArray

from outofcore.graph import StorageKind
from outofcore.planning.linear import UNIT, Linear, levels
from outofcore.planning.model import GapInfo, Model
from outofcore.planning.tight import tight_ops

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
    home = model.home
    gaps = [g for g, info in enumerate(model.gaps) if not info.arriving]
    linear = Linear()
    makespan = linear.column(model.costs.compute_seconds, cost=1.0)
    column: dict[int, int] = {}
    incoming: dict[int, float] = {makespan: 1.0}
    outgoing: dict[int, float] = {makespan: 1.0}
    arrivals = 0.0
    for g in gaps:
        seconds = home.in_seconds(model.gaps[g].bytes) if home else 0.0
        column[g] = linear.column(0.0 if home else 1.0, 1.0, -weight * seconds)
        incoming[column[g]] = seconds
        arrivals += seconds
    links: list[tuple[dict[int, float], float]] = []  # rows "sum >= bound"
    cyclic = {model.gaps[g].gap.storage: column[g] for g in gaps if model.gaps[g].cyclic}
    outs: dict[tuple[int, int], int] = {}  # one for each stretch
    for g in gaps if home else ():
        info = model.gaps[g]
        storage = info.gap.storage
        if model.graph.storages[storage].kind is StorageKind.INPUT:
            continue
        if info.cyclic and storage not in model.changed:
            continue  # at home it is up to date, always
        key = (storage, info.segment)
        if home and key not in outs:
            seconds = home.out_seconds(info.bytes)
            outs[key] = linear.column(0.0, 1.0, weight * seconds)
            outgoing[outs[key]] = -seconds
        if info.segment == 0 and not info.cyclic and storage in cyclic:
            # A copy is needed only if the storage was resident when the step began.
            links.append(({outs[key]: 1.0, column[g]: 1.0, cyclic[storage]: -1.0}, 0.0))
        else:
            links.append(({outs[key]: 1.0, column[g]: 1.0}, 1.0))
    linear.row(incoming, low=arrivals)
    linear.row(outgoing, low=0.0)
    for terms, bound in links:
        linear.row(terms, low=bound)
    cores = _cores(model, transit)
    room, total = _memory(model, gaps, cores)
    short = room[total > room]
    if len(short) and (home is None or int(short.min()) < 0):
        return None
    ops = tight_ops(room.tolist(), ((model.gaps[g].bytes, cores[g]) for g in gaps))
    held = levels(linear, ops, ((column[g], model.gaps[g].bytes / UNIT, cores[g]) for g in gaps))
    for i, level in zip(ops, held, strict=True):
        if level is not None and total[i] > room[i]:
            linear.row({level: 1.0}, high=float(room[i]) / UNIT)
    values = linear.minimise()
    if values is None:
        return None
    shares = np.zeros(len(model.gaps))
    for g in gaps:
        shares[g] = min(max(values[column[g]], 0.0), 1.0)
    return Relaxed(shares, float(values[makespan]), cores, room)


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
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each op the bytes left if no gap is kept over its core, and the bytes of all gaps whose core it is in."""
    n = len(model.graph.ops)
    edges, whole = np.zeros(n + 1, dtype=np.int64), np.zeros(n + 1, dtype=np.int64)
    for g in gaps:
        info = model.gaps[g]
        for ranges, change in ((model.inside(info), edges), (cores[g], whole)):
            for first, last in ranges:
                if first < last:
                    change[first] += info.bytes
                    change[last] -= info.bytes
    total: NDArray[np.int64] = np.cumsum(whole)[:-1]
    return model.free - np.cumsum(edges)[:-1] + total, total
