"""Which ops become one: what every choice has to keep, and what the rule says of small steps."""

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


def follows(one: Op, other: Op) -> bool:
    """Whether the second op has to come after the first, which stands before it in the graph."""
    writes, others = set(one.mutates + one.creates), set(other.mutates + other.creates)
    return bool(writes & set(other.touched) or others & set(one.touched))


def need(graph: StepGraph, ops: tuple[int, ...]) -> int:
    """Bytes that ops need as one, told naively."""
    made = {s for op in ops for s in graph.ops[op].creates}
    used = {s for op in ops for s in graph.ops[op].touched}
    inner = {s for s in made if s not in graph.outputs and all(use in ops for use in graph.uses[s])}
    outer = [s for s in used - inner if graph.storages[s].kind is not StorageKind.CONSTANT]
    size = {s: placed_bytes(graph.storages[s].bytes) for s in outer}
    dying = [
        size[s]
        for s in outer
        if s not in made and s in graph.creator and s not in graph.outputs and graph.uses[s][-1] in ops
    ]
    saved = 0
    for result in [s for s in outer if s in made] if len(ops) > 1 else []:
        if size[result] in dying:
            dying.remove(size[result])
            saved += size[result]
    return sum(size.values()) - saved


@LIMITS
@given(graphs(), st.data())
def test_groups_keep_what_ops_find_and_need_no_more_bytes(graph: StepGraph, data: st.DataObject) -> None:
    everything = fusible_of(graph)
    fusible = data.draw(st.sets(st.sampled_from(everything))) if everything and data.draw(st.booleans()) else everything
    least = data.draw(st.sampled_from([1, 4096, 65536]))
    groups = ops_to_fuse(graph, fusible, min_bytes=least, max_ops=data.draw(st.sampled_from([2, 3, 48])))
    members = [op for group in groups for op in group]
    assert len(set(members)) == len(members)
    assert set(members) <= set(fusible)
    place = position(groups)
    for one, other in combinations(graph.ops, 2):
        if follows(one, other):
            before, after = place.get(one.id, one.id), place.get(other.id, other.id)
            # Within a group the order of the graph is kept; else it is that of the places, which is a line: no cycles.
            assert before < after or (before == after and one.id in place and other.id in place)
    room = max((need(graph, (op.id,)) for op in graph.ops), default=0)
    for group in groups:
        assert list(group) == sorted(group)
        assert len(group) > 1
        made = {s for op in group for s in graph.ops[op].creates + graph.ops[op].mutates}
        shared = [s for op in group[1:] for s in graph.ops[op].reads if s in made]
        assert any(graph.storages[s].bytes >= least for s in shared)
        if least == 1:
            assert need(graph, group) <= room


@LIMITS
@given(graphs())
def test_nothing_that_others_read_in_between_is_delayed(graph: StepGraph) -> None:
    for group in ops_to_fuse(graph, fusible_of(graph), min_bytes=1):
        made = {s for op in group[:-1] for s in graph.ops[op].creates + graph.ops[op].mutates}
        between = [op for op in graph.ops[group[0] : group[-1]] if op.id not in group]
        after = {s: min(op for op in group if s in graph.ops[op].creates + graph.ops[op].mutates) for s in made}
        for op in between:
            assert not any(s in made and after[s] < op.id for s in op.touched)


def graph_of(written: list[Written], sizes: dict[str, int] | None = None, outputs: tuple[str, ...] = ()) -> StepGraph:
    """A step written down as ops: name, what it reads, mutates and creates; one letter or word each."""
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


def test_a_norm_goes_with_what_follows_it_and_back() -> None:
    graph = graph_of(residual_block(), {"w": 4096}, outputs=("d",))
    assert fused(graph) == [["norm", "add_", "relu_"], ["relu_back", "norm_back"]]


def test_a_group_needs_no_more_than_one_op_of_the_step() -> None:
    written: list[Written] = [
        ("conv", ("x", "w"), (), ("p",)),
        ("add", ("x", "y"), (), ("a",)),
        ("add", ("a", "z"), (), ("b",)),
    ]
    graph = graph_of(written, outputs=("p", "b"))
    assert fused(graph) == []  # x, y, z and b, where each op has three
    assert ops_to_fuse(graph, [1, 2], scratch={0: MB}) == ((1, 2),)


@pytest.mark.parametrize("held", [True, False])
def test_what_is_held_for_long_is_cut_from_what_is_made_of_it(held: bool) -> None:
    written: list[Written] = [
        ("conv", ("x", "w"), (), ("p",)),
        ("add", ("p", "x"), (), ("s",)),
        ("norm", ("s",), (), ("n",)),
        ("conv", ("n", "w"), (), ("z",)),
        ("exp", ("z",), (), ("e",)),
        ("conv_back", ("e", "n", "w"), (), ("dn",)),
        ("norm_back", ("dn", "s") if held else ("dn",), (), ("ds",)),
    ]
    graph = graph_of(written, outputs=("ds",))
    assert (["add", "norm"] in fused(graph)) == (not held)


def test_an_op_in_between_that_looks_at_a_result_ends_a_group() -> None:
    written: list[Written] = [
        ("exp", ("x",), (), ("a",)),
        ("conv", ("a", "w"), (), ("b",)),
        ("neg", ("a",), (), ("c",)),
    ]
    assert fused(graph_of(written, outputs=("b", "c"))) == []
    written[1] = ("conv", ("x", "w"), (), ("b",))
    assert fused(graph_of(written, outputs=("b", "c"))) == [["exp", "neg"]]


def test_an_op_that_writes_what_a_group_has_read_ends_it() -> None:
    written: list[Written] = [
        ("exp", ("x",), (), ("a",)),
        ("conv", ("w",), ("x",), ()),
        ("neg", ("a",), (), ("c",)),
    ]
    assert fused(graph_of(written, outputs=("c",))) == []


def test_what_is_small_is_no_reason() -> None:
    written: list[Written] = [("exp", ("x",), (), ("a",)), ("neg", ("a",), (), ("c",))]
    assert fused(graph_of(written, {"a": 64}, outputs=("c",))) == []
    assert fused(graph_of(written, dict.fromkeys("xac", 64), outputs=("c",)), least=64) == [["exp", "neg"]]


def test_two_chains_become_one_where_they_meet() -> None:
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


def test_some_are_compiled_alone_if_they_are_long() -> None:
    written: list[Written] = [
        ("conv", ("x", "w"), (), ("a",)),
        ("gelu", ("a",), (), ("b",)),
        ("conv", ("b", "w"), (), ("c",)),
        ("gelu", ("d",), (), ("e",)),
    ]
    graph = graph_of(written, {"d": 64, "e": 64}, outputs=("c", "e"))
    assert ops_to_fuse(graph, [1, 3]) == ()
    assert ops_to_fuse(graph, [1, 3], alone=[1, 3]) == ((1,),)
