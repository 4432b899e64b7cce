"""Tests of random loops within budgets against plain PyTorch."""

from __future__ import annotations

import pytest
from effort import some_of
from random_loops import compare

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("seed", some_of(range(8), range(4)))
def test_random_loop_matches_plain_pytorch(seed: int) -> None:
    compare(seed, 200)
