"""Plan and simulate a step for other budgets and faster machines; needs no PyTorch."""

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
from outofcore.progress import ProgressCallback
from outofcore.report import columns, facts_html, step_report, table_html
from outofcore.report.data import Help, Insight, Point
from outofcore.report.waits import TimeSpent, time_spent
from outofcore.simulator import simulate
from outofcore.units import MIB, format_bytes, format_seconds, parse_bytes

# A step counts as lossless up to this multiple of its fastest time.
LOSSLESS_RATIO = 1.01
# Budgets on a curve.
CURVE_POINTS = 5
# Shares of the step time: up to the first ops are the limit, above the second the budget is.
_NEGLIGIBLE_SHARE, _LARGE_SHARE = 0.005, 0.02
# Larger relative errors of a prediction are reported.
_LARGE_ERROR = 0.1

# Progress callback: number of plans made, and in total.
PlanProgress = Callable[[int, int], None]


def predict_point(graph: StepGraph, costs: Costs, budget: int, policy: PolicyLike = "auto") -> Point:
    """Plan a step for one budget and predict its time, which is None if no plan fits; raises ``InputError``."""
    try:
        planned = planning.plan_step(graph, costs, budget, policy)
    except BudgetError:
        return Point(budget, None)
    return point_of(graph, costs, budget, planned)


def point_of(graph: StepGraph, costs: Costs, budget: int, planned: Planned) -> Point:
    report = step_report(graph, planned.plan, planned.program, planned.timeline, budget)
    recompute_seconds = report.again_seconds(costs) if report.recomputed else 0.0
    return Point(
        budget, report.seconds, report.policy, report.bytes_out, report.bytes_in, recompute_seconds, report.peak_bytes
    )


def budgets_between(smallest: int, in_core: int, count: int = CURVE_POINTS) -> tuple[int, ...]:
    """Return up to ``count`` budgets in geometric steps from ``smallest`` to ``in_core``, or only ``in_core``."""
    smallest, in_core = max(smallest, 1), max(in_core, smallest, 1)
    if count < 2 or smallest == in_core:
        return (in_core,)
    ratio = in_core / smallest
    inner = [round(smallest * ratio ** (number / (count - 1))) for number in range(1, count - 1)]
    return tuple(dict.fromkeys([smallest, *inner, in_core]))


def plan_curve(
    graph: StepGraph,
    costs: Costs,
    budgets: Iterable[int],
    policy: PolicyLike = "auto",
    tell: PlanProgress | None = None,
) -> tuple[Point, ...]:
    """Predict the step for each budget, smallest first; a larger budget never gets a longer step time."""
    ordered = sorted(set(budgets))
    points: list[Point] = []
    for number, budget in enumerate(ordered, 1):
        points.append(_best_point(predict_point(graph, costs, budget, policy), points))
        if tell is not None:
            tell(number, len(ordered))
    return tuple(points)


def _best_point(new: Point, before: Sequence[Point]) -> Point:
    best = min((p for p in before if p.seconds is not None), key=lambda p: p.seconds or 0.0, default=None)
    if best is None or best.seconds is None or (new.seconds is not None and new.seconds <= best.seconds):
        return new
    return replace(best, budget=new.budget)


def find_lossless_budget(
    graph: StepGraph, costs: Costs, points: Sequence[Point], policy: PolicyLike = "auto"
) -> tuple[int, tuple[Point, ...]]:
    """Search between ``points`` for a small budget with at most 1 % slowdown; return the budget and all points."""
    ordered = sorted(points, key=lambda p: p.budget)
    limit = (ordered[-1].seconds or 0.0) * LOSSLESS_RATIO
    index = next(i for i, p in enumerate(ordered) if p.seconds is not None and p.seconds <= limit)
    for _ in range(3 if index else 0):
        low, high = ordered[index - 1].budget, ordered[index].budget
        if high - low < 2 * MIB or high < low * LOSSLESS_RATIO:
            break
        new = _best_point(predict_point(graph, costs, (low + high) // 2, policy), ordered[:index])
        ordered.insert(index, new)
        if new.seconds is None or new.seconds > limit:
            index += 1
    return ordered[index].budget, tuple(ordered)


def build_insight(
    graph: StepGraph,
    costs: Costs,
    budget: int,
    planned: Planned,
    *,
    measured: Timeline | None = None,  # replaces the prediction in the search for the bottleneck
    count: int = CURVE_POINTS,  # of other budgets; 0: only faster machines
    policy: PolicyLike = "auto",
    tell: PlanProgress | None = None,
) -> Insight:
    """Compare a planned step with other budgets and faster machines, and find its bottleneck."""
    smallest, in_core = planning.smallest_budget(graph, costs), planning.in_core_budget(graph, costs)
    current = point_of(graph, costs, budget, planned)
    # Compare with 100 MiB more, or a quarter of a small budget.
    extra = min(100 * MIB, max(budget // 4, 1), max(in_core - budget, 0))
    budgets: set[int] = set()
    if count:
        budgets = {*budgets_between(smallest, in_core, count), *((budget + extra,) if extra else ())} - {budget}
    curve_points = plan_curve(graph, costs, budgets, policy, tell)
    points = sorted([*curve_points, current], key=lambda p: p.budget)
    helps = _savings_of_faster_machines(graph, costs, planned)
    larger = next((p for p in curve_points if p.budget == budget + extra and extra), None)
    if larger is not None and larger.seconds is not None and current.seconds is not None:
        helps.append(Help(f"{format_bytes(extra)} more budget", max(current.seconds - larger.seconds, 0.0)))
    helps.sort(key=lambda h: -h.saves)
    spent, _ = time_spent(graph, planned.program, measured or planned.timeline)
    verdict = _describe_bottleneck(spent, bool(current.bytes_in or current.bytes_out))
    if measured is not None:
        verdict += _describe_error(planned.timeline.step_seconds, measured.step_seconds)
    return Insight(smallest, in_core, costs.compute_seconds, tuple(points), tuple(helps), verdict)


def _savings_of_faster_machines(graph: StepGraph, costs: Costs, planned: Planned) -> list[Help]:
    """Return the seconds that a step would save with ops twice as fast, and with links twice as fast."""
    now = planned.timeline.step_seconds
    faster = replace(costs, ops=tuple(OpCost(cost.seconds / 2, cost.workspace_bytes) for cost in costs.ops))
    cases = [("ops twice as fast", faster)]
    if costs.homes:
        homes = tuple(
            replace(h, bytes_per_s_out=2 * h.bytes_per_s_out, bytes_per_s_in=2 * h.bytes_per_s_in) for h in costs.homes
        )
        cases.append(("a link twice as fast", replace(costs, homes=homes)))
    return [Help(name, max(now - simulate(graph, c, planned.program).step_seconds, 0.0)) for name, c in cases]


def _describe_error(predicted: float, measured: float) -> str:
    ratio = measured / predicted - 1 if predicted else 0.0
    if abs(ratio) <= _LARGE_ERROR:
        return ""
    direction = "longer" if ratio > 0 else "shorter"
    return f" The step took {abs(ratio):.0%} {direction} than predicted: the machine has changed since it was measured."


def _describe_bottleneck(spent: TimeSpent, has_copies: bool) -> str:
    total = spent.seconds or 1.0
    shares = {
        "the link": spent.for_copies + spent.end,
        "room": spent.for_room,
        "ops that run again": spent.again,
    }
    worst = max(shares, key=lambda name: shares[name])
    lost = sum(shares.values())
    if lost <= _NEGLIGIBLE_SHARE * total:
        reason = "all copies overlap with ops" if has_copies else "no tensor is evicted"
        return f"Ops are the limit: {reason}. Only faster ops or a smaller model would help."
    cost = f"{format_seconds(shares[worst])} of {format_seconds(total)}"
    if worst == "the link":
        return f"The link is the limit: ops wait {cost} for copies."
    if worst == "room":
        return f"The budget is the limit: ops wait {cost} for room."
    if lost > _LARGE_SHARE * total:
        return f"The budget is the limit: recomputation to save memory takes {cost}."
    return f"Little is lost: recomputation to save memory takes {cost}."


@dataclass(frozen=True)
class Estimate:
    """The memory and time that a step is predicted to need. Budgets are in bytes.

    Attributes:
        smallest_budget: the smallest budget that has a plan, with split ops if these need less.
        lossless_budget: the smallest budget with a step at most 1 % slower than in core.
        in_core_budget: the smallest budget without evictions.
        compute_seconds: time of all ops, each run once.
        points: predictions by rising budget.
        machine: the machine of the predictions; "": this one.
        graph: the step.
        costs: of its ops and links.
        policy: the planning policy.
        whole_budget: the smallest budget without splitting ops; None: equal to ``smallest_budget``.
        parts: the step with split ops and its costs, for budgets below ``whole_budget``.

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
        """Return whether a budget can hold the step; raises ``UnitError`` if it is not a byte count."""
        return parse_bytes(budget) >= self.smallest_budget

    def at(self, budget: int | str) -> Point:
        """Return the prediction for a budget, planning for it if needed; raises ``UnitError`` for an invalid size."""
        budget_bytes = parse_bytes(budget)
        existing = next((point for point in self.points if point.budget == budget_bytes), None)
        graph, costs = self.graph, self.costs
        if self.parts is not None and self.whole_budget is not None and budget_bytes < self.whole_budget:
            graph, costs = self.parts
        return existing or predict_point(graph, costs, budget_bytes, self.policy)

    def _summary_lines(self) -> list[tuple[str, str]]:
        """Return the lines of the printed summary, as labels and values."""
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
        return facts_html(title, self._summary_lines()) + table_html("", _table_rows(self.points))

    def __str__(self) -> str:
        rows = self._summary_lines()
        width = max(len(name) for name, _ in rows)
        lines = [f"  {name:<{width}}  {text}" for name, text in rows]
        return "\n".join(
            [*([f"SIMULATED: {self.machine}"] if self.machine else []), *lines, format_points(self.points)]
        )


def format_points(points: Sequence[Point]) -> str:
    return columns(_table_rows(points))


def _table_rows(points: Sequence[Point]) -> list[tuple[str, ...]]:
    """Return the rows of a table as text: a header, then a row for each point."""
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


def estimate_graph(
    graph: StepGraph,
    costs: Costs,
    *,
    budgets: Sequence[int] = (),
    policy: PolicyLike = "auto",
    machine: str = "",
    parts: tuple[StepGraph, Costs] | None = None,  # the split step, for smaller budgets
    tell: ProgressCallback,
) -> Estimate:
    """Estimate a step at ``budgets`` and at a range of other budgets; raises ``GraphError`` if it has no ops."""
    if not graph.ops:
        raise GraphError("the step has no ops, so it has no costs to estimate; compute with tensors in it")
    smallest, in_core = planning.smallest_budget(graph, costs), planning.in_core_budget(graph, costs)
    candidates = budgets_between(smallest, in_core)
    points = plan_curve(
        graph, costs, candidates, policy, lambda finished, total: tell("plan for several budgets", finished, total)
    )
    tell("find the budget without slowdown", 0, 1)
    lossless, points = find_lossless_budget(graph, costs, points, policy)
    remaining = set(budgets) - {point.budget for point in points}
    smallest_split = smallest if parts is None else min(planning.smallest_budget(*parts), smallest)
    if smallest_split < smallest and parts is not None:
        below = {smallest_split, *(budget for budget in remaining if budget < smallest)}
        points = (*points, *plan_curve(*parts, below, policy))
        remaining -= below
    points = (*points, *(predict_point(graph, costs, budget, policy) for budget in remaining))
    tell("find the budget without slowdown", 1, 1)
    return Estimate(
        smallest_budget=smallest_split,
        lossless_budget=lossless,
        in_core_budget=in_core,
        compute_seconds=costs.compute_seconds,
        points=tuple(sorted(points, key=lambda p: p.budget)),
        machine=machine,
        graph=graph,
        costs=costs,
        policy=policy,
        whole_budget=smallest if smallest_split < smallest else None,
        parts=parts if smallest_split < smallest else None,
    )
