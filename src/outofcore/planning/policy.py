"""What a policy is, and how the plans of one are placed within a budget."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from typing import Any, Literal, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints, runtime_checkable

from outofcore.analysis.gaps import gaps_of, is_large
from outofcore.costs import Costs
from outofcore.errors import GraphError, InputError
from outofcore.graph import StepGraph
from outofcore.plan import Gap, Plan, Residency
from outofcore.planning.offload_all import offload_all
from outofcore.planning.parameters import SearchParams
from outofcore.planning.placing import Planned, fit, keep_all

# Makes a plan in which large blocks (64 KiB and more) take no more than a number of bytes, its *room*.
Asked = Callable[[int], Plan]


@runtime_checkable
class Policy(Protocol):
    """A way to decide what becomes of each gap of a step. Anything with these two attributes is one.

    A policy is asked where not everything fits (only ``OffloadAll`` and ``ProfileGuided`` are asked always). The
    plans are lowered, placed at addresses and simulated; where the blocks of one cannot be placed within the budget,
    the variant is asked again for less room. Of the variants that fit, that with the shortest simulated step is
    taken.

    A policy of one's own, in ten lines: the longest gaps leave, as few as will do.

    >>> from bisect import bisect_left
    >>> from outofcore.policies import Decision, Held, Plan, Residency, movable_gaps
    >>> class LongestFirst:
    ...     name = "longest-first"
    ...     def variants(self, graph, costs, budget):
    ...         gaps = sorted(movable_gaps(graph), key=lambda gap: gap.start - gap.end)
    ...         held = Held.of(graph, costs)
    ...         away = [Decision(gap, Residency.OFFLOAD, gap.start + 1, gap.end) for gap in gaps]
    ...         def plan(room):
    ...             count = bisect_left(range(len(away)), True, key=lambda count: held.peak(away[:count]) <= room)
    ...             return Plan(self.name, room, tuple(away[:count]))
    ...         return [plan] if costs.homes else []
    >>> from outofcore.policies import policy_of
    >>> policy_of(LongestFirst()).name
    'longest-first'

    Plans that contradict the step are refused with ``GraphError``, which names the decision; times that leave
    too little room show as a plan that does not fit.
    """

    @property
    def name(self) -> str:
        """What plans and reports call it."""
        ...

    def variants(self, graph: StepGraph, costs: Costs, budget: int) -> Sequence[Asked]:
        """Ways to plan a step, of which the quickest is taken; empty: there is none for such a step.

        Args:
            graph: the step.
            costs: measured or assumed; ``costs.homes`` is empty where nothing can be offloaded.
            budget: bytes of the whole arena, small blocks and constants included.

        Returns:
            Functions from bytes of room for large blocks to a plan. They may raise ``BudgetError``.
        """
        ...


def movable_gaps(graph: StepGraph) -> tuple[Gap, ...]:
    """The gaps that a plan may decide about, by storage: those of storages of 64 KiB and more.

    Gaps before the first use of an input are left out: there it waits at its home in any case.
    """
    large = (s.id for s in graph.storages if is_large(s.bytes))
    return tuple(gap for storage in large for gap in gaps_of(graph, storage) if gap.start >= 0)


# A policy, its name, a text such as "window:reach=2", or a function of graph, costs and bytes of room that makes a
# plan.
PolicyLike = str | Policy | Callable[[StepGraph, Costs, int], Plan]
_Policy = TypeVar("_Policy", bound=PolicyLike)


@dataclass(frozen=True)
class Checked:
    """Fields whose values have the types that they are declared with.

    Raises:
        InputError: when it is made with another value.
    """

    name = ""

    def __post_init__(self) -> None:
        """Refuse values of other types."""
        hints = get_type_hints(type(self))
        for given in fields(self):
            value = getattr(self, given.name)
            if not _suits(value, hints[given.name]):
                raise InputError(
                    f"the policy {self.name!r}: {given.name} must be {_words(hints[given.name])}, not {value!r}"
                )

    def require(self, field_name: str, right: bool, what: str) -> None:
        """Refuse a value that is out of range.

        Args:
            field_name: of the field.
            right: whether its value will do.
            what: what it must be, in words.
        """
        if not right:
            raise InputError(
                f"the policy {self.name!r}: {field_name} must be {what}, not {getattr(self, field_name)!r}"
            )


def _suits(value: object, hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_suits(value, part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return any(value == one and type(value) is type(one) for one in get_args(hint))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def _words(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_words(part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return " or ".join(repr(one) for one in get_args(hint))
    if hint is type(None):
        return "None"
    return {float: "a number", int: "a whole number", bool: "True or False"}.get(hint, f"a {hint.__name__}")


@dataclass(frozen=True)
class Auto(Checked):
    """The best plan that is found; the default.

    Attributes:
        params: what is tried, and how hard.

    >>> from outofcore.policies import SearchParams
    >>> Auto(SearchParams(polish_ops=0)).params.polish_ops
    0
    """

    name = "auto"
    params: SearchParams = field(default_factory=SearchParams)

    def variants(self, graph: StepGraph, costs: Costs, budget: int) -> Sequence[Asked]:
        """None by room: it is ``planning.search`` that places what it finds."""
        return ()


def quick_policy(policy: _Policy) -> _Policy | Auto:
    """Return a policy that plans as another one does, in a fraction of the time; that one itself, if it is quick."""
    return Auto(policy.params.in_a_hurry()) if isinstance(policy, Auto) else policy


@dataclass(frozen=True)
class KeepAll(Checked):
    """Nothing leaves the device: training as it is, in an arena. There is no plan unless everything fits.

    >>> KeepAll().name
    'keep-all'
    """

    name = "keep-all"

    def variants(self, graph: StepGraph, costs: Costs, budget: int) -> Sequence[Asked]:
        """The one plan there is, whatever the room."""
        return (keep_all,)


@dataclass(frozen=True)
class OffloadAll(Checked):
    """Everything leaves between any two uses: the smallest budget that there is, and the slowest step.

    Attributes:
        strict: True: also between an op and the very next one, which makes tighter placements; False: not so;
            None: only where no plan fits otherwise.

    >>> OffloadAll(strict=True)
    OffloadAll(strict=True)
    """

    name = "offload-all"
    strict: bool | None = None

    def variants(self, graph: StepGraph, costs: Costs, budget: int) -> Sequence[Asked]:
        """The lenient plan and the strict one, or the one that is asked for."""
        ways = (False, True) if self.strict is None else (self.strict,)
        return [
            lambda room, strict=strict: offload_all(graph, room, strict=strict, costs=costs)
            for strict in ways
            if costs.homes
        ]


@dataclass(frozen=True)
class Own:
    """A function as a policy.

    Attributes:
        name: for plans and reports.
        plan: of graph, costs and bytes of room; makes a plan or raises ``BudgetError``.
    """

    name: str
    plan: Callable[[StepGraph, Costs, int], Plan]

    def variants(self, graph: StepGraph, costs: Costs, budget: int) -> Sequence[Asked]:
        """The function, for this step."""
        return (lambda room: self.plan(graph, costs, room),)


def plans_of(policy: Policy, graph: StepGraph, costs: Costs, budget: int) -> list[Planned]:
    """The plans of a policy that fit a budget, one for each variant that has one, the quickest first.

    Args:
        policy: that is asked.
        graph: the step.
        costs: measured or assumed.
        budget: bytes of the arena.

    Raises:
        GraphError: a plan contradicts the step.
        InputError: what a variant returned is no plan.
    """
    found = [_fitted(policy, graph, costs, budget, asked) for asked in policy.variants(graph, costs, budget)]
    return sorted((p for p in found if p is not None), key=lambda p: p.timeline.step_seconds)


def first_of(policy: Policy, graph: StepGraph, costs: Costs, budget: int) -> list[Planned]:
    """The plan of the first variant that has one within the budget, if any."""
    for asked in policy.variants(graph, costs, budget):
        planned = _fitted(policy, graph, costs, budget, asked)
        if planned is not None:
            return [planned]
    return []


def _fitted(policy: Policy, graph: StepGraph, costs: Costs, budget: int, asked: Asked) -> Planned | None:
    def named(room: int) -> Plan:
        plan = asked(room)
        if not isinstance(plan, Plan):  # pyright: ignore[reportUnnecessaryIsInstance] - it may be a user's
            raise InputError(f"the policy {policy.name!r} returned {plan!r}, which is no outofcore.plan.Plan")
        for decision in plan.decisions:
            data = graph.storages[decision.gap.storage]
            if decision.residency is not Residency.KEEP and not is_large(data.bytes):
                raise GraphError(f"storage {data.id} ({data.name}) is below 64 KiB, and so has to stay: {decision}")
        return plan if plan.policy == policy.name else replace(plan, policy=policy.name)

    try:
        return fit(graph, costs, budget, named)
    except GraphError as error:
        raise GraphError(f"the policy {policy.name!r} made a plan that cannot be carried out: {error}") from error
