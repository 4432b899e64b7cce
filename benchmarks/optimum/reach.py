"""Where schedules begin, and the plan that a finished one amounts to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from optimum.fluid import Fluid
from optimum.moment import Event, Moment, Place
from optimum.prices import Prices
from outofcore.analysis.gaps import gaps_of
from outofcore.graph import StorageKind
from outofcore.plan import Decision, Gap, Residency
from outofcore.planning.baselines.held import Held


def starts(fluid: Fluid, prices: Prices) -> Iterator[Moment]:
    """All ways in which a step may begin: which persistent storages are at home."""
    graph = fluid.graph
    n, count = len(graph.ops), len(graph.storages)
    cyclic = {gap.storage: gap for gap in prices.penalties if gap.end >= n} if fluid.costs.homes else {}
    movable = sorted(cyclic)
    for choice in product((False, True), repeat=len(movable)):
        begun = frozenset(s for s, away in zip(movable, choice, strict=True) if away)
        places = [Place.NOWHERE] * count
        home = [-1] * count
        for storage in graph.storages:
            exists = storage.id not in graph.creator and (
                graph.uses[storage.id] or storage.kind is StorageKind.CONSTANT
            )
            if (storage.arrives and exists) or storage.id in begun:
                places[storage.id], home[storage.id] = Place.AWAY, 0
            elif exists:
                places[storage.id] = Place.HERE
        held = sum(size for size, place in zip(fluid.sizes, places, strict=True) if place is Place.HERE)
        penalty = sum(prices.penalties[cyclic[s]][Residency.OFFLOAD if s in begun else Residency.KEEP] for s in movable)
        zeros = (0.0,) * count
        if held <= fluid.limit:
            yield Moment(
                0, tuple(places), tuple(home), begun, 0.0, 0.0, 0.0, 0.0, zeros, zeros, zeros, held, (), penalty
            )


def decisions_of(fluid: Fluid, moment: Moment) -> tuple[Decision, ...]:
    """The decisions of the plan that does what a finished schedule does."""
    graph = fluid.graph
    n = len(graph.ops)
    events: list[Event] = []
    at: Moment | None = moment
    while at is not None:
        if at.event is not None:
            events.append(at.event)
        at = at.before
    events.reverse()
    begins = [event.start for event in events if event.what is Residency.KEEP]
    back: dict[tuple[int, int], int] = {}  # storage and next use -> the op before which it comes back
    for event in events:
        if event.what is Residency.KEEP:
            continue
        storages = (event.storages,) if event.what is Residency.OFFLOAD else event.storages
        use_from = event.op
        for storage in storages:
            back[storage, fluid.next_use[storage][min(use_from, n)]] = event.op
    read = {(s, fluid.next_use[s][event.op]): event.op for event in events for s in event.pinned}
    found: list[Decision] = []
    for storage in graph.storages:
        if storage.arrives and graph.uses[storage.id]:
            gap = gaps_of(graph, storage.id)[0]
            found.append(Decision(gap, Residency.OFFLOAD, 0, min(back[storage.id, gap.end], gap.end)))
    for event in events:
        for storage, fate in event.storages if event.what is Residency.KEEP else ():
            if fate is Residency.KEEP:
                continue
            gap = fluid.gaps[storage, event.op]
            made = _decision(fluid, gap, fate, event, begins, back)
            held_to = read.get((storage, gap.end % n), -1) + 1  # what is read where it is must not be counted on
            found.append(replace(made, release_by=min(max(made.release_by, held_to), made.fetch_at)))
    return tuple(sorted(found, key=lambda d: d.gap))


def _decision(
    fluid: Fluid,
    gap: Gap,
    fate: Residency,
    event: Event,
    begins: list[float],
    back: dict[tuple[int, int], int],
) -> Decision:
    n = len(fluid.graph.ops)
    fetch = back[gap.storage, gap.end % n] + (n if gap.end >= n else 0)
    if fate is Residency.RECOMPUTE:
        return Decision(gap, fate, gap.start + 1, fetch)
    gone = next((time for time, storage in event.gone if storage == gap.storage), event.start)
    release = max(bisect_left(begins, gone), gap.start + 1)
    return Decision(gap, fate, min(release, fetch, n), fetch)


def spread(fluid: Fluid, decisions: tuple[Decision, ...]) -> tuple[Decision, ...]:
    """The same decisions with room counted on later and taken earlier, where nobody else needs it.

    A placed copy-in waits for whatever lay where it goes. With room to spare that should be something long gone.
    """
    n = len(fluid.graph.ops)
    room = np.full(n, fluid.limit, dtype=np.int64) - Held.of(fluid.graph, fluid.costs).under(decisions)
    found = list(decisions)
    for index in sorted(range(len(found)), key=lambda i: (found[i].gap.start, found[i].gap.storage)):
        made = found[index]
        if made.residency is not Residency.OFFLOAD or made.gap.start < 0:
            continue
        size, release = fluid.sizes[made.gap.storage], made.release_by
        while release < min(made.fetch_at, n) and room[release] >= size:
            room[release] -= size
            release += 1
        found[index] = replace(made, release_by=release)
    earliest = 0
    for index in sorted(
        range(len(found)), key=lambda i: (found[i].fetch_at % n, found[i].gap.end % n, found[i].gap.storage)
    ):
        made = found[index]
        if made.residency is not Residency.OFFLOAD:
            continue
        size, base = fluid.sizes[made.gap.storage], n if made.gap.end >= n else 0
        fetch, least = made.fetch_at - base, max(made.release_by - base, 0)
        while fetch > max(least, earliest) and room[fetch - 1] >= size:
            fetch -= 1
            room[fetch] -= size
        earliest = max(earliest, fetch)
        found[index] = replace(made, fetch_at=base + fetch)
    return tuple(found)
