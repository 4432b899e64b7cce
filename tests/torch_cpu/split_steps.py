"""Steps with all their ops split."""

from __future__ import annotations

from outofcore.capture import Captured
from outofcore.execution.backend import CpuBackend
from outofcore.profiling.cache import Cache
from outofcore.profiling.equality import find_mismatches
from outofcore.transforms.passes import hoist_order, reorder, reuse_arguments
from outofcore.transforms.split import split_step

ROOM = 1 << 30  # bytes for exactness checks


def split_all(captured: Captured, parts: int, verdicts: Cache, max_bytes: int = 1) -> Captured:
    """Split each op ``parts`` times where the result is bit-identical, with storages of any size.

    Each op uses the split that needs the fewest bytes, or any split that needs at most ``max_bytes``.
    """
    refused: frozenset[str] = frozenset()
    while True:
        split = split_step(captured, max_bytes, parts=parts, min_bytes=1, refused=refused)
        mismatches = find_mismatches(split.checks, split.values, CpuBackend(), ROOM, verdicts)
        if not mismatches:
            break
        refused |= mismatches
    assert len(split.captured.graph.ops) > len(captured.graph.ops)
    reused = reuse_arguments(split.captured, min_bytes=1)
    return reorder(reused, hoist_order(reused))
