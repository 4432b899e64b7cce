"""Tests that compiled recomputation sequences equal the results of a naive Python version."""

from __future__ import annotations

import random
from dataclasses import replace

import naive_chains
import pytest
from examples import network, network_costs
from hypothesis import given
from hypothesis import strategies as st
from strategies import LIMITS, costs_for, deep_graphs, graphs

from outofcore.costs import Costs
from outofcore.graph import StepGraph
from outofcore.planning import QUICK, plan_step
from outofcore.planning.problem import Problem
from outofcore.planning.remat.chains import OFFLOADED, RECOMPUTED, RESIDENT, Chain, Choices
from outofcore.planning.remat.contents import StepContents

Facts = tuple[object, ...]


@st.composite
def steps(draw: st.DrawFn) -> tuple[StepGraph, Costs]:
    graph = draw(st.one_of(deep_graphs(max_layers=9), graphs(max_layers=3)))
    return graph, draw(costs_for(graph))


def facts(chain: Chain | None) -> Facts | None:
    return None if chain is None else (chain.seconds, chain.bytes, chain.target_bytes, chain.contents)


@given(steps(), st.randoms(use_true_random=False))
@LIMITS
def test_compiled_sequences_equal_naive_ones(step: tuple[StepGraph, Costs], draw: random.Random) -> None:
    graph, costs = step
    # Random graphs rarely have scratch memory, and have many blocks of one size.
    contents = StepContents.of(graph, costs)
    lists = "size", "fresh", "scratch", "workspace"
    changed = {name: [draw.randint(0, 1000) for _ in getattr(contents, name)] for name in lists}
    choices = Choices(Problem.of(graph, costs, 1 << 40), replace(contents, **changed))
    gaps = choices.problem.gaps
    for _ in range(3):
        for g, info in enumerate(gaps):
            choices.kind[g] = draw.choice([RESIDENT, RESIDENT, OFFLOADED, RECOMPUTED])
            choices.fetch[g] = draw.randint(min(info.gap.start + 1, info.gap.end), info.gap.end)
        for _ in range(8):
            wanted_gaps = draw.sample(range(len(gaps)), min(len(gaps), draw.randint(1, 4))) if gaps else []
            at = draw.randrange(len(graph.ops))
            limit = draw.choice([float("inf"), draw.uniform(0, sum(choices.contents.seconds))])
            work = choices.work
            compiled = choices.chain(at, wanted_gaps, limit)
            counted, choices.work = choices.work - work, work
            assert facts(compiled) == facts(naive_chains.chain(choices, at, wanted_gaps, limit))
            assert choices.work - work == counted


def test_plans_are_the_same_with_naive_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = network(12)
    plan_texts: list[bytes] = []
    for chain in (Choices.chain, naive_chains.chain):
        monkeypatch.setattr(Choices, "chain", chain)
        plans = [plan_step(graph, network_costs(graph, copy=copy), 9 << 20, params=QUICK).plan for copy in (None, 4e-3)]
        plan_texts.append(repr(plans).encode())
    assert plan_texts[0] == plan_texts[1]


def test_links_of_a_sequence_are_built_once() -> None:
    graph = network(8)
    choices = Choices(Problem.of(graph, network_costs(graph), 1 << 40), StepContents.of(graph, network_costs(graph)))
    g = choices.recomputable[-1]
    sequence = choices.chain(choices.end[g], (g,))
    assert sequence is not None
    assert sequence.contents is sequence.contents
    assert choices.content[g] in sequence.contents.made <= sequence.contents.seen
    assert sequence.contents.ops == tuple(sorted(sequence.contents.ops))
