"""Tests of graphs, costs and programs as data: derived values and checks."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from math import nan

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import budgets_for, costs_for, graphs

from outofcore.costs import Costs, Home, OpCost
from outofcore.errors import GraphError
from outofcore.graph import PERSISTENT_KINDS, Op, StepGraph, Storage, StorageKind
from outofcore.program import Block, CopyIn, CopyOut, Instruction, Program, Queue, Run, Wait, queue_of

GRAPH = StepGraph(
    (
        Storage(0, 8, StorageKind.PARAMETER, "weight"),
        Storage(1, 8, StorageKind.INPUT, "x"),
        Storage(2, 8, StorageKind.ACTIVATION, "y"),
        Storage(3, 8, StorageKind.GRADIENT, "made"),
        Storage(4, 8, StorageKind.GRADIENT, "kept"),
        Storage(5, 0, StorageKind.CONSTANT),
    ),
    (
        Op(0, "forward", (1, 0, 5), (), (2,)),
        Op(1, "backward", (2, 4), (4,), (3,)),
        Op(2, "idle", (), (), ()),
        Op(3, "update", (3, 0, 4), (0, 4), ()),
    ),
    (2,),
)


def test_touched_names_each_storage_once_in_order() -> None:
    assert [op.touched for op in GRAPH.ops] == [(1, 0, 5, 2), (2, 4, 3), (), (3, 0, 4)]
    assert Op(0, "op", (3, 1, 3), (1, 2), (5, 4)).touched == (3, 1, 2, 5, 4)


def test_creator_maps_storages_to_ops() -> None:
    assert GRAPH.creator == {2: 0, 3: 1}


def test_persistent_excludes_storages_created_by_the_step() -> None:
    assert GRAPH.persistent == {0, 4}


def test_persistent_kinds_are_complete() -> None:
    kinds = StorageKind.PARAMETER, StorageKind.GRADIENT, StorageKind.OPTIMIZER_STATE, StorageKind.BUFFER
    assert set(kinds) == PERSISTENT_KINDS


def test_uses_list_the_ops_of_each_storage() -> None:
    assert GRAPH.uses == ((0, 3), (0,), (0, 1), (1, 3), (1, 3), (0,))


def test_sound_graph_passes() -> None:
    GRAPH.check()
    StepGraph((), ()).check()


def test_graph_is_immutable() -> None:
    with pytest.raises(FrozenInstanceError):
        GRAPH.outputs = ()  # type: ignore[misc]


def with_op(op: Op) -> StepGraph:
    return replace(GRAPH, ops=(*GRAPH.ops[: op.id], op, *GRAPH.ops[op.id + 1 :]))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (replace(GRAPH, storages=(GRAPH.storages[1], *GRAPH.storages[1:])), "storage at index 0 has id 1"),
        (replace(GRAPH, storages=(replace(GRAPH.storages[0], bytes=-1), *GRAPH.storages[1:])), "has -1 bytes"),
        (replace(GRAPH, ops=GRAPH.ops[1:]), "op at index 0 has id 1"),
        (with_op(Op(0, "forward", (3,), (), (2,))), r"op 0 \(forward\) uses storage 3 before any op creates it"),
        (with_op(Op(0, "forward", (), (2,), (2,))), r"op 0 \(forward\) uses storage 2 before any op creates it"),
        (with_op(Op(2, "idle", (6,), (), ())), r"op 2 \(idle\) uses storage 6"),
        (with_op(Op(2, "idle", (-1,), (), ())), r"op 2 \(idle\) uses storage -1"),
        (with_op(Op(2, "idle", (), (), (2,))), r"op 2 \(idle\) creates storage 2, which exists already"),
        (with_op(Op(2, "idle", (), (), (6,))), r"op 2 \(idle\) creates storage 6"),
        (with_op(replace(GRAPH.ops[2], discards=(0,))), r"op 2 .* discards storage 0, which it does not mutate"),
        (replace(GRAPH, outputs=(6,)), "output 6 is not a storage of the step"),
    ],
)
def test_contradictory_graph_is_refused(broken: StepGraph, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        broken.check()


@settings(max_examples=examples(50), deadline=None)
@given(graphs())
def test_random_graphs_are_sound(graph: StepGraph) -> None:
    graph.check()
    for storage, ops in enumerate(graph.uses):
        assert ops == tuple(op.id for op in graph.ops if storage in op.touched)
    assert not graph.persistent & graph.creator.keys()


TWO_OPS = StepGraph((), (Op(0, "a", (), (), ()), Op(1, "b", (), (), ())))


def test_copy_seconds_include_latency() -> None:
    home = Home("host", None, bytes_per_s_out=100.0, bytes_per_s_in=200.0, latency_s=0.5)
    assert home.out_seconds(400) == 4.5
    assert home.in_seconds(400) == 2.5
    assert home.out_seconds(0) == home.in_seconds(0) == 0.5


def test_latency_is_zero_by_default() -> None:
    assert Home("host", None, 100.0, 200.0).out_seconds(100) == 1.0


def test_compute_seconds_add_up() -> None:
    assert Costs((OpCost(1.0), OpCost(2.5))).compute_seconds == 3.5
    assert Costs(()).compute_seconds == 0


def test_matching_costs_pass() -> None:
    Costs((OpCost(0.0), OpCost(1.0, 4096))).check(TWO_OPS)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (Costs((OpCost(1.0),)), "1 op costs for a graph of 2 ops"),
        (Costs((OpCost(1.0),) * 3), "3 op costs for a graph of 2 ops"),
        (Costs((OpCost(1.0), OpCost(-1.0))), "op 1 has a negative cost"),
        (Costs((OpCost(nan), OpCost(1.0))), "op 0 has a negative cost"),
        (Costs((OpCost(1.0), OpCost(1.0, -1))), "op 1 has a negative cost"),
    ],
)
def test_mismatching_costs_are_refused(costs: Costs, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        costs.check(TWO_OPS)


@settings(max_examples=examples(25), deadline=None)
@given(st.data())
def test_random_costs_and_budgets_fit(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    costs = data.draw(costs_for(graph))
    costs.check(graph)
    assert data.draw(budgets_for(graph, costs)) > 0


@pytest.mark.parametrize(("contention", "slowdown"), [(1.1, 0.0), (-0.1, 0.0), (0.0, -0.1), (nan, 0.0), (0.0, nan)])
def test_impossible_contention_is_refused(contention: float, slowdown: float) -> None:
    home = Home("disk", None, 1.0, 1.0, 0.0, contention, slowdown)
    with pytest.raises(GraphError, match="contention"):
        Costs((OpCost(1.0), OpCost(1.0)), (home,)).check(TWO_OPS)


@pytest.mark.parametrize("part", [0.0, 1.0, -0.5, nan])
def test_contention_out_must_leave_both_directions_running(part: float) -> None:
    home = Home("disk", None, 1.0, 1.0, contention=1.0, contention_out=part)
    with pytest.raises(GraphError, match=r"from 0\.05 to 0\.95"):
        Costs((OpCost(1.0), OpCost(1.0)), (home,)).check(TWO_OPS)


@pytest.mark.parametrize(
    ("instruction", "queue"),
    [(Run(0, ()), Queue.COMPUTE), (CopyOut(0, 1), Queue.COPY_OUT), (CopyIn(0, 1), Queue.COPY_IN)],
)
def test_each_instruction_has_its_queue(instruction: Instruction, queue: Queue) -> None:
    assert queue_of(instruction) is queue


def test_programs_are_values() -> None:
    """Equal programs hash alike, so that they can key a cache."""

    def make() -> Program:
        waits = (Wait(Queue.COPY_IN, 1),)
        return Program((CopyIn(0, 0), Run(0, (0,), None, waits)), (Block(0, 0, 8, 0, 2),), 8, (0,))

    assert make() == make()
    assert hash(make()) == hash(make())
    with pytest.raises(FrozenInstanceError):
        make().arena_bytes = 9  # type: ignore[misc]


def test_new_block_is_unplaced() -> None:
    assert Block(0, None, 8, 0, 1).offset == -1
