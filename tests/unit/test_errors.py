"""The tree of errors: what a caller may catch, and what an error carries."""

from __future__ import annotations

import pytest

from outofcore import errors


@pytest.mark.parametrize(
    ("error", "bases"),
    [
        (errors.InputError, (errors.OutOfCoreError, ValueError)),
        (errors.UnitError, (errors.InputError, ValueError)),
        (errors.BudgetError, (errors.InputError, ValueError)),
        (errors.SpillError, (errors.InputError, ValueError)),
        (errors.GraphError, (errors.InputError, ValueError)),
        (errors.CaptureError, (errors.OutOfCoreError,)),
        (errors.ValidationError, (errors.OutOfCoreError,)),
        (errors.ArenaError, (errors.OutOfCoreError, MemoryError)),
        (errors.TransferError, (errors.OutOfCoreError, OSError)),
        (errors.DeviceError, (errors.TransferError, OSError)),
        (errors.StateError, (errors.OutOfCoreError, RuntimeError)),
    ],
)
def test_what_an_error_can_be_caught_as(error: type[Exception], bases: tuple[type[Exception], ...]) -> None:
    for base in bases:
        with pytest.raises(base, match="what happened"):
            raise error("what happened")


def test_a_planners_fault_is_not_the_users() -> None:
    assert not issubclass(errors.ValidationError, errors.InputError)


def test_all_errors_have_one_root() -> None:
    found = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(found) == 14
    assert all(issubclass(error, errors.OutOfCoreError) for error in found)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, Exception):
            assert name in (errors.__doc__ or "")


def test_a_budget_error_carries_the_smallest_budget() -> None:
    assert errors.BudgetError("too small", smallest_budget=4096).smallest_budget == 4096
    assert errors.BudgetError("too small").smallest_budget is None


def test_a_capture_error_carries_the_users_line() -> None:
    assert errors.CaptureError("no", location="train.py:7").location == "train.py:7"
    assert errors.CaptureError("no").location == ""
    assert str(errors.CaptureError("no", "train.py:7")) == "no"
