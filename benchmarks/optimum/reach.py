"""Initial states of schedules, and the plan of a finished schedule."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from optimum.fluid import Fluid
from optimum.moment import Event, Location, Moment
from optimum.prices import Prices
from outofcore.analysis.gaps import gaps_of
from outofcore.graph import StorageKind
from outofcore.plan import Decision, Gap, Residency
from outofcore.planning.baselines.held import Held


def initial_moments(fluid: Fluid, prices: Prices) -> Iterator[Moment]:
    """Yield a moment for each choice of persistent storages that start at home."""
    graph = fluid.graph
    n, count = len(graph.ops), len(graph.storages)
    cyclic = {gap.storage: gap for gap in prices.penalties if gap.end >= n} if fluid.costs.homes else {}
    movable = sorted(cyclic)
    for choice in product((False, True), repeat=len(movable)):
        initially_offloaded = frozenset(s for s, is_offloaded in zip(movable, choice, strict=True) if is_offloaded)
        places = [Location.NOWHERE] * count
        home = [-1] * count
        for storage in graph.storages:
            exists = storage.id not in graph.creator and (
                graph.uses[storage.id] or storage.kind is StorageKind.CONSTANT
            )
            if (storage.arrives and exists) or storage.id in initially_offloaded:
                places[storage.id], home[storage.id] = Location.OFFLOADED, 0
            elif exists:
                places[storage.id] = Location.RESIDENT
        allocated = sum(size for size, place in zip(fluid.sizes, places, strict=True) if place is Location.RESIDENT)
        penalty = sum(
            prices.penalties[cyclic[s]][Residency.OFFLOAD if s in initially_offloaded else Residency.KEEP]
            for s in movable
        )
        zeros = (0.0,) * count
        if allocated <= fluid.limit:
            yield Moment(
                0,
                tuple(places),
                tuple(home),
                initially_offloaded,
                0.0,
                0.0,
                0.0,
                0.0,
                zeros,
                zeros,
                zeros,
                allocated,
                (),
                penalty,
            )


def decisions_of(fluid: Fluid, moment: Moment) -> tuple[Decision, ...]:
    """Return the decisions of the plan that a finished schedule represents."""
    graph = fluid.graph
    n = len(graph.ops)
    events: list[Event] = []
    current: Moment | None = moment
    while current is not None:
        if current.event is not None:
            events.append(current.event)
        current = current.before
    events.reverse()
    op_starts = [event.start for event in events if event.residency is Residency.KEEP]
    fetch_op: dict[tuple[int, int], int] = {}  # storage and next use -> op before which it is fetched
    for event in events:
        if event.residency is Residency.KEEP:
            continue
        storages = (event.storages,) if event.residency is Residency.OFFLOAD else event.storages
        use_from = event.op
        for storage in storages:
            fetch_op[storage, fluid.next_use[storage][min(use_from, n)]] = event.op
    read = {(s, fluid.next_use[s][event.op]): event.op for event in events for s in event.pinned}
    decisions: list[Decision] = []
    for storage in graph.storages:
        if storage.arrives and graph.uses[storage.id]:
            gap = gaps_of(graph, storage.id)[0]
            decisions.append(Decision(gap, Residency.OFFLOAD, 0, min(fetch_op[storage.id, gap.end], gap.end)))
    for event in events:
        for storage, fate in event.storages if event.residency is Residency.KEEP else ():
            if fate is Residency.KEEP:
                continue
            gap = fluid.gaps[storage, event.op]
            decision = _decision(fluid, gap, fate, event, op_starts, fetch_op)
            pinned_until = read.get((storage, gap.end % n), -1) + 1  # a block that reruns read in place is not free
            decisions.append(
                replace(decision, release_by=min(max(decision.release_by, pinned_until), decision.fetch_at))
            )
    return tuple(sorted(decisions, key=lambda d: d.gap))


def _decision(
    fluid: Fluid,
    gap: Gap,
    fate: Residency,
    event: Event,
    op_starts: list[float],
    fetch_op: dict[tuple[int, int], int],
) -> Decision:
    n = len(fluid.graph.ops)
    fetch = fetch_op[gap.storage, gap.end % n] + (n if gap.end >= n else 0)
    if fate is Residency.RECOMPUTE:
        return Decision(gap, fate, gap.start + 1, fetch)
    freed_at = next((time for time, storage in event.freed if storage == gap.storage), event.start)
    release = max(bisect_left(op_starts, freed_at), gap.start + 1)
    return Decision(gap, fate, min(release, fetch, n), fetch)


def relax_times(fluid: Fluid, decisions: tuple[Decision, ...]) -> tuple[Decision, ...]:
    """Release storages later and fetch them earlier, where room is free; placed copies then wait less."""
    n = len(fluid.graph.ops)
    room = np.full(n, fluid.limit, dtype=np.int64) - Held.of(fluid.graph, fluid.costs).bytes_by_op(decisions)
    relaxed = list(decisions)
    for index in sorted(range(len(relaxed)), key=lambda i: (relaxed[i].gap.start, relaxed[i].gap.storage)):
        decision = relaxed[index]
        if decision.residency is not Residency.OFFLOAD or decision.gap.start < 0:
            continue
        size, release = fluid.sizes[decision.gap.storage], decision.release_by
        while release < min(decision.fetch_at, n) and room[release] >= size:
            room[release] -= size
            release += 1
        relaxed[index] = replace(decision, release_by=release)
    earliest = 0
    for index in sorted(
        range(len(relaxed)), key=lambda i: (relaxed[i].fetch_at % n, relaxed[i].gap.end % n, relaxed[i].gap.storage)
    ):
        decision = relaxed[index]
        if decision.residency is not Residency.OFFLOAD:
            continue
        size, base = fluid.sizes[decision.gap.storage], n if decision.gap.end >= n else 0
        fetch, earliest_fetch = decision.fetch_at - base, max(decision.release_by - base, 0)
        while fetch > max(earliest_fetch, earliest) and room[fetch - 1] >= size:
            fetch -= 1
            room[fetch] -= size
        earliest = max(earliest, fetch)
        relaxed[index] = replace(decision, fetch_at=base + fetch)
    return tuple(relaxed)
