"""Tests of switches between input shapes: the copies and moves when one plan replaces another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from effort import some_of
from hypothesis import given
from hypothesis import strategies as st
from sides import batch, build_side, compile_side, is_same, visible_tensors

from outofcore.execution.arena import Arena
from outofcore.execution.state_moves import move_order


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    for name in ("save", "load"):
        original = getattr(Arena, name)

        def record_copy(self: Arena, *args: Any, name: str = name, original: Any = original) -> None:
            names.append(name)
            original(self, *args)

        monkeypatch.setattr(Arena, name, record_copy)
    return names


def test_switch_between_known_shapes_copies_no_persistent_state(copies: list[str]) -> None:
    ours, theirs = compile_side(0, budget="all", home="host", shared=False), build_side(0)
    for number, rows in enumerate((8, 16, 8, 4, 16)):
        for side in (ours, theirs):
            torch.manual_seed(number)
            side.train(batch(number, rows))
        if number == 1:
            copies.clear()  # planning the second shape emptied the arena
        if number == 2:
            assert copies == []
    assert is_same(visible_tensors(ours), visible_tensors(theirs))
    arena = ours.steps[0]._session.steps.arena
    assert arena is not None
    assert arena.bytes >= ours.steps[0].budget
    for step in ours.steps:
        step.close()


@pytest.mark.parametrize("budget", some_of(["smallest", "half"], ["smallest"]))
def test_switches_under_tight_budgets_are_exact(budget: str) -> None:
    ours, theirs = compile_side(1, budget=budget, home="host", shared=True), build_side(1)
    for number, rows in enumerate((8, 4, 8, 2, 4, 8, 2)):
        for side in (ours, theirs):
            torch.manual_seed(number)
            side.train(batch(number, rows))
            torch.manual_seed(number)
            side.gather(batch(number, rows))
        for step in ours.steps:
            step._session.keeper.check_invariants()
        assert is_same(visible_tensors(ours), visible_tensors(theirs))
    for step in ours.steps:
        step.close()


@st.composite
def arrangements(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]], list[int]]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=8))

    def draw_offsets() -> list[int]:
        order, offsets, offset = draw(st.permutations(range(len(sizes)))), [0] * len(sizes), 0
        for index in order:
            offset += draw(st.integers(0, 2))
            offsets[index] = offset
            offset += sizes[index]
        return offsets

    begins, targets = draw_offsets(), draw_offsets()
    return sum(sizes) + 2 * len(sizes), [(b, b + n) for b, n in zip(begins, sizes, strict=True)], targets


@given(arrangements())
def test_moves_do_not_overwrite_pending_sources(case: tuple[int, list[tuple[int, int]], list[int]]) -> None:
    total, sources, targets = case
    region: list[int | None] = [None] * total
    for number, (begin, end) in enumerate(sources):
        region[begin:end] = [number] * (end - begin)
    aside: set[int] = set()
    order = move_order(sources, targets)
    assert sorted(n if n >= 0 else ~n for n in order) == list(range(len(sources)))
    for number in order:
        begin, end = sources[number if number >= 0 else ~number]
        if number < 0:
            aside.add(~number)
            continue
        moved = region[begin:end]
        assert moved == [number] * (end - begin)
        region[targets[number] : targets[number] + end - begin] = moved
    for number in set(range(len(sources))) - aside:
        begin, end = sources[number]
        assert region[targets[number] : targets[number] + end - begin] == [number] * (end - begin)
    if all(begin == target for (begin, _), target in zip(sources, targets, strict=True)):
        assert not aside


def test_cycle_moves_its_smallest_piece_aside() -> None:
    assert move_order([(0, 4), (4, 6)], [2, 0]) == [~1, 0]
    assert move_order([(0, 4)], [2]) == [0]
