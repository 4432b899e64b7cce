"""Tests of ``auto`` on hand-made steps, and properties of all its plans."""

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
from outofcore.planning.placing import comparison_seconds, keep_all, room_for_large
from outofcore.planning.polish import polish_plan
from outofcore.planning.problem import Problem
from outofcore.planning.repair import Attempts
from outofcore.planning.tuner import Tuner
from outofcore.policies import Auto
from outofcore.simulator import simulate
from outofcore.validator import validate

SIZE = 1 << 20
INSTANCES = Path(__file__).parents[2] / "benchmarks" / "instances" / "small"
LIMITS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
# All techniques of every tier.
FULL = SearchParams()
# Less local search, which takes most of the time.
BRIEF = replace(FULL, polish_ops=600)
# The value of each parameter that switches its technique off.
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
    forward = tuple(Op(i, "forward", (), (), (i,)) for i in range(layers))
    backward = tuple(Op(layers + i, "backward", (layers - 1 - i,), (), ()) for i in range(layers))
    return StepGraph(tuple(Storage(i, SIZE, StorageKind.ACTIVATION) for i in range(layers)), forward + backward)


def costs(graph: StepGraph, *homes: Home) -> Costs:
    return Costs(tuple(OpCost(1.0) for _ in graph.ops), homes)


def home(seconds: float, capacity: int | None = None) -> Home:
    """Return a home to and from which one storage takes ``seconds``."""
    return Home(f"{seconds} s", capacity, SIZE / seconds, SIZE / seconds)


def chain(layers: int) -> StepGraph:
    ops = [Op(0, "layer", (), (), (0,))]
    ops += [Op(i, "layer", (i - 1,), (), (i,)) for i in range(1, layers)]
    ops += [Op(layers + i, "back", (layers - 1 - i,), (), ()) for i in range(layers)]
    return StepGraph(tuple(Storage(i, SIZE, StorageKind.ACTIVATION) for i in range(layers)), tuple(ops))


def test_step_does_not_stall_when_the_link_keeps_up() -> None:
    """Eight activations share the room of four; the link moves one per op."""
    graph = stack(8)
    step_costs = costs(graph, home(1.0))
    planned = plan_step(graph, step_costs, 4 * SIZE, params=BRIEF)
    assert planned.timeline.step_seconds == pytest.approx(step_costs.compute_seconds, rel=0.15)
    assert planned.program.arena_bytes <= 4 * SIZE


def test_two_links_carry_more_than_one() -> None:
    """Each link alone has half the bandwidth that the step needs; both together suffice."""
    graph = stack(16)
    one_link, two_links = costs(graph, home(2.0)), costs(graph, home(2.0), home(2.0))
    alone = plan_step(graph, one_link, 4 * SIZE, params=BRIEF).timeline.step_seconds
    planned = plan_step(graph, two_links, 4 * SIZE, params=BRIEF)
    validate(graph, planned.program, 4 * SIZE, two_links)
    assert planned.timeline.step_seconds < alone
    assert {d.home for d in planned.plan.decisions} == {0, 1}
    both, bound = lower_bound_seconds(graph, two_links, 4 * SIZE), lower_bound_seconds(graph, one_link, 4 * SIZE)
    assert both is not None and bound is not None
    assert both <= bound <= alone * (1 + 1e-9)


def test_bound_counts_copies_of_visible_outputs() -> None:
    """The output takes 9 seconds to go home, from second 3 on; all ops together take 8."""
    graph = stack(4)
    visible = replace(graph, outputs=(2,))
    step_costs = costs(graph, home(9.0))
    bounds = [lower_bound_seconds(step, step_costs, 4 * SIZE) for step in (graph, visible)]
    assert bounds == pytest.approx([8.0, 12.0], rel=1e-4)
    planned = plan_step(visible, step_costs, 3 * SIZE, params=BRIEF)
    validate(visible, planned.program, 3 * SIZE, step_costs)
    assert planned.timeline.step_seconds >= 12.0


def test_unusably_slow_home_does_not_slow_the_plan() -> None:
    """Without a home the step takes 218 s; dropping gaps one at a time gives 241 s."""
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


def test_budget_between_block_multiples_gets_the_lower_plan() -> None:
    """Blocks of one size fill multiples of it; the rest of the budget is not usable."""
    graph = stack(8)
    step_costs = costs(graph, home(1.0))
    assert room_for_large(graph, step_costs, 5 * SIZE - 4096) == 4 * SIZE
    exact, between = (plan_step(graph, step_costs, budget, params=BRIEF) for budget in (4 * SIZE, 5 * SIZE - 4096))
    assert exact.plan.decisions == between.plan.decisions
    mixed = replace(graph, storages=(*graph.storages[:-1], replace(graph.storages[-1], bytes=SIZE + 4096)))
    assert room_for_large(mixed, step_costs, 5 * SIZE - 4096) == 5 * SIZE - 4096


def test_attempts_spare_twice_as_much_for_each_repeated_plan() -> None:
    graph = stack(4)
    step_costs = costs(graph, home(1.0))
    budget = 4 * SIZE - 8192
    tried = Attempts(graph, step_costs, budget)
    for times in (1, 2, 4):
        assert tried.place(keep_all(budget)) is None
        assert tried.is_repeat == (times > 1)
        assert tried.spared_bytes.max() == times * 8192


def test_block_across_the_budget_is_evicted_on_retry() -> None:
    """Two of four blocks fit, one sticks out by three quarters, and one is above the budget entirely."""
    graph = stack(4)
    step_costs = costs(graph, home(1.0))
    budget = 2 * SIZE + SIZE // 4
    tried = Attempts(graph, step_costs, budget)
    for count in (0, 1):
        assert tried.place(keep_all(budget)) is None
        assert len(tried.forced_offloads) == count


def test_overflow_of_a_full_home_goes_to_the_second_home() -> None:
    graph = stack(8)
    step_costs = costs(graph, home(0.5, 2 * SIZE), home(0.6))
    planned = plan_step(graph, step_costs, 4 * SIZE, params=BRIEF)
    validate(graph, planned.program, 4 * SIZE, step_costs)
    assert sum(d.home == 0 for d in planned.plan.decisions) <= 2
    assert any(d.home == 1 for d in planned.plan.decisions)


def test_plans_come_best_first_and_list_their_candidates(caplog: pytest.LogCaptureFixture) -> None:
    graph = chain(10)
    step_costs = costs(graph, home(3.0))
    with caplog.at_level(logging.DEBUG, logger="outofcore.planning"):
        plans = list(plans_of_step(graph, step_costs, 5 * SIZE, params=BRIEF))
    # The last plan is a last resort: it offloads all storages.
    values = [comparison_seconds(step_costs, planned) for planned in plans[:-1]]
    assert len(plans) > 1
    assert values[0] == min(values)
    for planned in plans:
        validate(graph, planned.program, 5 * SIZE, step_costs)
    chosen = [outcome for outcome in plans[0].candidates if outcome.verdict == "chosen"]
    assert [outcome.plan for outcome in chosen] == [plans[0].plan]
    assert chosen[0].seconds == plans[0].timeline.step_seconds
    for outcome in plans[0].candidates:
        assert outcome.verdict and (outcome.seconds is not None or outcome.arena_bytes > 5 * SIZE)
        assert outcome.how in caplog.text


@pytest.mark.parametrize("technique", sorted(OFF))
def test_each_technique_can_be_switched_off(technique: str) -> None:
    graph = chain(6)
    params = replace(BRIEF, tunings=60, annealing=60)
    params = replace(params, **{technique: OFF[technique]})
    for step_costs in (costs(graph, home(3.0)), costs(graph)):
        planned = plan_step(graph, step_costs, 4 * SIZE, Auto(params))
        validate(graph, planned.program, 4 * SIZE, step_costs)


def test_every_technique_is_documented() -> None:
    assert SearchParams.__doc__ is not None
    assert all(f"        {field.name}: " in SearchParams.__doc__ for field in fields(SearchParams))
    assert set(OFF) <= {field.name for field in fields(SearchParams)}


def test_polished_plan_is_valid_quicker_and_deterministic() -> None:
    graph = chain(8)
    step_costs = costs(graph, home(3.0))
    budget = smallest_budget(graph, step_costs) + SIZE
    start = plan_step(graph, step_costs, budget, "offload-all")
    problem = Problem.of(graph, step_costs, room_for_large(graph, step_costs, budget))
    better = polish_plan(problem, budget, start, [start.plan], FULL)
    assert better is not None
    assert better.timeline.step_seconds < start.timeline.step_seconds
    validate(graph, better.program, budget, step_costs)
    assert polish_plan(problem, budget, start, [start.plan], FULL) == better


def test_tiny_step_is_not_polished() -> None:
    graph = chain(8)
    quick = Costs(tuple(OpCost(1e-7) for _ in graph.ops), (Home("host", None, 3e12, 3e12),))
    budget = smallest_budget(graph, quick) + SIZE
    start = plan_step(graph, quick, budget, "offload-all")
    problem = Problem.of(graph, quick, room_for_large(graph, quick, budget))
    assert polish_plan(problem, budget, start, [start.plan], FULL) is None


@pytest.mark.parametrize(
    "name", some_of(["chain-inplace-slow", "unet-none", "residual-none"], ["chain-inplace-slow", "unet-none"])
)
def test_plans_are_near_the_proved_optimum(name: str) -> None:
    file = read_graph(INSTANCES / f"{name}.json")
    for optimum in json.loads((INSTANCES / "optimum.json").read_text(encoding="utf-8"))[name]:
        planned = plan_step(file.graph, file.costs, optimum["budget"], params=BRIEF)
        assert planned.timeline.step_seconds <= optimum["lower_seconds"] * 1.05


@pytest.mark.parametrize("part", [0.1, 0.15, 0.2, 0.3])
@pytest.mark.parametrize("room", [2, 4])
def test_quick_search_fills_a_small_home(room: int, part: float) -> None:
    """``QUICK`` assumes a home with room for half of the bytes above the limit; this home is smaller."""
    graph = chain(48)
    roomy = costs(graph, home(1e-6))
    budget = smallest_budget(graph, roomy) + room * SIZE
    capacity = int((in_core_budget(graph, roomy) - budget) * part)
    small = costs(graph, home(1e-6, capacity))
    planned = plan_step(graph, small, budget, params=QUICK)
    validate(graph, planned.program, budget, small)
    offloaded = sum(decision.residency is Residency.OFFLOAD for decision in planned.plan.decisions)
    assert capacity / SIZE * 0.5 <= offloaded  # at least half of the home is used


@st.composite
def tasks(draw: st.DrawFn) -> tuple[StepGraph, Costs, int]:
    graph = draw(graphs())
    step_costs = draw(costs_for(graph))
    all_bytes = sum(s.bytes for s in graph.storages)
    sizes = st.one_of(st.none(), st.integers(0, all_bytes))
    step_costs = replace(step_costs, homes=tuple(replace(home_, bytes=draw(sizes)) for home_ in step_costs.homes))
    smallest, in_core = smallest_budget(graph, step_costs), in_core_budget(graph, step_costs)
    return graph, step_costs, draw(st.integers(smallest, max(smallest, in_core - 1)))


@settings(LIMITS, max_examples=examples(150))
@given(tasks())
def test_every_plan_is_valid_at_any_home_capacity(task: tuple[StepGraph, Costs, int]) -> None:
    graph, step_costs, budget = task
    try:
        planned = plan_step(graph, step_costs, budget, params=QUICK)
    except BudgetError:
        event("no plan")
        return
    validate(graph, planned.program, budget, step_costs)
    assert planned.timeline == simulate(graph, step_costs, planned.program)
    bound = lower_bound_seconds(graph, step_costs, budget)
    assert bound is not None
    assert bound <= planned.timeline.step_seconds * (1 + 1e-9)


@pytest.mark.parametrize("name", ["chain-fast", "residual-slow", "unet-fast"])
def test_auto_is_as_fast_as_the_published_systems(name: str) -> None:
    file = read_graph(INSTANCES / f"{name}.json")
    budget = json.loads((INSTANCES / "optimum.json").read_text(encoding="utf-8"))[name][0]["budget"]
    auto = plan_step(file.graph, file.costs, budget, params=BRIEF).timeline.step_seconds
    for policy in POLICIES:
        try:
            planned = plan_step(file.graph, file.costs, budget, policy)
        except BudgetError:
            continue
        assert auto <= planned.timeline.step_seconds * 1.001 or policy == "auto", policy
