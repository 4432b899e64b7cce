"""The published policies under one roof: plans of each by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from outofcore.costs import Costs
from outofcore.graph import StepGraph, StorageKind
from outofcore.plan import Plan, Residency
from outofcore.planning.placing import Planned, fit, fit_once
from outofcore.planning.baselines.pooch import pooch
from outofcore.planning.baselines.sqrt_checkpoint import segment_counts, sqrt_checkpoint
from outofcore.planning.baselines.superneurons import superneurons
from outofcore.planning.baselines.tflms import tflms
from outofcore.planning.baselines.window import window

PUBLISHED = ("pooch", "sqrt-checkpoint", "superneurons", "tflms", "window")

Asked = Callable[[int], Plan]  # makes a plan for a number of bytes of large blocks; may raise BudgetError


def plans_of(graph: StepGraph, costs: Costs, budget: int, policy: str) -> list[Planned]:
    """The plans of a published policy that fit the budget; they know of one home, the farthest."""
    last = len(costs.homes) - 1
    farthest = replace(costs, homes=costs.homes[-1:])

    def everywhere(asked: Asked) -> Asked:
        def plan(room: int) -> Plan:
            made = asked(room)
            moved = (
                replace(d, home=last)
                if d.residency is Residency.OFFLOAD
                and d.gap.storage not in graph.outputs
                and graph.storages[d.gap.storage].kind is not StorageKind.INPUT
                else d
                for d in made.decisions
            )
            return replace(made, decisions=tuple(moved))

        return plan if last > 0 else asked

    found = [
        _fitted(graph, costs, budget, policy, everywhere(asked)) for asked in _ways(graph, farthest, budget, policy)
    ]
    return sorted((p for p in found if p is not None), key=lambda p: p.timeline.step_seconds)


def _ways(graph: StepGraph, costs: Costs, budget: int, policy: str) -> Sequence[Asked]:
    """The variants of a policy, of which the simulator takes the best."""
    if not costs.homes and policy not in ("sqrt-checkpoint", "superneurons"):
        return ()  # they offload
    match policy:
        case "pooch":
            return (lambda room: pooch(graph, costs, room),)
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
    return fit(graph, costs, budget, asked)


def _sqrt_checkpoint(graph: StepGraph, budget: int, count: int) -> Asked:
    return lambda room: sqrt_checkpoint(graph, budget, segments=count)


def _superneurons(graph: StepGraph, costs: Costs, recompute: bool) -> Asked:
    return lambda room: superneurons(graph, costs, room, recompute=recompute)


def _tflms(graph: StepGraph, costs: Costs, synchronous: bool) -> Asked:
    return lambda room: tflms(graph, costs, room, synchronous=synchronous)
