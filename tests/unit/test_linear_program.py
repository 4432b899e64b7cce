"""Tests of the linear program: leaving out implied constraints does not change the minimum."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outofcore.planning.linear_program import LinearProgram, add_levels, binding_ops

_OPS = 12
_STAYS = st.lists(
    st.tuples(st.integers(1, 8), st.integers(0, _OPS), st.integers(0, _OPS), st.integers(1, 9)), min_size=1, max_size=8
)


def max_kept(ops: list[int], free: list[int], intervals: list[tuple[int, int, int, int]]) -> float:
    program = LinearProgram()
    variables = [program.add_variable(0.0, 1.0, -float(worth)) for *_, worth in intervals]
    level_variables = add_levels(
        program,
        ops,
        [
            (column, float(size), [(first, last)])
            for column, (size, first, last, _) in zip(variables, intervals, strict=True)
        ],
    )
    for op, level in zip(ops, level_variables, strict=True):
        if level is not None:
            program.add_row({level: 1.0}, high=float(free[op]))
    assert program.minimise() is not None
    return program.objective()


@given(st.lists(st.integers(0, 20), min_size=_OPS, max_size=_OPS), _STAYS)
def test_binding_ops_imply_all_constraints(free: list[int], stays: list[tuple[int, int, int, int]]) -> None:
    ops = binding_ops(free, [(size, [(first, last)]) for size, first, last, _ in stays])
    assert ops == sorted(set(ops))
    with_binding, with_all = max_kept(ops, free, stays), max_kept(list(range(_OPS)), free, stays)
    assert abs(with_binding - with_all) < 1e-6 * max(1.0, abs(with_all))


def test_ops_imply_each_other_only_within_a_span() -> None:
    """With the same room at all ops, each span has one binding op."""
    assert binding_ops([5] * 6, [(3, [(0, 6)])]) == [5]
    assert binding_ops([5] * 6, [(3, [(0, 6)])], [0, 0, 1, 1, 1, 2]) == [1, 4, 5]


def test_op_with_enough_room_for_ending_storages_is_implied() -> None:
    """Storage 0 has 3 bytes and ends at op 1: op 0 is implied if it has 3 bytes more room than op 1."""
    assert binding_ops([9, 6], [(3, [(0, 1)]), (4, [(0, 2)])]) == [1]
    assert binding_ops([9, 7], [(3, [(0, 1)]), (4, [(0, 2)])]) == [0, 1]


@pytest.mark.parametrize("interior", [False, True])
def test_program_is_solved_only_if_its_rows_are_bounded(interior: bool) -> None:
    for high, minimum in ((4.0, -4.0), (7.0, -7.0), (None, None)):
        program = LinearProgram(interior=interior)
        x = program.add_variable(0.0, 10.0, -1.0)
        program.add_row({x: 1.0}, *((11.0,) if high is None else (0.0, high)))
        values = program.minimise()
        assert (values is None) == (minimum is None)
        assert values is None or program.objective() == pytest.approx(minimum)


def test_linear_program_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    """Standard output belongs to the commands: the output of ``plan --json`` must be JSON."""
    program = LinearProgram()
    program.add_variable(1.0, 2.0, 3.0)
    assert program.minimise() is not None
    assert program.objective() == 3.0
    assert capfd.readouterr() == ("", "")
