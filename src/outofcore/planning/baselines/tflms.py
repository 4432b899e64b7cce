"""Swap tensors with a distant next use, fetch them a fixed distance ahead: TFLMS (arXiv 1807.02037)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from outofcore.analysis.gaps import gaps_of, is_large
from outofcore.analysis.recipes import History
from outofcore.costs import Costs
from outofcore.errors import BudgetError
from outofcore.graph import StepGraph
from outofcore.plan import Decision, Gap, Plan, Residency
from outofcore.planning.baselines.held import Held
from outofcore.planning.baselines.one_home import use_farthest_home
from outofcore.planning.policy import Asked, CheckedPolicy

Mode = Literal[0, 1, 2, 3]
_MODES: tuple[Mode, ...] = (0, 1, 2, 3)


@dataclass(frozen=True)
class TFLMS(CheckedPolicy):
    """Swaps by three distances in the order of the ops, tuned to the budget.

    Le, Imai, Negishi & Kawachiya, "TFLMS: Large Model Support in TensorFlow by Graph Rewriting", arXiv 1807.02037,
    section 4, and the tuning of its second version (same authors, "Automatic GPU memory management for large neural
    models in TensorFlow", ISMM 2019; arXiv 1812.07816 tunes it for a 3D U-Net).

        op           0 1 2 3 4 5 6 7 8 9          threshold 3, ahead 2, group 1
        made, used   M u         u u   u
        on device    ===     ===========          op 9 is served by a second swap-in, which starts at op 8,
        home          \\out--  \\in    \\in         since the room of the first is in use until then

    Unset fields are tuned in this order, by a simulation of the bytes held: the largest threshold that fits with
    ``ahead`` 1 and ``group`` 0, in the first mode with such a threshold; then the largest ``ahead``; then the largest
    ``group``. If the step fits, nothing is swapped.

    Different from the papers (see IBM ``tensorflow-large-model-support``): each op is a level of its own. A result is
    what an op last wrote, since captured ops may write in place. A copy-out takes the seconds of the link, where the
    simulator of the second version takes one level; and all of the memory is used, not nine tenths. Clean storages are
    evicted without a copy. The largest group that fits is used, where the code stops at the first. Storages below 64
    KiB stay, where the code never swaps vectors. Of several homes the farthest is used. Left out: excluded scopes and
    op types, and the parameters of the first version that pick the op of a control edge, which are one distance,
    ``ahead``, in the second. As in TFLMS, variables stay (parameters, persistent gradients, optimizer states, buffers),
    and inputs are there from the start.

    Attributes:
        threshold: in ops. A result goes home if a consumer is further than this from the op that wrote it; nearer
            consumers use it on the device. None: tuned.
        ahead: in ops, at least 1. A swap-in starts this far before the first consumer that it serves. None: tuned. Not
            used in modes 2 and 3.
        group: in ops. Consecutive far consumers within this distance share a swap-in, and the bytes stay between them.
            0: each has its own. None: tuned, and 0 in modes 2 and 3.
        mode: the synchronous copies. 0: none. 1: swap-outs; their room counts as free at once, so the op that takes it
            waits. 2: swap-ins, which begin when the consumer is due. 3: both. None: the first that fits.

    >>> TFLMS(ahead=4)
    TFLMS(threshold=None, ahead=4, group=None, mode=None)
    """

    name = "tflms"
    threshold: int | None = None
    ahead: int | None = None
    group: int | None = None
    mode: Mode | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("threshold", self.threshold is None or self.threshold >= 0, "0 or more")
        self.require("ahead", self.ahead is None or self.ahead >= 1, "1 or more")
        self.require("group", self.group is None or self.group >= 0, "0 or more")

    def variants(self, graph: StepGraph, costs: Costs, budget: int) -> Sequence[Asked]:
        return (
            (use_farthest_home(graph, costs, lambda home_costs, room: tflms(graph, home_costs, room, self)),)
            if costs.homes
            else ()
        )


def tflms(graph: StepGraph, costs: Costs, budget: int, options: TFLMS | None = None) -> Plan:
    """Plan a step by the method of ``TFLMS``; raise ``BudgetError`` if no plan fits."""
    options = options or TFLMS()
    rewriting, n = Rewriting.of(graph, costs), len(graph.ops)
    if rewriting.occupancy.peak(()) <= budget:
        return Plan("tflms", budget, ())

    def fits(threshold: int, ahead: int, group: int, mode: Mode) -> bool:
        return rewriting.occupancy.peak(rewriting.decisions(threshold, ahead, group, mode)) <= budget

    min_ahead, min_group = (options.ahead or 1, options.group or 0)
    for mode in (_MODES if options.mode is None else (options.mode,)) if costs.homes else ():
        threshold, ahead, group = options.threshold, min_ahead, min_group
        if not fits(0 if threshold is None else threshold, ahead, group, mode):
            continue
        if threshold is None:
            threshold = _largest(0, n, lambda value, mode=mode: fits(value, min_ahead, min_group, mode))
        if mode < 2 and options.ahead is None:
            ahead = _largest(1, n, lambda value, t=threshold, mode=mode: fits(t, value, min_group, mode))
        if mode < 2 and options.group is None:
            group = _largest(0, n, lambda value, t=threshold, a=ahead, mode=mode: fits(t, a, value, mode))
        return Plan("tflms", budget, rewriting.decisions(threshold, ahead, group, mode))
    raise BudgetError(
        f"the step needs more than {budget} bytes even with every swap that the options of tflms and the homes allow; "
        "raise the budget, or choose another policy"
    )


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """Return by bisection the largest value from ``low`` to ``high`` that fits; ``low`` must fit."""
    return low + bisect_left(range(low + 1, high + 1), True, key=lambda value: not fits(value))


@dataclass(frozen=True)
class Rewriting:
    """A step to which swaps can be added; ``costs`` have one home."""

    graph: StepGraph
    costs: Costs
    occupancy: Held  # without swaps
    gaps: tuple[tuple[Gap, int], ...]  # of storages that the step creates, each with the op that last wrote the bytes
    times: tuple[float, ...]  # the second at which each op starts if there are no stalls

    @staticmethod
    def of(graph: StepGraph, costs: Costs) -> Rewriting:
        """Collect the gaps of large storages that the step creates."""
        writes = History.of(graph).writes
        gaps = [
            (gap, writes[storage][bisect_left(writes[storage], gap.start + 1) - 1])
            for storage in sorted(graph.creator)
            if is_large(graph.storages[storage].bytes)
            for gap in gaps_of(graph, storage)
        ]
        times = tuple(accumulate((cost.seconds for cost in costs.ops), initial=0.0))
        return Rewriting(graph, costs, Held.of(graph, costs), tuple(gaps), times)

    def decisions(self, threshold: int, ahead: int, group: int, mode: Mode) -> tuple[Decision, ...]:
        """Return decisions to offload the gaps that these options of ``TFLMS`` select."""
        swapped: dict[Gap, int] = {}
        for gap, written in self.gaps:
            is_far = gap.end - written > threshold and gap.end > gap.start + 1
            is_served = gap.start - written > threshold and gap.end - gap.start <= group
            if is_far and not is_served:
                swapped[gap] = written
        ahead = 0 if mode >= 2 else ahead
        fetch = {gap: max(gap.end - ahead, gap.start + 1) for gap in swapped}
        release = {gap: gap.start + 1 for gap in swapped}
        link_free = 0.0
        at_home: dict[int, int] = {}  # storage -> the op that wrote the copy at home
        for gap in sorted(swapped, key=lambda gap: (gap.start, gap.storage)) if mode in (0, 2) else ():
            if at_home.get(gap.storage) != swapped[gap]:
                at_home[gap.storage] = swapped[gap]
                seconds = self.costs.homes[0].out_seconds(self.graph.storages[gap.storage].bytes)
                link_free = max(link_free, self.times[gap.start + 1]) + seconds
                release[gap] = min(max(bisect_left(self.times, link_free), gap.start + 1), fetch[gap])
        return tuple(Decision(gap, Residency.OFFLOAD, release[gap], fetch[gap]) for gap in sorted(swapped))
