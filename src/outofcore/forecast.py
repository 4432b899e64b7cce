"""What a step would need, and how long it would take over budgets. Without PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outofcore import insight, planning
from outofcore.costs import Costs
from outofcore.errors import GraphError
from outofcore.graph import StepGraph
from outofcore.planning import PolicyLike
from outofcore.progress import Tell
from outofcore.report import columns
from outofcore.report.insight import Point
from outofcore.units import format_bytes, format_seconds, parse_bytes


@dataclass(frozen=True)
class Estimate:
    """What a step would need, and how long it would take.

    Attributes:
        smallest_budget: the least bytes that can hold the step.
        lossless_budget: the bytes from which on nothing is lost: a step takes at most 1 % longer than with room for
            everything.
        in_core_budget: the bytes from which on nothing needs to move.
        compute_seconds: all ops once.
        points: what is predicted for several budgets, by rising budget.
        machine: what the predictions are for; "" is the machine that they were made on.
        graph: the step.
        costs: of its ops and of the link.
        policy: that plans.
    """

    smallest_budget: int
    lossless_budget: int
    in_core_budget: int
    compute_seconds: float
    points: tuple[Point, ...]
    machine: str = ""
    graph: StepGraph = field(repr=False, compare=False, default_factory=lambda: StepGraph((), ()))
    costs: Costs = field(repr=False, compare=False, default_factory=lambda: Costs(()))
    policy: PolicyLike = "auto"

    def fits(self, budget: int | str) -> bool:
        """Whether a budget can hold the step.

        Raises:
            UnitError: it is no byte count.
        """
        return parse_bytes(budget) >= self.smallest_budget

    def at(self, budget: int | str) -> Point:
        """What is predicted for a budget: known, or planned for now.

        Raises:
            UnitError: it is no byte count.
        """
        wanted = parse_bytes(budget)
        known = next((point for point in self.points if point.budget == wanted), None)
        return known or insight.point(self.graph, self.costs, wanted, self.policy)

    def __str__(self) -> str:
        rows = [
            ("smallest budget", format_bytes(self.smallest_budget)),
            ("nothing lost from", format_bytes(self.lossless_budget)),
            ("nothing moves from", format_bytes(self.in_core_budget)),
            ("ops alone", f"{format_seconds(self.compute_seconds)} a step"),
        ]
        width = max(len(name) for name, _ in rows)
        lines = [f"  {name:<{width}}  {text}" for name, text in rows]
        return "\n".join([*([f"SIMULATED: {self.machine}"] if self.machine else []), *lines, points_text(self.points)])


def points_text(points: Sequence[Point]) -> str:
    """Step time over budgets, as a table."""
    rows = [("budget", "step", "bytes out", "bytes in", "again", "policy")]
    rows += [
        (
            format_bytes(point.budget),
            "no plan" if point.seconds is None else format_seconds(point.seconds),
            format_bytes(point.bytes_out),
            format_bytes(point.bytes_in),
            format_seconds(point.again_seconds) if point.again_seconds else "-",
            point.policy,
        )
        for point in points
    ]
    return columns(rows)


def estimated(
    graph: StepGraph,
    costs: Costs,
    *,
    budgets: Sequence[int] = (),
    policy: PolicyLike = "auto",
    machine: str = "",
    tell: Tell,
) -> Estimate:
    """Plan a step for several budgets.

    Args:
        graph: the step.
        costs: what it costs.
        budgets: bytes, to be looked at besides those that suit the step.
        policy: how to plan; see ``planning.plan_step``.
        machine: what the costs are of, where that is not this machine.
        tell: told how far things are.

    Raises:
        GraphError: the step has no ops.
    """
    if not graph.ops:
        raise GraphError("the step has no ops: nothing is computed in it, so there is nothing to estimate")
    smallest, everything = planning.smallest_budget(graph, costs), planning.in_core_budget(graph, costs)
    suiting = insight.budgets_between(smallest, everything)
    points = insight.curve(graph, costs, suiting, policy, lambda done, total: tell("plan for budgets", done, total))
    tell("find what is enough", 0, 1)
    lossless, points = insight.lossless_budget(graph, costs, points, policy)
    more = set(budgets) - {point.budget for point in points}
    points = (*points, *(insight.point(graph, costs, budget, policy) for budget in more))
    tell("find what is enough", 1, 1)
    return Estimate(
        smallest_budget=smallest,
        lossless_budget=lossless,
        in_core_budget=everything,
        compute_seconds=costs.compute_seconds,
        points=tuple(sorted(points, key=lambda p: p.budget)),
        machine=machine,
        graph=graph,
        costs=costs,
        policy=policy,
    )
