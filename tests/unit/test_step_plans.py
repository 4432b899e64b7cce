"""Plans on disk: found again, proved before they are used, and no more of them than a number."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from weights_in_turn import BUDGET, COSTS, GRAPH, LAYERS, WINDOW, chain

from outofcore.costs import Home, OpCost
from outofcore.planning import Planned, in_core_budget, plan_step, policy_of
from outofcore.planning.policy import OffloadAll, Own
from outofcore.step_plans import StepPlans
from outofcore.units import MIB


@pytest.fixture
def planned() -> Planned:
    return plan_step(GRAPH, COSTS, BUDGET, WINDOW)


def test_a_plan_is_found_again_under_other_times(tmp_path: Path, planned: Planned) -> None:
    plans = StepPlans(tmp_path)
    assert plans.find(GRAPH, COSTS, BUDGET, WINDOW) is None
    plans.keep(GRAPH, COSTS, BUDGET, WINDOW, planned)
    assert plans.find(GRAPH, COSTS, BUDGET, WINDOW) == (replace(planned, candidates=()), False)
    slower = replace(COSTS, ops=(OpCost(0.03),) * 2 * LAYERS)
    found = plans.find(GRAPH, slower, BUDGET, WINDOW)
    assert found is not None
    assert found[0].program == planned.program
    assert found[0].timeline.step_seconds >= 0.3
    # The line of the user's that an op stands in may change.
    moved = replace(GRAPH, ops=tuple(replace(op, source="elsewhere") for op in GRAPH.ops))
    assert plans.find(moved, COSTS, BUDGET, WINDOW) is not None


def test_a_plan_of_a_quick_search_is_kept_until_there_is_a_better_one(tmp_path: Path, planned: Planned) -> None:
    plans = StepPlans(tmp_path)
    plans.keep(GRAPH, COSTS, BUDGET, WINDOW, planned, is_quick=True)
    assert plans.find(GRAPH, COSTS, BUDGET, WINDOW) == (replace(planned, candidates=()), True)
    plans.keep(GRAPH, COSTS, BUDGET, WINDOW, planned)
    assert plans.find(GRAPH, COSTS, BUDGET, WINDOW) == (replace(planned, candidates=()), False)
    plans.keep(GRAPH, COSTS, BUDGET, WINDOW, planned, is_quick=True)
    assert len(list(tmp_path.glob("plan-*.json"))) == 1


def test_the_plan_of_another_step_is_not_found(tmp_path: Path, planned: Planned) -> None:
    plans = StepPlans(tmp_path)
    plans.keep(GRAPH, COSTS, BUDGET, WINDOW, planned)
    needs = replace(COSTS, ops=(OpCost(0.01, 4096),) * 2 * LAYERS)
    host = replace(COSTS, homes=(Home("host", None, 1e9, 1e9),))
    smaller = replace(GRAPH, storages=tuple(replace(s, bytes=MIB - 64) for s in GRAPH.storages))
    for graph, costs, budget, policy in (
        (smaller, COSTS, BUDGET, WINDOW),
        (GRAPH, needs, BUDGET, WINDOW),
        (GRAPH, host, BUDGET, WINDOW),
        (GRAPH, COSTS, BUDGET + 1, WINDOW),
        (GRAPH, COSTS, BUDGET, policy_of("window:reach=2")),
    ):
        assert plans.find(graph, costs, budget, policy) is None


@pytest.mark.parametrize("damage", ["cut", "nonsense", "another step", "an op is left out"])
def test_a_damaged_file_is_ignored(
    damage: str, tmp_path: Path, planned: Planned, caplog: pytest.LogCaptureFixture
) -> None:
    plans = StepPlans(tmp_path)
    plans.keep(GRAPH, COSTS, BUDGET, WINDOW, planned)
    (path,) = tmp_path.glob("plan-*.json")
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "nonsense":
        path.write_text('{"format": 1}')
    elif damage == "another step":
        other, costs = chain(3), replace(COSTS, ops=COSTS.ops[:6])
        budget = in_core_budget(other, costs)
        plans.keep(other, costs, budget, WINDOW, plan_step(other, costs, budget, WINDOW))
        (wrong,) = set(tmp_path.glob("plan-*.json")) - {path}
        wrong.replace(path)
    else:
        program = replace(planned.program, instructions=planned.program.instructions[1:])
        plans.keep(GRAPH, COSTS, BUDGET, WINDOW, replace(planned, program=program))
    assert plans.find(GRAPH, COSTS, BUDGET, WINDOW) is None
    assert "a plan that was kept is made anew" in caplog.text
    plans.keep(GRAPH, COSTS, BUDGET, WINDOW, planned)
    assert plans.find(GRAPH, COSTS, BUDGET, WINDOW) is not None


def test_what_was_used_longest_ago_goes_first(
    tmp_path: Path, planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outofcore.step_plans._MOST_FILES", 2)
    plans, budgets = StepPlans(tmp_path), [BUDGET, BUDGET + 1, BUDGET + 2]
    for age, budget in ((200, budgets[0]), (100, budgets[1])):
        plans.keep(GRAPH, COSTS, budget, WINDOW, planned)
        for path in tmp_path.glob("plan-*.json"):
            os.utime(path, (path.stat().st_mtime - age,) * 2)
    assert plans.find(GRAPH, COSTS, budgets[0], WINDOW) is not None  # used now
    plans.keep(GRAPH, COSTS, budgets[2], WINDOW, planned)
    assert [plans.find(GRAPH, COSTS, budget, WINDOW) is not None for budget in budgets] == [True, False, True]


def test_the_plans_of_a_users_own_policy_are_not_kept(tmp_path: Path, planned: Planned) -> None:
    class Mine(OffloadAll):
        """Has the name of another."""

    for policy in (Own("auto", lambda *_: planned.plan), Mine()):
        StepPlans(tmp_path).keep(GRAPH, COSTS, BUDGET, policy, planned)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_used_costs_nothing_else(tmp_path: Path, planned: Planned) -> None:
    (tmp_path / "file").write_text("")
    for folder in (None, tmp_path / "file"):
        StepPlans(folder).keep(GRAPH, COSTS, BUDGET, WINDOW, planned)
        assert StepPlans(folder).find(GRAPH, COSTS, BUDGET, WINDOW) is None
