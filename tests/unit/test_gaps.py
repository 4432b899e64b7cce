"""Gaps and sizes."""

from test_lowering import K64, LOSS, A, G, W, X, step

from outofcore.analysis import gaps_of, is_large, large_needs, live_bytes, placed_bytes
from outofcore.costs import Costs, OpCost
from outofcore.plan import Gap


def test_gaps_run_from_use_to_use() -> None:
    graph = step()
    assert gaps_of(graph, A) == (Gap(A, 0, 1), Gap(A, 1, 2))
    assert gaps_of(graph, G) == (Gap(G, 2, 3),)
    assert gaps_of(graph, LOSS) == ()


def test_a_parameter_has_a_gap_around_the_end_of_the_step() -> None:
    assert gaps_of(step(), W) == (Gap(W, 0, 3), Gap(W, 3, 4))


def test_an_input_waits_at_home_for_its_first_use() -> None:
    assert gaps_of(step(), X) == (Gap(X, -1, 0), Gap(X, 0, 2))


def test_large_blocks_take_whole_pages_and_small_ones_cache_lines() -> None:
    assert placed_bytes(K64) == K64
    assert placed_bytes(K64 + 1) == K64 + 4096
    assert placed_bytes(K64 - 1) == K64
    assert placed_bytes(65) == 128
    assert placed_bytes(0) == 0
    assert is_large(K64)
    assert not is_large(K64 - 64)


def test_rounding_makes_no_block_large() -> None:
    for count in range(K64 - 200, K64 + 200):
        assert is_large(placed_bytes(count)) == is_large(count)


def test_an_op_needs_its_storages_and_its_workspace() -> None:
    costs = Costs((OpCost(1.0, K64), OpCost(1.0, 100), OpCost(1.0), OpCost(1.0)))
    assert large_needs(step(), costs) == [11 * K64, 4 * K64, 10 * K64, 4 * K64]


def test_the_most_bytes_are_live_where_activations_and_gradients_meet() -> None:
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
