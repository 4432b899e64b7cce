"""Tests of how PoocH classifies activations, and of its simulation."""

import math
from dataclasses import replace

import pytest
from examples import MIB, network, network_costs

from outofcore.costs import Costs, Home, OpCost
from outofcore.errors import BudgetError
from outofcore.graph import StepGraph
from outofcore.plan import Gap, Residency
from outofcore.planning import POLICIES, in_core_budget, plan_step
from outofcore.planning.baselines.pooch import (
    _Classifier,  # pyright: ignore[reportPrivateUsage]
    pooch,
)
from outofcore.planning.baselines.trial import MapClass, StepSimulator
from outofcore.simulator import recompute_seconds
from outofcore.validator import validate

ROOMY = 1 << 40


def classes(graph: StepGraph, step_costs: Costs, budget: int) -> dict[int, Residency]:
    return {d.gap.storage: d.residency for d in pooch(graph, step_costs, budget).decisions}


def test_all_activations_are_kept_if_they_fit() -> None:
    graph = network()
    assert classes(graph, network_costs(graph), ROOMY) == {}


def test_activations_used_again_soonest_are_kept() -> None:
    graph = network(rerunnable=False)
    class_of = classes(graph, network_costs(graph), 4 * MIB)
    assert set(class_of.values()) == {Residency.OFFLOAD}
    assert sorted(class_of) == list(range(len(class_of)))
    with pytest.raises(BudgetError):
        pooch(graph, network_costs(graph), MIB)


def test_slow_links_recompute_and_quick_ones_offload() -> None:
    graph = network()
    slow = classes(graph, network_costs(graph, 0.1, 10.0), 4 * MIB)
    quick = classes(graph, network_costs(graph, 10.0, 0.1), 4 * MIB)
    assert Residency.RECOMPUTE in slow.values()
    assert set(quick.values()) == {Residency.OFFLOAD}


def test_step_without_homes_has_a_plan_only_in_core() -> None:
    graph = network()
    assert classes(graph, network_costs(graph, copy=None), ROOMY) == {}
    with pytest.raises(BudgetError):
        pooch(graph, network_costs(graph, copy=None), 5 * MIB)


def test_simulation_waits_for_copies() -> None:
    graph = network(3)
    # Three activations; that of op 2 is used by the op after the loss, op 4.
    trials = StepSimulator.of(graph, network_costs(graph), ROOMY)
    assert trials.maps == (Gap(0, 1, 6), Gap(1, 2, 5), Gap(2, 2, 4))
    all_kept = trials.run([MapClass.KEEP] * 3)
    assert all_kept is not None and all_kept.seconds == 7.0 and all_kept.decisions == ()
    # Out from 2 to 3 s, in from 5 s (when it is due in time) to 6 s: hidden.
    one_swapped = trials.run([MapClass.SWAP, MapClass.KEEP, MapClass.KEEP])
    assert (
        one_swapped is not None
        and one_swapped.seconds == 7.0
        and not one_swapped.stalling_out
        and not one_swapped.stalling_in
    )
    # A copy takes ten times as long: out from 2 to 12 s, in to 22 s, and then the last op.
    slow = StepSimulator.of(graph, network_costs(graph, copy=10.0), ROOMY).run(
        [MapClass.SWAP, MapClass.KEEP, MapClass.KEEP]
    )
    assert slow is not None and slow.seconds == 23.0
    recomputed = trials.run([MapClass.RECOMPUTE, MapClass.KEEP, MapClass.KEEP])
    assert recomputed is not None and recomputed.seconds == 8.0


def test_recomputation_restores_intermediate_activations() -> None:
    graph = network(4)
    trials = StepSimulator.of(graph, network_costs(graph), ROOMY)
    trial = trials.run([MapClass.KEEP, MapClass.RECOMPUTE, MapClass.RECOMPUTE, MapClass.KEEP])
    assert trial is not None
    assert [(d.gap.storage, d.fetch_at) for d in trial.decisions] == [(1, 6), (2, 6)]
    assert trial.seconds == len(graph.ops) + 2


def test_pooch_is_a_policy() -> None:
    graph = network(10)
    step_costs = network_costs(graph, 1.0, 3.0)
    budget = in_core_budget(graph, step_costs) * 2 // 3
    planned = plan_step(graph, step_costs, budget, "pooch")
    validate(graph, planned.program, budget, step_costs)
    assert planned.plan.policy == "pooch"
    assert recompute_seconds(step_costs, planned.program) > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_step_without_homes_is_planned_without_copies(policy: str) -> None:
    graph = network()
    step_costs = network_costs(graph, copy=None)
    budget = in_core_budget(graph, step_costs) - 2 * MIB
    try:
        planned = plan_step(graph, step_costs, budget, policy)
    except BudgetError:
        return
    assert {d.residency for d in planned.plan.decisions} == {Residency.RECOMPUTE}


def uneven(sizes: list[int], rerunnable: bool = True) -> StepGraph:
    graph = network(len(sizes), rerunnable)
    storages = tuple(replace(storage, bytes=size * MIB) for storage, size in zip(graph.storages, sizes, strict=True))
    return StepGraph(storages, graph.ops)


def test_keeping_stalling_activations_may_beat_last_first() -> None:
    graph = uneven([3, 1, 3, 3], rerunnable=False)
    seconds = (1.0, 1.0, 2.0, 1.0, 1.0, 4.0, 1.0, 1.0, 2.0)
    step_costs = Costs(tuple(map(OpCost, seconds)), (Home("host", None, MIB, MIB),))
    swapped = StepSimulator.of(graph, step_costs, 9 * MIB).run([MapClass.SWAP] * 4)
    assert swapped is not None and swapped.stalling_out == {1, 3} and swapped.stalling_in == {2, 3}
    # Without the tree search: the last three activations fit, and the first is swapped; 16 s. With it: 15 s.
    assert [d.gap.storage for d in pooch(graph, step_costs, 9 * MIB, effort=0).decisions] == [0]
    assert [d.gap.storage for d in pooch(graph, step_costs, 9 * MIB).decisions] == [1]


def test_forward_stalling_activations_are_kept_until_one_does_not_fit() -> None:
    graph = uneven([1, 2, 1, 1], rerunnable=False)
    # The loss has room for two of the four.
    step_costs = Costs(
        tuple(OpCost(1.0, 2 * MIB if op.name == "loss" else 0) for op in graph.ops), network_costs(graph).homes
    )
    search = _Classifier(StepSimulator.of(graph, step_costs, 4 * MIB), 0)
    # Activation 3 fits and activation 1 does not, so that activation 2 is next, not 0.
    filled = search._keep_fitting([MapClass.SWAP] * 4, frozenset({0, 1, 3}))[1]
    assert filled == [MapClass.SWAP, MapClass.SWAP, MapClass.KEEP, MapClass.KEEP]
    filled = search._keep_fitting([MapClass.SWAP] * 4, frozenset({0, 3}))[1]
    assert filled == [MapClass.KEEP, MapClass.SWAP, MapClass.SWAP, MapClass.KEEP]


def test_activation_stays_swapped_unless_recomputation_is_cheaper() -> None:
    graph = network(6)
    # A copy of 1.5 s overlaps all but one op: swapping activation 1 costs more than the one second of its
    # recomputation.
    plan = pooch(graph, network_costs(graph, 1.0, 1.5), 3 * MIB)
    assert {d.gap.storage: d.residency for d in plan.decisions} == {
        0: Residency.OFFLOAD,
        1: Residency.RECOMPUTE,
        2: Residency.OFFLOAD,
    }
    # A recomputation ten times as long is not worth it.
    slow = Costs(tuple(OpCost(10.0) for _ in graph.ops), network_costs(graph, 1.0, 15.0).homes)
    assert pooch(graph, slow, 3 * MIB).decisions[1].residency is Residency.RECOMPUTE
    dear = Costs(tuple(OpCost(10.0) for _ in graph.ops), network_costs(graph, 1.0, 1.5).homes)
    assert {d.residency for d in pooch(graph, dear, 3 * MIB).decisions} == {Residency.OFFLOAD}


def test_ratio_divides_added_seconds() -> None:
    graph = network(6)
    trials = StepSimulator.of(graph, network_costs(graph, 1.0, 3.0), 3 * MIB)
    classes = [MapClass.SWAP, MapClass.SWAP, MapClass.SWAP, MapClass.KEEP, MapClass.KEEP, MapClass.KEEP]
    now = trials.run(classes)
    free = trials.without_copies([1]).run(classes)
    assert now is not None and free is not None and now.seconds > free.seconds
    # Activation 1 is made from activation 0, which is swapped: one op runs again.
    assert _Classifier(trials, 0)._added_seconds_ratio(classes, (1,), now) == pytest.approx(
        1.0 / (now.seconds - free.seconds)
    )
    quick = StepSimulator.of(graph, network_costs(graph, 1.0, 0.1), 3 * MIB)
    hidden = quick.run(classes)
    assert hidden is not None and _Classifier(quick, 0)._added_seconds_ratio(classes, (1,), hidden) == math.inf
