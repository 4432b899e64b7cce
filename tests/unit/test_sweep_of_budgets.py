"""Tests of step time over budgets, the lossless budget, suggestions, and progress reports."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outofcore import planning
from outofcore.cli.app import app
from outofcore.costs import Costs, Home, OpCost
from outofcore.errors import GraphError
from outofcore.estimation.sweep import LOSSLESS_RATIO, budgets_between, build_insight, estimate_graph
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.graphfile import GraphFile, write_graph
from outofcore.planning import QUICK
from outofcore.policies import Auto
from outofcore.progress import ignore_progress, show_progress

MIB = 1 << 20


def net(layers: int = 8) -> StepGraph:
    storages = [Storage(i, 4 * MIB, StorageKind.ACTIVATION, f"layer{i} linear") for i in range(layers)]
    forward = [Op(i, "forward", (i - 1,) if i else (), (), (i,), module=f"layer{i}") for i in range(layers)]
    backward = [
        Op(layers + n, "backward", (i,), (), (), rerunnable=False, module=f"layer{i}")
        for n, i in enumerate(reversed(range(layers)))
    ]
    return StepGraph(tuple(storages), (*forward, *backward))


def costs(graph: StepGraph, rate: float = 1e9, seconds: float = 0.01) -> Costs:
    return Costs(tuple(OpCost(seconds) for _ in graph.ops), (Home("disk", None, rate, rate),))


def test_budgets_rise_at_equal_ratios() -> None:
    assert budgets_between(100, 800, 4) == (100, 200, 400, 800)
    assert budgets_between(100, 100, 4) == (100,)
    assert budgets_between(0, 0) == (1,)


@pytest.mark.parametrize("rate", [1e10, 2e8])
def test_estimate_agrees_with_plans(rate: float) -> None:
    graph = net()
    estimate = estimate_graph(graph, costs(graph, rate), budgets=[20 * MIB], policy=Auto(QUICK), tell=ignore_progress)
    assert estimate.smallest_budget == planning.smallest_budget(graph, costs(graph, rate))
    assert estimate.in_core_budget == 32 * MIB
    assert [p.budget for p in estimate.points] == sorted(p.budget for p in estimate.points)
    seconds = [p.seconds for p in estimate.points if p.budget != 20 * MIB]
    assert seconds == sorted(seconds, reverse=True)
    assert estimate.points[-1].seconds == pytest.approx(0.16)
    assert estimate.at(20 * MIB) in estimate.points
    assert estimate.fits(estimate.smallest_budget)
    assert not estimate.fits(estimate.smallest_budget - 1)
    assert estimate.at(1).seconds is None
    # Copies overlap ops on the fast link. On the slow link they do not, and only budgets with few copies are lossless.
    limit = LOSSLESS_RATIO * 0.16
    assert (estimate.at(estimate.lossless_budget).seconds or 1.0) <= limit
    below = [p for p in estimate.points if p.budget < estimate.lossless_budget and p.budget != 20 * MIB]
    assert all(p.seconds is None or p.seconds > limit for p in below)
    assert "no slowdown from" in str(estimate)


def test_slow_link_needs_a_larger_lossless_budget() -> None:
    graph = net()
    slow, fast = (
        estimate_graph(graph, costs(graph, rate), policy=Auto(QUICK), tell=ignore_progress) for rate in (2e8, 1e10)
    )
    assert slow.lossless_budget > fast.lossless_budget


def test_empty_step_is_refused() -> None:
    with pytest.raises(GraphError, match="no ops"):
        estimate_graph(StepGraph((), ()), Costs(()), tell=ignore_progress)


def test_suggestions_are_sorted_by_saved_time() -> None:
    graph = net()
    slow = costs(graph, 2e8)
    budget = 12 * MIB
    progress: list[tuple[int, int]] = []
    result = build_insight(
        graph,
        slow,
        budget,
        planning.plan_step(graph, slow, budget),
        tell=lambda step, total: progress.append((step, total)),
    )
    saves = {help_.what: help_.saves for help_ in result.helps}
    assert list(saves.values()) == sorted(saves.values(), reverse=True)
    assert set(saves) == {"ops twice as fast", "a link twice as fast", "3.00 MiB more budget"}
    assert saves["a link twice as fast"] > 0
    assert any(point.budget == budget for point in result.points)
    assert progress[-1][0] == progress[-1][1] == len(progress)
    assert not result.verdict.startswith("Ops are the limit")


def test_ops_are_the_limit_if_the_step_fits() -> None:
    graph = net()
    planned = planning.plan_step(graph, costs(graph), 64 * MIB)
    result = build_insight(graph, costs(graph), 64 * MIB, planned, count=0)
    assert result.verdict.startswith("Ops are the limit: no tensor is evicted")
    assert [point.budget for point in result.points] == [64 * MIB]
    assert "more budget" not in " ".join(help_.what for help_ in result.helps)


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    path, graph = tmp_path / "graph.json", net()
    write_graph(path, GraphFile.of(graph, costs(graph)))
    return path


def test_plan_command_prints_the_curve(graph_file: Path) -> None:
    run = CliRunner()
    plan = ["plan", "--graph", str(graph_file), "--curve", "--policy", "auto:polish_ops=0"]
    result = run.invoke(app, [*plan, "--json", "--budget", "20MiB"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    assert answer["smallest_budget"] <= answer["lossless_budget"] <= answer["in_core_budget"]
    assert [point["budget"] for point in answer["points"]].count(20 * MIB) == 1
    text = run.invoke(app, plan)
    assert "no slowdown" in text.output
    assert "step time over budgets" in text.output


def test_report_command_reports_and_traces_a_graph_file(graph_file: Path, tmp_path: Path) -> None:
    page, trace = tmp_path / "report.html", tmp_path / "trace.json"
    arguments = ["report", "--graph", str(graph_file), "--budget", "12MiB", "-o", str(page), "--trace", str(trace)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert '"name":"predicted"' in page.read_text(encoding="utf-8")
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    refused = CliRunner().invoke(app, ["report", "--graph", str(graph_file), "--budget", "5MiB", "-o", str(page)])
    assert refused.exit_code == 2
    assert "The smallest budget that would do is" in refused.stderr
    assert CliRunner().invoke(app, ["report", "--graph", str(graph_file)]).exit_code == 2


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def report_all(**options: Any) -> None:
    with show_progress(**options) as tell:
        tell("profile", 0, 2)
        tell("profile", 2, 2)
        tell("plan", 0, 1)


def test_progress_is_shown_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet, terminal = io.StringIO(), _Terminal()
    monkeypatch.setattr(sys, "stderr", quiet)
    report_all()
    assert quiet.getvalue() == ""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    report_all()
    assert "outofcore: profile" in terminal.getvalue()
    assert "left" in terminal.getvalue()


def test_progress_callback_replaces_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress: list[tuple[str, int, int]] = []
    report_all(tell=lambda *event: progress.append(event))
    assert progress == [("profile", 0, 2), ("profile", 2, 2), ("plan", 0, 1)]
    assert terminal.getvalue() == ""
