"""Offload tensors that are slow to compute, recompute the others: SuperNeurons (arXiv 1801.04380)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from outofcore.analysis.gaps import is_large, large_needs, placed_bytes
from outofcore.analysis.recipes import History, can_recompute
from outofcore.costs import Costs
from outofcore.errors import BudgetError
from outofcore.graph import Op, StepGraph
from outofcore.plan import Decision, Gap, Plan, Residency
from outofcore.planning.baselines.held import Held
from outofcore.planning.baselines.one_home import use_farthest_home
from outofcore.planning.baselines.waiting import waiting_gaps
from outofcore.planning.policy import Asked, CheckedPolicy

# An op is heavy if it takes this many times the median op's seconds per byte.
_HEAVY = 2.0


@dataclass(frozen=True)
class SuperNeurons(CheckedPolicy):
    """Liveness, a tensor pool and cost-aware recomputation, adapted from layers to ops.

    Wang et al., "SuperNeurons: Dynamic GPU Memory Management for Training Deep Neural Networks" (PPoPP 2018, arXiv
    1801.04380), section 3:

    - Unified tensor pool (3.3): *checkpoints* go home, and are fetched one checkpoint ahead in the backward pass. A
      cache on the device keeps as many of them as fit; the least recently used are evicted first.
    - Cost-aware recomputation (3.4): the storages between two checkpoints, a *segment*, are dropped and recomputed. If
      a segment takes no more than the neediest op, it is recomputed at once and stays (speed-centric). If it takes
      more, each storage is recomputed when it is needed, and is then dropped (memory-centric).

        forward    C1 - s - s - C2 - s - C3 ...      C: conv, linear, join, fork; s: batch norm, relu, dropout
        home       C1 ------>   C2 -->               copied out while the next ones are computed
        backward   ... C3   [C2 s] C2   [C1 s s] C1  copied in one ahead; [ ]: recomputed, from the checkpoint

    Checkpoints are the results of heavy ops, joins and forks. Heavy ops take more than twice the median seconds per
    byte, since a graph need not name its ops (in the paper, convolutions and fully connected layers). Joins read two
    storages of the step (random numbers aside); forks are storages that several forward ops read.

    Different from the paper: decisions are made before the step, and the cache is the number of checkpoints that fit.
    If there is no room to fetch one checkpoint ahead, they are fetched just in time. Storages below 64 KiB stay. Of
    several homes the farthest is used; without any, checkpoints stay. Left out: the preallocated heap, and the choice
    of algorithms by workspace (3.5), since algorithms round differently. As in the paper, parameters, gradients and
    optimizer states stay, and inputs are there from the start.

    Attributes:
        recompute: recompute segments; False: they stay, and only checkpoints are offloaded.

    >>> SuperNeurons(recompute=False)
    SuperNeurons(recompute=False)
    """

    name = "superneurons"
    recompute: bool = True

    def variants(self, graph: StepGraph, costs: Costs, budget: int) -> Sequence[Asked]:
        def plan(home_costs: Costs, room: int) -> Plan:
            return superneurons(graph, home_costs, room, recompute=self.recompute)

        return (use_farthest_home(graph, costs, plan),)


def superneurons(graph: StepGraph, costs: Costs, budget: int, *, recompute: bool = True) -> Plan:
    """Plan a step by the method of ``SuperNeurons``; raise ``BudgetError`` if no plan fits."""
    segments = _Segments.of(graph, costs)
    max_count = len(segments.checkpoints) if costs.homes else 0
    for ahead in (True, False):

        def fits(count: int, ahead: bool = ahead) -> bool:
            return segments.occupancy.peak(segments.decisions(count, recompute, ahead)) <= budget

        count = bisect_left(range(max_count + 1), True, key=fits)
        if count <= max_count:
            return Plan("superneurons", budget, segments.decisions(count, recompute, ahead))
    raise BudgetError(
        f"the step needs more than {budget} bytes even if superneurons offloads every checkpoint for which there is a "
        "home; raise the budget, or choose another policy"
    )


@dataclass(frozen=True)
class _Segments:
    """The checkpoints of a step and the gaps between them, which may be recomputed."""

    graph: StepGraph
    checkpoints: tuple[Gap, ...]  # the least recently used first
    makers: tuple[int, ...]  # the ops that make them, in order
    segments: tuple[tuple[Gap, ...], ...]  # gaps before the first maker, between it and the second, and so on
    neediest: int  # bytes that the neediest op takes by itself
    occupancy: Held

    @staticmethod
    def of(graph: StepGraph, costs: Costs) -> _Segments:
        """Divide the gaps that wait for the backward pass into checkpoints and the segments between them."""
        waiting = waiting_gaps(graph)
        history = History.of(graph)
        branching = _checkpoint_storages(graph, costs, waiting)
        checkpoints = [
            gap for gap in waiting if gap.storage in branching or not can_recompute(history, gap.storage, gap.end)
        ]
        makers = sorted({graph.creator[gap.storage] for gap in checkpoints})
        segments: dict[int, list[Gap]] = {}
        for gap in sorted(set(waiting) - set(checkpoints)):
            segments.setdefault(bisect_right(makers, graph.creator[gap.storage]), []).append(gap)
        return _Segments(
            graph,
            tuple(sorted(checkpoints, key=lambda gap: (gap.start, gap.storage))),
            tuple(makers),
            tuple(tuple(segments.get(index, ())) for index in range(len(makers) + 1)),
            max(large_needs(graph, costs), default=0),
            Held.of(graph, costs),
        )

    def decisions(self, count: int, recompute: bool, fetch_ahead: bool) -> tuple[Decision, ...]:
        """Return decisions that offload the first ``count`` checkpoints and optionally recompute the segments."""
        decisions: list[Decision] = []
        due: dict[Gap, int] = {gap: gap.end for gap in self.checkpoints[:count]}
        checkpoints_of: dict[int, list[Gap]] = {}  # by the op that makes them
        for gap in due:
            checkpoints_of.setdefault(self.graph.creator[gap.storage], []).append(gap)
        for index, gaps in enumerate(self.segments if recompute else ()):
            together = sum(map(self._bytes, gaps)) <= self.neediest
            first = min((gap.end for gap in gaps), default=0)
            for gap in gaps:
                fetch = max(first, gap.start + 1) if together else gap.end
                decisions.append(Decision(gap, Residency.RECOMPUTE, gap.start + 1, fetch))
            for gap in checkpoints_of.get(self.makers[index - 1], ()) if gaps and index else ():
                due[gap] = max(min(due[gap], first), gap.start + 1)
        times = sorted(set(due.values()))
        for gap, at in due.items():
            release, fetch = gap.start + 1, at
            if fetch_ahead:  # the times of the paper; if not, room is taken as late and freed as early as possible
                earlier = bisect_left(times, at)
                fetch = max(times[earlier - 1] if earlier else at, release)
                following = bisect_right(self.makers, gap.start)
                release = min(self.makers[following] if following < len(self.makers) else release, fetch)
            decisions.append(Decision(gap, Residency.OFFLOAD, max(release, gap.start + 1), fetch))
        return tuple(sorted(decisions, key=lambda d: d.gap))

    def _bytes(self, gap: Gap) -> int:
        return placed_bytes(self.graph.storages[gap.storage].bytes)


def _checkpoint_storages(graph: StepGraph, costs: Costs, waiting: tuple[Gap, ...]) -> set[int]:
    """Return the results of expensive ops and the storages at branches, which become checkpoints."""
    turn = min((gap.end for gap in waiting), default=0)
    random_storages = {s for op in graph.ops if op.random for s in op.mutates + op.creates}
    forward = [op for op in graph.ops[:turn] if any(_is_large_result(graph, s) for s in op.creates)]
    median_intensity = median(_seconds_per_byte(graph, costs, op) for op in forward) if forward else 0.0
    readers: dict[int, int] = {}
    branching: set[int] = set()
    for op in graph.ops[:turn]:
        read = {s for s in op.reads if _is_large_result(graph, s) and s not in random_storages}
        for storage in read - set(op.mutates):
            readers[storage] = readers.get(storage, 0) + 1
        if len(read) > 1 or _seconds_per_byte(graph, costs, op) > _HEAVY * median_intensity:
            branching.update(
                s for s in op.mutates + op.creates if _is_large_result(graph, s) and s not in random_storages
            )
    return branching | {storage for storage, count in readers.items() if count > 1}


def _is_large_result(graph: StepGraph, storage: int) -> bool:
    return storage in graph.creator and is_large(graph.storages[storage].bytes)


def _seconds_per_byte(graph: StepGraph, costs: Costs, op: Op) -> float:
    return costs.ops[op.id].seconds / max(sum(graph.storages[s].bytes for s in op.touched), 1)
