"""A loop's planner starts another plan only while plans take a small share of the loop's time."""

from __future__ import annotations

import pytest

from outofcore.follow.loop_planner import LoopPlanner


def test_plans_wait_until_they_are_a_small_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("outofcore.follow.loop_planner.time.monotonic", lambda: now)
    planner = LoopPlanner.__new__(LoopPlanner)
    planner._started, planner._planning_seconds = now, 0.0
    assert planner._may_plan()
    planner._planning_seconds = 4.0
    assert not planner._may_plan()
    now += 50.0
    assert not planner._may_plan()
    now += 100.0
    assert planner._may_plan()
