"""Tests of stored plans of compiled steps: loaded, proved before use, and limited in number."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from weights_in_sequence import BUDGET, COSTS, GRAPH, LAYERS, WINDOW, chain

from outofcore.costs import Costs, Home, OpCost
from outofcore.graph import StepGraph
from outofcore.planning import Planned, Policy, in_core_budget, plan_step, policy_of
from outofcore.planning.policy import FunctionPolicy, OffloadAll
from outofcore.step_plans import StepPlans, VariantChoice
from outofcore.units import MIB
from outofcore.variant import LOWEST_MEMORY, Variant, split

FACTS = ("room", BUDGET)


@pytest.fixture
def planned() -> Planned:
    return plan_step(GRAPH, COSTS, BUDGET, WINDOW)


def key_of(plans: StepPlans, graph: StepGraph = GRAPH, policy: Policy = WINDOW, facts: object = FACTS) -> str:
    return plans.key(graph, policy, facts)


def store(
    plans: StepPlans,
    planned: Planned,
    *,
    key: str = "",
    variant: Variant = LOWEST_MEMORY,
    costs: Costs = COSTS,
    is_quick: bool = False,
) -> None:
    choice = VariantChoice(key or key_of(plans), variant, {"a family": 5})
    plans.keep(choice, GRAPH, costs, BUDGET, planned, is_quick=is_quick)


def load(
    plans: StepPlans, key: str = "", graph: StepGraph = GRAPH, costs: Costs = COSTS
) -> tuple[Planned, VariantChoice, bool] | None:
    key = key or key_of(plans, graph)
    return plans.find(key, lambda stored: (stored.prove(graph, costs, BUDGET), stored.choice, stored.is_quick))


def test_plan_is_loaded_under_other_times(tmp_path: Path, planned: Planned) -> None:
    plans = StepPlans(tmp_path)
    assert load(plans) is None
    variant = split(MIB, 3 * MIB)
    store(plans, planned, variant=variant)
    choice = VariantChoice(key_of(plans), variant, {"a family": 5})
    assert load(plans) == (replace(planned, candidates=()), choice, False)
    slower = replace(COSTS, ops=(OpCost(0.03),) * 2 * LAYERS)
    loaded = load(plans, costs=slower)
    assert loaded is not None
    assert loaded[0].program == planned.program
    assert loaded[0].timeline.step_seconds >= 0.3
    # The source line of an op may change.
    moved = replace(GRAPH, ops=tuple(replace(op, source="elsewhere") for op in GRAPH.ops))
    assert load(plans, graph=moved) is not None


def test_quick_plan_is_kept_until_there_is_a_better_one(tmp_path: Path, planned: Planned) -> None:
    plans, choice = StepPlans(tmp_path), VariantChoice(key_of(StepPlans(tmp_path)), LOWEST_MEMORY, {"a family": 5})
    store(plans, planned, is_quick=True)
    assert load(plans) == (replace(planned, candidates=()), choice, True)
    store(plans, planned)
    assert load(plans) == (replace(planned, candidates=()), choice, False)
    store(plans, planned, is_quick=True)
    assert load(plans) == (replace(planned, candidates=()), choice, False)
    assert len(list(tmp_path.glob("plan-*.json"))) == 1
    # A plan whose ops need other memory is useless.
    needs = replace(COSTS, ops=(OpCost(0.01, 4096),) * 2 * LAYERS)
    store(plans, planned, costs=needs, is_quick=True)
    assert load(plans) is None


def test_plan_of_another_step_is_not_loaded(tmp_path: Path, planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = StepPlans(tmp_path)
    store(plans, planned)
    smaller = replace(GRAPH, storages=tuple(replace(s, bytes=MIB - 64) for s in GRAPH.storages))
    renamed = replace(GRAPH, ops=tuple(replace(op, family=f"{op.family} 2") for op in GRAPH.ops))
    keys = [
        key_of(plans),
        key_of(plans, smaller),
        key_of(plans, renamed),
        key_of(plans, policy=policy_of("window:reach=2")),
        key_of(plans, facts=("room", BUDGET + 1)),
    ]
    monkeypatch.setattr("outofcore.plan_store.library_version", lambda: "another")
    keys.append(key_of(plans))
    assert len(set(keys)) == len(keys)
    assert [key for key in keys if load(plans, key)] == keys[:1]


@pytest.mark.parametrize(
    "damage",
    ["cut", "nonsense", "another step", "an op is left out", "another format", "other scratch memory", "a home less"],
)
def test_damaged_file_is_ignored(
    damage: str, tmp_path: Path, planned: Planned, caplog: pytest.LogCaptureFixture
) -> None:
    plans, costs = StepPlans(tmp_path), COSTS
    store(plans, planned)
    (path,) = tmp_path.glob("plan-*.json")
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "nonsense":
        path.write_text('{"format": 1}')
    elif damage == "another step":
        other_graph, other_costs = chain(3), replace(COSTS, ops=COSTS.ops[:6])
        budget = in_core_budget(other_graph, other_costs)
        choice = VariantChoice(key_of(plans, other_graph), LOWEST_MEMORY)
        plans.keep(
            choice,
            other_graph,
            other_costs,
            budget,
            plan_step(other_graph, other_costs, budget, WINDOW),
            is_quick=False,
        )
        (other_path,) = set(tmp_path.glob("plan-*.json")) - {path}
        other_path.replace(path)
    elif damage == "an op is left out":
        program = replace(planned.program, instructions=planned.program.instructions[1:])
        store(plans, replace(planned, program=program))
    elif damage == "another format":
        path.write_text(path.read_text().replace("outofcore-chosen/1", "outofcore-chosen/0"))
    elif damage == "other scratch memory":
        costs = replace(COSTS, ops=(OpCost(0.01, 4096),) * 2 * LAYERS)
    else:
        costs = replace(COSTS, homes=(Home("host", MIB, 1e9, 1e9),))
    assert load(plans, costs=costs) is None
    assert "a stored plan cannot be used and is made again" in caplog.text
    store(plans, planned)
    assert load(plans) is not None


def test_least_recently_used_plan_is_deleted_first(
    tmp_path: Path, planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outofcore.plan_store._MAX_FILES", 2)
    plans = StepPlans(tmp_path)
    (tmp_path / "loop-0.json").write_text("of the other door, counted on its own")
    keys = [key_of(plans, facts=number) for number in range(3)]
    for age, key in ((200, keys[0]), (100, keys[1])):
        store(plans, planned, key=key)
        for path in tmp_path.glob("*.json"):
            os.utime(path, (path.stat().st_mtime - age,) * 2)
    assert load(plans, keys[0]) is not None  # used now
    store(plans, planned, key=keys[2])
    assert [load(plans, key) is not None for key in keys] == [True, False, True]
    assert (tmp_path / "loop-0.json").exists()


def test_plans_of_a_user_policy_are_not_stored(tmp_path: Path, planned: Planned) -> None:
    class Mine(OffloadAll):
        """Has the name of a built-in policy."""

    for policy in (FunctionPolicy("auto", lambda *_: planned.plan), Mine()):
        assert not key_of(StepPlans(tmp_path), policy=policy)


def test_unusable_folder_only_disables_the_store(tmp_path: Path, planned: Planned) -> None:
    (tmp_path / "file").write_text("")
    assert not key_of(StepPlans(None))
    for folder in (None, tmp_path / "file"):
        plans = StepPlans(folder)
        store(plans, planned, key="0")
        assert load(plans, "0") is None
