"""What a graph says of itself, and what it refuses."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given, settings
from strategies import graphs

from outofcore.errors import GraphError
from outofcore.graph import PERSISTENT_KINDS, Op, StepGraph, Storage, StorageKind

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


def test_creator() -> None:
    assert GRAPH.creator == {2: 0, 3: 1}


def test_persistent_leaves_out_what_the_step_creates() -> None:
    assert GRAPH.persistent == {0, 4}


def test_persistent_kinds() -> None:
    kinds = StorageKind.PARAMETER, StorageKind.GRADIENT, StorageKind.OPTIMIZER_STATE, StorageKind.BUFFER
    assert set(kinds) == PERSISTENT_KINDS


def test_uses() -> None:
    assert GRAPH.uses == ((0, 3), (0,), (0, 1), (1, 3), (1, 3), (0,))


def test_a_sound_graph_passes() -> None:
    GRAPH.check()
    StepGraph((), ()).check()


def test_it_cannot_be_changed() -> None:
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
def test_a_graph_that_contradicts_itself_is_refused(broken: StepGraph, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        broken.check()


@settings(max_examples=50, deadline=None)
@given(graphs())
def test_random_graphs_are_sound(graph: StepGraph) -> None:
    graph.check()
    for storage, ops in enumerate(graph.uses):
        assert ops == tuple(op.id for op in graph.ops if storage in op.touched)
    assert not graph.persistent & graph.creator.keys()
