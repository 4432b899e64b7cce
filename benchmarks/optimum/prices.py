"""Minimum costs of choices: the lower bound of ``planning.bound`` and its reduced costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outofcore.costs import Costs
from outofcore.graph import StepGraph
from outofcore.plan import Gap, Residency
from outofcore.planning.bound import LowerBound
from outofcore.planning.placing import room_for_large
from outofcore.planning.problem import Problem


@dataclass(frozen=True)
class Prices:
    """Lower bounds for single choices: penalties are minimum added seconds, and add up over gaps."""

    lower_seconds: float
    penalties: Mapping[Gap, Mapping[Residency, float]]


def price_choices(graph: StepGraph, costs: Costs, budget: int) -> Prices | None:
    """Return the reduced costs of the linear program, for at most one home; None if no plan fits the budget."""
    problem = Problem.of(graph, costs, room_for_large(graph, costs, budget))
    if not problem.is_feasible:
        return None
    bound = LowerBound(problem)
    lower_seconds = bound.solve()
    if lower_seconds is None:
        return None
    columns, rows = bound.program.dual_values()
    penalties: dict[Gap, dict[Residency, float]] = {}
    for g, keep_column in bound.resident.items():
        recompute_column = bound.recomputed.get(g)
        columns_of = {Residency.KEEP: {keep_column}, Residency.OFFLOAD: set[int]()}
        if recompute_column is not None:
            columns_of[Residency.RECOMPUTE] = {recompute_column}
        gap_columns = [column for column in (keep_column, recompute_column) if column is not None]
        # Without homes the row is an equation that every choice satisfies.
        row = rows[bound.share_rows[g]] if costs.homes and g in bound.share_rows else 0.0
        penalties[problem.gaps[g].gap] = {
            choice: sum(_reduced_cost(columns[c], float(c in chosen)) for c in gap_columns)
            + _reduced_cost(row, float(len(chosen)))
            for choice, chosen in columns_of.items()
        }
    return Prices(lower_seconds, penalties)


def _reduced_cost(dual: float, value: float) -> float:
    """Return the cost of moving a value in [0, 1] away from the bound that its dual implies."""
    return dual * value if dual > 0 else -dual * (1.0 - value)
