"""Policies: their protocol, the simplest ones, and the placing of their plans within a budget."""

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
from outofcore.planning.placing import Planned, fit_policy, keep_all

# Returns a plan in which large blocks (64 KiB and more) take at most the given *room*, in bytes.
Asked = Callable[[int], Plan]


@runtime_checkable
class Policy(Protocol):
    """Decides the residency of each gap of a step. Any object with ``name`` and ``variants`` is a policy.

    The planner asks a policy only if the whole step does not fit (``OffloadAll`` and ``ProfileGuided``: always). It
    lowers each plan, places it at addresses and simulates it. If the blocks of a plan do not fit the budget, the
    planner asks the variant again with less room. The variant with the shortest simulated step wins.

    A custom policy in ten lines, which offloads the longest gaps until the step fits:

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

    A plan that contradicts the step raises ``GraphError``, which names the decision. A plan whose times leave too
    little room just does not fit.
    """

    @property
    def name(self) -> str:
        """The name in plans and reports."""
        ...

    def variants(self, graph: StepGraph, costs: Costs, budget: int) -> Sequence[Asked]:
        """Return functions that each plan the step in a different way; the fastest plan is used.

        Args:
            graph: the step.
            costs: measured or assumed; ``costs.homes`` is empty if nothing can be offloaded.
            budget: bytes of the whole arena, small blocks and constants included.

        Returns:
            Functions from bytes of room for large blocks to a plan. They may raise ``BudgetError``.
        """
        ...


def movable_gaps(graph: StepGraph) -> tuple[Gap, ...]:
    """Return the gaps of storages of 64 KiB and more, by storage; a plan may decide about these.

    Gaps before the first use of an input are left out, because the input is at its home until then.
    """
    large = (s.id for s in graph.storages if is_large(s.bytes))
    return tuple(gap for storage in large for gap in gaps_of(graph, storage) if gap.start >= 0)


# A policy, its name, a text such as "window:reach=2", or a function from graph, costs and bytes of room to a plan.
PolicyLike = str | Policy | Callable[[StepGraph, Costs, int], Plan]
_Policy = TypeVar("_Policy", bound=PolicyLike)


@dataclass(frozen=True)
class CheckedPolicy:
    """Base class of policies; raises ``InputError`` if a field has a value of the wrong type."""

    name = ""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for declared in fields(self):
            value = getattr(self, declared.name)
            if not _matches_type(value, hints[declared.name]):
                raise InputError(
                    f"the policy {self.name!r}: {declared.name} must be {_describe_type(hints[declared.name])}, "
                    f"not {value!r}"
                )

    def require(self, field_name: str, is_valid: bool, valid_values: str) -> None:
        """Raise ``InputError`` about a field unless ``is_valid``; the message contains ``valid_values``."""
        if not is_valid:
            raise InputError(
                f"the policy {self.name!r}: {field_name} must be {valid_values}, not {getattr(self, field_name)!r}"
            )


def _matches_type(value: object, hint: Any) -> bool:
    """Return whether a value matches a type hint; integers match ``float``, too."""
    if get_origin(hint) in (Union, types.UnionType):
        return any(_matches_type(value, part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return any(value == option and type(value) is type(option) for option in get_args(hint))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def _describe_type(hint: Any) -> str:
    """Return a type hint in words, for error messages."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_describe_type(part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return " or ".join(repr(option) for option in get_args(hint))
    if hint is type(None):
        return "None"
    return {float: "a number", int: "a whole number", bool: "True or False"}.get(hint, f"a {hint.__name__}")


@dataclass(frozen=True)
class Auto(CheckedPolicy):
    """The best plan found by search; the default.

    Attributes:
        params: the techniques of the search and their effort.

    >>> from outofcore.policies import SearchParams
    >>> Auto(SearchParams(polish_ops=0)).params.polish_ops
    0
    """

    name = "auto"
    params: SearchParams = field(default_factory=SearchParams)

    def variants(self, graph: StepGraph, costs: Costs, budget: int) -> Sequence[Asked]:
        """Return an empty sequence, since the planner runs the search itself."""
        return ()


def quick_policy(policy: _Policy) -> _Policy | Auto:
    """Return ``auto`` with the least search effort instead of ``auto``; return any other policy unchanged."""
    return Auto(policy.params.in_a_hurry()) if isinstance(policy, Auto) else policy


@dataclass(frozen=True)
class KeepAll(CheckedPolicy):
    """Everything stays on the device: in-core training in an arena. The whole step must fit.

    >>> KeepAll().name
    'keep-all'
    """

    name = "keep-all"

    def variants(self, graph: StepGraph, costs: Costs, budget: int) -> Sequence[Asked]:
        return (keep_all,)


@dataclass(frozen=True)
class OffloadAll(CheckedPolicy):
    """Everything is offloaded between any two uses: the smallest possible budget, and the slowest step.

    Attributes:
        strict: True: offload between two consecutive ops, too, which allows tighter placements. False: do not. None:
            only if no other plan fits.

    >>> OffloadAll(strict=True)
    OffloadAll(strict=True)
    """

    name = "offload-all"
    strict: bool | None = None

    def variants(self, graph: StepGraph, costs: Costs, budget: int) -> Sequence[Asked]:
        stricts = (False, True) if self.strict is None else (self.strict,)
        return [
            lambda room, strict=strict: offload_all(graph, room, strict=strict, costs=costs)
            for strict in stricts
            if costs.homes
        ]


@dataclass(frozen=True)
class FunctionPolicy:
    name: str
    # From graph, costs and bytes of room to a plan; may raise ``BudgetError``.
    plan: Callable[[StepGraph, Costs, int], Plan]

    def variants(self, graph: StepGraph, costs: Costs, budget: int) -> Sequence[Asked]:
        return (lambda room: self.plan(graph, costs, room),)


def fitting_plans(policy: Policy, graph: StepGraph, costs: Costs, budget: int) -> list[Planned]:
    """Return the plans of a policy that fit a budget, at most one for each variant, the fastest first."""
    plans = [_fit_variant(policy, graph, costs, budget, variant) for variant in policy.variants(graph, costs, budget)]
    return sorted((p for p in plans if p is not None), key=lambda p: p.timeline.step_seconds)


def first_fitting_plan(policy: Policy, graph: StepGraph, costs: Costs, budget: int) -> list[Planned]:
    """Return a list with the plan of the first variant that fits the budget; empty if no variant fits."""
    for variant in policy.variants(graph, costs, budget):
        planned = _fit_variant(policy, graph, costs, budget, variant)
        if planned is not None:
            return [planned]
    return []


def _fit_variant(policy: Policy, graph: StepGraph, costs: Costs, budget: int, make_plan: Asked) -> Planned | None:
    """Plan with ``make_plan`` and place the plan within the budget; None if no plan fits."""

    def named_plan(room: int) -> Plan:
        """Return the plan under the policy's name; raise an error if it is invalid."""
        plan = make_plan(room)
        if not isinstance(plan, Plan):  # pyright: ignore[reportUnnecessaryIsInstance] - it may be a user's
            raise InputError(
                f"the policy {policy.name!r} returned {plan!r}, which is not an outofcore.plan.Plan; return a Plan"
            )
        for decision in plan.decisions:
            data = graph.storages[decision.gap.storage]
            if decision.residency is not Residency.KEEP and not is_large(data.bytes):
                raise GraphError(
                    f"storage {data.id} ({data.name}) is below 64 KiB, so it must stay on the device: {decision}; "
                    "decide only about the gaps in movable_gaps(graph)"
                )
        return plan if plan.policy == policy.name else replace(plan, policy=policy.name)

    try:
        return fit_policy(graph, costs, budget, named_plan)
    except GraphError as error:
        raise GraphError(f"the policy {policy.name!r} made a plan that cannot be carried out: {error}") from error
