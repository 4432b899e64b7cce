"""How PoocH classifies feature maps, and the simulation that it asks."""

import pytest

from outofcore.costs import Costs, Home, OpCost
from outofcore.errors import BudgetError
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.plan import Gap, Residency
from outofcore.planning import POLICIES, in_core_budget, plan_step
from outofcore.planning.baselines.pooch import pooch
from outofcore.planning.baselines.trial import Class, Trials
from outofcore.simulator import recompute_seconds
from outofcore.validator import validate

MIB = 1 << 20
ROOMY = 1 << 40


def network(layers: int = 6, rerunnable: bool = True) -> StepGraph:
    """Maps of one MiB, each made from the one before, looked at again in the opposite order."""
    storages = [Storage(i, MIB, StorageKind.ACTIVATION, f"x{i}") for i in range(layers)]
    ops = [Op(0, "layer", (), (), (0,))]
    ops += [Op(i, "layer", (i - 1,), (), (i,), rerunnable=rerunnable) for i in range(1, layers)]
    ops.append(Op(layers, "loss", (), (), ()))
    ops += [Op(layers + 1 + i, "back", (layers - 1 - i,), (), ()) for i in range(layers)]
    return StepGraph(tuple(storages), tuple(ops))


def costs(graph: StepGraph, seconds: float = 1.0, copy: float | None = 1.0) -> Costs:
    """Ops and copies that take so many seconds; None: nowhere to copy to."""
    homes = () if copy is None else (Home("host", None, MIB / copy, MIB / copy),)
    return Costs(tuple(OpCost(seconds) for _ in graph.ops), homes)


def classes(graph: StepGraph, given: Costs, budget: int) -> dict[int, Residency]:
    return {d.gap.storage: d.residency for d in pooch(graph, given, budget).decisions}


def test_where_all_fits_all_is_kept() -> None:
    graph = network()
    assert classes(graph, costs(graph), ROOMY) == {}


def test_what_is_used_again_soonest_is_kept() -> None:
    graph = network(rerunnable=False)
    found = classes(graph, costs(graph), 4 * MIB)
    assert set(found.values()) == {Residency.OFFLOAD}
    assert sorted(found) == list(range(len(found)))
    with pytest.raises(BudgetError):
        pooch(graph, costs(graph), MIB)


def test_slow_links_make_maps_computed_again_and_quick_ones_do_not() -> None:
    graph = network()
    slow = classes(graph, costs(graph, 0.1, 10.0), 4 * MIB)
    quick = classes(graph, costs(graph, 10.0, 0.1), 4 * MIB)
    assert Residency.RECOMPUTE in slow.values()
    assert set(quick.values()) == {Residency.OFFLOAD}


def test_without_homes_there_is_no_plan_unless_all_fits() -> None:
    graph = network()
    assert classes(graph, costs(graph, copy=None), ROOMY) == {}
    with pytest.raises(BudgetError):
        pooch(graph, costs(graph, copy=None), 5 * MIB)


def test_the_simulation_waits_for_copies() -> None:
    graph = network(3)
    # Three maps; that of op 2 is used by the op after the loss, op 4.
    trials = Trials.of(graph, costs(graph), ROOMY)
    assert trials.maps == (Gap(0, 1, 6), Gap(1, 2, 5), Gap(2, 2, 4))
    kept = trials.run([Class.KEEP] * 3)
    assert kept is not None and kept.seconds == 7.0 and kept.decisions == ()
    # Out from 2 to 3 s, in from 5 s (when it is due in time) to 6 s: hidden.
    one = trials.run([Class.SWAP, Class.KEEP, Class.KEEP])
    assert one is not None and one.seconds == 7.0 and not one.stalling_out and not one.stalling_in
    # A copy takes ten times as long: out from 2 to 12 s, in to 22 s, and then the last op.
    slow = Trials.of(graph, costs(graph, copy=10.0), ROOMY).run([Class.SWAP, Class.KEEP, Class.KEEP])
    assert slow is not None and slow.seconds == 23.0
    again = trials.run([Class.RECOMPUTE, Class.KEEP, Class.KEEP])
    assert again is not None and again.seconds == 8.0


def test_a_chain_brings_back_what_it_passes_through() -> None:
    graph = network(4)
    trials = Trials.of(graph, costs(graph), ROOMY)
    found = trials.run([Class.KEEP, Class.RECOMPUTE, Class.RECOMPUTE, Class.KEEP])
    assert found is not None
    assert [(d.gap.storage, d.fetch_at) for d in found.decisions] == [(1, 6), (2, 6)]
    assert found.seconds == len(graph.ops) + 2


def test_it_is_a_policy() -> None:
    graph = network(10)
    given = costs(graph, 1.0, 3.0)
    budget = in_core_budget(graph, given) * 2 // 3
    planned = plan_step(graph, given, budget, "pooch")
    validate(graph, planned.program, budget, given)
    assert planned.plan.policy == "pooch"
    assert recompute_seconds(given, planned.program) > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_without_homes_no_policy_copies(policy: str) -> None:
    graph = network()
    given = costs(graph, copy=None)
    budget = in_core_budget(graph, given) - 2 * MIB
    try:
        planned = plan_step(graph, given, budget, policy)
    except BudgetError:
        return
    assert {d.residency for d in planned.plan.decisions} == {Residency.RECOMPUTE}
