"""Tests of how policies are named, read, checked and used, and of user-defined policies."""

from __future__ import annotations

import doctest
import importlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import LIMITS, costs_for, deep_graphs
from typer.testing import CliRunner

from outofcore import policies
from outofcore.cli.app import app
from outofcore.costs import Costs, Home, OpCost
from outofcore.errors import BudgetError, GraphError, InputError
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.planning import in_core_budget, plan_step, smallest_budget
from outofcore.planning.placing import fit_policy
from outofcore.policies import (
    POLICIES,
    TFLMS,
    Auto,
    Decision,
    Held,
    KeepAll,
    OffloadAll,
    Plan,
    PolicyLike,
    PoocH,
    ProfileGuided,
    Residency,
    SearchParams,
    SqrtCheckpoint,
    SuperNeurons,
    Window,
    gaps_of,
    movable_gaps,
    policy_of,
)
from outofcore.units import PAGE_BYTES
from outofcore.validator import validate

MIB = 1 << 20


def network(layers: int = 6) -> StepGraph:
    storages = [Storage(i, MIB, StorageKind.ACTIVATION, f"x{i}") for i in range(layers)]
    ops = [Op(0, "layer", (), (), (0,)), *(Op(i, "layer", (i - 1,), (), (i,)) for i in range(1, layers))]
    ops += [Op(layers + i, "back", (layers - 1 - i,), (), ()) for i in range(layers)]
    return StepGraph(tuple(storages), tuple(ops))


def costs(graph: StepGraph, homes: int = 1) -> Costs:
    return Costs(tuple(OpCost(1e-3) for _ in graph.ops), tuple(Home(f"home{i}", None, 1e9, 1e9) for i in range(homes)))


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("auto", Auto()),
        ("keep-all", KeepAll()),
        ("offload-all", OffloadAll()),
        ("offload-all:strict=TRUE", OffloadAll(strict=True)),
        ("pooch", PoocH()),
        ("pooch:effort=10", PoocH(effort=10)),
        ("profile-guided", ProfileGuided()),
        ("sqrt-checkpoint:segments=4", SqrtCheckpoint(segments=4)),
        ("sqrt-checkpoint: segments = none", SqrtCheckpoint()),
        ("superneurons:recompute=false", SuperNeurons(recompute=False)),
        (" tflms : threshold=3, mode=2 ", TFLMS(threshold=3, mode=2)),
        ("tflms:ahead=2,group=0", TFLMS(ahead=2, group=0)),
        ("window:reach=2", Window(reach=2)),
        ("window:reach=1e0,persist=false", Window(reach=1.0, persist=False)),
        (
            "auto:polish_ops=0,shares=[0.5],recompute_changes=1",
            Auto(SearchParams(polish_ops=0, shares=(0.5,), recompute_changes=1)),
        ),
    ],
)
@pytest.mark.usefixtures("full_search")
def test_policy_texts_are_read(text: str, policy: object) -> None:
    assert policy_of(text) == policy


def test_policy_names_match_their_policies() -> None:
    assert [policy_of(name).name for name in POLICIES] == list(POLICIES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("windw", "there is no policy 'windw'; did you mean 'window'"),
        ("", "there is no policy ''; choose one of auto, keep-all"),
        ("streamed", "there is no policy 'streamed'"),
        ("window:width=3", "'window' has no field 'width'; it has reach, persist"),
        ("keep-all:x=1", "it has no fields"),
        ("auto:polish=0", "'auto' has no field 'polish'; it has relaxations"),
        ("auto:polish_ops=0.5", "polish_ops must be a whole number"),
        ("auto:polish_ops=[1]", "polish_ops must be a whole number"),
        ("auto:shares=1", "shares must be a list of numbers"),
        ("auto:placed=-1", "0 or more, not -1"),
        ("window:reach=wide", "'window': reach must be a number, not 'wide'"),
        ("window:reach=0", "reach must be above 0, not 0"),
        ("window:reach=1e999", "reach must be a number"),
        ("window:persist=1", "persist must be True or False, not 1"),
        ("tflms:mode=4", "mode must be 0 or 1 or 2 or 3 or None, not 4"),
        ("tflms:mode=true", "mode must be"),
        ("tflms:ahead=0", "ahead must be 1 or more, not 0"),
        ("sqrt-checkpoint:segments=2.5", "segments must be a whole number or None, not 2.5"),
        ("superneurons:algorithms=fastest", "has no field 'algorithms'; it has recompute"),
        ("window:2", "cannot read the policy 'window:2'; write it like window:reach"),
        ("window(reach=2)", "cannot read the policy 'window\\(reach=2\\)'; write it like window:reach"),
        ("window:reach=2)", "cannot read"),
        ("window:reach=2,reach=3", "cannot read"),
        ("window:**{'reach': 2}", "cannot read"),
        ("window:reach=1)+g(", "cannot read"),
        ("window:reach=__import__('os').getpid()", "cannot read"),
        ("window:reach=" + "(" * 500 + "1" + ")" * 500, "cannot read"),
    ],
)
def test_invalid_policy_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        policy_of(text)


def test_fields_are_checked_at_construction() -> None:
    makers: list[Callable[[], object]] = [
        lambda: Window(reach="2"),  # type: ignore[arg-type]
        lambda: Window(reach=float("nan")),
        lambda: TFLMS(mode=7),  # type: ignore[arg-type]
        lambda: SqrtCheckpoint(segments=0),
        lambda: PoocH(effort=-1),
        lambda: Auto(params=3),  # type: ignore[arg-type]
    ]
    for make in makers:
        with pytest.raises(InputError, match="must be"):
            make()


def test_non_policy_object_is_refused() -> None:
    for candidate, message in ((3, "must be a name"), (Window, r"give an instance: Window\(\)")):
        with pytest.raises(InputError, match=message):
            policy_of(candidate)  # type: ignore[arg-type]


class LongestFirst:
    name = "longest-first"

    def variants(self, graph: StepGraph, costs: Costs, budget: int) -> Sequence[Callable[[int], Plan]]:
        gaps = sorted(movable_gaps(graph), key=lambda gap: gap.start - gap.end)
        residents = Held.of(graph, costs)
        evictions = [Decision(gap, Residency.OFFLOAD, gap.start + 1, gap.end) for gap in gaps]

        def plan(room: int) -> Plan:
            count = bisect_left(
                range(len(evictions)), True, key=lambda count: residents.peak(evictions[:count]) <= room
            )
            return Plan("of mine", room, tuple(evictions[:count]))

        return [plan] if costs.homes else []


@LIMITS
@given(st.data())
def test_user_policy_is_planned_like_any_other(data: st.DataObject) -> None:
    graph = data.draw(deep_graphs())
    prices = data.draw(costs_for(graph))
    smallest, in_core = smallest_budget(graph, prices), in_core_budget(graph, prices)
    budget = data.draw(st.integers(smallest, max(smallest, in_core - 1)))
    try:
        planned = plan_step(graph, prices, budget, LongestFirst())
    except BudgetError as error:
        assert "'longest-first'" in str(error)
        return
    assert planned.plan.policy in ("longest-first", "keep-all")
    validate(graph, planned.program, budget, prices)


def test_function_is_a_policy() -> None:
    graph = network()

    def mine(step: StepGraph, prices: Costs, room: int) -> Plan:
        assert step is graph and room <= 5 * MIB
        [gap] = [gap for gap in gaps_of(step, 0) if gap.end > gap.start + 1]
        return Plan("", room, (Decision(gap, Residency.OFFLOAD, gap.start + 1, gap.end),))

    planned = plan_step(graph, costs(graph), 5 * MIB, mine)
    assert planned.plan.policy == "mine" and len(planned.plan.decisions) == 1


def test_quickest_of_several_variants_is_used() -> None:
    graph = network()

    class Two(LongestFirst):
        def variants(self, graph: StepGraph, costs: Costs, budget: int) -> Sequence[Callable[[int], Plan]]:
            return [
                lambda room: plan_step(graph, costs, budget, OffloadAll()).plan,
                *super().variants(graph, costs, budget),
            ]

    slow = plan_step(graph, costs(graph), 5 * MIB, OffloadAll()).timeline.step_seconds
    assert plan_step(graph, costs(graph), 5 * MIB, Two()).timeline.step_seconds < slow


def test_faults_of_a_user_policy_name_the_policy() -> None:
    graph = network()

    def late(step: StepGraph, prices: Costs, room: int) -> Plan:
        [gap] = [gap for gap in gaps_of(step, 0) if gap.end > gap.start + 1]
        return Plan("", room, (Decision(gap, Residency.OFFLOAD, gap.start + 1, gap.end + 3),))

    with pytest.raises(GraphError, match="the policy 'late' made a plan that cannot be carried out"):
        plan_step(graph, costs(graph), 5 * MIB, late)
    small = StepGraph((replace(graph.storages[0], bytes=1024), *graph.storages[1:]), graph.ops)
    with pytest.raises(GraphError, match="below 64 KiB"):
        plan_step(small, costs(small), 4 * MIB, late)
    with pytest.raises(InputError, match="the policy '<lambda>' returned None"):
        plan_step(graph, costs(graph), 5 * MIB, lambda step, prices, room: None)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("policy", [Window(), TFLMS(), PoocH()])
def test_policies_evict_to_the_farthest_of_two_homes(policy: PolicyLike) -> None:
    graph = network()
    graph = StepGraph(graph.storages, graph.ops, (1,))
    planned = plan_step(graph, costs(graph, 2), 4 * MIB, policy)
    validate(graph, planned.program, 4 * MIB, costs(graph, 2))
    home_of = {d.gap.storage: d.home for d in planned.plan.decisions if d.residency is Residency.OFFLOAD}
    assert home_of and all(home == (0 if storage == 1 else 1) for storage, home in home_of.items())


def test_command_line_refuses_wrong_policy_fields() -> None:
    run = CliRunner()
    result = run.invoke(app, ["plan", "vgg16", "--budget", "1GiB", "--policy", "window:reach=far"])
    assert result.exit_code == 2
    assert "reach must be a number" in " ".join(result.output.split())


MODULES = ["outofcore.policies", "outofcore.planning.registry"]
MODULES += sorted({type(policy_of(name)).__module__ for name in POLICIES})


@pytest.mark.parametrize("name", MODULES)
def test_doctest_examples_pass(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted and not results.failed


def test_every_policy_is_public_and_documented() -> None:
    kinds = [type(policy_of(name)) for name in POLICIES]
    assert {kind.__name__ for kind in kinds} <= set(policies.__all__)
    for kind in kinds:
        assert ">>>" in (kind.__doc__ or ""), kind
        for field in getattr(kind, "__dataclass_fields__", {}):
            assert f"\n        {field}: " in (kind.__doc__ or ""), (kind, field)


@pytest.mark.parametrize("near", [0, 3, 100])
def test_offload_all_fills_the_nearest_home_first(near: int) -> None:
    graph = network()
    prices = costs(graph, 2)
    limited = replace(prices.homes[0], bytes=near * MIB)
    prices = replace(prices, homes=(limited, prices.homes[1]))
    smallest = smallest_budget(graph, prices)
    for policy in ("offload-all", "auto"):
        planned = plan_step(graph, prices, smallest, policy)
        validate(graph, planned.program, smallest, prices)
    homes = {d.gap.storage: d.home for d in plan_step(graph, prices, smallest, "offload-all").plan.decisions}
    assert sum(home == 0 for home in homes.values()) == min(near, len(homes))


def test_fit_rejects_a_plan_one_page_over_the_budget() -> None:
    graph = network()
    offload_all = plan_step(graph, costs(graph), 4 * MIB, "offload-all")
    height = offload_all.program.arena_bytes
    fitted = fit_policy(graph, costs(graph), height, lambda room: offload_all.plan)
    assert fitted is not None and fitted.program.arena_bytes == height
    assert fit_policy(graph, costs(graph), height - PAGE_BYTES, lambda room: offload_all.plan) is None


def test_room_is_searched_between_too_much_and_too_little() -> None:
    graph = network()
    rooms: list[float] = []

    def picky(step: StepGraph, prices: Costs, room: int) -> Plan:
        rooms.append(room / MIB)
        if room < 3.85 * MIB:
            raise BudgetError("too little")
        return KeepAll().variants(step, prices, room)[0](room) if room > 3.9 * MIB else offload_all

    offload_all = plan_step(graph, costs(graph), 4 * MIB, "offload-all").plan
    assert plan_step(graph, costs(graph), 4 * MIB, picky).plan.policy == "picky"
    assert [room > 3.9 for room in rooms] == [True, False, False] and rooms[1] < 3.85 < rooms[2]
