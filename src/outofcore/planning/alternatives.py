"""Other plans of a step, of which one may be quicker than that which is best by simulation.

A simulation is as good as its costs, and what is least sure of these is what copies take beside ops. So the step is
planned as well as if copies took twice as long and half as long: one of the plans moves less and computes more again,
the other the reverse. Beside them are the plain rules: everything leaves, and each layer is computed again. All are
then simulated under the costs that are believed, and it is for who runs them to say which is the quickest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from outofcore.costs import Costs
from outofcore.errors import BudgetError
from outofcore.graph import StepGraph
from outofcore.plan import Residency
from outofcore.planning.baselines.sqrt_checkpoint import SqrtCheckpoint
from outofcore.planning.offload_all import offload_all
from outofcore.planning.parameters import QUICK
from outofcore.planning.placing import Planned
from outofcore.planning.policy import OffloadAll, first_of, plans_of
from outofcore.planning.resident_gradients import let_stay
from outofcore.planning.search import search
from outofcore.program import Run
from outofcore.simulator import recompute_seconds, simulate

# Plans that move so much less or more, or compute so much of the step again less or more, are of another kind.
_MOVED, _AGAIN = 0.1, 0.01
# A plain rule is placed where it could take no longer than the plan, times this, with links twice as fast.
_WORTH_PLACING = 1.25
_FASTER = 2.0
_IN_LIST = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")
# No more lists than that are stages rather than layers.
_STAGES = 5


@dataclass(frozen=True)
class Alternative:
    """Another plan.

    Attributes:
        how: it was made, in words.
        planned: with the timeline under the costs that are believed.
    """

    how: str
    planned: Planned


def alternatives(graph: StepGraph, costs: Costs, budget: int, chosen: Planned) -> Iterator[Alternative]:
    """Plans of other kinds than one, and than each other; none where nothing has to leave.

    Args:
        graph: the step.
        costs: that are believed.
        budget: bytes of the arena.
        chosen: the best plan under these.
    """
    if not costs.homes or chosen.plan.policy == "keep-all":
        return
    found = [chosen]
    for how, planned in _all(graph, costs, budget, chosen):
        again = resimulated(graph, costs, let_stay(graph, costs, budget, planned))
        if all(is_another_kind(costs, again, other) for other in found):
            found.append(again)
            yield Alternative(how, again)


def resimulated(graph: StepGraph, costs: Costs, planned: Planned) -> Planned:
    """A plan with its timeline under other costs."""
    return replace(planned, timeline=simulate(graph, costs, planned.program))


def is_another_kind(costs: Costs, one: Planned, other: Planned) -> bool:
    """Whether two plans move or compute again clearly different amounts."""
    moved = moved_bytes(one), moved_bytes(other)
    again = recompute_seconds(costs, one.program), recompute_seconds(costs, other.program)
    return abs(moved[0] - moved[1]) > _MOVED * max(moved) or abs(again[0] - again[1]) > _AGAIN * costs.compute_seconds


def moved_bytes(planned: Planned) -> int:
    """Bytes that a step copies, both ways together."""
    program = planned.program
    return sum(program.blocks[i.block].bytes for i in program.instructions if not isinstance(i, Run))


def _all(graph: StepGraph, costs: Costs, budget: int, chosen: Planned) -> Iterator[tuple[str, Planned]]:
    for how, times in (("as if copies took twice as long", 0.5), ("as if copies took half as long", _FASTER)):
        for planned in search(graph, _tilted(costs, times), budget, QUICK)[:1]:
            yield how, planned
    seconds = chosen.timeline.step_seconds * _WORTH_PLACING
    layers = layers_of(graph)
    if layers > 1:
        rule = SqrtCheckpoint(segments=layers)
        try:
            placed = plans_of(rule, graph, costs, budget)
        except BudgetError:
            placed = []
        yield from (("each layer computed again", planned) for planned in placed)
    if _leaving_seconds(graph, costs, budget) <= seconds:
        yield from (("everything leaves", planned) for planned in first_of(OffloadAll(), graph, costs, budget))


def _tilted(costs: Costs, times: float) -> Costs:
    """The costs with links so many times as fast, which take as much less from ops."""
    homes = tuple(
        replace(
            home,
            bytes_per_s_out=home.bytes_per_s_out * times,
            bytes_per_s_in=home.bytes_per_s_in * times,
            latency_s=home.latency_s / times,
            compute_slowdown=home.compute_slowdown / times,
        )
        for home in costs.homes
    )
    return replace(costs, homes=homes)


def layers_of(graph: StepGraph) -> int:
    """How many layers a model has: modules in lists, such as ``encoder.layer.11``; 0: none.

    Where the outermost lists are of a few stages, the layers are those in the lists within.
    """
    outer: set[str] = set()
    inner: set[str] = set()
    for op in graph.ops:
        ends = [match.end() for match in _IN_LIST.finditer(op.module)]
        outer.update(op.module[:end] for end in ends[:1])
        inner.update(op.module[:end] for end in ends[1:2])
    return len(outer) if len(outer) > _STAGES else max(len(outer), len(inner))


def _leaving_seconds(graph: StepGraph, costs: Costs, budget: int) -> float:
    """Seconds of a step in which everything leaves, at the least, with links twice as fast as believed."""
    links = _tilted(costs, _FASTER)
    arriving = sum(
        links.homes[decision.home].in_seconds(graph.storages[decision.gap.storage].bytes)
        for decision in offload_all(graph, budget, costs=costs).decisions
        if decision.residency is Residency.OFFLOAD
    )
    return costs.compute_seconds + arriving
