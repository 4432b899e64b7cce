"""Steps with all their ops split."""

from __future__ import annotations

from outofcore.capture import Captured
from outofcore.execution.backend import CpuBackend
from outofcore.profiling.cache import Cache
from outofcore.profiling.equality import refuted
from outofcore.transforms.passes import hoisting, reordered, reuse
from outofcore.transforms.split import tiled

ROOM = 1 << 30  # bytes for exactness checks


def in_parts(captured: Captured, parts: int, verdicts: Cache, most: int = 1) -> Captured:
    """Split each op ``parts`` times where the result is bit-identical, with storages of any size.

    Each op uses the split that needs the fewest bytes, or any split that needs at most ``max_bytes``.
    """
    refused: frozenset[str] = frozenset()
    while True:
        split = tiled(captured, most, parts=parts, least=1, refused=refused)
        mismatches = refuted(split.claims, split.values, CpuBackend(), ROOM, verdicts)
        if not mismatches:
            break
        refused |= mismatches
    assert len(split.captured.graph.ops) > len(captured.graph.ops)
    reused = reuse(split.captured, least=1)
    return reordered(reused, hoisting(reused))
