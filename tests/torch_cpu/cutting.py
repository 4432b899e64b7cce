"""Steps with all their ops in parts."""

from __future__ import annotations

from outofcore.capture import Captured
from outofcore.execution.backend import CpuBackend
from outofcore.profiling.cache import Cache
from outofcore.profiling.equality import refuted
from outofcore.transforms.passes import hoisting, reordered, reuse
from outofcore.transforms.split import tiled

ROOM = 1 << 30  # bytes that a trial may take


def in_parts(captured: Captured, parts: int, verdicts: Cache, most: int = 1) -> Captured:
    """The step with all ops that can be in so many parts, storages of any size, where that is exact here.

    Each is cut by the way that needs the least; with a larger ``most`` by one of those that need no more than that.
    """
    refused: frozenset[str] = frozenset()
    while True:
        found = tiled(captured, most, parts=parts, least=1, refused=refused)
        wrong = refuted(found.claims, found.values, CpuBackend(), ROOM, verdicts)
        if not wrong:
            break
        refused |= wrong
    assert len(found.captured.graph.ops) > len(captured.graph.ops)
    done = reuse(found.captured, least=1)
    return reordered(done, hoisting(done))
