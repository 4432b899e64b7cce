"""Tests of gaps, block sizes and hoisted ops."""

from __future__ import annotations

from effort import examples
from examples import K64, LOSS, A, G, W, X, step
from hypothesis import given, settings
from strategies import graphs

from outofcore.analysis import gaps_of, is_large, large_needs, live_bytes, placed_bytes
from outofcore.analysis.hoisting import hoisted_order
from outofcore.costs import Costs, OpCost
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.plan import Gap


def test_gaps_run_from_use_to_use() -> None:
    graph = step()
    assert gaps_of(graph, A) == (Gap(A, 0, 1), Gap(A, 1, 2))
    assert gaps_of(graph, G) == (Gap(G, 2, 3),)
    assert gaps_of(graph, LOSS) == ()


def test_parameter_has_a_gap_around_the_end_of_the_step() -> None:
    assert gaps_of(step(), W) == (Gap(W, 0, 3), Gap(W, 3, 4))


def test_input_has_a_gap_before_its_first_use() -> None:
    assert gaps_of(step(), X) == (Gap(X, -1, 0), Gap(X, 0, 2))


def test_large_blocks_round_to_pages_and_small_ones_to_cache_lines() -> None:
    assert placed_bytes(K64) == K64
    assert placed_bytes(K64 + 1) == K64 + 4096
    assert placed_bytes(K64 - 1) == K64
    assert placed_bytes(65) == 128
    assert placed_bytes(0) == 0
    assert is_large(K64)
    assert not is_large(K64 - 64)


def test_rounding_does_not_make_a_block_large() -> None:
    for count in range(K64 - 200, K64 + 200):
        assert is_large(placed_bytes(count)) == is_large(count)


def test_op_needs_its_storages_and_its_workspace() -> None:
    costs = Costs((OpCost(1.0, K64), OpCost(1.0, 100), OpCost(1.0), OpCost(1.0)))
    assert large_needs(step(), costs) == [11 * K64, 4 * K64, 10 * K64, 4 * K64]


def test_live_bytes_peak_counts_activations_and_gradients() -> None:
    graph = step()
    live = [
        sum(
            s.bytes
            for s in graph.storages
            if s.id in graph.persistent or (graph.uses[s.id] and graph.uses[s.id][0] <= op.id <= graph.uses[s.id][-1])
        )
        for op in graph.ops
    ]
    assert live_bytes(graph) == max(live) > graph.storages[W].bytes


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


def test_update_is_hoisted_to_the_last_read_of_its_parameter() -> None:
    # The gradient of w2 is final after op 0, but op 1 still reads w2.
    assert hoisted_order(two_layers(), {2, 3}) == (0, 1, 2, 3)
    ops = two_layers().ops
    free = StepGraph(two_layers().storages, (ops[0], Op(1, "backward1", (W1,), (), (G1,)), *ops[2:]))
    assert hoisted_order(free, {2, 3}) == (0, 3, 1, 2)


def test_ops_outside_the_movable_set_stay() -> None:
    assert hoisted_order(two_layers(), ()) == (0, 1, 2, 3)


def conflicts(a: Op, b: Op) -> bool:
    writes_a, writes_b = {*a.mutates, *a.creates}, {*b.mutates, *b.creates}
    return bool(writes_a & set(b.touched) or writes_b & set(a.touched))


@settings(max_examples=examples(100), deadline=None)
@given(graphs())
def test_conflicting_ops_keep_their_order(graph: StepGraph) -> None:
    order = hoisted_order(graph, [op.id for op in graph.ops if not op.random])
    place = {op: at for at, op in enumerate(order)}
    assert sorted(order) == list(range(len(graph.ops)))
    for b in graph.ops:
        for a in graph.ops[: b.id]:
            if conflicts(a, b):
                assert place[a.id] < place[b.id]
    fixed = [op for op in order if graph.ops[op].random]
    assert fixed == sorted(fixed)
