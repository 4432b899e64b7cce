"""Leaving out what follows from a neighbour changes no linear program's least cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outofcore.planning.linear_program import LinearProgram, add_levels, binding_ops

_OPS = 12
_STAYS = st.lists(
    st.tuples(st.integers(1, 8), st.integers(0, _OPS), st.integers(0, _OPS), st.integers(1, 9)), min_size=1, max_size=8
)


def most_kept(ops: list[int], free: list[int], stays: list[tuple[int, int, int, int]]) -> float:
    program = LinearProgram()
    variables = [program.add_variable(0.0, 1.0, -float(worth)) for *_, worth in stays]
    held = add_levels(
        program,
        ops,
        [
            (column, float(size), [(first, last)])
            for column, (size, first, last, _) in zip(variables, stays, strict=True)
        ],
    )
    for op, level in zip(ops, held, strict=True):
        if level is not None:
            program.add_row({level: 1.0}, high=float(free[op]))
    assert program.minimise() is not None
    return program.objective()


@given(st.lists(st.integers(0, 20), min_size=_OPS, max_size=_OPS), _STAYS)
def test_binding_ops_say_all(free: list[int], stays: list[tuple[int, int, int, int]]) -> None:
    """With room asked about at the binding ops only, as much can be kept as with all, and no more."""
    ops = binding_ops(free, [(size, [(first, last)]) for size, first, last, _ in stays])
    assert ops == sorted(set(ops))
    most, with_all = most_kept(ops, free, stays), most_kept(list(range(_OPS)), free, stays)
    assert abs(most - with_all) < 1e-6 * max(1.0, abs(with_all))


def test_ops_of_a_span_speak_for_each_other_only() -> None:
    """The same room everywhere is one thing to say in each span."""
    assert binding_ops([5] * 6, [(3, [(0, 6)])]) == [5]
    assert binding_ops([5] * 6, [(3, [(0, 6)])], [0, 0, 1, 1, 1, 2]) == [1, 4, 5]


def test_an_op_that_has_what_ends_there_to_spare_is_left_out() -> None:
    """An op that touches a storage has less room, but no more in its way than the op before."""
    assert binding_ops([9, 6], [(3, [(0, 1)]), (4, [(0, 2)])]) == [1]
    assert binding_ops([9, 7], [(3, [(0, 1)]), (4, [(0, 2)])]) == [0, 1]


@pytest.mark.parametrize("interior", [False, True])
def test_program_has_values_only_where_its_rows_can_hold(interior: bool) -> None:
    for high, least in ((4.0, -4.0), (7.0, -7.0), (None, None)):
        program = LinearProgram(interior=interior)
        x = program.add_variable(0.0, 10.0, -1.0)
        program.add_row({x: 1.0}, *((11.0,) if high is None else (0.0, high)))
        found = program.minimise()
        assert (found is None) == (least is None)
        assert found is None or program.objective() == pytest.approx(least)


def test_linear_program_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Standard output belongs to the commands: ``plan --json`` has to be JSON."""
    program = LinearProgram()
    program.add_variable(1.0, 2.0, 3.0)
    assert program.minimise() is not None
    assert program.objective() == 3.0
    assert capfd.readouterr() == ("", "")
