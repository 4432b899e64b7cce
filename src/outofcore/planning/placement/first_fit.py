"""First fit in a given order: each rectangle at the lowest offset where nothing placed before is in its way.

The order may be any, which a sweep over time cannot offer; for that each rectangle looks at all that
share a moment with it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from outofcore.planning.placement.rectangles import FAR, Ints, Rectangles
from outofcore.units import round_up


def first_fit(rectangles: Rectangles, order: Iterable[int]) -> Ints:
    """Offsets by first fit in an order."""
    offsets = np.full(len(rectangles), FAR, dtype=np.int64)
    sizes, base = rectangles.sizes, rectangles.base
    for index in order:
        size, alignment = int(sizes[index]), int(rectangles.alignments[index])
        near = rectangles.near(index)
        lows = offsets[near]
        by_low = np.argsort(lows, kind="stable")
        lows = lows[by_low]
        by_low = by_low[: int(np.searchsorted(lows, FAR))]
        lows = lows[: len(by_low)]
        # Where the free stretch below each one begins, and below nothing at all.
        floors = np.empty(len(lows) + 1, dtype=np.int64)
        floors[0] = base
        np.maximum.accumulate(lows + sizes[near[by_low]], out=floors[1:])
        if alignment > 1:
            floors = -(-floors // alignment) * alignment
        fits = lows - floors[:-1] >= size
        at = int(fits.argmax()) if fits.any() else len(lows)
        offsets[index] = round_up(int(floors[at]), alignment)
    return offsets
