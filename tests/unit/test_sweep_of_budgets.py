"""Step time over budgets, the budget from which nothing is lost, what would help, and who is told meanwhile."""

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
    """A chain of layers: each activation waits for its backward op."""
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
def test_an_estimate_is_what_plans_say(rate: float) -> None:
    graph = net()
    found = estimate_graph(graph, costs(graph, rate), budgets=[20 * MIB], policy=Auto(QUICK), tell=ignore_progress)
    assert found.smallest_budget == planning.smallest_budget(graph, costs(graph, rate))
    assert found.in_core_budget == 32 * MIB
    assert [p.budget for p in found.points] == sorted(p.budget for p in found.points)
    seconds = [p.seconds for p in found.points if p.budget != 20 * MIB]
    assert seconds == sorted(seconds, reverse=True)
    assert found.points[-1].seconds == pytest.approx(0.16)
    assert found.at(20 * MIB) in found.points
    assert found.fits(found.smallest_budget)
    assert not found.fits(found.smallest_budget - 1)
    assert found.at(1).seconds is None
    # On the fast link copies hide; on the slow one they do not, and nothing is lost only where little moves.
    limit = LOSSLESS_RATIO * 0.16
    assert (found.at(found.lossless_budget).seconds or 1.0) <= limit
    below = [p for p in found.points if p.budget < found.lossless_budget and p.budget != 20 * MIB]
    assert all(p.seconds is None or p.seconds > limit for p in below)
    assert "no slowdown from" in str(found)


def test_a_slow_link_needs_more_than_a_fast_one() -> None:
    graph = net()
    slow, fast = (
        estimate_graph(graph, costs(graph, rate), policy=Auto(QUICK), tell=ignore_progress) for rate in (2e8, 1e10)
    )
    assert slow.lossless_budget > fast.lossless_budget


def test_an_empty_step_is_refused() -> None:
    with pytest.raises(GraphError, match="no ops"):
        estimate_graph(StepGraph((), ()), Costs(()), tell=ignore_progress)


def test_what_helps_is_told_with_the_most_helpful_first() -> None:
    graph = net()
    slow = costs(graph, 2e8)
    budget = 12 * MIB
    told: list[tuple[int, int]] = []
    found = build_insight(
        graph,
        slow,
        budget,
        planning.plan_step(graph, slow, budget),
        tell=lambda done, total: told.append((done, total)),
    )
    saves = {one.what: one.saves for one in found.helps}
    assert list(saves.values()) == sorted(saves.values(), reverse=True)
    assert set(saves) == {"ops twice as fast", "a link twice as fast", "3.00 MiB more budget"}
    assert saves["a link twice as fast"] > 0
    assert any(point.budget == budget for point in found.points)
    assert told[-1][0] == told[-1][1] == len(told)
    assert not found.verdict.startswith("Ops are the limit")


def test_where_everything_fits_ops_are_the_limit() -> None:
    graph = net()
    planned = planning.plan_step(graph, costs(graph), 64 * MIB)
    found = build_insight(graph, costs(graph), 64 * MIB, planned, count=0)
    assert found.verdict.startswith("Ops are the limit: no tensor is evicted")
    assert [point.budget for point in found.points] == [64 * MIB]
    assert "more budget" not in " ".join(one.what for one in found.helps)


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    path, graph = tmp_path / "graph.json", net()
    write_graph(path, GraphFile.of(graph, costs(graph)))
    return path


def test_plan_tells_the_curve_on_the_command_line(graph_file: Path) -> None:
    run = CliRunner()
    plan = ["plan", "--graph", str(graph_file), "--curve", "--policy", "auto:polish_ops=0"]
    told = run.invoke(app, [*plan, "--json", "--budget", "20MiB"])
    assert told.exit_code == 0, told.output
    answer = json.loads(told.output)
    assert answer["smallest_budget"] <= answer["lossless_budget"] <= answer["in_core_budget"]
    assert [point["budget"] for point in answer["points"]].count(20 * MIB) == 1
    words = run.invoke(app, plan)
    assert "no slowdown" in words.output
    assert "step time over budgets" in words.output


def test_a_plan_from_a_file_is_reported_and_traced(graph_file: Path, tmp_path: Path) -> None:
    page, trace = tmp_path / "report.html", tmp_path / "trace.json"
    arguments = ["report", "--graph", str(graph_file), "--budget", "12MiB", "-o", str(page), "--trace", str(trace)]
    told = CliRunner().invoke(app, arguments)
    assert told.exit_code == 0, told.output
    assert '"name":"predicted"' in page.read_text(encoding="utf-8")
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    refused = CliRunner().invoke(app, ["report", "--graph", str(graph_file), "--budget", "5MiB", "-o", str(page)])
    assert refused.exit_code == 2
    assert "The smallest budget that would do is" in refused.stderr
    assert CliRunner().invoke(app, ["report", "--graph", str(graph_file)]).exit_code == 2


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def tell_all(**options: Any) -> None:
    with show_progress(**options) as tell:
        tell("profile", 0, 2)
        tell("profile", 2, 2)
        tell("plan", 0, 1)


def test_progress_is_shown_on_a_terminal_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet, terminal = io.StringIO(), _Terminal()
    monkeypatch.setattr(sys, "stderr", quiet)
    tell_all()
    assert quiet.getvalue() == ""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    tell_all()
    assert "outofcore: profile" in terminal.getvalue()
    assert "left" in terminal.getvalue()


def test_whoever_asks_is_told_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    told: list[tuple[str, int, int]] = []
    tell_all(tell=lambda *what: told.append(what))
    assert told == [("profile", 0, 2), ("profile", 2, 2), ("plan", 0, 1)]
    assert terminal.getvalue() == ""
