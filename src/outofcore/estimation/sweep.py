"""A step under other budgets and on other machines, by planning and simulating it there. Without PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from outofcore import planning
from outofcore.busy import NOTE
from outofcore.costs import Costs, OpCost
from outofcore.errors import BudgetError, GraphError
from outofcore.graph import StepGraph
from outofcore.planning import Planned, PolicyLike
from outofcore.program import Timeline
from outofcore.progress import Tell
from outofcore.report import columns, facts_html, step_report, table_html
from outofcore.report.data import Help, Insight, Point
from outofcore.report.waits import TimeSpent, time_spent
from outofcore.simulator import simulate
from outofcore.units import MIB, format_bytes, format_seconds, parse_bytes

# A step that is no more than this longer than its fastest has lost nothing.
LOSSLESS = 1.01
# How many budgets are looked at between the smallest and that at which nothing needs to leave.
POINTS = 5
# Parts of a step. Up to the first nothing is said to be lost, above the second the budget is said to be the limit.
_LITTLE, _MUCH = 0.005, 0.02
# A prediction that is off by more, as part of it, deserves a word.
_FAR = 0.1

# Progress callback: how many plans are made, and how many are to be.
Count = Callable[[int, int], None]


def point(graph: StepGraph, costs: Costs, budget: int, policy: PolicyLike = "auto") -> Point:
    """What is predicted for one budget; raises ``InputError`` if there is no such policy."""
    try:
        planned = planning.plan_step(graph, costs, budget, policy)
    except BudgetError:
        return Point(budget, None)
    return point_of(graph, costs, budget, planned)


def point_of(graph: StepGraph, costs: Costs, budget: int, planned: Planned) -> Point:
    """A plan that was made already, as a point."""
    report = step_report(graph, planned.plan, planned.program, planned.timeline, budget)
    again = report.again_seconds(costs) if report.recomputed else 0.0
    return Point(budget, report.seconds, report.policy, report.bytes_out, report.bytes_in, again, report.peak_bytes)


def budgets_between(smallest: int, everything: int, count: int = POINTS) -> tuple[int, ...]:
    """Budgets at equal ratios, from the smallest that can be to that at which nothing needs to leave."""
    smallest, everything = max(smallest, 1), max(everything, smallest, 1)
    if count < 2 or smallest == everything:
        return (everything,)
    ratio = everything / smallest
    inner = [round(smallest * ratio ** (number / (count - 1))) for number in range(1, count - 1)]
    return tuple(dict.fromkeys([smallest, *inner, everything]))


def curve(
    graph: StepGraph, costs: Costs, budgets: Iterable[int], policy: PolicyLike = "auto", tell: Count | None = None
) -> tuple[Point, ...]:
    """Step time over budgets.

    A plan that is found for a budget is a plan for every larger one as well, so no point is slower than those at
    smaller budgets.
    """
    wanted = sorted(set(budgets))
    found: list[Point] = []
    for number, budget in enumerate(wanted, 1):
        found.append(_no_slower(point(graph, costs, budget, policy), found))
        if tell is not None:
            tell(number, len(wanted))
    return tuple(found)


def _no_slower(new: Point, before: Sequence[Point]) -> Point:
    best = min((p for p in before if p.seconds is not None), key=lambda p: p.seconds or 0.0, default=None)
    if best is None or best.seconds is None or (new.seconds is not None and new.seconds <= best.seconds):
        return new
    return replace(best, budget=new.budget)


def lossless_budget(
    graph: StepGraph, costs: Costs, points: Sequence[Point], policy: PolicyLike = "auto"
) -> tuple[int, tuple[Point, ...]]:
    """The budget from which on nothing is lost: a step takes at most 1 % longer than with room for everything.

    Found by bisection between the points of ``curve``, the last of them with room for everything, so it is exact to an
    eighth of their distance. Returned with it are the points with those that were looked at besides.
    """
    known = sorted(points, key=lambda p: p.budget)
    limit = (known[-1].seconds or 0.0) * LOSSLESS
    enough = next(i for i, p in enumerate(known) if p.seconds is not None and p.seconds <= limit)
    for _ in range(3 if enough else 0):
        low, high = known[enough - 1].budget, known[enough].budget
        if high - low < 2 * MIB or high < low * LOSSLESS:
            break
        new = _no_slower(point(graph, costs, (low + high) // 2, policy), known[:enough])
        known.insert(enough, new)
        if new.seconds is None or new.seconds > limit:
            enough += 1
    return known[enough].budget, tuple(known)


def insight(
    graph: StepGraph,
    costs: Costs,
    budget: int,
    planned: Planned,
    *,
    measured: Timeline | None = None,
    count: int = POINTS,
    policy: PolicyLike = "auto",
    tell: Count | None = None,
) -> Insight:
    """What a planned step would be under other budgets, and what would help it most.

    Where it was ``measured``, the verdict is on that. ``count`` budgets are planned for besides; with none, nothing is
    said of a larger budget.
    """
    smallest, everything = planning.smallest_budget(graph, costs), planning.in_core_budget(graph, costs)
    here = point_of(graph, costs, budget, planned)
    # How much more is asked about: 100 MiB, or of a small budget a quarter.
    more = min(100 * MIB, max(budget // 4, 1), max(everything - budget, 0))
    wanted: set[int] = set()
    if count:
        wanted = {*budgets_between(smallest, everything, count), *((budget + more,) if more else ())} - {budget}
    others = curve(graph, costs, wanted, policy, tell)
    points = sorted([*others, here], key=lambda p: p.budget)
    helps = _machines(graph, costs, planned)
    larger = next((p for p in others if p.budget == budget + more and more), None)
    if larger is not None and larger.seconds is not None and here.seconds is not None:
        helps.append(Help(f"{format_bytes(more)} more budget", max(here.seconds - larger.seconds, 0.0)))
    helps.sort(key=lambda h: -h.saves)
    spent, _ = time_spent(graph, planned.program, measured or planned.timeline)
    verdict = _verdict(spent, bool(here.bytes_in or here.bytes_out))
    if measured is not None:
        verdict += _off(planned.timeline.step_seconds, measured.step_seconds)
    return Insight(smallest, everything, costs.compute_seconds, tuple(points), tuple(helps), verdict)


def _machines(graph: StepGraph, costs: Costs, planned: Planned) -> list[Help]:
    """What the same program would gain from a better machine."""
    now = planned.timeline.step_seconds
    faster = replace(costs, ops=tuple(OpCost(cost.seconds / 2, cost.workspace_bytes) for cost in costs.ops))
    cases = [("ops twice as fast", faster)]
    if costs.homes:
        homes = tuple(
            replace(h, bytes_per_s_out=2 * h.bytes_per_s_out, bytes_per_s_in=2 * h.bytes_per_s_in) for h in costs.homes
        )
        cases.append(("a link twice as fast", replace(costs, homes=homes)))
    return [Help(what, max(now - simulate(graph, c, planned.program).step_seconds, 0.0)) for what, c in cases]


def _off(predicted: float, measured: float) -> str:
    ratio = measured / predicted - 1 if predicted else 0.0
    if abs(ratio) <= _FAR:
        return ""
    how = "longer" if ratio > 0 else "shorter"
    return f" The step took {abs(ratio):.0%} {how} than predicted: the machine was not as it was when it was measured."


def _verdict(spent: TimeSpent, moves: bool) -> str:
    total = spent.seconds or 1.0
    shares = {
        "the link": spent.for_copies + spent.end,
        "room": spent.for_room,
        "ops that run again": spent.again,
    }
    worst = max(shares, key=lambda name: shares[name])
    lost = sum(shares.values())
    if lost <= _LITTLE * total:
        how = "all copies hide behind ops" if moves else "nothing has to move"
        return f"Ops are the limit: {how}, so that only faster ops or a smaller model would help."
    cost = f"{format_seconds(shares[worst])} of {format_seconds(total)}"
    if worst == "the link":
        return f"The link is the limit: ops wait {cost} for copies."
    if worst == "room":
        return f"The budget is the limit: ops wait {cost} for room."
    if lost > _MUCH * total:
        return f"The budget is the limit: ops that run again for want of room take {cost}."
    return f"Little is lost: ops that run again for want of room take {cost}."


@dataclass(frozen=True)
class Estimate:
    """What a step would need, and how long it would take.

    Attributes:
        smallest_budget: the least bytes that can hold the step, with ops in parts where that needs less.
        lossless_budget: the bytes from which on nothing is lost: a step takes at most 1 % longer than with room for
            everything.
        in_core_budget: the bytes from which on nothing needs to move.
        compute_seconds: all ops once.
        points: what is predicted for several budgets, by rising budget.
        machine: what the predictions are for; "" is the machine that they were made on.
        graph: the step.
        costs: of its ops and of the link.
        policy: that plans.
        whole_budget: the least bytes that can hold the step with ops as a whole; None: that is the smallest budget.
        parts: the step with ops in parts, and its costs, for budgets below that.

    >>> found = Estimate(4 << 20, 9 << 20, 16 << 20, 0.25, (Point(8 << 20, 0.5, "auto"),))
    >>> found.fits("5MiB"), found.at("8MiB").seconds
    (True, 0.5)
    >>> print(found)
      smallest budget     4.00 MiB
      no slowdown from    9.00 MiB
      nothing moves from  16.0 MiB
      compute time        250 ms per step
      budget      step  evicted  fetched  recompute  policy
      8.00 MiB  500 ms      0 B      0 B          -    auto
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
    whole_budget: int | None = None
    parts: tuple[StepGraph, Costs] | None = field(repr=False, compare=False, default=None)

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
        graph, costs = self.graph, self.costs
        if self.parts is not None and self.whole_budget is not None and wanted < self.whole_budget:
            graph, costs = self.parts
        return known or point(graph, costs, wanted, self.policy)

    def _facts(self) -> list[tuple[str, str]]:
        whole = [] if self.whole_budget is None else [("without splitting", format_bytes(self.whole_budget))]
        return [
            ("smallest budget", format_bytes(self.smallest_budget)),
            *whole,
            ("no slowdown from", format_bytes(self.lossless_budget)),
            ("nothing moves from", format_bytes(self.in_core_budget)),
            ("compute time", f"{format_seconds(self.compute_seconds)} per step"),
            *([("note", NOTE)] if self.costs.is_busy else []),
        ]

    def _repr_html_(self) -> str:
        title = f"SIMULATED: {self.machine}" if self.machine else "estimate"
        return facts_html(title, self._facts()) + table_html("", _rows(self.points))

    def __str__(self) -> str:
        rows = self._facts()
        width = max(len(name) for name, _ in rows)
        lines = [f"  {name:<{width}}  {text}" for name, text in rows]
        return "\n".join([*([f"SIMULATED: {self.machine}"] if self.machine else []), *lines, points_text(self.points)])


def points_text(points: Sequence[Point]) -> str:
    """Step time over budgets, as a table."""
    return columns(_rows(points))


def _rows(points: Sequence[Point]) -> list[tuple[str, ...]]:
    rows = [("budget", "step", "evicted", "fetched", "recompute", "policy")]
    rows += [
        (
            format_bytes(point.budget),
            "no plan" if point.seconds is None else format_seconds(point.seconds),
            "-" if point.seconds is None else format_bytes(point.bytes_out),
            "-" if point.seconds is None else format_bytes(point.bytes_in),
            format_seconds(point.again_seconds) if point.again_seconds else "-",
            point.policy,
        )
        for point in points
    ]
    return rows


def estimated(
    graph: StepGraph,
    costs: Costs,
    *,
    budgets: Sequence[int] = (),
    policy: PolicyLike = "auto",
    machine: str = "",
    parts: tuple[StepGraph, Costs] | None = None,
    tell: Tell,
) -> Estimate:
    """Plan a step for the budgets given and for those that suit it; raises ``GraphError`` if it has no ops.

    ``machine`` is what the costs are of, where that is not this machine; ``parts`` the step with ops in parts, for
    budgets that do not hold it otherwise.
    """
    if not graph.ops:
        raise GraphError("the step has no ops: nothing is computed in it, so there is nothing to estimate")
    smallest, everything = planning.smallest_budget(graph, costs), planning.in_core_budget(graph, costs)
    suiting = budgets_between(smallest, everything)
    points = curve(graph, costs, suiting, policy, lambda done, total: tell("plan for several budgets", done, total))
    tell("find the budget without slowdown", 0, 1)
    lossless, points = lossless_budget(graph, costs, points, policy)
    more = set(budgets) - {point.budget for point in points}
    least = smallest if parts is None else min(planning.smallest_budget(*parts), smallest)
    if least < smallest and parts is not None:
        below = {least, *(budget for budget in more if budget < smallest)}
        points = (*points, *curve(*parts, below, policy))
        more -= below
    points = (*points, *(point(graph, costs, budget, policy) for budget in more))
    tell("find the budget without slowdown", 1, 1)
    return Estimate(
        smallest_budget=least,
        lossless_budget=lossless,
        in_core_budget=everything,
        compute_seconds=costs.compute_seconds,
        points=tuple(sorted(points, key=lambda p: p.budget)),
        machine=machine,
        graph=graph,
        costs=costs,
        policy=policy,
        whole_budget=smallest if least < smallest else None,
        parts=parts if least < smallest else None,
    )
