"""Searches for what to recompute: what they return is so and fits; annealing is no worse than any choice."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain, combinations

import pytest
from effort import examples
from examples import MIB, network, network_costs
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import LIMITS, costs_for, deep_graphs, graphs

from outofcore.costs import Costs
from outofcore.graph import StepGraph
from outofcore.planning import QUICK, SearchParams, in_core_budget
from outofcore.planning.front import Front
from outofcore.planning.problem import Problem
from outofcore.planning.remat.chains import AGAIN, Choices
from outofcore.planning.remat.compiled import Annealed
from outofcore.planning.remat.contents import Contents
from outofcore.planning.remat.selection import Selection
from outofcore.planning.remat.selection import choices_of as choices_of_pairs
from outofcore.validator import validate


@st.composite
def steps(draw: st.DrawFn) -> tuple[StepGraph, Costs]:
    """Graphs with costs and no home."""
    graph = draw(st.one_of(deep_graphs(max_layers=9), graphs(max_layers=3)))
    return graph, replace(draw(costs_for(graph)), homes=())


def choices_of(graph: StepGraph, costs: Costs) -> Choices:
    return Choices(Problem.of(graph, costs, 1 << 40), Contents.of(graph, costs))


def most_bytes(choices: Choices) -> int:
    return int((choices.held + choices.need).max(initial=0))


@settings(LIMITS, max_examples=examples(60))
@given(steps(), st.lists(st.floats(0, 1), min_size=1, max_size=4), st.integers(0, 1 << 64))
def test_annealing_returns_what_python_counts(step: tuple[StepGraph, Costs], parts: list[float], seed: int) -> None:
    kept = choices_of(*step)
    annealing = kept.search()
    for part in parts:
        limit = int(most_bytes(kept) * part)
        found = annealing.run(limit, 300, 1 << 40, 0.3, seed % (1 << 64))
        if found is None:
            continue
        counted = choices_of_pairs(kept, found.pairs, limit)
        assert found.seconds == pytest.approx(counted.seconds)
        assert found.bytes == most_bytes(counted) <= limit
        annealing.restore(found.pairs)
        assert annealing.run(limit, 0, 1, 0.3, 0) == found


@settings(LIMITS, max_examples=examples(25))
@given(steps(), st.floats(0.3, 1))
def test_annealing_is_no_worse_than_any_choice(step: tuple[StepGraph, Costs], part: float) -> None:
    kept = choices_of(*step)
    free = kept.free[:8]
    assume(free)
    limit = int(most_bytes(kept) * part)
    best = float("inf")
    for picked in chain.from_iterable(combinations(free, count) for count in range(len(free) + 1)):
        choices = Choices(kept.problem, kept.contents, like=kept)
        if choices.begin(tuple((g, AGAIN, kept.end[g]) for g in picked)) and most_bytes(choices) <= limit:
            best = min(best, choices.seconds)
    assume(best < float("inf"))
    annealing = kept.search()
    found = [annealing.run(limit, 20_000, 1 << 40, 0.3, seed) for seed in range(3)]
    assert min(one.seconds for one in found if one is not None) <= best * (1 + 1e-9)


def test_annealing_returns_nothing_where_nothing_fits() -> None:
    graph = network(8)
    annealing = choices_of(graph, network_costs(graph, copy=None)).search()
    assert annealing.run(MIB // 2, 1000, 1 << 40, 0.3, 0) is None
    assert annealing.run(1 << 40, 0, 1, 0.3, 0) is not None


def test_annealing_repeats_itself_and_ends_with_its_work() -> None:
    graph = network(16)

    def run(seed: int, work: int = 1 << 40) -> Annealed | None:
        return choices_of(graph, network_costs(graph, copy=None)).search().run(8 * MIB, 5000, work, 0.3, seed)

    assert run(1) is not None
    assert run(1) == run(1)
    assert run(1, work=1) is None  # it has only looked at the beginning, which does not fit


@settings(LIMITS, max_examples=examples(60))
@given(steps(), st.floats(0.2, 1), st.floats(1, 1.5), st.randoms(use_true_random=False))
def test_greedy_search_fits_and_settles(
    step: tuple[StepGraph, Costs], part: float, more: float, draw: random.Random
) -> None:
    graph, costs = step
    everything = most_bytes(choices_of(graph, costs))
    kept = Choices(Problem.of(graph, costs, int(everything * part)), Contents.of(graph, costs))
    selection = Selection(kept)
    dropped = selection.drop(int(everything * part * more))
    if dropped is not None:
        assert not dropped.over().any()
    if everything <= int(everything * part):
        assert dropped is not None and dropped.snapshot() == ()
    gaps = [g for g in kept.free if draw.random() < 0.5]
    plain = Choices(kept.problem, kept.contents, like=kept)
    assert plain.begin(tuple((g, AGAIN, kept.end[g]) for g in gaps))
    settled = selection.settle(gaps)
    assert {g for g, _, _ in settled.snapshot()} == set(gaps)
    assert settled.seconds <= plain.seconds * (1 + 1e-9)
    assert settled.over().sum() <= plain.over().sum()
    again = selection.drop(int(everything * part * more))
    assert (None if again is None else again.snapshot()) == (None if dropped is None else dropped.snapshot())


def test_a_plan_does_not_depend_on_what_was_asked_for_before() -> None:
    graph = network(24)
    costs = network_costs(graph, copy=None)
    fresh, used = Front(graph, costs, QUICK), Front(graph, costs, QUICK)
    everything, smallest = in_core_budget(graph, costs), fresh.smallest
    budgets = [smallest + (everything - smallest) * part // 8 for part in range(8)]
    for budget in reversed(budgets):
        used.plan(budget)
    for budget in budgets:
        one, other = fresh.plan(budget), used.plan(budget)
        assert one is not None and other is not None
        assert (one.plan, one.program) == (other.plan, other.program)
        validate(graph, one.program, budget, costs)


def test_the_smallest_budget_is_the_same_for_all_params() -> None:
    graph = network(24)
    costs = network_costs(graph, copy=None)
    fronts = [Front(graph, costs, params) for params in (QUICK, SearchParams(), SearchParams(annealing=0))]
    assert len({front.smallest for front in fronts}) == 1
    assert fronts[0].plan(fronts[0].smallest - 1) is None
    assert fronts[2].plan(fronts[2].smallest) is not None
