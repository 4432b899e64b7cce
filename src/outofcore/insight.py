"""A step under other budgets and on other machines, by planning and simulating it there. Without PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from outofcore import planning
from outofcore.costs import Costs, OpCost
from outofcore.errors import BudgetError
from outofcore.graph import StepGraph
from outofcore.planning import Planned, PolicyLike
from outofcore.program import Timeline
from outofcore.report import step_report
from outofcore.report.insight import Help, Insight, Point
from outofcore.report.waits import TimeSpent, time_spent
from outofcore.simulator import simulate
from outofcore.units import MIB, format_bytes, format_seconds

# A step that is no more than this longer than its fastest has lost nothing.
LOSSLESS = 1.01
# How many budgets are looked at between the smallest and that at which nothing needs to leave.
POINTS = 5
_MORE = 100 * MIB
# Where a budget is small, a share of it is worth asking about rather than 100 MiB.
_MORE_SHARE = 4
# What holds a step back is told apart from what it merely also does.
_MUCH, _LITTLE = 0.02, 0.005
# A prediction that is off by more deserves a word.
_FAR = 0.1

Tell = Callable[[int, int], None]


def point(graph: StepGraph, costs: Costs, budget: int, policy: PolicyLike = "auto") -> Point:
    """What is predicted for one budget.

    Raises:
        InputError: there is no such policy.
    """
    try:
        planned = planning.plan_step(graph, costs, budget, policy)
    except BudgetError:
        return Point(budget, None)
    return point_of(graph, costs, budget, planned)


def point_of(graph: StepGraph, costs: Costs, budget: int, planned: Planned) -> Point:
    """A plan that was made already, as a point."""
    report = step_report(graph, planned.plan, planned.program, planned.timeline, budget)
    again = max(report.compute_seconds - costs.compute_seconds, 0.0) if report.recomputed else 0.0
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
    graph: StepGraph, costs: Costs, budgets: Iterable[int], policy: PolicyLike = "auto", tell: Tell | None = None
) -> tuple[Point, ...]:
    """Step time over budgets.

    A plan that is found for a budget is a plan for every larger one as well, so no point is slower than those at
    smaller budgets.

    Args:
        graph: the step.
        costs: measured or assumed.
        budgets: bytes.
        policy: how to plan; see ``planning.plan_step``.
        tell: called with (points found, points) after each.
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
    graph: StepGraph, costs: Costs, points: Sequence[Point], policy: PolicyLike = "auto", tries: int = 3
) -> tuple[int, tuple[Point, ...]]:
    """The budget from which on nothing is lost: a step takes at most 1 % longer than with room for everything.

    Found by bisection between the points, so it is exact to an eighth of their distance.

    Args:
        graph: the step.
        costs: measured or assumed.
        points: of ``curve``, the last of them with room for everything.
        policy: as there.
        tries: how often the interval is halved.

    Returns:
        The budget in bytes, and the points with those that were looked at besides.
    """
    known = sorted(points, key=lambda p: p.budget)
    limit = (known[-1].seconds or 0.0) * LOSSLESS
    enough = next(i for i, p in enumerate(known) if p.seconds is not None and p.seconds <= limit)
    for _ in range(tries if enough else 0):
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
    tell: Tell | None = None,
) -> Insight:
    """What a planned step would be under other budgets, and what would help it most.

    Args:
        graph: the step.
        costs: that it was planned with.
        budget: bytes.
        planned: under this budget.
        measured: the step as it ran, if it did: the verdict is on that.
        count: of budgets to plan for besides; 0: none, and nothing is said of a larger budget.
        policy: to plan with.
        tell: called with (plans made, plans to make) after each.
    """
    smallest, everything = planning.smallest_budget(graph, costs), planning.in_core_budget(graph, costs)
    here = point_of(graph, costs, budget, planned)
    more = min(_more(budget), max(everything - budget, 0))
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


def _more(budget: int) -> int:
    return _MORE if budget >= _MORE_SHARE * _MORE else max(budget // _MORE_SHARE, 1)


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


__all__ = ["LOSSLESS", "POINTS", "budgets_between", "curve", "insight", "lossless_budget", "point", "point_of"]
