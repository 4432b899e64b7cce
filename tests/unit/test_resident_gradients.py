"""Tests of visible gradients: those used last stay on the device while there is room."""

from __future__ import annotations

from dataclasses import replace

import pytest
from effort import examples
from hypothesis import given, settings
from strategies import LIMITS, tasks

from outofcore.costs import Costs, Home, OpCost
from outofcore.errors import BudgetError
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.planning import POLICIES, QUICK, in_core_budget, plan_in_core, plan_step
from outofcore.planning.placing import comparison_seconds
from outofcore.planning.resident_gradients import keep_fitting_gradients, undecided_gradients
from outofcore.program import CopyOut
from outofcore.validator import validate

K64 = 64 * 1024
LAYERS = 6


def step(layers: int = LAYERS) -> StepGraph:
    storages: list[Storage] = []

    def storage(kind: StorageKind, count: int, name: str) -> int:
        storages.append(Storage(len(storages), count * K64, kind, name))
        return len(storages) - 1

    weights = [storage(StorageKind.PARAMETER, 4, f"w{i}") for i in range(layers)]
    flow = [storage(StorageKind.INPUT, 2, "x")]
    flow += [storage(StorageKind.ACTIVATION, 2, f"a{i}") for i in range(layers)]
    gradients = [storage(StorageKind.GRADIENT, 4, f"w{i}.grad") for i in range(layers)]
    ops: list[Op] = []
    for i in range(layers):
        ops.append(Op(len(ops), "forward", (flow[i], weights[i]), (), (flow[i + 1],)))
    for i in reversed(range(layers)):
        ops.append(Op(len(ops), "backward", (flow[i], flow[i + 1], weights[i]), (), (gradients[i],)))
        ops.append(Op(len(ops), "update", (weights[i], gradients[i]), (weights[i],), (), rerunnable=False))
    return StepGraph(tuple(storages), tuple(ops), tuple(gradients))


GRAPH = step()
COSTS = Costs(tuple(OpCost(0.01) for _ in GRAPH.ops), (Home("disk", None, 1e8, 1e8),))


def test_all_gradients_stay_if_there_is_room() -> None:
    budget = sum(storage.bytes for storage in GRAPH.storages) + K64
    for policy in ("auto", "window"):
        planned = plan_step(GRAPH, COSTS, budget, policy)
        assert planned.plan.staying == GRAPH.outputs
        assert not any(isinstance(instruction, CopyOut) for instruction in planned.program.instructions)
        validate(GRAPH, planned.program, budget, COSTS)


def test_tuning_splits_gradients_into_staying_and_evicted() -> None:
    budget = in_core_budget(GRAPH, COSTS) * 9 // 10
    planned = plan_step(GRAPH, COSTS, budget, params=QUICK)
    validate(GRAPH, planned.program, budget, COSTS)
    leaving = {d.gap.storage for d in planned.plan.decisions if d.gap.end == len(GRAPH.ops)}
    assert planned.plan.staying
    assert leaving
    assert leaving.isdisjoint(planned.plan.staying)
    assert leaving.union(planned.plan.staying) == set(GRAPH.outputs)


def test_gradients_used_last_stay_first() -> None:
    budget = in_core_budget(GRAPH, COSTS)
    planned = plan_in_core(GRAPH, COSTS, budget)
    assert planned is not None
    order = undecided_gradients(GRAPH, replace(planned.plan, staying=()))
    assert order == sorted(GRAPH.outputs)  # the first layer's gradient comes last
    assert 0 < len(planned.plan.staying) < LAYERS
    assert set(planned.plan.staying) == set(order[: len(planned.plan.staying)])
    copied = {planned.program.blocks[i.block].storage for i in planned.program.instructions if isinstance(i, CopyOut)}
    assert copied == set(GRAPH.outputs) - set(planned.plan.staying)


@pytest.mark.parametrize("part", [0.5, 0.7, 0.9])
def test_staying_gradients_do_not_slow_the_plan(part: float) -> None:
    budget = int(in_core_budget(GRAPH, COSTS) * part)
    planned = plan_step(GRAPH, COSTS, budget)
    validate(GRAPH, planned.program, budget, COSTS)
    without_outputs = replace(GRAPH, outputs=())
    assert planned.timeline.step_seconds >= plan_step(without_outputs, COSTS, budget).timeline.step_seconds * 0.999
    assert planned.plan.staying


def test_auto_counts_the_time_of_evicted_gradients() -> None:
    milliseconds = [2, 2, 10, 20, 20, 10, 5, 5, 10, 20, 2, 5, 20, 2, 2]
    graph = step(len(milliseconds) // 3)
    costs = Costs(tuple(OpCost(ms / 1000) for ms in milliseconds), (Home("disk", None, 2e07, 1e08),))
    budget = int(in_core_budget(graph, costs) * 0.7)
    best = comparison_seconds(costs, plan_step(graph, costs, budget, params=QUICK))
    for policy in set(POLICIES) - {"auto"}:
        try:
            planned = plan_step(graph, costs, budget, policy)
        except BudgetError:
            continue
        assert best <= comparison_seconds(costs, planned), policy


@settings(LIMITS, max_examples=examples(100))
@given(tasks())
def test_let_stay_keeps_the_plan_valid(task: tuple[StepGraph, Costs, int]) -> None:
    graph, costs, budget = task
    planned = plan_step(graph, costs, budget, params=QUICK)
    longer = keep_fitting_gradients(graph, costs, budget, planned)
    validate(graph, longer.program, budget, costs)
    assert comparison_seconds(costs, longer) <= comparison_seconds(costs, planned)
    assert set(longer.plan.staying) <= graph.gradients_left
