"""Swap what is used again far away, and fetch it a fixed distance ahead: TFLMS.

Le, Imai, Negishi & Kawachiya, "TFLMS: Large Model Support in TensorFlow by Graph Rewriting" (arXiv 1807.02037),
and the automatic tuning of its second version (same authors, "Automatic GPU memory management for large neural
models in TensorFlow", ISMM 2019; arXiv 1812.07816 tunes it for a 3D U-Net). Three numbers rule it, all of them
distances in the order of the ops:

- ``threshold``: the result of an op goes home if a consumer lies further away than this. Nearer consumers take
  it from the device, and with the last of them it leaves.
- ``ahead``: a swap-in starts this many ops before the first consumer that it serves (the ``lb`` of the first
  version, where a control edge from an op between ``lb`` and ``ub`` levels before the consumer starts it).
- ``group``: consumers within this distance of the first one that a swap-in serves share it; between them the
  bytes stay.

    op           0 1 2 3 4 5 6 7 8 9          threshold 3, ahead 2, group 1
    made, used   M u           u u   u
    on device    ===         ======= =        op 9 is served by a swap-in of its own, which starts at
    home           \\-out--   \\in    \\in       op 8, since the room of the first is in use until then

They are tuned with a simulation of the bytes held: the largest threshold that fits with ``ahead`` 1 and
``group`` 0, then the largest ``ahead`` that fits, then the largest ``group``. Copies-out are asynchronous, and their
room is counted on when they should be done; or synchronous: it is counted on at once, and the op that takes it waits.
Where even that does not fit, copies-in are synchronous as well (``ahead`` 0). The paper's second version is synchronous
only where nothing else fits; here whoever plans may ask for either, and take what the simulator finds faster.

Different from the paper: each op is a level of its own, since a captured step runs its ops one after the other
(what TFLMS calls serialisation of all levels); a result is what an op last wrote, since captured ops may write in
place; a value that was copied out and has not changed leaves again without a copy. Left out: the scopes and op types
that a user may exclude, and the "chain rule" that picks the op of a control edge through the forward pass. As in TFLMS
variables stay (parameters, gradients that persist, optimizer states, buffers), and inputs are there from the start.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from outofcore.analysis.gaps import gaps_of, is_large
from outofcore.analysis.recipes import History
from outofcore.costs import Costs
from outofcore.errors import BudgetError
from outofcore.graph import StepGraph
from outofcore.plan import Decision, Gap, Plan, Residency
from outofcore.planning.baselines.held import Held


def tflms(graph: StepGraph, costs: Costs, budget: int, *, synchronous: bool = False) -> Plan:
    """Plan a step by the three distances, tuned to the budget.

    Args:
        graph: the step.
        costs: measured or assumed. Without homes there is no plan unless everything fits.
        budget: bytes of large blocks that may be resident.
        synchronous: count on the room of copies-out at once.

    Raises:
        BudgetError: it does not fit even if every result is swapped at once and fetched as late as can be.
    """
    rewriting = _Rewriting.of(graph, costs)
    if rewriting.held.peak(()) <= budget:
        return Plan("tflms", budget, ())

    def fits(threshold: int, ahead: int, group: int) -> bool:
        return rewriting.held.peak(rewriting.decisions(threshold, ahead, group, synchronous)) <= budget

    n = len(graph.ops)
    for least in (1, 0) if synchronous else (1,):
        if costs.homes and fits(0, least, 0):
            threshold = _largest(0, n, lambda value, ahead=least: fits(value, ahead, 0))
            ahead = _largest(least, n if least else 0, lambda value, threshold=threshold: fits(threshold, value, 0))
            group = _largest(0, n, lambda value, threshold=threshold, ahead=ahead: fits(threshold, ahead, value))
            return Plan("tflms", budget, rewriting.decisions(threshold, ahead, group, synchronous))
    raise BudgetError(f"with every result swapped more than {budget} bytes are needed")


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest value that fits, if what fits does so up to some value; ``low`` is known to fit."""
    return low + bisect_left(range(low + 1, high + 1), True, key=lambda value: not fits(value))


@dataclass(frozen=True)
class _Rewriting:
    graph: StepGraph
    costs: Costs
    held: Held
    gaps: tuple[tuple[Gap, int], ...]  # of what the step creates, with the op that last wrote the bytes
    times: tuple[float, ...]  # when each op starts if nothing ever stalls

    @staticmethod
    def of(graph: StepGraph, costs: Costs) -> _Rewriting:
        writes = History.of(graph).writes
        found = [
            (gap, writes[storage][bisect_left(writes[storage], gap.start + 1) - 1])
            for storage in sorted(graph.creator)
            if is_large(graph.storages[storage].bytes)
            for gap in gaps_of(graph, storage)
        ]
        times = tuple(accumulate((cost.seconds for cost in costs.ops), initial=0.0))
        return _Rewriting(graph, costs, Held.of(graph, costs), tuple(found), times)

    def decisions(self, threshold: int, ahead: int, group: int, synchronous: bool) -> tuple[Decision, ...]:
        """The gaps that end with a swap-in."""
        home = self.costs.homes[0]
        swapped: list[tuple[Gap, int]] = []
        leader: dict[int, int] = {}  # storage -> the consumer that its latest swap-in was for
        for gap, written in self.gaps:
            first = leader.get(gap.storage, -1)
            served = first > written and gap.end - first <= group
            if gap.end - written > threshold and gap.end > gap.start + 1 and not served:
                leader[gap.storage] = gap.end
                swapped.append((gap, written))
        found: list[Decision] = []
        done = 0.0
        at_home: dict[int, int] = {}  # storage -> the op whose result its home holds
        for gap, _ in sorted(swapped):
            fetch = max(gap.end - ahead, gap.start + 1)
            found.append(Decision(gap, Residency.OFFLOAD, gap.start + 1, fetch))
        if synchronous:
            return tuple(found)
        when = dict(swapped)
        for index in sorted(range(len(found)), key=lambda index: (found[index].gap.start, found[index].gap.storage)):
            gap, fetch = found[index].gap, found[index].fetch_at
            if at_home.get(gap.storage) == when[gap]:
                continue
            at_home[gap.storage] = when[gap]
            seconds = home.out_seconds(self.graph.storages[gap.storage].bytes)
            done = max(done, self.times[gap.start + 1]) + seconds
            release = min(max(bisect_left(self.times, done), gap.start + 1), fetch)
            found[index] = Decision(gap, Residency.OFFLOAD, release, fetch)
        return tuple(found)
