"""Tests of random loops within budgets against plain PyTorch."""

from __future__ import annotations

import sys

import pytest
import torch
from effort import some_of
from random_loops import compare

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("seed", some_of(range(8), range(4)))
def test_random_loop_matches_plain_pytorch(seed: int) -> None:
    """``python tests/torch_cpu/test_follow_fuzz.py FIRST LAST [STEPS]`` runs other seeds, for longer."""
    compare(seed, 200)


if __name__ == "__main__":
    torch.set_num_threads(1)
    first, last, *more = map(int, sys.argv[1:])
    for number in range(first, last):
        compare(number, *(more or [1000]))
        print(f"seed {number}: the same", flush=True)
