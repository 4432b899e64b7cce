"""Leaving out what follows from a neighbour changes no linear program's least cost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outofcore.planning.linear import Linear, levels
from outofcore.planning.tight import tight_ops

_OPS = 12
_STAYS = st.lists(
    st.tuples(st.integers(1, 8), st.integers(0, _OPS), st.integers(0, _OPS), st.integers(1, 9)), min_size=1, max_size=8
)


def _most_kept(ops: list[int], free: list[int], stays: list[tuple[int, int, int, int]]) -> float:
    linear = Linear()
    columns = [linear.column(0.0, 1.0, -float(worth)) for *_, worth in stays]
    held = levels(
        linear,
        ops,
        [(column, float(size), [(first, last)]) for column, (size, first, last, _) in zip(columns, stays, strict=True)],
    )
    for op, level in zip(ops, held, strict=True):
        if level is not None:
            linear.row({level: 1.0}, high=float(free[op]))
    assert linear.minimise() is not None
    return linear.least()


@given(st.lists(st.integers(0, 20), min_size=_OPS, max_size=_OPS), _STAYS)
def test_tight_ops_say_all(free: list[int], stays: list[tuple[int, int, int, int]]) -> None:
    """With room asked about at the tight ops only, as much can be kept as with all, and no more."""
    ops = tight_ops(free, [(size, [(first, last)]) for size, first, last, _ in stays])
    assert ops == sorted(set(ops))
    most, with_all = _most_kept(ops, free, stays), _most_kept(list(range(_OPS)), free, stays)
    assert abs(most - with_all) < 1e-6 * max(1.0, abs(with_all))


def test_ops_of_a_span_speak_for_each_other_only() -> None:
    """The same room everywhere is one thing to say in each span."""
    assert tight_ops([5] * 6, [(3, [(0, 6)])]) == [5]
    assert tight_ops([5] * 6, [(3, [(0, 6)])], [0, 0, 1, 1, 1, 2]) == [1, 4, 5]


def test_an_op_that_has_what_ends_there_to_spare_is_left_out() -> None:
    """An op that touches a storage has less room, but no more in its way than the op before."""
    assert tight_ops([9, 6], [(3, [(0, 1)]), (4, [(0, 2)])]) == [1]
    assert tight_ops([9, 7], [(3, [(0, 1)]), (4, [(0, 2)])]) == [0, 1]
