"""Assign consecutive logical workers to each process, so that the sum passes each process once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from outofcore.errors import InputError


def shares(workers: int, seconds: Sequence[float]) -> tuple[int, ...]:
    """Return the number of workers for each process, at least one, so that the slowest process ends soonest.

    ``seconds`` are the times of one worker's turn, by process. Each must be above 0, or ``InputError`` is raised.

    >>> shares(4, [1.0, 1.0])
    (2, 2)
    >>> shares(4, [1.0, 3.0])
    (3, 1)
    """
    if workers < len(seconds):
        raise InputError(
            f"{workers} logical workers cannot be shared by {len(seconds)} processes: start at most {workers} "
            "(torchrun --nproc-per-node, --nnodes), or start the training with more workers"
        )
    if not all(math.isfinite(duration) and duration > 0 for duration in seconds):
        raise InputError(
            f"the workers cannot be balanced: by process, a worker's turn took {seconds} seconds, but each must be "
            "a positive number; make another step, then call balance() again"
        )
    # Greedy is optimal: any other assignment gives some process a worker that greedy refused, so that this process ends
    # no sooner than the slowest does here.
    counts = [1] * len(seconds)
    for _ in range(workers - len(seconds)):
        counts[min(range(len(seconds)), key=lambda p: ((counts[p] + 1) * seconds[p], p))] += 1
    return tuple(counts)


def worker_ranges(counts: Sequence[int]) -> tuple[range, ...]:
    return tuple(range(start, end) for start, end in pairwise(accumulate(counts, initial=0)))


def even_ranges(workers: int, processes: int) -> tuple[range, ...]:
    return worker_ranges(shares(workers, [1.0] * processes))
