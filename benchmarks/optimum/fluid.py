"""Schedules of a step with memory as a fluid: bytes count, addresses do not.

Ops, reruns and copies-in allocate in sequence, each as soon as its queue, its inputs and enough free bytes allow. Bytes
are freed when the last reader or a copy-out ends. See ``exact``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from optimum.moment import Event, Location, Moment, advance, free_at
from optimum.prices import Prices
from outofcore.analysis.gaps import constant_bytes, gaps_of, is_large, placed_bytes
from outofcore.analysis.recipes import Content, History, can_recompute, ops_to_recompute
from outofcore.costs import Costs
from outofcore.graph import StepGraph, StorageKind
from outofcore.lowering import lower
from outofcore.plan import Gap, Residency
from outofcore.planning.placing import keep_all, small_region_bytes


@dataclass(frozen=True)
class Fluid:
    """A step with precomputed lookups for the search.

    Attributes:
        limit: bytes for large blocks.
        sizes: placed bytes of each storage; 0 for small and constant storages.
        remaining_seconds: seconds of each op and all later ops.
        next_use: first use of each storage from each op on, or the number of ops.
        gaps: gap by storage and starting op.
        recomputable: gaps that can be recomputed.
        rerun_sources_until: for each storage, the last op before which a rerun may need an old version of it.
    """

    graph: StepGraph
    costs: Costs
    history: History
    limit: int
    sizes: tuple[int, ...]
    in_seconds: tuple[float, ...]
    out_seconds: tuple[float, ...]
    remaining_seconds: tuple[float, ...]
    next_use: tuple[tuple[int, ...], ...]
    gaps: Mapping[tuple[int, int], Gap]
    recomputable: frozenset[Gap]
    rerun_sources_until: tuple[int, ...]

    @staticmethod
    def of(graph: StepGraph, costs: Costs, budget: int) -> Fluid:
        n = len(graph.ops)
        history = History.of(graph)
        large = [is_large(s.bytes) and s.kind is not StorageKind.CONSTANT for s in graph.storages]
        home = costs.homes[0] if costs.homes else None
        remaining = [0.0] * (n + 1)
        for index in reversed(range(n)):
            remaining[index] = remaining[index + 1] + costs.ops[index].seconds
        gaps = {(s.id, gap.start): gap for s in graph.storages for gap in gaps_of(graph, s.id)}
        inner = [gap for gap in gaps.values() if gap.start >= 0 and gap.end < n]
        recomputable = frozenset(gap for gap in inner if can_recompute(history, gap.storage, gap.end))
        uses = graph.uses
        ends = [[*uses[s.id], n] for s in graph.storages]
        return Fluid(
            graph,
            costs,
            history,
            budget - small_region_bytes(lower(graph, costs, keep_all(0))) - constant_bytes(graph),
            tuple(placed_bytes(s.bytes) * large[s.id] for s in graph.storages),
            tuple(home.in_seconds(s.bytes) if home else 0.0 for s in graph.storages),
            tuple(home.out_seconds(s.bytes) if home else 0.0 for s in graph.storages),
            tuple(remaining),
            tuple(tuple(use_list[bisect_left(uses[s], i)] for i in range(n + 1)) for s, use_list in enumerate(ends)),
            gaps,
            recomputable,
            _rerun_source_ends(history, recomputable),
        )

    def successors(self, moment: Moment, prices: Prices) -> Iterator[Moment]:
        """Yield the successors: a copy-in, reruns, or the next op with every choice for its gaps."""
        op = moment.op
        if moment.finished:
            return
        offloaded = [
            s for s, place in enumerate(moment.places) if place is Location.OFFLOADED and self._next(s, op) < self._n
        ]
        if offloaded:
            yield from self._fetches(moment, offloaded)
            if any(self._next(storage, op) == op for storage in offloaded):
                return
        dropped = [s for s, place in enumerate(moment.places) if place is Location.DROPPED]
        due = [s for s in dropped if self._next(s, op) == op]
        if due:
            yield from self._rerun(moment, due, dropped)
        else:
            yield from self._run(moment, prices)

    def lower_bound(self, moment: Moment) -> float:
        op, history = moment.op, self.history
        if moment.finished:
            return max(moment.done, moment.in_free, moment.out_free)
        writers = {
            history.writes[s][history.version_at(s, op) - 1]
            for s, place in enumerate(moment.places)
            if place is Location.DROPPED
        }
        best = moment.done + self.remaining_seconds[op] + sum(self.costs.ops[index].seconds for index in writers)
        arrival = moment.in_free
        offloaded = [
            s for s, place in enumerate(moment.places) if place is Location.OFFLOADED and self._next(s, op) < self._n
        ]
        for storage in sorted(offloaded, key=lambda s: (self._next(s, op), s)):
            arrival += self.in_seconds[storage]
            best = max(best, arrival + self.remaining_seconds[self._next(storage, op)])
        leaving = moment.out_free
        for storage, writes in enumerate(history.writes):
            if writes and writes[-1] >= op and (storage in self.graph.outputs or storage in moment.initially_offloaded):
                leaving += self.out_seconds[storage]
        return max(best, leaving)

    @property
    def _n(self) -> int:
        return len(self.graph.ops)

    def _next(self, storage: int, op: int) -> int:
        return self.next_use[storage][op]

    def _fetches(self, moment: Moment, offloaded: list[int]) -> Iterator[Moment]:
        """Yield the copy-in that is needed first, and each other one that can start sooner."""
        first, *later = sorted(offloaded, key=lambda s: (self._next(s, moment.op), s))
        fetched = self._fetch(moment, first)
        if fetched is not None:
            yield fetched
        for storage in later:
            sooner = self._fetch(moment, storage)
            if sooner is not None and (fetched is None or sooner.last < fetched.last):
                yield sooner

    def _fetch(self, moment: Moment, storage: int) -> Moment | None:
        size = self.sizes[storage]
        earliest = max(moment.in_free, moment.last, moment.ready[storage])
        start = free_at(moment, earliest, self.limit - size)
        if start is None:
            return None
        end = start + self.in_seconds[storage]
        arrive = list(moment.arrive)
        arrive[storage] = end
        places = list(moment.places)
        places[storage] = Location.RESIDENT
        return advance(
            moment,
            start,
            Event(Residency.OFFLOAD, storage, moment.op + moment.replayed, start),
            held=moment.held + size,
            in_free=end,
            arrive=tuple(arrive),
            places=tuple(places),
        )

    def _rerun(self, moment: Moment, due: list[int], dropped: list[int]) -> Iterator[Moment]:
        """Yield reruns that create the due storages, with each choice of byproducts to keep."""
        op, history = moment.op, self.history
        current = {s: (s, history.version_at(s, op)) for s in dropped}

        def is_available(content: Content) -> bool:
            storage, version = content
            is_here = moment.places[storage] is Location.RESIDENT and version == history.version_at(storage, op)
            return is_here or moment.home[storage] == version

        runs = ops_to_recompute(history, [current[s] for s in due], is_available)
        created = {content for index in runs for content in history.makes(self.graph.ops[index])}
        byproducts = [s for s in dropped if s not in due and current[s] in created]
        for choice in product((True, False), repeat=len(byproducts)):
            kept_byproducts = [s for s, is_kept in zip(byproducts, choice, strict=True) if is_kept]
            pending = any(moment.ready[s] > moment.last for s in {s for i in runs for s in self.graph.ops[i].reads})
            for in_place in (False, True) if pending else (False,):
                successor = self._replay(moment, [*due, *kept_byproducts], runs, in_place)
                if successor is not None:
                    yield successor

    def _replay(self, moment: Moment, storages: list[int], runs: tuple[int, ...], in_place: bool) -> Moment | None:
        """Run reruns that create storages; ``in_place`` reads blocks that are being copied out where they are."""
        graph, history, op = self.graph, self.history, moment.op
        targets = {(s, history.version_at(s, op)) for s in storages}
        last_need = {content: index for index in runs for content in history.needs(graph.ops[index])}
        ready: dict[Content, float] = {}  # time at which each rerun result is ready
        in_free, now = moment.in_free, moment
        pinned: set[int] = set()

        def on_device(content: Content) -> bool:
            storage, version = content
            place = moment.places[storage]
            is_here = place is Location.RESIDENT or (
                in_place and place is Location.OFFLOADED and moment.ready[storage] > moment.last
            )
            return is_here and version == history.version_at(storage, op)

        for index in runs:
            rerun_op = graph.ops[index]
            needs, makes = dict(history.needs(rerun_op)), dict(history.makes(rerun_op))
            scratch = placed_bytes(self.costs.ops[index].workspace_bytes)
            scratch = scratch if is_large(scratch) else 0
            earliest, allocated = max(now.done, now.last), scratch
            for content in needs.items():
                storage = content[0]
                if content in ready:
                    earliest = max(earliest, ready[content])
                elif on_device(content):
                    earliest = max(earliest, moment.arrive[storage])
                    if moment.places[storage] is Location.OFFLOADED:
                        pinned.add(storage)
                else:
                    in_free = max(in_free, moment.ready[storage], moment.last) + self.in_seconds[storage]
                    ready[content] = in_free
                    earliest, allocated = max(earliest, in_free), allocated + self.sizes[storage]
            allocated += sum(self.sizes[s] for s in rerun_op.touched if s not in needs)
            start = free_at(now, earliest, self.limit - allocated)
            if start is None:
                return None
            end = start + self.costs.ops[index].seconds
            freed = scratch + sum(self.sizes[s] for s in rerun_op.discards)
            for storage in set(needs) & set(makes):
                ready.pop((storage, needs[storage]), None)
            ready |= dict.fromkeys(makes.items(), end)
            for content in set(ready) - targets:
                if last_need.get(content, -1) <= index or on_device(content):
                    del ready[content]
                    freed += self.sizes[content[0]]
            now = advance(now, start, None, held=now.held + allocated, done=end, frees=((end, freed),))
        places, written = list(now.places), list(now.written)
        for storage in storages:
            places[storage], written[storage] = Location.RESIDENT, ready[storage, history.version_at(storage, op)]
        chain = Event(Residency.RECOMPUTE, tuple(sorted(storages)), op, now.last, pinned=frozenset(pinned))
        pinned_frees = tuple((moment.ready[s], self.sizes[s]) for s in sorted(pinned))
        remaining_frees = list(now.frees)
        for item in pinned_frees:
            if item not in remaining_frees:
                return None  # it was freed before the last rerun could read it
            remaining_frees.remove(item)
        now = replace(now, frees=tuple(remaining_frees), pinned=pinned_frees)
        return advance(now, now.last, chain, in_free=in_free, places=tuple(places), written=tuple(written), replayed=1)

    def _run(self, moment: Moment, prices: Prices) -> Iterator[Moment]:
        index = moment.op
        op = self.graph.ops[index]
        scratch = placed_bytes(self.costs.ops[index].workspace_bytes)
        scratch = scratch if is_large(scratch) else 0
        allocated = scratch + sum(self.sizes[s] for s in op.creates)
        earliest = max([moment.done, moment.last, *(moment.arrive[s] for s in op.touched)])
        start = free_at(moment, earliest, self.limit - allocated)
        if start is None:
            return
        end = start + self.costs.ops[index].seconds
        gaps = [self.gaps[s, index] for s in op.touched if (s, index) in self.gaps]
        for choices in product(*(self._choices(moment, gap, prices) for gap in gaps)):
            fate = {gap.storage: choice for gap, choice in zip(gaps, choices, strict=True)}
            yield self._moment_after(moment, index, start, end, allocated, scratch, fate, prices)

    def _choices(self, moment: Moment, gap: Gap, prices: Prices) -> tuple[Residency, ...]:
        if gap.end >= self._n:
            return (Residency.OFFLOAD,) if gap.storage in moment.initially_offloaded else (Residency.KEEP,)
        if gap not in prices.penalties:
            return (Residency.KEEP,)
        choices = [Residency.KEEP]
        if self.costs.homes:
            choices.append(Residency.OFFLOAD)
        if gap in self.recomputable:
            choices.append(Residency.RECOMPUTE)
        return tuple(choices)

    def _moment_after(
        self,
        moment: Moment,
        index: int,
        start: float,
        end: float,
        allocated: int,
        scratch: int,
        fate: dict[int, Residency],
        prices: Prices,
    ) -> Moment:
        """Return the moment after an op, given the fate of each storage that it touches."""
        graph, op = self.graph, self.graph.ops[index]
        places, home = list(moment.places), list(moment.home)
        ready, written = list(moment.ready), list(moment.written)
        frees, gone = [(end, scratch)], list[tuple[float, int]]()
        frees += [(max(time, end), count) for time, count in moment.pinned]
        out_free, penalty = moment.out_free, moment.penalty
        for storage in op.creates:
            places[storage] = Location.RESIDENT
        for storage in op.mutates + op.creates:
            written[storage] = end
        for storage in op.touched:
            if storage in fate or graph.storages[storage].kind is StorageKind.CONSTANT:
                continue
            version = self.history.version_at(storage, index + 1)
            changed = graph.storages[storage].arrives and version > 0
            if (storage in graph.outputs or changed) and home[storage] != version:
                out_free = max(out_free, written[storage]) + self.out_seconds[storage]
                ready[storage], home[storage] = out_free, version
                frees.append((max(out_free, end), self.sizes[storage]))
            else:
                frees.append((end, self.sizes[storage]))
            # The copy at home stays valid, as a possible source of reruns.
            places[storage] = Location.NOWHERE
        leaving = sorted(s for s, residency in fate.items() if residency is not Residency.KEEP)
        for storage, residency in sorted(fate.items()):
            gap = self.gaps[storage, index]
            if gap.end < self._n and gap in prices.penalties:
                penalty += prices.penalties[gap][residency]
        for storage in leaving:
            version = self.history.version_at(storage, index + 1)
            places[storage] = Location.OFFLOADED if fate[storage] is Residency.OFFLOAD else Location.DROPPED
            if fate[storage] is Residency.RECOMPUTE or home[storage] == version:
                frees.append((end, self.sizes[storage]))
                gone.append((end, storage))
                continue
            out_free = max(out_free, written[storage]) + self.out_seconds[storage]
            frees.append((max(out_free, end), self.sizes[storage]))
            gone.append((max(out_free, end), storage))
            ready[storage], home[storage] = out_free, version
        if index + 1 == self._n:
            for storage in graph.outputs:
                if places[storage] is Location.RESIDENT and home[storage] != self.history.version_at(storage, self._n):
                    out_free = max(out_free, written[storage]) + self.out_seconds[storage]
        for storage, until in enumerate(self.rerun_sources_until):
            is_old = places[storage] is Location.NOWHERE or home[storage] != self.history.version_at(storage, index + 1)
            if is_old and until <= index:
                home[storage] = -1
        return advance(
            moment,
            start,
            Event(Residency.KEEP, tuple(sorted(fate.items())), index, start, tuple(gone)),
            op=index + 1,
            finished=index + 1 == self._n,
            held=moment.held + allocated,
            done=end,
            out_free=out_free,
            places=tuple(places),
            home=tuple(home),
            ready=tuple(ready),
            written=tuple(written),
            penalty=penalty,
            frees=tuple(frees),
            replayed=0,
            pinned=(),
        )


def _rerun_source_ends(history: History, recomputable: frozenset[Gap]) -> tuple[int, ...]:
    """Return for each storage the latest gap end whose recomputation may need it, directly or not."""
    latest = [0] * len(history.graph.storages)
    for gap in recomputable:
        pending = [(gap.storage, history.version_at(gap.storage, gap.end))]
        visited = set(pending)
        while pending:
            storage, version = pending.pop()
            latest[storage] = max(latest[storage], gap.end)
            if version > 0:
                op = history.graph.ops[history.writes[storage][version - 1]]
                fresh = set(history.needs(op)) - visited
                visited |= fresh
                pending += fresh
    return tuple(latest)
