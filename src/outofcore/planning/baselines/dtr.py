"""Greedy eviction as the step runs: Dynamic Tensor Rematerialization (arXiv 2006.09616), decided before the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outofcore.costs import Costs
from outofcore.errors import BudgetError
from outofcore.graph import StepGraph
from outofcore.plan import Plan
from outofcore.planning.ladder import Ladder
from outofcore.planning.placing import Planned, room_for_large
from outofcore.planning.policy import Asked, Checked


@dataclass(frozen=True)
class DTR(Checked):
    """Whatever is cheapest to compute again for its bytes and its age is evicted when room is needed.

    Kirisame et al., "Dynamic Tensor Rematerialization" (ICLR 2021, arXiv 2006.09616), sections 2 and 4.1: as the step
    runs, each allocation that does not fit evicts the tensor for which the heuristic h_DTR is least,

        h = (seconds of the op that made it and of its evicted neighbours) / (bytes x seconds since its last use)

    and an op whose input was evicted first computes that again, with what it takes.

        forward    a == b == c == d == e ==     at e there is no room: of a to d the cheapest for its age goes, say b
        backward   e, d, c, [b from a], a       [ ] computed again right before it is used; it may evict in its turn

    Neighbours are evicted storages that it is made from, and those that are made from it, each through evicted ones.

    Different from the paper: the step is followed before it runs, with the costs of its ops, and what comes of it is a
    plan. A plan says less than a run does: what is evicted between two uses is dropped right after the first; of
    several times that it comes back between two uses only the last remains, so that ops between run again for
    themselves; and what has had its last use is gone, and is made again for each chain. A chain evicts within itself,
    and runs ops several times, where it would take more than a share of the room (``remat.nesting``): by when each
    content is read next, and not by its age. Where an evicted tensor cannot be computed again for lack of room, the
    step is followed anew with that kept. Where the plan then takes more bytes than were followed, more is computed
    again by the greedy search of ``auto``. It is asked on the rungs of ``planning.ladder``, of which the quickest plan
    up to the budget is taken, so that a larger budget is never slower. What exists before the step stays, nothing is
    copied but inputs and outputs, and storages below 64 KiB stay. Left out: the cheaper approximations of the
    heuristic, since planning has the time.

    >>> DTR().name
    'dtr'
    """

    name = "dtr"

    def variants(self, graph: StepGraph, costs: Costs, budget: int) -> Sequence[Asked]:
        """The plan for each number of bytes; ``placed`` also gives it its addresses."""
        beside = budget - room_for_large(graph, costs, budget)

        def plan(room: int) -> Plan:
            planned = self.placed(graph, costs, room + beside)
            if planned is None:
                raise BudgetError(f"greedy eviction finds no plan in which large blocks take {room} bytes")
            return planned.plan

        return (plan,)

    def placed(self, graph: StepGraph, costs: Costs, budget: int) -> Planned | None:
        """The plan with its addresses, or None where there is none.

        Args:
            graph: the step.
            costs: measured or assumed.
            budget: bytes of the arena.
        """
        planned = Ladder(graph, costs).plan_by_eviction(budget)
        return None if planned is None else replace(planned, plan=replace(planned.plan, policy=self.name))
