"""A quick simulation of kept, swapped and recomputed feature maps, for PoocH (see ``pooch``).

It lowers no program and plans no addresses. Ops run in order. Copies-out run in the order of their maps' creation,
after the last use; copies-in in the order of use, from the op at which they get room. Recomputation adds to the time of
the op before which it runs; its reads from home are not timed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate

from outofcore.analysis.gaps import is_large, placed_bytes
from outofcore.analysis.recipes import Content, History, can_recompute, ops_to_recompute
from outofcore.costs import Costs
from outofcore.errors import GraphError
from outofcore.graph import StepGraph
from outofcore.plan import Decision, Gap, Residency
from outofcore.planning.baselines.held import Held
from outofcore.planning.baselines.waiting import waiting_gaps
from outofcore.planning.problem import Ints


class MapClass(Enum):
    KEEP = "keep"  # resident
    SWAP = "swap"  # offloaded and fetched
    RECOMPUTE = "recompute"  # dropped and recomputed


@dataclass(frozen=True)
class SimulatedStep:
    """The result of simulating a step with a class for each feature map."""

    decisions: tuple[Decision, ...]
    seconds: float
    stalling_out: frozenset[int]  # the maps whose copy-out an op or a copy-in waited for
    stalling_in: frozenset[int]  # the maps whose copy-in an op waited for


@dataclass(frozen=True)
class _Chain:
    maps: tuple[int, ...]
    seconds: float
    bytes: int  # needed in addition to the maps


@dataclass(frozen=True)
class StepSimulator:
    """Simulates a step in which each feature map is kept, swapped or recomputed."""

    graph: StepGraph
    costs: Costs
    limit: int
    maps: tuple[Gap, ...]  # the gap of each feature map
    sizes: tuple[int, ...]
    occupancy: Held
    history: History
    recomputable: frozenset[int]  # maps that can be recomputed
    out_seconds: tuple[float, ...]
    in_seconds: tuple[float, ...]

    @staticmethod
    def of(graph: StepGraph, costs: Costs, limit: int) -> StepSimulator:
        """Build the simulator of a step in which large blocks may take ``limit`` bytes."""
        maps, history = waiting_gaps(graph), History.of(graph)
        recomputable = frozenset(m for m, gap in enumerate(maps) if can_recompute(history, gap.storage, gap.end))
        sizes = tuple(placed_bytes(graph.storages[gap.storage].bytes) for gap in maps)
        home = costs.homes[0] if costs.homes else None
        counts = [graph.storages[gap.storage].bytes for gap in maps]
        out = tuple(home.out_seconds(count) if home else 0.0 for count in counts)
        back = tuple(home.in_seconds(count) if home else 0.0 for count in counts)
        return StepSimulator(graph, costs, limit, maps, sizes, Held.of(graph, costs), history, recomputable, out, back)

    @property
    def ops(self) -> int:
        return len(self.graph.ops)

    def can_recompute(self, m: int) -> bool:
        return m in self.recomputable

    def copy_seconds(self, m: int) -> float:
        return self.out_seconds[m] + self.in_seconds[m]

    def chain_seconds(self, m: int, classes: list[MapClass]) -> float:
        trial = list(classes)
        trial[m] = MapClass.RECOMPUTE
        return next((chain.seconds for chain in self._chains(trial).values() if m in chain.maps), 0.0)

    def without_copies(self, maps: Iterable[int]) -> StepSimulator:
        """Return a simulator in which copies of these maps take no time."""
        free_maps = set(maps)
        out = tuple(0.0 if m in free_maps else seconds for m, seconds in enumerate(self.out_seconds))
        back = tuple(0.0 if m in free_maps else seconds for m, seconds in enumerate(self.in_seconds))
        return replace(self, out_seconds=out, in_seconds=back)

    def compute_seconds(self, classes: list[MapClass]) -> float:
        """Return the seconds of all ops and of recomputation, without stalls."""
        recompute_seconds = sum(chain.seconds for chain in self._chains(classes).values())
        return sum(cost.seconds for cost in self.costs.ops) + recompute_seconds

    def room_with_kept_maps(self, classes: list[MapClass]) -> Ints:
        """Return for each op the bytes left if only maps of class ``KEEP`` are on the device."""
        evicted = [gap for gap, map_class in zip(self.maps, classes, strict=True) if map_class is not MapClass.KEEP]
        evictions = [Decision(gap, Residency.OFFLOAD, gap.start + 1, gap.end) for gap in evicted]
        return self.limit - self.occupancy.bytes_by_op(evictions)

    def reserve(self, room: Ints, m: int) -> bool:
        """Subtract a map from the free bytes ``room`` over its gap; return False if it does not fit."""
        gap = self.maps[m]
        if int(room[gap.start + 1 : gap.end].min(initial=self.sizes[m])) < self.sizes[m]:
            return False
        room[gap.start + 1 : gap.end] -= self.sizes[m]
        return True

    def run(self, classes: list[MapClass]) -> SimulatedStep | None:
        """Simulate a step with the given class (keep, swap or recompute) of each map; None if it does not fit."""
        chains = self._chains(classes)
        room = self.room_with_kept_maps(classes)
        extra = [0.0] * self.ops
        decisions: list[Decision] = []
        for op, chain in chains.items():
            extra[op] = chain.seconds
            room[op] -= chain.bytes
            for m in chain.maps:
                gap = self.maps[m]
                decisions.append(Decision(gap, Residency.RECOMPUTE, gap.start + 1, op))
                room[op : gap.end] -= self.sizes[m]
        if int(room.min(initial=0)) < 0:
            return None
        times = (0.0, *accumulate(cost.seconds + more for cost, more in zip(self.costs.ops, extra, strict=True)))
        swapped = [m for m, map_class in enumerate(classes) if map_class is MapClass.SWAP]
        releases = self._releases(swapped, room, times)
        best: SimulatedStep | None = None
        for delayed in (True, False):
            fetches = self._fetches(swapped, room.copy(), times, releases, delayed)
            seconds, out, back = self._timeline(swapped, times, releases, fetches)
            if best is None or seconds < best.seconds:
                swaps = [Decision(self.maps[m], Residency.OFFLOAD, releases[m], fetches[m]) for m in swapped]
                best = SimulatedStep(tuple(sorted([*decisions, *swaps], key=lambda d: d.gap)), seconds, out, back)
        return best

    def _chains(self, classes: list[MapClass]) -> dict[int, _Chain]:
        """Return the recomputations (chains), by the op before which each runs."""
        graph, history = self.graph, self.history
        recomputed = {gap.storage: m for m, gap in enumerate(self.maps) if classes[m] is MapClass.RECOMPUTE}
        back: dict[int, int] = {}
        chains: dict[int, _Chain] = {}
        due: dict[int, list[int]] = defaultdict(list)
        for m in recomputed.values():
            due[self.maps[m].end].append(m)
        for op in sorted(due):
            targets = [m for m in due[op] if m not in back]
            if not targets:
                continue
            always = history.always_available(op)

            def is_held(content: Content, op: int = op, always: Callable[[Content], bool] = always) -> bool:
                """Return whether a storage version is available right before ``op``."""
                storage, version = content
                if version != history.version_at(storage, op):
                    return False
                uses, m = graph.uses[storage], recomputed.get(storage)
                if m is not None and m not in back and self.maps[m].start < op <= self.maps[m].end:
                    return False
                return always(content) or uses[0] < op <= history.last_op_with(content, uses[-1])

            contents = [(self.maps[m].storage, history.version_at(self.maps[m].storage, op)) for m in targets]
            try:
                runs = ops_to_recompute(history, contents, is_held)
            except GraphError:
                # An input of the chain exists only at the start of the step.
                runs = ops_to_recompute(history, contents, always)
            contents_made = {content for index in runs for content in history.makes(graph.ops[index])}
            passed = [
                recomputed[storage]
                for storage, version in sorted(contents_made)
                if storage in recomputed
                and recomputed[storage] not in back
                and self.maps[recomputed[storage]].start < op <= self.maps[recomputed[storage]].end
                and version == history.version_at(storage, op)
            ]
            for m in passed:
                back[m] = op
            chains[op] = self._chain(op, tuple(passed), runs)
        return chains

    def _chain(self, op: int, maps: tuple[int, ...], runs: tuple[int, ...]) -> _Chain:
        """Return the recomputation (chain) of these maps before an op, with its seconds and additional bytes."""
        graph = self.graph
        returned = {self.maps[m].storage for m in maps}
        alive = {s for s in returned if s in graph.ops[op].touched}
        needs = 0
        for index in runs:
            scratch = placed_bytes(self.costs.ops[index].workspace_bytes)
            touched = set(graph.ops[index].touched) - returned - alive
            needs = max(needs, sum(map(self._large_bytes, touched)) + (scratch if is_large(scratch) else 0))
        # The chain may use the room of the op's own results and workspace, since the op has not started.
        scratch = placed_bytes(self.costs.ops[op].workspace_bytes)
        spare = sum(map(self._large_bytes, graph.ops[op].creates)) + (scratch if is_large(scratch) else 0)
        seconds = sum(self.costs.ops[index].seconds for index in runs)
        return _Chain(maps, seconds, max(needs - spare, 0))

    def _large_bytes(self, storage: int) -> int:
        count = self.graph.storages[storage].bytes
        return placed_bytes(count) if is_large(count) else 0

    def _releases(self, swapped: list[int], room: Ints, times: tuple[float, ...]) -> dict[int, int]:
        """Return for each swapped map the op at which its bytes are freed."""
        releases: dict[int, int] = {}
        link_free = 0.0
        for m in sorted(swapped, key=lambda m: self.maps[m].start):
            gap, size = self.maps[m], self.sizes[m]
            first = gap.start + 1
            link_free = max(link_free, times[first]) + self.out_seconds[m]
            safe = min(max(bisect_left(times, link_free), first), gap.end)
            short = (room[first:safe] < size).nonzero()[0]
            releases[m] = first + int(short[0]) if len(short) else safe
            room[first : releases[m]] -= size
        return releases

    def _fetches(
        self, swapped: list[int], room: Ints, times: tuple[float, ...], releases: dict[int, int], delayed: bool
    ) -> dict[int, int]:
        """Return for each swapped map the op at which its copy in starts: early, or late if ``delayed``."""
        latest: dict[int, float] = {}
        due = float("inf")
        for m in sorted(swapped, key=lambda m: -self.maps[m].end):
            due = min(due, times[self.maps[m].end]) - self.in_seconds[m]
            latest[m] = due
        fetches: dict[int, int] = {}
        for m in sorted(swapped, key=lambda m: (self.maps[m].end, m)):
            end, size = self.maps[m].end, self.sizes[m]
            wish = bisect_right(times, latest[m]) - 1 if delayed else 0
            first = min(max(wish, releases[m]), end)
            short = (room[first:end] < size).nonzero()[0]
            fetches[m] = first + int(short[-1]) + 1 if len(short) else first
            room[fetches[m] : end] -= size
        return fetches

    def _timeline(
        self, swapped: list[int], times: tuple[float, ...], releases: dict[int, int], fetches: dict[int, int]
    ) -> tuple[float, frozenset[int], frozenset[int]]:
        """Return the step's seconds, and two sets of maps that delayed it: by copies out, and by copies in."""
        events: list[tuple[int, int, int]] = []  # the op before which it happens, the kind, the map
        for m in swapped:
            gap = self.maps[m]
            events += [(gap.start + 1, 0, m), (releases[m], 1, m), (fetches[m], 2, m), (gap.end, 3, m)]
        late = out_free = in_free = 0.0  # how much later than ``times`` compute runs; when the links are free
        out_done: dict[int, float] = {}
        in_done: dict[int, float] = {}
        stalling_out: set[int] = set()
        stalling_in: set[int] = set()
        for op, kind, m in sorted(events):
            now = times[op] + late
            if kind == 0:
                out_free = out_done[m] = max(out_free, now) + self.out_seconds[m]
            elif kind == 1:
                if out_done[m] > now:
                    stalling_out.add(m)
                    late += out_done[m] - now
            elif kind == 2:
                in_free = in_done[m] = max(in_free, now, out_done[m]) + self.in_seconds[m]
            elif in_done[m] > now:
                stalling_in.add(m)
                late += in_done[m] - now
        return max(times[-1] + late, out_free, in_free), frozenset(stalling_out), frozenset(stalling_in)
