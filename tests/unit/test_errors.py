"""Tests of the exception hierarchy and of the attributes of errors."""

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
def test_error_can_be_caught_as_its_bases(error: type[Exception], bases: tuple[type[Exception], ...]) -> None:
    for base in bases:
        with pytest.raises(base, match="what happened"):
            raise error("what happened")


def test_validation_error_is_not_an_input_error() -> None:
    assert not issubclass(errors.ValidationError, errors.InputError)


def test_all_errors_have_one_root() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(classes) == 14
    assert all(issubclass(error, errors.OutOfCoreError) for error in classes)


def test_docstring_lists_all_errors() -> None:
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, Exception):
            assert name in (errors.__doc__ or "")


def test_budget_error_carries_the_smallest_budget() -> None:
    assert errors.BudgetError("too small", smallest_budget=4096).smallest_budget == 4096
    assert errors.BudgetError("too small").smallest_budget is None


def test_capture_error_carries_the_source_line() -> None:
    assert errors.CaptureError("no", location="train.py:7").location == "train.py:7"
    assert errors.CaptureError("no").location == ""
    assert str(errors.CaptureError("no", "train.py:7")) == "no"
