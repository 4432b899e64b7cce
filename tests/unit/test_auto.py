"""``auto``: what it does on steps worked out by hand, and what holds of all its plans."""

from __future__ import annotations

import json
import logging
from dataclasses import fields, replace
from pathlib import Path

import pytest
from effort import examples, some_of
from examples import MIB, network, network_costs
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from strategies import costs_for, graphs

from outofcore.costs import Costs, Home, OpCost
from outofcore.errors import BudgetError
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.graphfile import read_graph
from outofcore.plan import Residency
from outofcore.planning import (
    POLICIES,
    QUICK,
    SearchParams,
    candidates,
    in_core_budget,
    lower_bound_seconds,
    plan_step,
    plans_of_step,
    smallest_budget,
)
from outofcore.planning.placing import keep_all, room_for_large, worth
from outofcore.planning.polish import polished
from outofcore.planning.problem import Problem
from outofcore.planning.repair import Attempts
from outofcore.planning.tuner import Tuner
from outofcore.policies import Auto
from outofcore.simulator import simulate
from outofcore.validator import validate

SIZE = 1 << 20
INSTANCES = Path(__file__).parents[2] / "benchmarks" / "instances" / "small"
LIMITS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
# All techniques, whatever the tier.
FULL = SearchParams()
# With little of the local search, which takes most of the time.
BRIEF = replace(FULL, polish_ops=600)
# What switches a technique off.
OFF = {
    "relaxations": 0,
    "shares": (),
    "zooms": 0,
    "slacks": (1.5,),
    "tunings": 0,
    "tuned": 1,
    "further": 0,
    "recompute_changes": 0.0,
    "polish_ops": 0,
    "annealing": 0,
}


def stack(layers: int) -> StepGraph:
    """As many activations as layers, made one by one and used one by one in reverse."""
    made = tuple(Op(i, "forward", (), (), (i,)) for i in range(layers))
    used = tuple(Op(layers + i, "backward", (layers - 1 - i,), (), ()) for i in range(layers))
    return StepGraph(tuple(Storage(i, SIZE, StorageKind.ACTIVATION) for i in range(layers)), made + used)


def costs(graph: StepGraph, *homes: Home) -> Costs:
    return Costs(tuple(OpCost(1.0) for _ in graph.ops), homes)


def home(seconds: float, most: int | None = None) -> Home:
    """A home to which one storage takes so many seconds, and from which it takes as many."""
    return Home(f"{seconds} s", most, SIZE / seconds, SIZE / seconds)


def chain(layers: int) -> StepGraph:
    """Activations each made from the one before, and looked at again in reverse."""
    ops = [Op(0, "layer", (), (), (0,))]
    ops += [Op(i, "layer", (i - 1,), (), (i,)) for i in range(1, layers)]
    ops += [Op(layers + i, "back", (layers - 1 - i,), (), ()) for i in range(layers)]
    return StepGraph(tuple(Storage(i, SIZE, StorageKind.ACTIVATION) for i in range(layers)), tuple(ops))


def test_no_stall_where_the_link_keeps_up() -> None:
    """Eight activations in the room of four: four leave while others are made, and come back in time."""
    graph = stack(8)
    given_ = costs(graph, home(1.0))
    planned = plan_step(graph, given_, 4 * SIZE, params=BRIEF)
    assert planned.timeline.step_seconds == pytest.approx(given_.compute_seconds, rel=0.15)
    assert planned.program.arena_bytes <= 4 * SIZE


def test_two_links_carry_what_one_cannot() -> None:
    """Each link alone is too slow by half; side by side they do."""
    graph = stack(16)
    one, two = costs(graph, home(2.0)), costs(graph, home(2.0), home(2.0))
    alone = plan_step(graph, one, 4 * SIZE, params=BRIEF).timeline.step_seconds
    planned = plan_step(graph, two, 4 * SIZE, params=BRIEF)
    validate(graph, planned.program, 4 * SIZE, two)
    assert planned.timeline.step_seconds < alone
    assert {d.home for d in planned.plan.decisions} == {0, 1}
    both, bound = lower_bound_seconds(graph, two, 4 * SIZE), lower_bound_seconds(graph, one, 4 * SIZE)
    assert both is not None and bound is not None
    assert both <= bound <= alone * (1 + 1e-9)


def test_bound_counts_the_copies_of_what_the_user_sees() -> None:
    """The output takes 9 seconds to go home, from second 3 on; all ops together take 8."""
    graph = stack(4)
    visible = replace(graph, outputs=(2,))
    given_ = costs(graph, home(9.0))
    bounds = [lower_bound_seconds(each, given_, 4 * SIZE) for each in (graph, visible)]
    assert bounds == pytest.approx([8.0, 12.0], rel=1e-4)
    planned = plan_step(visible, given_, 3 * SIZE, params=BRIEF)
    validate(visible, planned.program, 3 * SIZE, given_)
    assert planned.timeline.step_seconds >= 12.0


def test_a_home_that_is_too_slow_to_be_used_costs_nothing() -> None:
    """Without a home, 218; only dropping one gap after the other gives 241."""
    graph = network(64)
    slow = network_costs(graph, copy=200.0)
    budget = int(in_core_budget(graph, slow) * 0.12)
    planned = plan_step(graph, slow, budget, params=BRIEF)
    validate(graph, planned.program, budget, slow)
    assert planned.timeline.step_seconds <= 222


def test_best_candidates_are_tuned_further(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = network(24)
    tight, budget = network_costs(graph, copy=3.0), 9 * MIB
    tries: list[int] = []
    tune = Tuner.tune
    monkeypatch.setattr(
        Tuner, "tune", lambda self, count, share, seed=0: (tries.append(count), tune(self, count, share, seed))[1]
    )

    def further(params: SearchParams, budget: int) -> int:
        tries.clear()
        plan_step(graph, tight, budget, params=params)
        return sum(count > params.tunings for count in tries)

    assert further(BRIEF, budget) == BRIEF.tuned * len(BRIEF.slacks)
    assert not further(replace(BRIEF, further=0), budget)
    assert not further(BRIEF, in_core_budget(graph, tight))
    with monkeypatch.context() as short:
        short.setattr(candidates, "_RUNS", 0)
        assert not further(BRIEF, budget)


def test_bytes_that_no_block_fills_are_not_counted_on() -> None:
    """Blocks of one size fill whole multiples of it: a budget between two of these has the plan of the lower one."""
    graph = stack(8)
    given_ = costs(graph, home(1.0))
    assert room_for_large(graph, given_, 5 * SIZE - 4096) == 4 * SIZE
    one, other = (plan_step(graph, given_, budget, params=BRIEF) for budget in (4 * SIZE, 5 * SIZE - 4096))
    assert one.plan.decisions == other.plan.decisions
    mixed = replace(graph, storages=(*graph.storages[:-1], replace(graph.storages[-1], bytes=SIZE + 4096)))
    assert room_for_large(mixed, given_, 5 * SIZE - 4096) == 5 * SIZE - 4096


def test_a_plan_that_is_proposed_again_is_asked_for_ever_more() -> None:
    graph = stack(4)
    given_ = costs(graph, home(1.0))
    budget = 4 * SIZE - 8192
    tried = Attempts(graph, given_, budget)
    for times in (1, 2, 4):
        assert tried.place(keep_all(budget)) is None
        assert tried.repeated == (times > 1)
        assert tried.spared.max() == times * 8192


def test_a_block_that_mostly_sticks_out_twice_leaves_but_none_that_lies_above_it() -> None:
    """Of four blocks on each other two fit, one sticks out by three quarters, and one lies wholly above."""
    graph = stack(4)
    given_ = costs(graph, home(1.0))
    budget = 2 * SIZE + SIZE // 4
    tried = Attempts(graph, given_, budget)
    for count in (0, 1):
        assert tried.place(keep_all(budget)) is None
        assert len(tried.leaving) == count


def test_what_a_full_home_cannot_hold_goes_to_the_other() -> None:
    graph = stack(8)
    given_ = costs(graph, home(0.5, 2 * SIZE), home(0.6))
    planned = plan_step(graph, given_, 4 * SIZE, params=BRIEF)
    validate(graph, planned.program, 4 * SIZE, given_)
    assert sum(d.home == 0 for d in planned.plan.decisions) <= 2
    assert any(d.home == 1 for d in planned.plan.decisions)


def test_plans_come_best_first_and_say_what_they_were_chosen_from(caplog: pytest.LogCaptureFixture) -> None:
    graph = chain(10)
    given_ = costs(graph, home(3.0))
    with caplog.at_level(logging.DEBUG, logger="outofcore.planning"):
        found = list(plans_of_step(graph, given_, 5 * SIZE, params=BRIEF))
    values = [worth(given_, planned) for planned in found[:-1]]  # the last one, with everything away, is a last resort
    assert len(found) > 1
    assert values[0] == min(values)
    for planned in found:
        validate(graph, planned.program, 5 * SIZE, given_)
    chosen = [outcome for outcome in found[0].candidates if outcome.verdict == "chosen"]
    assert [outcome.plan for outcome in chosen] == [found[0].plan]
    assert chosen[0].seconds == found[0].timeline.step_seconds
    for outcome in found[0].candidates:
        assert outcome.verdict and (outcome.seconds is not None or outcome.arena_bytes > 5 * SIZE)
        assert outcome.how in caplog.text


@pytest.mark.parametrize("technique", sorted(OFF))
def test_each_technique_can_be_switched_off(technique: str) -> None:
    graph = chain(6)
    params = replace(BRIEF, tunings=60, annealing=60)
    params = replace(params, **{technique: OFF[technique]})
    for given_ in (costs(graph, home(3.0)), costs(graph)):
        planned = plan_step(graph, given_, 4 * SIZE, Auto(params))
        validate(graph, planned.program, 4 * SIZE, given_)


def test_every_technique_is_documented() -> None:
    assert SearchParams.__doc__ is not None
    assert all(f"        {field.name}: " in SearchParams.__doc__ for field in fields(SearchParams))
    assert set(OFF) <= {field.name for field in fields(SearchParams)}


def test_what_is_polished_is_valid_and_quicker_and_the_same_each_time() -> None:
    graph = chain(8)
    given_ = costs(graph, home(3.0))
    budget = smallest_budget(graph, given_) + SIZE
    start = plan_step(graph, given_, budget, "offload-all")
    problem = Problem.of(graph, given_, room_for_large(graph, given_, budget))
    better = polished(problem, budget, start, [start.plan], FULL)
    assert better is not None
    assert better.timeline.step_seconds < start.timeline.step_seconds
    validate(graph, better.program, budget, given_)
    assert polished(problem, budget, start, [start.plan], FULL) == better


def test_a_tiny_step_is_not_polished_for_longer_than_its_runs_could_win_back() -> None:
    graph = chain(8)
    quick = Costs(tuple(OpCost(1e-7) for _ in graph.ops), (Home("host", None, 3e12, 3e12),))
    budget = smallest_budget(graph, quick) + SIZE
    start = plan_step(graph, quick, budget, "offload-all")
    problem = Problem.of(graph, quick, room_for_large(graph, quick, budget))
    assert polished(problem, budget, start, [start.plan], FULL) is None


@pytest.mark.parametrize(
    "name", some_of(["chain-inplace-slow", "unet-none", "residual-none"], ["chain-inplace-slow", "unet-none"])
)
def test_plans_are_near_the_proved_optimum(name: str) -> None:
    file = read_graph(INSTANCES / f"{name}.json")
    for known in json.loads((INSTANCES / "optimum.json").read_text(encoding="utf-8"))[name]:
        planned = plan_step(file.graph, file.costs, known["budget"], params=BRIEF)
        assert planned.timeline.step_seconds <= known["lower_seconds"] * 1.05


@pytest.mark.parametrize("part", [0.1, 0.15, 0.2, 0.3])
@pytest.mark.parametrize("room", [2, 4])
def test_quick_search_fills_a_small_home(room: int, part: float) -> None:
    """``QUICK`` offloads half of the bytes above the limit where a home has room for them, and this one has not."""
    graph = chain(48)
    roomy = costs(graph, home(1e-6))
    budget = smallest_budget(graph, roomy) + room * SIZE
    most = int((in_core_budget(graph, roomy) - budget) * part)
    small = costs(graph, home(1e-6, most))
    planned = plan_step(graph, small, budget, params=QUICK)
    validate(graph, planned.program, budget, small)
    away = sum(decision.residency is Residency.OFFLOAD for decision in planned.plan.decisions)
    assert most / SIZE * 0.5 <= away  # at least half of the home is used


@st.composite
def tasks(draw: st.DrawFn) -> tuple[StepGraph, Costs, int]:
    """A graph, costs with homes that may be small, and a budget below what everything takes."""
    graph = draw(graphs())
    given_ = draw(costs_for(graph))
    everything = sum(s.bytes for s in graph.storages)
    sizes = st.one_of(st.none(), st.integers(0, everything))
    given_ = replace(given_, homes=tuple(replace(place, bytes=draw(sizes)) for place in given_.homes))
    smallest, most = smallest_budget(graph, given_), in_core_budget(graph, given_)
    return graph, given_, draw(st.integers(smallest, max(smallest, most - 1)))


@settings(LIMITS, max_examples=examples(150))
@given(tasks())
def test_every_plan_is_valid_whatever_the_homes_hold(task: tuple[StepGraph, Costs, int]) -> None:
    graph, given_, budget = task
    try:
        planned = plan_step(graph, given_, budget, params=QUICK)
    except BudgetError:
        event("no plan")
        return
    validate(graph, planned.program, budget, given_)
    assert planned.timeline == simulate(graph, given_, planned.program)
    bound = lower_bound_seconds(graph, given_, budget)
    assert bound is not None
    assert bound <= planned.timeline.step_seconds * (1 + 1e-9)


@pytest.mark.parametrize("name", ["chain-fast", "residual-slow", "unet-fast"])
def test_auto_is_no_slower_than_the_published_systems(name: str) -> None:
    file = read_graph(INSTANCES / f"{name}.json")
    budget = json.loads((INSTANCES / "optimum.json").read_text(encoding="utf-8"))[name][0]["budget"]
    auto = plan_step(file.graph, file.costs, budget, params=BRIEF).timeline.step_seconds
    for policy in POLICIES:
        try:
            other = plan_step(file.graph, file.costs, budget, policy)
        except BudgetError:
            continue
        assert auto <= other.timeline.step_seconds * 1.001 or policy == "auto", policy
