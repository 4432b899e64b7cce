"""Tests of op fusion: invariants of every choice, and results on small steps."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import LIMITS, graphs

from outofcore.analysis import LARGE_BYTES, placed_bytes
from outofcore.analysis.fusing import MAX_OPS, REACH, ops_to_fuse
from outofcore.graph import Op, StepGraph, Storage, StorageKind

MB = 1 << 20
Written = tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]


def fusible_of(graph: StepGraph) -> list[int]:
    return [op.id for op in graph.ops if op.rerunnable and not op.random and not op.communicates and op.touched]


def position(groups: tuple[tuple[int, ...], ...]) -> dict[int, int]:
    return {op: group[-1] for group in groups for op in group}


def follows(first: Op, second: Op) -> bool:
    """Return whether the second op depends on the first, which comes earlier in the graph."""
    writes, second_writes = set(first.mutates + first.creates), set(second.mutates + second.creates)
    return bool(writes & set(second.touched) or second_writes & set(first.touched))


def needed_bytes(graph: StepGraph, ops: tuple[int, ...]) -> int:
    created = {s for op in ops for s in graph.ops[op].creates}
    touched = {s for op in ops for s in graph.ops[op].touched}
    internal = {s for s in created if s not in graph.outputs and all(use in ops for use in graph.uses[s])}
    external = [s for s in touched - internal if graph.storages[s].kind is not StorageKind.CONSTANT]
    size = {s: placed_bytes(graph.storages[s].bytes) for s in external}
    dying = [
        size[s]
        for s in external
        if s not in created and s in graph.creator and s not in graph.outputs and graph.uses[s][-1] in ops
    ]
    saved = 0
    for result in [s for s in external if s in created] if len(ops) > 1 else []:
        if size[result] in dying:
            dying.remove(size[result])
            saved += size[result]
    return sum(size.values()) - saved


@LIMITS
@given(graphs(), st.data())
def test_groups_respect_dependencies_and_need_no_extra_bytes(graph: StepGraph, data: st.DataObject) -> None:
    candidates = fusible_of(graph)
    fusible = data.draw(st.sets(st.sampled_from(candidates))) if candidates and data.draw(st.booleans()) else candidates
    min_shared_bytes = data.draw(st.sampled_from([1, 4096, 65536]))
    groups = ops_to_fuse(graph, fusible, min_bytes=min_shared_bytes, max_ops=data.draw(st.sampled_from([2, 3, 48])))
    members = [op for group in groups for op in group]
    assert len(set(members)) == len(members)
    assert set(members) <= set(fusible)
    place = position(groups)
    for first, second in combinations(graph.ops, 2):
        if follows(first, second):
            before, after = place.get(first.id, first.id), place.get(second.id, second.id)
            # Members of a group keep the order of the graph. Groups are ordered by their last op, so there are no
            # cycles.
            assert before < after or (before == after and first.id in place and second.id in place)
    room = max((needed_bytes(graph, (op.id,)) for op in graph.ops), default=0)
    for group in groups:
        assert list(group) == sorted(group)
        assert len(group) > 1
        written = {s for op in group for s in graph.ops[op].creates + graph.ops[op].mutates}
        shared = [s for op in group[1:] for s in graph.ops[op].reads if s in written]
        assert any(graph.storages[s].bytes >= min_shared_bytes for s in shared)
        if min_shared_bytes == 1:
            assert needed_bytes(graph, group) <= room


@LIMITS
@given(graphs())
def test_no_op_between_group_members_touches_written_storages(graph: StepGraph) -> None:
    for group in ops_to_fuse(graph, fusible_of(graph), min_bytes=1):
        written = {s for op in group[:-1] for s in graph.ops[op].creates + graph.ops[op].mutates}
        between = [op for op in graph.ops[group[0] : group[-1]] if op.id not in group]
        first_write = {
            s: min(op for op in group if s in graph.ops[op].creates + graph.ops[op].mutates) for s in written
        }
        for op in between:
            assert not any(s in written and first_write[s] < op.id for s in op.touched)


def graph_of(written: list[Written], sizes: dict[str, int] | None = None, outputs: tuple[str, ...] = ()) -> StepGraph:
    """Build a graph from ops given as (name, reads, mutates, creates), with one name for each storage."""
    names = list(dict.fromkeys(name for _, *parts in written for part in parts for name in part))
    created = {name for _, _, _, creates in written for name in creates}
    number = {name: index for index, name in enumerate(names)}
    storages = tuple(
        Storage(
            index,
            (sizes or {}).get(name, MB),
            StorageKind.ACTIVATION if name in created else StorageKind.INPUT,
            name,
        )
        for name, index in number.items()
    )

    def ids(part: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(number[name] for name in part)

    ops = tuple(
        Op(index, name, ids(reads), ids(mutates), ids(creates))
        for index, (name, reads, mutates, creates) in enumerate(written)
    )
    graph = StepGraph(storages, ops, tuple(number[name] for name in outputs))
    graph.check()
    return graph


def fused(graph: StepGraph, least: int = LARGE_BYTES, most: int = MAX_OPS, reach: int = REACH) -> list[list[str]]:
    fusible = [op.id for op in graph.ops if op.name not in ("conv", "conv_back")]
    groups = ops_to_fuse(graph, fusible, min_bytes=least, max_ops=most, reach=reach)
    return [[graph.ops[op].name for op in group] for group in groups]


def residual_block() -> list[Written]:
    return [
        ("conv", ("x", "w"), (), ("a",)),
        ("norm", ("a",), (), ("n",)),
        ("add_", ("n", "x"), ("n",), ()),
        ("relu_", ("n",), ("n",), ()),
        ("conv", ("n", "w"), (), ("z",)),
        ("conv_back", ("z", "n", "w"), (), ("dn",)),
        ("relu_back", ("dn", "n"), (), ("m",)),
        ("norm_back", ("m", "a"), (), ("da",)),
        ("conv_back", ("da", "x", "w"), (), ("dx",)),
        ("add", ("dx", "m"), (), ("d",)),
    ]


def test_norm_fuses_with_its_activation_in_both_passes() -> None:
    graph = graph_of(residual_block(), {"w": 4096}, outputs=("d",))
    assert fused(graph) == [["norm", "add_", "relu_"], ["relu_back", "norm_back"]]


def test_group_needs_at_most_the_bytes_of_the_largest_op() -> None:
    written: list[Written] = [
        ("conv", ("x", "w"), (), ("p",)),
        ("add", ("x", "y"), (), ("a",)),
        ("add", ("a", "z"), (), ("b",)),
    ]
    graph = graph_of(written, outputs=("p", "b"))
    assert fused(graph) == []  # x, y, z and b, where each op has three
    assert ops_to_fuse(graph, [1, 2], scratch={0: MB}) == ((1, 2),)


@pytest.mark.parametrize("is_read_again", [True, False])
def test_long_lived_result_is_not_fused_with_its_reader(is_read_again: bool) -> None:
    written: list[Written] = [
        ("conv", ("x", "w"), (), ("p",)),
        ("add", ("p", "x"), (), ("s",)),
        ("norm", ("s",), (), ("n",)),
        ("conv", ("n", "w"), (), ("z",)),
        ("exp", ("z",), (), ("e",)),
        ("conv_back", ("e", "n", "w"), (), ("dn",)),
        ("norm_back", ("dn", "s") if is_read_again else ("dn",), (), ("ds",)),
    ]
    graph = graph_of(written, outputs=("ds",))
    assert (["add", "norm"] in fused(graph)) == (not is_read_again)


def test_reader_in_between_ends_a_group() -> None:
    written: list[Written] = [
        ("exp", ("x",), (), ("a",)),
        ("conv", ("a", "w"), (), ("b",)),
        ("neg", ("a",), (), ("c",)),
    ]
    assert fused(graph_of(written, outputs=("b", "c"))) == []
    written[1] = ("conv", ("x", "w"), (), ("b",))
    assert fused(graph_of(written, outputs=("b", "c"))) == [["exp", "neg"]]


def test_writer_of_a_group_input_ends_the_group() -> None:
    written: list[Written] = [
        ("exp", ("x",), (), ("a",)),
        ("conv", ("w",), ("x",), ()),
        ("neg", ("a",), (), ("c",)),
    ]
    assert fused(graph_of(written, outputs=("c",))) == []


def test_small_results_are_not_fused() -> None:
    written: list[Written] = [("exp", ("x",), (), ("a",)), ("neg", ("a",), (), ("c",))]
    assert fused(graph_of(written, {"a": 64}, outputs=("c",))) == []
    assert fused(graph_of(written, dict.fromkeys("xac", 64), outputs=("c",)), least=64) == [["exp", "neg"]]


def test_two_chains_fuse_where_they_join() -> None:
    written: list[Written] = [
        ("exp", ("x",), (), ("a",)),
        ("sin", ("y",), (), ("b",)),
        ("add", ("a", "b"), (), ("c",)),
    ]
    assert fused(graph_of(written, outputs=("c",))) == [["exp", "sin", "add"]]


def test_groups_end_at_their_limits() -> None:
    written: list[Written] = [("exp", ("s0",), (), ("s1",))]
    written += [("neg", (f"s{index}",), (), (f"s{index + 1}",)) for index in range(1, 7)]
    graph = graph_of(written, outputs=("s7",))
    assert [len(group) for group in fused(graph)] == [7]
    assert [len(group) for group in fused(graph, most=3)] == [3, 3]
    far: list[Written] = [written[0], *[("conv", ("w",), (), (f"c{n}",)) for n in range(5)], written[1]]
    assert fused(graph_of(far, outputs=("s2",)), reach=5) == []
    assert fused(graph_of(far, outputs=("s2",)), reach=6) == [["exp", "neg"]]


def test_long_ops_are_compiled_alone() -> None:
    written: list[Written] = [
        ("conv", ("x", "w"), (), ("a",)),
        ("gelu", ("a",), (), ("b",)),
        ("conv", ("b", "w"), (), ("c",)),
        ("gelu", ("d",), (), ("e",)),
    ]
    graph = graph_of(written, {"d": 64, "e": 64}, outputs=("c", "e"))
    assert ops_to_fuse(graph, [1, 3]) == ()
    assert ops_to_fuse(graph, [1, 3], alone=[1, 3]) == ((1,),)
