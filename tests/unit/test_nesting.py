"""Chains that hold less because they run ops several times."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from effort import examples
from examples import MIB
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import LIMITS, costs_for, deep_graphs

from outofcore.costs import Costs, OpCost
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.lowering import lower, wire
from outofcore.plan import Plan
from outofcore.planning import SearchParams
from outofcore.planning.candidates import arrivals, decisions_again, orders_again
from outofcore.planning.ladder import Ladder
from outofcore.planning.problem import Problem
from outofcore.planning.remat.chains import AGAIN, Choices
from outofcore.planning.remat.contents import Contents
from outofcore.planning.remat.nesting import Surroundings, nested
from outofcore.simulator import recompute_seconds
from outofcore.validator import validate

_NOTHING = frozenset[int]()


def graph_of(sizes: tuple[int, ...], reads: tuple[tuple[int, ...], ...]) -> StepGraph:
    """Op i makes storage i, of so many MiB, from others."""
    storages = tuple(Storage(i, size * MIB, StorageKind.ACTIVATION, f"x{i}") for i, size in enumerate(sizes))
    return StepGraph(storages, tuple(Op(i, "op", r, (), (i,)) for i, r in enumerate(reads)))


def contents_of(sizes: tuple[int, ...], reads: tuple[tuple[int, ...], ...]) -> Contents:
    """Contents 2 i + 1 are what the ops leave."""
    return Contents.of(graph_of(sizes, reads), Costs(tuple(OpCost(1.0 + i) for i in range(len(reads)))))


def made(*storages: int) -> frozenset[int]:
    return frozenset(2 * storage + 1 for storage in storages)


def test_what_waits_over_the_peak_is_dropped_and_made_again_before_it_is_read() -> None:
    """As a skip connection does: x0 is read early by op 1 and late by op 4, and x2 is large as well."""
    contents = contents_of((4, 1, 4, 1, 1), ((), (0,), (1,), (2,), (0, 3)))
    ops = tuple(range(5))
    found = nested(contents, ops, Surroundings(made(4), _NOTHING, _NOTHING), 6 * MIB)
    assert found.ops == (0, 1, 2, 3, 0, 4)
    assert (found.bytes, found.seconds) == (6 * MIB, 16.0)
    assert nested(contents, ops, Surroundings(made(4), _NOTHING, _NOTHING), 9 * MIB).ops == ops  # it fits


def test_what_a_chain_is_for_is_made_late_where_that_holds_less_and_costs_nothing() -> None:
    contents = contents_of((4, 8, 1), ((), (), (1,)))
    found = nested(contents, (0, 1, 2), Surroundings(made(0, 2), _NOTHING, _NOTHING), 9 * MIB)
    assert found.ops == (1, 2, 0)
    assert (found.bytes, found.seconds) == (9 * MIB, 6.0)


def test_a_bound_that_cannot_be_had_ends_the_search() -> None:
    contents = contents_of((4, 1, 4, 1, 1), ((), (0,), (1,), (2,), (0, 3)))
    found = nested(contents, tuple(range(5)), Surroundings(made(4), _NOTHING, _NOTHING), MIB)
    assert found.bytes == 6 * MIB


@settings(LIMITS, max_examples=examples(60))
@given(st.data())
def test_chains_hold_what_the_search_says(data: st.DataObject) -> None:
    """Random gaps are computed again, in chains within random bounds: the plans are valid, within what was counted."""
    graph = data.draw(deep_graphs(max_layers=9))
    costs = replace(data.draw(costs_for(graph)), homes=())
    problem, contents = Problem.of(graph, costs, 1 << 40), Contents.of(graph, costs)
    share = data.draw(st.floats(0, 1))
    once = Choices(problem, contents)
    picked = [(g, AGAIN, once.end[g]) for g in once.free if data.draw(st.booleans())]
    bound = (once.alone + share * once.held).astype(np.int64)
    choices = Choices(problem, contents, like=once, bound=bound)
    if not choices.begin(tuple(picked)):
        return
    plan = Plan("test", 0, (*arrivals(choices), *decisions_again(choices)), (), orders_again(choices))
    program = wire(graph, lower(graph, costs, plan))
    beside = Ladder(graph, costs).beside
    validate(graph, program, int((choices.held + choices.need).max(initial=0)) + beside, costs)
    seconds = recompute_seconds(costs, program)
    assert abs(seconds - choices.seconds) < 1e-9


def test_nested_chains_can_be_switched_off() -> None:
    """The chain of the first test, and an op of 7 MiB over which nothing can be held: what x4 is made of has to go."""
    sizes, reads = (4, 1, 4, 1, 1, 7, 1), ((), (0,), (1,), (2,), (0, 3), (), (4,))
    graph = graph_of(sizes, reads)
    costs = Costs(tuple(OpCost(1.0) for _ in reads))
    off, on = (Ladder(graph, costs, SearchParams(nested=shares)) for shares in ((), SearchParams().nested))
    assert (on.smallest, off.smallest) == (7 * MIB, 8 * MIB)  # off: x4 is held over the large op
    smallest = on.plan(on.smallest)
    assert smallest is not None and [chain.fetch_at for chain in smallest.plan.chains] == [6]
    validate(graph, smallest.program, on.smallest, costs)
    one, other = off.plan(off.smallest), on.plan(off.smallest)
    assert one is not None and other is not None
    assert not one.plan.chains
    assert other.timeline.step_seconds <= one.timeline.step_seconds
