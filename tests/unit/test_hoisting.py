"""Ops move up to what they have to follow, and no further."""

from __future__ import annotations

from hypothesis import given, settings
from strategies import graphs

from outofcore.analysis.hoisting import hoisted_order
from outofcore.graph import Op, StepGraph, Storage, StorageKind

W1, W2, G1, G2 = range(4)


def two_layers() -> StepGraph:
    storages = tuple(
        Storage(i, 8, kind) for i, kind in enumerate([StorageKind.PARAMETER] * 2 + [StorageKind.GRADIENT] * 2)
    )
    ops = (
        Op(0, "backward2", (W2,), (), (G2,)),
        Op(1, "backward1", (W1, W2), (), (G1,)),
        Op(2, "update1", (W1, G1), (W1,), ()),
        Op(3, "update2", (W2, G2), (W2,), ()),
    )
    return StepGraph(storages, ops)


def test_an_update_runs_when_its_parameter_is_read_no_more() -> None:
    # The gradient of w2 is final after op 0, but op 1 still reads w2.
    assert hoisted_order(two_layers(), {2, 3}) == (0, 1, 2, 3)
    ops = two_layers().ops
    free = StepGraph(two_layers().storages, (ops[0], Op(1, "backward1", (W1,), (), (G1,)), *ops[2:]))
    assert hoisted_order(free, {2, 3}) == (0, 3, 1, 2)


def test_what_may_not_move_stays() -> None:
    assert hoisted_order(two_layers(), ()) == (0, 1, 2, 3)


def conflicts(a: Op, b: Op) -> bool:
    writes_a, writes_b = {*a.mutates, *a.creates}, {*b.mutates, *b.creates}
    return bool(writes_a & set(b.touched) or writes_b & set(a.touched))


@settings(max_examples=100, deadline=None)
@given(graphs())
def test_no_conflicting_ops_change_places(graph: StepGraph) -> None:
    order = hoisted_order(graph, [op.id for op in graph.ops if not op.random])
    place = {op: at for at, op in enumerate(order)}
    assert sorted(order) == list(range(len(graph.ops)))
    for b in graph.ops:
        for a in graph.ops[: b.id]:
            if conflicts(a, b):
                assert place[a.id] < place[b.id]
    fixed = [op for op in order if graph.ops[op].random]
    assert fixed == sorted(fixed)
