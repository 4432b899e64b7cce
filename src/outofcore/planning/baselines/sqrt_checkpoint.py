"""Checkpoints at the borders of segments, with everything between recomputed (arXiv 1604.06174)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import isqrt

from outofcore.analysis.gaps import placed_bytes
from outofcore.analysis.recipes import Content, History, ops_to_recompute
from outofcore.costs import Costs
from outofcore.errors import GraphError
from outofcore.graph import StepGraph
from outofcore.plan import Decision, Gap, Plan, Residency
from outofcore.planning.baselines.waiting import waiting_gaps
from outofcore.planning.policy import Asked, CheckedPolicy

# Maximum distance of a border from an equal cut, as a share of a segment.
_REACH = 1 / 3


@dataclass(frozen=True)
class SqrtCheckpoint(CheckedPolicy):
    """Keeps the borders of segments and recomputes the other storages of each segment.

    Chen, Xu, Zhang & Guestrin, "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174), section 4. A chain
    of n layers is cut into segments, and only tensors that cross a border are kept. When the backward pass reaches a
    segment, its forward ops run again once. With sqrt(n) segments of equal size, O(sqrt(n)) memory suffices, at the
    cost of one more forward pass.

        forward    |--- segment 1 ---|--- segment 2 ---|--- segment 3 ---| turn
        backward                                         <- kept as is -- |
                     <- 1 runs again   <- 2 runs again

    Different from the paper: the forward pass ends at the *turn*, the op over which most bytes wait for later uses.
    Segments are equal in waiting bytes; numbers of segments are tried instead of budgets (4.2). Near an equal cut, a
    border is where the crossing tensors wait for the backward pass anyway, and where they are smallest. The last
    segment is not recomputed. Left out: the recursive form (4.3) and automatic in-place ops. Parameters, gradients and
    optimizer states stay, so the smallest budget is far above that of policies that offload. Only inputs and outputs
    are copied.

    Attributes:
        segments: number of segments. None: the root of the number of waiting storages, and some numbers up to four
            times more and fewer, of which the fastest plan is used.

    >>> SqrtCheckpoint(segments=4)
    SqrtCheckpoint(segments=4)
    """

    name = "sqrt-checkpoint"
    segments: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("segments", self.segments is None or self.segments >= 1, "1 or more")

    def variants(self, graph: StepGraph, costs: Costs, budget: int) -> Sequence[Asked]:
        counts = segment_counts(graph) if self.segments is None else (self.segments,)
        plans = [sqrt_checkpoint(graph, budget, segments=count) for count in counts]
        return [lambda room, plan=plan: plan for plan in plans]


def sqrt_checkpoint(graph: StepGraph, budget: int, *, segments: int | None = None) -> Plan:
    """Plan a step by checkpoints (see ``SqrtCheckpoint``); ``budget`` is only recorded in the plan."""
    waiting = waiting_gaps(graph)
    count = max(isqrt(len(waiting)), 1) if segments is None else segments
    decisions = sorted(_Checkpoints.of(graph, waiting, count).decisions(), key=lambda d: d.gap)
    return Plan("sqrt-checkpoint", budget, tuple(decisions))


def segment_counts(graph: StepGraph) -> tuple[int, ...]:
    """Return the numbers of segments to try, the number of the paper first."""
    root = max(isqrt(len(waiting_gaps(graph))), 1)
    tries = [root, *(round(root * 2**step) for step in (-0.5, 0.5, -1, 1, -2, 2))]
    return tuple(dict.fromkeys(max(count, 1) for count in tries))


@dataclass(frozen=True)
class _Checkpoints:
    """The borders that cut the forward pass into segments, and the gaps to recompute by segment."""

    graph: StepGraph
    history: History
    waiting: tuple[Gap, ...]  # in order of their storages
    turn: int
    borders: tuple[int, ...]  # ops that begin a segment, without the first; after the last everything is kept

    @staticmethod
    def of(graph: StepGraph, waiting: tuple[Gap, ...], count: int) -> _Checkpoints:
        """Cut the forward pass into up to ``count`` segments of about equal bytes."""
        turn = min((gap.end for gap in waiting), default=0)
        crossing = _crossing_bytes(graph, {gap.storage for gap in waiting}, turn)
        created = sorted(
            (graph.creator[gap.storage], placed_bytes(graph.storages[gap.storage].bytes)) for gap in waiting
        )
        ops, below = [op for op, _ in created], list(accumulate((size for _, size in created), initial=0))
        waits = [below[bisect_left(ops, op)] for op in range(turn + 1)]  # bytes made before each op that wait
        borders: list[int] = []
        for number in range(1, count):
            cut, reach = below[-1] * number / count, below[-1] / count * _REACH
            first, last = bisect_left(waits, cut - reach), bisect_right(waits, cut + reach)
            near = range(max(first, borders[-1] + 1 if borders else 1), min(last, turn))
            if near:
                borders.append(min(near, key=lambda op: (crossing[op], abs(waits[op] - cut))))
        return _Checkpoints(graph, History.of(graph), waiting, turn, tuple(borders))

    def decisions(self) -> Iterator[Decision]:
        """Yield the decisions that recompute each segment as a whole."""
        graph, history = self.graph, self.history
        checkpoints: set[int] = set()
        for border in self.borders:
            for gap in self.waiting:
                uses = graph.uses[gap.storage]
                at = bisect_left(uses, border)
                if uses[0] < border and at < len(uses) and uses[at] < self.turn:
                    checkpoints.add(gap.storage)
        dropped = {
            gap.storage
            for gap in self.waiting
            if gap.storage not in checkpoints and self.borders and graph.creator[gap.storage] < self.borders[-1]
        }
        for first, last in pairwise((0, *self.borders)):
            gaps = [g for g in self.waiting if g.storage in dropped and first <= graph.creator[g.storage] < last]
            if not gaps:
                continue
            fetch = min(gap.end for gap in gaps)
            is_held = self._is_held_at(fetch, dropped)
            computable: set[Content] = set()  # contents that can be recomputed, so that no chain is followed twice

            def at_hand(
                content: Content, is_held: Callable[[Content], bool] = is_held, computable: set[Content] = computable
            ) -> bool:
                return content in computable or is_held(content)

            for gap in sorted(gaps, key=lambda gap: graph.creator[gap.storage]):
                target = (gap.storage, history.version_at(gap.storage, fetch))
                try:
                    ops_to_recompute(history, [target], at_hand)
                except GraphError:
                    dropped.discard(gap.storage)  # it stays resident, so others may be recomputed from it
                    continue
                computable.add(target)
                yield Decision(gap, Residency.RECOMPUTE, gap.start + 1, fetch)

    def _is_held_at(self, op: int, dropped: set[int]) -> Callable[[Content], bool]:
        """Return a function that checks whether a storage version is available right before an op."""
        graph, history = self.graph, self.history
        always_held = history.always_available(op)

        def is_held(content: Content) -> bool:
            storage, version = content
            uses = graph.uses[storage]
            is_alive = storage not in dropped and uses[0] < op <= history.last_op_with(content, uses[-1])
            return always_held(content) or (is_alive and version == history.version_at(storage, op))

        return is_held


def _crossing_bytes(graph: StepGraph, waiting: set[int], forward_end: int) -> Sequence[tuple[int, int]]:
    """Return for each op of the forward pass the bytes held before it, without and with ``waiting`` storages."""
    writes = History.of(graph).writes
    without_waiting = [0] * (forward_end + 2)
    total = [0] * (forward_end + 2)
    for storage, creator in graph.creator.items():
        ahead = [use for use in graph.uses[storage] if use < forward_end]
        if not ahead or creator >= forward_end:
            continue
        count = placed_bytes(graph.storages[storage].bytes)
        # A storage that waits but is written again after the border does not wait as it crosses.
        steady = max(op for op in writes[storage] if op < forward_end) if storage in waiting else ahead[-1]
        for change, last in ((total, ahead[-1]), (without_waiting, min(steady, ahead[-1]))):
            change[creator + 1] += count
            change[last + 1] -= count
    return list(zip(accumulate(without_waiting), accumulate(total), strict=True))
