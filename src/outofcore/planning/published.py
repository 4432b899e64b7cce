"""The published policies under one roof: plans of each by its name, and those of them that may beat a plan.

A policy that is written here is by that a rival of ``auto``, which takes its plan where it is the quicker one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outofcore.costs import Costs
from outofcore.errors import BudgetError
from outofcore.graph import StepGraph
from outofcore.plan import Plan
from outofcore.planning.placing import Planned, fit, fit_once, op_times, outlook, room_for_large, worth
from outofcore.planning.pooch import pooch
from outofcore.planning.priced import priced
from outofcore.planning.sqrt_checkpoint import segment_counts, sqrt_checkpoint
from outofcore.planning.superneurons import superneurons
from outofcore.planning.tflms import tflms
from outofcore.planning.window import window

PUBLISHED = ("pooch", "priced", "sqrt-checkpoint", "superneurons", "tflms", "window")
# How often the priced policy is asked again, with times from the simulation.
_REFINEMENTS = 4
# Steps of no more ops are small.
_SMALL = 100
# A plan may turn out so much quicker than it looks before it is placed closely.
_DOUBT = 1.02

Asked = Callable[[int], Plan]  # makes a plan for a number of bytes of large blocks; may raise BudgetError


def plans_of(graph: StepGraph, costs: Costs, budget: int, policy: str) -> list[Planned]:
    """The plans of a published policy that fit the budget."""
    found = [_fitted(graph, costs, budget, policy, asked) for asked in _ways(graph, costs, budget, policy)]
    return [planned for planned in found if planned is not None]


def rivals(graph: StepGraph, costs: Costs, budget: int, seconds: float) -> list[Planned]:
    """Plans of all published policies but those that look slower than ``seconds`` a step.

    Of a small step all are made: there what a plan looks like before it is placed closely says the least.
    """
    if len(graph.ops) <= _SMALL:
        return [planned for policy in PUBLISHED for planned in plans_of(graph, costs, budget, policy)]
    room = room_for_large(graph, costs, budget)
    found: list[Planned] = []
    for policy in PUBLISHED:
        for way in _ways(graph, costs, budget, policy):
            asked = _remembered(way)
            try:
                look = outlook(graph, costs, budget, asked(room), seconds * _DOUBT)
            except BudgetError:
                continue
            if look is not None:
                planned = _fitted(graph, costs, budget, policy, asked)
                found += [planned] if planned else []
    return found


def _remembered(asked: Asked) -> Asked:
    """The same, but what is asked twice is made once."""
    made: dict[int, Plan] = {}

    def remembered(room: int) -> Plan:
        if room not in made:
            made[room] = asked(room)
        return made[room]

    return remembered


def _ways(graph: StepGraph, costs: Costs, budget: int, policy: str) -> Sequence[Asked]:
    """The variants of a policy, of which the simulator takes the best."""
    if not costs.homes and policy not in ("sqrt-checkpoint", "superneurons"):
        return ()  # they offload
    match policy:
        case "pooch":
            return (lambda room: pooch(graph, costs, room),)
        case "priced":
            return (lambda room: priced(graph, costs, room),)
        case "sqrt-checkpoint":
            return [_sqrt_checkpoint(graph, budget, count) for count in segment_counts(graph)]
        case "superneurons":
            return [_superneurons(graph, costs, again) for again in (False, True)]
        case "tflms":
            return [_tflms(graph, costs, synchronous) for synchronous in (False, True)]
        case "window":
            return (lambda room: window(graph, costs, room),)
        case _:
            raise ValueError(f"{policy!r} is not a published policy; choose one of {', '.join(PUBLISHED)}")


def _fitted(graph: StepGraph, costs: Costs, budget: int, policy: str, asked: Asked) -> Planned | None:
    if policy == "sqrt-checkpoint":  # it makes the same plan whatever the room
        return fit_once(graph, costs, budget, asked(budget))
    if policy == "priced":
        return _priced(graph, costs, budget)
    return fit(graph, costs, budget, asked)


def _priced(graph: StepGraph, costs: Costs, budget: int) -> Planned | None:
    """A plan by ``priced``, made again with the times at which ops really start, while that helps."""
    times: Sequence[float] | None = None
    best: Planned | None = None
    for _ in range(_REFINEMENTS):

        def policy(room: int, times: Sequence[float] | None = times) -> Plan:
            return priced(graph, costs, room, times=times)

        planned = fit(graph, costs, budget, policy)
        if planned is None or (best is not None and worth(costs, planned) >= worth(costs, best)):
            return best
        best = planned
        times = op_times(planned)
        if planned.timeline.step_seconds <= costs.compute_seconds * 1.005:
            return best
    return best


def _sqrt_checkpoint(graph: StepGraph, budget: int, count: int) -> Asked:
    return lambda room: sqrt_checkpoint(graph, budget, segments=count)


def _superneurons(graph: StepGraph, costs: Costs, recompute: bool) -> Asked:
    return lambda room: superneurons(graph, costs, room, recompute=recompute)


def _tflms(graph: StepGraph, costs: Costs, synchronous: bool) -> Asked:
    return lambda room: tflms(graph, costs, room, synchronous=synchronous)
