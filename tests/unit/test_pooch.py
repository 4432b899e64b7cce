"""How PoocH classifies feature maps, and the simulation that it asks."""

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


def classes(graph: StepGraph, given: Costs, budget: int) -> dict[int, Residency]:
    return {d.gap.storage: d.residency for d in pooch(graph, given, budget).decisions}


def test_where_all_fits_all_is_kept() -> None:
    graph = network()
    assert classes(graph, network_costs(graph), ROOMY) == {}


def test_what_is_used_again_soonest_is_kept() -> None:
    graph = network(rerunnable=False)
    found = classes(graph, network_costs(graph), 4 * MIB)
    assert set(found.values()) == {Residency.OFFLOAD}
    assert sorted(found) == list(range(len(found)))
    with pytest.raises(BudgetError):
        pooch(graph, network_costs(graph), MIB)


def test_slow_links_make_maps_computed_again_and_quick_ones_do_not() -> None:
    graph = network()
    slow = classes(graph, network_costs(graph, 0.1, 10.0), 4 * MIB)
    quick = classes(graph, network_costs(graph, 10.0, 0.1), 4 * MIB)
    assert Residency.RECOMPUTE in slow.values()
    assert set(quick.values()) == {Residency.OFFLOAD}


def test_without_homes_there_is_no_plan_unless_all_fits() -> None:
    graph = network()
    assert classes(graph, network_costs(graph, copy=None), ROOMY) == {}
    with pytest.raises(BudgetError):
        pooch(graph, network_costs(graph, copy=None), 5 * MIB)


def test_the_simulation_waits_for_copies() -> None:
    graph = network(3)
    # Three maps; that of op 2 is used by the op after the loss, op 4.
    trials = StepSimulator.of(graph, network_costs(graph), ROOMY)
    assert trials.maps == (Gap(0, 1, 6), Gap(1, 2, 5), Gap(2, 2, 4))
    kept = trials.run([MapClass.KEEP] * 3)
    assert kept is not None and kept.seconds == 7.0 and kept.decisions == ()
    # Out from 2 to 3 s, in from 5 s (when it is due in time) to 6 s: hidden.
    one = trials.run([MapClass.SWAP, MapClass.KEEP, MapClass.KEEP])
    assert one is not None and one.seconds == 7.0 and not one.stalling_out and not one.stalling_in
    # A copy takes ten times as long: out from 2 to 12 s, in to 22 s, and then the last op.
    slow = StepSimulator.of(graph, network_costs(graph, copy=10.0), ROOMY).run(
        [MapClass.SWAP, MapClass.KEEP, MapClass.KEEP]
    )
    assert slow is not None and slow.seconds == 23.0
    again = trials.run([MapClass.RECOMPUTE, MapClass.KEEP, MapClass.KEEP])
    assert again is not None and again.seconds == 8.0


def test_a_chain_brings_back_what_it_passes_through() -> None:
    graph = network(4)
    trials = StepSimulator.of(graph, network_costs(graph), ROOMY)
    found = trials.run([MapClass.KEEP, MapClass.RECOMPUTE, MapClass.RECOMPUTE, MapClass.KEEP])
    assert found is not None
    assert [(d.gap.storage, d.fetch_at) for d in found.decisions] == [(1, 6), (2, 6)]
    assert found.seconds == len(graph.ops) + 2


def test_it_is_a_policy() -> None:
    graph = network(10)
    given = network_costs(graph, 1.0, 3.0)
    budget = in_core_budget(graph, given) * 2 // 3
    planned = plan_step(graph, given, budget, "pooch")
    validate(graph, planned.program, budget, given)
    assert planned.plan.policy == "pooch"
    assert recompute_seconds(given, planned.program) > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_without_homes_no_policy_copies(policy: str) -> None:
    graph = network()
    given = network_costs(graph, copy=None)
    budget = in_core_budget(graph, given) - 2 * MIB
    try:
        planned = plan_step(graph, given, budget, policy)
    except BudgetError:
        return
    assert {d.residency for d in planned.plan.decisions} == {Residency.RECOMPUTE}


def uneven(sizes: list[int], rerunnable: bool = True) -> StepGraph:
    """A chain of maps of so many MiB."""
    graph = network(len(sizes), rerunnable)
    storages = tuple(replace(storage, bytes=size * MIB) for storage, size in zip(graph.storages, sizes, strict=True))
    return StepGraph(storages, graph.ops)


def test_keeping_what_stalled_the_backward_pass_may_beat_what_fits_last_first() -> None:
    graph = uneven([3, 1, 3, 3], rerunnable=False)
    seconds = (1.0, 1.0, 2.0, 1.0, 1.0, 4.0, 1.0, 1.0, 2.0)
    given = Costs(tuple(map(OpCost, seconds)), (Home("host", None, MIB, MIB),))
    swapped = StepSimulator.of(graph, given, 9 * MIB).run([MapClass.SWAP] * 4)
    assert swapped is not None and swapped.stalling_out == {1, 3} and swapped.stalling_in == {2, 3}
    # Without the tree search: the last three maps fit, and the first is swapped; 16 s. With it: 15 s.
    assert [d.gap.storage for d in pooch(graph, given, 9 * MIB, effort=0).decisions] == [0]
    assert [d.gap.storage for d in pooch(graph, given, 9 * MIB).decisions] == [1]


def test_of_those_that_held_the_forward_pass_up_none_is_kept_beyond_the_first_that_does_not_fit() -> None:
    graph = uneven([1, 2, 1, 1], rerunnable=False)
    # The loss leaves room for two of the four.
    given = Costs(
        tuple(OpCost(1.0, 2 * MIB if op.name == "loss" else 0) for op in graph.ops), network_costs(graph).homes
    )
    search = _Classifier(StepSimulator.of(graph, given, 4 * MIB), 0)
    # Map 3 fits, and map 1 does not; so it is no longer the turn of map 0, but of map 2.
    kept = search._keep_fitting([MapClass.SWAP] * 4, frozenset({0, 1, 3}))[1]
    assert kept == [MapClass.SWAP, MapClass.SWAP, MapClass.KEEP, MapClass.KEEP]
    kept = search._keep_fitting([MapClass.SWAP] * 4, frozenset({0, 3}))[1]
    assert kept == [MapClass.KEEP, MapClass.SWAP, MapClass.SWAP, MapClass.KEEP]


def test_what_adds_no_less_when_computed_again_stays_swapped() -> None:
    graph = network(6)
    # A copy of 1.5 s hides behind all but one op: swapping map 1 costs the step more than the one second of its chain.
    found = pooch(graph, network_costs(graph, 1.0, 1.5), 3 * MIB)
    assert {d.gap.storage: d.residency for d in found.decisions} == {
        0: Residency.OFFLOAD,
        1: Residency.RECOMPUTE,
        2: Residency.OFFLOAD,
    }
    # Chains that take ten times as long as before are not worth it.
    slow = Costs(tuple(OpCost(10.0) for _ in graph.ops), network_costs(graph, 1.0, 15.0).homes)
    assert pooch(graph, slow, 3 * MIB).decisions[1].residency is Residency.RECOMPUTE
    dear = Costs(tuple(OpCost(10.0) for _ in graph.ops), network_costs(graph, 1.0, 1.5).homes)
    assert {d.residency for d in pooch(graph, dear, 3 * MIB).decisions} == {Residency.OFFLOAD}


def test_the_ratio_is_that_of_added_seconds() -> None:
    graph = network(6)
    trials = StepSimulator.of(graph, network_costs(graph, 1.0, 3.0), 3 * MIB)
    classes = [MapClass.SWAP, MapClass.SWAP, MapClass.SWAP, MapClass.KEEP, MapClass.KEEP, MapClass.KEEP]
    now = trials.run(classes)
    free = trials.without_copies([1]).run(classes)
    assert now is not None and free is not None and now.seconds > free.seconds
    # Map 1 is made from map 0, which is swapped: one op runs again.
    assert _Classifier(trials, 0)._added_seconds_ratio(classes, (1,), now) == pytest.approx(
        1.0 / (now.seconds - free.seconds)
    )
    quick = StepSimulator.of(graph, network_costs(graph, 1.0, 0.1), 3 * MIB)
    hidden = quick.run(classes)
    assert hidden is not None and _Classifier(quick, 0)._added_seconds_ratio(classes, (1,), hidden) == math.inf
