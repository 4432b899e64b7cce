"""Tests that only validated plans run."""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import costs_for, graphs

from outofcore.costs import Costs, Home, OpCost
from outofcore.errors import BudgetError, ValidationError
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.graphfile import read_graph
from outofcore.planfile import read_plan
from outofcore.planning import Planned, in_core_budget, plans_of_step
from outofcore.proving import prove_plan


def break_plan(planned: Planned) -> Planned:
    return replace(planned, program=replace(planned.program, instructions=planned.program.instructions[1:]))


@given(st.data())
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_invalid_plan_is_reported_and_the_next_one_runs(
    caplog: pytest.LogCaptureFixture, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    graph = data.draw(graphs())
    costs = data.draw(costs_for(graph))
    budget = in_core_budget(graph, costs)
    folder = tmp_path_factory.mktemp("faults")
    good = next(plans_of_step(graph, costs, budget))
    caplog.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(folder))
        assert prove_plan(graph, costs, budget, _once(good)) is good
        assert not caplog.records
        assert prove_plan(graph, costs, budget, [break_plan(good), good]) is good
    (error,) = (r.getMessage() for r in caplog.records if r.levelno == logging.ERROR)
    assert "bug in outofcore" in error
    (archive,) = folder.glob("outofcore-fault-*.zip")
    assert str(archive) in error
    _check_readable(archive, folder, graph, costs, break_plan(good))


def _once(planned: Planned) -> Iterator[Planned]:
    yield planned
    raise AssertionError("a plan passed, and another one was asked for")


def _check_readable(archive: Path, folder: Path, graph: StepGraph, costs: Costs, planned: Planned) -> None:
    with zipfile.ZipFile(archive) as file:
        file.extractall(folder)
    loaded = read_graph(folder / "graph.json")
    assert len(loaded.graph.ops) == len(graph.ops)
    assert loaded.costs == costs
    assert read_plan(folder / "plan.json", loaded.keys).program == planned.program


def test_error_is_raised_when_no_plan_is_valid(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    graph, costs = _small()
    good = next(plans_of_step(graph, costs, 1 << 30))
    with pytest.raises(ValidationError, match=r"rejected 2 plans .* bug in outofcore"):
        prove_plan(graph, costs, 1 << 30, [break_plan(good), break_plan(good)])

    def ends() -> Iterator[Planned]:
        yield break_plan(good)
        raise BudgetError("no other plan")

    with pytest.raises(ValidationError, match="rejected 1 plans"):
        prove_plan(graph, costs, 1 << 30, ends())
    with pytest.raises(BudgetError):
        prove_plan(graph, costs, 1, plans_of_step(graph, costs, 1))


def test_plan_without_a_needed_workspace_is_not_run(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    graph, costs = _small()
    needy = replace(costs, ops=(replace(costs.ops[0], workspace_bytes=1 << 17), costs.ops[1]))
    without_workspace, good = (next(plans_of_step(graph, step_costs, 1 << 30)) for step_costs in (costs, needy))
    assert prove_plan(graph, needy, 1 << 30, [without_workspace, good]) is good
    assert "has a workspace of 0 bytes and needs 131072" in caplog.text


def test_full_disk_does_not_hide_the_fault(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    graph, costs = _small()
    good = next(plans_of_step(graph, costs, 1 << 30))
    assert prove_plan(graph, costs, 1 << 30, [break_plan(good), good]) is good
    assert "could not be written" in caplog.text


def _small() -> tuple[StepGraph, Costs]:
    storages = (
        Storage(0, 1 << 17, StorageKind.PARAMETER),
        Storage(1, 1 << 17, StorageKind.INPUT),
        Storage(2, 1 << 17, StorageKind.ACTIVATION),
    )
    ops = (Op(0, "double", (1,), (), (2,)), Op(1, "update", (0, 2), (0,), ()))
    return StepGraph(storages, ops), Costs((OpCost(1.0), OpCost(1.0)), (Home("home", None, 1e9, 1e9, 0.0),))
