"""Tests of the searches for recomputations."""

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
from outofcore.planning.remat.chains import RECOMPUTED, Choices
from outofcore.planning.remat.compiled import BestState
from outofcore.planning.remat.contents import StepContents
from outofcore.planning.remat.selection import Selection
from outofcore.planning.remat.selection import choices_from_pairs as choices_of_pairs
from outofcore.validator import validate


@st.composite
def steps(draw: st.DrawFn) -> tuple[StepGraph, Costs]:
    graph = draw(st.one_of(deep_graphs(max_layers=9), graphs(max_layers=3)))
    return graph, replace(draw(costs_for(graph)), homes=())


def choices_of(graph: StepGraph, costs: Costs) -> Choices:
    return Choices(Problem.of(graph, costs, 1 << 40), StepContents.of(graph, costs))


def max_bytes(choices: Choices) -> int:
    return int((choices.held + choices.need).max(initial=0))


@settings(LIMITS, max_examples=examples(60))
@given(steps(), st.lists(st.floats(0, 1), min_size=1, max_size=4), st.integers(0, 1 << 64))
def test_annealing_counts_match_python(step: tuple[StepGraph, Costs], parts: list[float], seed: int) -> None:
    choices = choices_of(*step)
    annealing = choices.open_search()
    for part in parts:
        limit = int(max_bytes(choices) * part)
        result = annealing.anneal(limit, 300, 1 << 40, 0.3, seed % (1 << 64))
        if result is None:
            continue
        counted = choices_of_pairs(choices, result.pairs, limit)
        assert result.seconds == pytest.approx(counted.seconds)
        assert result.bytes == max_bytes(counted) <= limit
        annealing.restore(result.pairs)
        assert annealing.anneal(limit, 0, 1, 0.3, 0) == result


@settings(LIMITS, max_examples=examples(25))
@given(steps(), st.floats(0.3, 1))
def test_annealing_is_as_good_as_any_choice(step: tuple[StepGraph, Costs], part: float) -> None:
    choices = choices_of(*step)
    free = choices.recomputable[:8]
    assume(free)
    limit = int(max_bytes(choices) * part)
    best = float("inf")
    for picked in chain.from_iterable(combinations(free, count) for count in range(len(free) + 1)):
        candidate = Choices(choices.problem, choices.contents, like=choices)
        snapshot = tuple((g, RECOMPUTED, choices.end[g]) for g in picked)
        if candidate.apply_snapshot(snapshot) and max_bytes(candidate) <= limit:
            best = min(best, candidate.seconds)
    assume(best < float("inf"))
    annealing = choices.open_search()
    results = [annealing.anneal(limit, 20_000, 1 << 40, 0.3, seed) for seed in range(3)]
    assert min(result.seconds for result in results if result is not None) <= best * (1 + 1e-9)


def test_annealing_fails_when_no_choice_fits() -> None:
    graph = network(8)
    annealing = choices_of(graph, network_costs(graph, copy=None)).open_search()
    assert annealing.anneal(MIB // 2, 1000, 1 << 40, 0.3, 0) is None
    assert annealing.anneal(1 << 40, 0, 1, 0.3, 0) is not None


def test_annealing_repeats_itself_and_ends_with_its_work() -> None:
    graph = network(16)

    def run(seed: int, work: int = 1 << 40) -> BestState | None:
        return choices_of(graph, network_costs(graph, copy=None)).open_search().anneal(8 * MIB, 5000, work, 0.3, seed)

    assert run(1) is not None
    assert run(1) == run(1)
    assert run(1, work=1) is None  # the work allows a look at the start only, and that does not fit


@settings(LIMITS, max_examples=examples(60))
@given(steps(), st.floats(0.2, 1), st.floats(1, 1.5), st.randoms(use_true_random=False))
def test_greedy_search_fits_and_settle_never_worsens_it(
    step: tuple[StepGraph, Costs], part: float, factor: float, draw: random.Random
) -> None:
    graph, costs = step
    all_bytes = max_bytes(choices_of(graph, costs))
    choices = Choices(Problem.of(graph, costs, int(all_bytes * part)), StepContents.of(graph, costs))
    selection = Selection(choices)
    dropped = selection.drop(int(all_bytes * part * factor))
    if dropped is not None:
        assert not dropped.overload().any()
    if all_bytes <= int(all_bytes * part):
        assert dropped is not None and dropped.snapshot() == ()
    gaps = [g for g in choices.recomputable if draw.random() < 0.5]
    plain = Choices(choices.problem, choices.contents, like=choices)
    assert plain.apply_snapshot(tuple((g, RECOMPUTED, choices.end[g]) for g in gaps))
    result = selection.recompute_gaps(gaps)
    assert {g for g, _, _ in result.snapshot()} == set(gaps)
    assert result.seconds <= plain.seconds * (1 + 1e-9)
    assert result.overload().sum() <= plain.overload().sum()
    repeated = selection.drop(int(all_bytes * part * factor))
    assert (None if repeated is None else repeated.snapshot()) == (None if dropped is None else dropped.snapshot())


def test_plan_does_not_depend_on_earlier_requests() -> None:
    graph = network(24)
    costs = network_costs(graph, copy=None)
    fresh, used = Front(graph, costs, QUICK), Front(graph, costs, QUICK)
    in_core, smallest = in_core_budget(graph, costs), fresh.smallest
    budgets = [smallest + (in_core - smallest) * part // 8 for part in range(8)]
    for budget in reversed(budgets):
        used.plan(budget)
    for budget in budgets:
        from_fresh, from_used = fresh.plan(budget), used.plan(budget)
        assert from_fresh is not None and from_used is not None
        assert (from_fresh.plan, from_fresh.program) == (from_used.plan, from_used.program)
        validate(graph, from_fresh.program, budget, costs)


def test_smallest_budget_is_the_same_for_all_params() -> None:
    graph = network(24)
    costs = network_costs(graph, copy=None)
    fronts = [Front(graph, costs, params) for params in (QUICK, SearchParams(), SearchParams(annealing=0))]
    assert len({front.smallest for front in fronts}) == 1
    assert fronts[0].plan(fronts[0].smallest - 1) is None
    assert fronts[2].plan(fronts[2].smallest) is not None
