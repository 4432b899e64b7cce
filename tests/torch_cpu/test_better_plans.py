"""Tests of quick first plans, and of better plans that are made in the background and stored."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from foreground_planning import ForegroundPlanner
from torch import nn

import outofcore
from outofcore import planning
from outofcore.background import BackgroundPlanner
from outofcore.plan_updates import PlanUpdater
from outofcore.planned_step import plan
from outofcore.profiling import links, ops
from outofcore.units import MIB

WIDTH, BATCH, LAYERS = 192, 512, 6
# Without the search over placed plans, which takes seconds for steps as short as these.
QUICKLY = "auto:polish_ops=0,tunings=20,further=0,placed=8"


def make() -> tuple[Callable[[torch.Tensor], torch.Tensor], nn.Module, torch.optim.Optimizer]:
    """Build a model with dropout, so that extra random draws change the results."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, model, optimizer


def batches() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(BATCH, WIDTH, generator=generator)


def train(step: Callable[[torch.Tensor], torch.Tensor], count: int) -> list[float]:
    torch.manual_seed(2)
    stream = batches()
    return [step(next(stream)).item() for _ in range(count)]


def use_best_plans(updates: PlanUpdater) -> None:
    updates.background.wait()
    updates._adopt_finished_plan()
    steps = updates._steps
    for entry in steps.by_signature.values():
        step = entry.step
        if step.is_quick:
            steps.leave_arena()
            best = plan(step.captured, step.costs, step.profiles, step.budget, updates._policy, updates._stores)
            steps.replace_plan(entry, replace(best, variant=step.variant))


@pytest.fixture(scope="module")
def budget() -> int:
    step, model, optimizer = make()
    return outofcore.smallest_budget(step, model, optimizer, inputs=(next(batches()),)) + MIB


@pytest.fixture
def always_replan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the first plan at any cost, even without a gain."""
    monkeypatch.setattr("outofcore.undisturbed.DISTURBED", 1e6)
    monkeypatch.setattr("outofcore.replanning.DISTURBED", 1e6)
    monkeypatch.setattr("outofcore.replanning.SHARE", 1e6)
    monkeypatch.setattr("outofcore.replanning._MAX_OPS_SHARE", 1e6)
    monkeypatch.setattr("outofcore.background._CLEARLY", -1e6)


@pytest.mark.usefixtures("always_replan")
@pytest.mark.parametrize("home", ["host", "disk"])
def test_results_stay_bit_identical_when_plans_are_exchanged(
    home: str, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outofcore.plan_updates.BackgroundPlanner", ForegroundPlanner)
    step, model, optimizer = make()
    expected = train(step, 10)
    weights = [p.detach().clone() for p in model.parameters()]
    step, model, optimizer = make()
    with outofcore.compile(step, model, optimizer, budget=budget, home=home, policy=QUICKLY, cache=False) as compiled:
        torch.manual_seed(2)
        plans, arenas = [], []
        for loss, batch in zip(expected, batches(), strict=False):
            assert compiled(batch).item() == loss
            plans.append(compiled.planned)
            # Statistics describe the plan that ran, not that of the next call.
            assert len(compiled.timeline.starts) == len(plans[-1].program.instructions)
            assert compiled.stats.compute_seconds <= compiled.stats.seconds
            arenas.append(compiled._session.steps.arena)
            assert compiled.planned.program.arena_bytes <= arenas[-1].bytes <= budget
        assert plans[0] is not plans[-1]
        assert plans[-1] is compiled._session.steps.last_step.planned
        assert all(arena is arenas[0] for arena in arenas)
        assert compiled.stats.off_plan == 0
    for mine, theirs in zip(weights, model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_call_plans_quickly_and_prepare_searches_fully(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[planning.SearchParams] = []
    plans = planning.plans_of_step

    def record(graph: Any, costs: Any, room: int, policy: Any, *args: Any) -> Any:
        searched.append(policy.params)
        return plans(graph, costs, room, policy, *args)

    monkeypatch.setattr(planning, "plans_of_step", record)
    step, model, optimizer = make()
    with outofcore.compile(step, model, optimizer, budget=budget, policy=QUICKLY) as compiled:
        compiled(next(batches()))
        (quick,) = searched
        assert quick == compiled.policy.params.in_a_hurry()
        first = compiled.planned
        use_best_plans(compiled._session.updates)
        assert searched[1:] == [compiled.policy.params]
        compiled(next(batches()))
        assert compiled.planned is not first
    searched.clear()
    step, model, optimizer = make()
    with outofcore.compile(step, model, optimizer, budget=budget, policy=QUICKLY) as compiled:
        compiled.prepare(next(batches()))
        compiled(next(batches()))
        assert searched == [compiled.policy.params]


def test_full_search_runs_when_the_quick_search_finds_no_plan(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget is refused only if the full search finds no plan."""
    plans = planning.plans_of_step

    def refuse_quick_search(graph: Any, costs: Any, room: int, policy: Any, *args: Any) -> Any:
        if policy == quick:
            raise outofcore.BudgetError("too small", room + 1)
        return plans(graph, costs, room, policy, *args)

    monkeypatch.setattr(planning, "plans_of_step", refuse_quick_search)
    step, model, optimizer = make()
    expected = train(step, 2)
    step, model, optimizer = make()
    with outofcore.compile(step, model, optimizer, budget=budget, policy=QUICKLY) as compiled:
        quick = type(compiled.policy)(compiled.policy.params.in_a_hurry())
        assert train(compiled, 2) == expected


@pytest.mark.usefixtures("always_replan")
def test_second_process_reuses_measurements_and_plans(
    budget: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, model, optimizer = make()
    expected = train(step, 6)
    step, model, optimizer = make()
    with outofcore.compile(step, model, optimizer, budget=budget, policy=QUICKLY, cache=tmp_path) as compiled:
        assert train(compiled, 6) == expected
        use_best_plans(compiled._session.updates)  # a child process made it
        compiled(next(batches()))
        best = compiled.planned
    assert list(tmp_path.glob("plan-*.json"))

    def never(*_: object, **__: object) -> Any:
        raise AssertionError("it was measured or planned again")

    monkeypatch.setattr(planning, "plans_of_step", never)
    monkeypatch.setattr(links, "measure_link", never)
    monkeypatch.setattr(ops._OpBench, "_measure", never)
    monkeypatch.setattr(BackgroundPlanner, "start", lambda *_: False)
    monkeypatch.setattr("outofcore.replanning.SHARE", 0.0)
    step, model, optimizer = make()
    with outofcore.compile(step, model, optimizer, budget=budget, policy=QUICKLY, cache=tmp_path) as compiled:
        assert train(compiled, 6) == expected
        assert compiled.planned.program == best.program
        # The plan uses the first process's measurements.
        assert compiled.planned.timeline.step_seconds == pytest.approx(best.timeline.step_seconds, rel=0.5)


@pytest.mark.usefixtures("always_replan")
def test_damaged_plan_is_planned_again(budget: int, tmp_path: Path) -> None:
    for _ in range(2):
        step, model, optimizer = make()
        with outofcore.compile(step, model, optimizer, budget=budget, policy=QUICKLY, cache=tmp_path) as compiled:
            train(compiled, 6)
            use_best_plans(compiled._session.updates)
        stored = list(tmp_path.glob("plan-*.json"))
        assert stored
        for path in stored:
            path.write_bytes(path.read_bytes()[:-50])


@pytest.mark.usefixtures("always_replan")
@pytest.mark.parametrize("share", [1e6, 0.0])
def test_planning_runs_in_process_if_cheap_when_no_child_starts(
    share: float, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object) -> bool:
        monkeypatch.setattr("outofcore.replanning.SHARE", share)
        asked.append(True)
        return False

    asked: list[bool] = []
    monkeypatch.setattr(BackgroundPlanner, "start", start)
    step, model, optimizer = make()
    expected = train(step, 6)
    step, model, optimizer = make()
    with outofcore.compile(step, model, optimizer, budget=budget, policy=QUICKLY, cache=False) as compiled:
        torch.manual_seed(2)
        stream = batches()
        losses = [compiled(next(stream)).item()]
        first = compiled.planned
        losses += [compiled(next(stream)).item() for _ in range(5)]
        assert losses == expected
        assert asked == [True]
        assert (compiled.planned is first) == (share == 0)


@pytest.mark.usefixtures("always_replan")
def test_planning_process_is_killed_when_the_step_closes(budget: int) -> None:
    step, model, optimizer = make()
    with outofcore.compile(step, model, optimizer, budget=budget, cache=False) as compiled:
        train(compiled, 4)
        process = compiled._session.updates.background._process
        assert process is not None
        os.kill(process.handle.pid, signal.SIGSTOP)  # simulates a long search
        train(compiled, 2)
    assert process.handle.returncode == -signal.SIGKILL


@pytest.mark.usefixtures("always_replan")
def test_background_plan_is_discarded_when_plans_are_forgotten(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outofcore.plan_updates.BackgroundPlanner", ForegroundPlanner)
    step, model, optimizer = make()
    expected = train(step, 9)
    step, model, optimizer = make()
    with outofcore.compile(step, model, optimizer, budget=budget, policy=QUICKLY, cache=False) as compiled:
        torch.manual_seed(2)
        stream = batches()
        with monkeypatch.context() as patch:
            patch.setattr(ForegroundPlanner, "poll", lambda _: None)
            losses = [compiled(next(stream)).item() for _ in range(5)]
        assert compiled._session.updates.background.done is not None
        compiled._session.forget_plans()
        losses += [compiled(next(stream)).item() for _ in range(4)]
        assert losses == expected
