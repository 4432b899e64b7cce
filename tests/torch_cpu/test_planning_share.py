"""Tests of the share of a loop's time that its planner may take."""

from __future__ import annotations

import pytest

from outofcore.follow.loop_planner import LoopPlanner


def test_planner_waits_until_plans_took_a_small_share_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("outofcore.follow.loop_planner.time.monotonic", lambda: now)
    planner = LoopPlanner.__new__(LoopPlanner)
    planner._started, planner._planning_seconds, planner._trial, planner._ended_steps = now, 0.0, None, 0
    assert planner._may_plan()
    planner._planning_seconds = 4.0
    now, planner._ended_steps = now + 50.0, 1000
    assert not planner._may_plan()
    now, planner._ended_steps = now + 100.0, 3000
    assert planner._may_plan()


def test_first_plans_may_take_the_time_of_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("outofcore.follow.loop_planner.time.monotonic", lambda: now)
    planner = LoopPlanner.__new__(LoopPlanner)
    planner._started, planner._planning_seconds, planner._trial, planner._ended_steps = now, 16.0, None, 20
    now += 20.0
    assert planner._may_plan()
    planner._ended_steps = 40
    assert not planner._may_plan()
