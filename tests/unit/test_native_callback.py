"""Tests of the answer of native callbacks when Python raises."""

from __future__ import annotations

import ctypes

import pytest

from outofcore.compiling import native_callback


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("raised", "expected"), [(None, 14), (ValueError("wrong"), 5), (MemoryError(), 5), (KeyboardInterrupt(), -1)]
)
def test_native_callback_writes_its_answer(raised: BaseException | None, expected: int) -> None:
    def double(number: int) -> int:
        if raised is not None:
            raise raised
        return 2 * number

    callback = native_callback(double, ctypes.c_int64, failed=5)
    # Called through an address, as from native code.
    address = ctypes.cast(callback, ctypes.c_void_p).value
    assert address is not None
    call = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_void_p)(address)
    answer = ctypes.c_int64(-1)
    assert call(7, ctypes.addressof(answer)) is None
    assert answer.value == expected
