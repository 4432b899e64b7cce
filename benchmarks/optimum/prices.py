"""What choices cost at least: the lower bound of ``planning.bound`` and its reduced costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outofcore.costs import Costs
from outofcore.graph import StepGraph
from outofcore.plan import Gap, Residency
from outofcore.planning.bound import Bound
from outofcore.planning.placing import room_for_large
from outofcore.planning.problem import Problem


@dataclass(frozen=True)
class Prices:
    """What the bound says of single choices.

    Attributes:
        least: the bound in seconds.
        penalties: for each gap and each choice that there is for it, by how many seconds the step takes longer at
            least if that is chosen. Penalties of several gaps add up.
    """

    least: float
    penalties: Mapping[Gap, Mapping[Residency, float]]


def prices(graph: StepGraph, costs: Costs, budget: int) -> Prices | None:
    """The bound with the reduced costs of the linear program, for at most one home.

    Args:
        graph: the step.
        costs: measured or assumed.
        budget: bytes of the arena.

    Returns:
        None if no plan can hold the step within the budget.
    """
    problem = Problem.of(graph, costs, room_for_large(graph, costs, budget))
    if not problem.is_feasible:
        return None
    bound = Bound(problem)
    least = bound.seconds_at_least()
    if least is None:
        return None
    columns, rows = bound.program.duals()
    penalties: dict[Gap, dict[Residency, float]] = {}
    for g, kept in bound.kept.items():
        repeated = bound.repeated.get(g)
        found = {Residency.KEEP: {kept}, Residency.OFFLOAD: set[int]()}
        if repeated is not None:
            found[Residency.RECOMPUTE] = {repeated}
        own = [column for column in (kept, repeated) if column is not None]
        # Without homes the row is an equation, and every choice fulfils it.
        row = rows[bound.share_rows[g]] if costs.homes and g in bound.share_rows else 0.0
        penalties[problem.gaps[g].gap] = {
            choice: sum(_beyond(columns[c], float(c in chosen)) for c in own) + _beyond(row, float(len(chosen)))
            for choice, chosen in found.items()
        }
    return Prices(least, penalties)


def _beyond(dual: float, value: float) -> float:
    """What a value in [0, 1] costs beyond the bound at which its dual holds it."""
    return dual * value if dual > 0 else -dual * (1.0 - value)
