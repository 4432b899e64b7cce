"""Where in the arena each block lies: dynamic storage allocation by first fit.

A block is a rectangle: its bytes by the instructions over which it is held. Rectangles that share an
instruction may not share an address. Finding the lowest arena is NP-hard; first fit in a few good
orders is what this module does, and the lowest of the results is kept.

Small blocks (below 64 KiB) lie below all large ones, so that large ones stay aligned to pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from outofcore.analysis.gaps import is_large
from outofcore.program import Block, Program
from outofcore.units import PAGE_BYTES, round_up

_Ints = NDArray[np.int64]


@dataclass(frozen=True)
class _Rectangles:
    ids: list[int]
    sizes: _Ints
    born: _Ints
    dies: _Ints
    wraps: NDArray[np.bool_]

    @staticmethod
    def of(blocks: list[Block], end: int) -> _Rectangles:
        whole = [b.wraps and b.born == b.dies == 0 for b in blocks]
        return _Rectangles(
            [b.id for b in blocks],
            np.array([b.bytes for b in blocks], dtype=np.int64),
            np.array([0 if w else b.born for b, w in zip(blocks, whole, strict=True)], dtype=np.int64),
            np.array([end if w else b.dies for b, w in zip(blocks, whole, strict=True)], dtype=np.int64),
            np.array([b.wraps and not w for b, w in zip(blocks, whole, strict=True)], dtype=np.bool_),
        )

    def share_time(self, index: int, others: _Ints) -> NDArray[np.bool_]:
        """Which of ``others`` are held at some instruction at which ``index`` is held too."""
        born, dies, wraps = self.born[others], self.dies[others], self.wraps[others]
        b, d = self.born[index], self.dies[index]
        if self.wraps[index]:  # held over [0, d) and [b, end)
            return wraps | (born < d) | (dies > b)
        return (wraps & ((b < dies) | (d > born))) | (~wraps & (born < d) & (b < dies))


def _first_fit(rectangles: _Rectangles, order: Iterable[int], limit: int | None) -> tuple[_Ints, int]:
    """Offsets by first fit in the given order, and the height; gives up above ``limit``."""
    count = len(rectangles.ids)
    offsets = np.full(count, -1, dtype=np.int64)
    placed = np.empty(count, dtype=np.int64)  # indices, in order of offset
    tops = np.empty(count, dtype=np.int64)
    starts = np.empty(count, dtype=np.int64)
    height = 0
    for filled, index in enumerate(order):
        size = int(rectangles.sizes[index])
        mask = rectangles.share_time(index, placed[:filled])
        lows, highs = starts[:filled][mask], tops[:filled][mask]
        at = 0
        if len(lows):
            ceilings = np.maximum.accumulate(highs)
            room = np.empty(len(lows), dtype=np.int64)
            room[0] = lows[0]
            room[1:] = lows[1:] - ceilings[:-1]
            fits = np.flatnonzero(room >= size)
            if len(fits):
                first = int(fits[0])
                at = int(ceilings[first - 1]) if first else 0
            else:
                at = int(ceilings[-1])
        offsets[index] = at
        where = int(np.searchsorted(starts[:filled], at, side="right"))
        for array, value in ((placed, index), (starts, at), (tops, at + size)):
            array[where + 1 : filled + 1] = array[where:filled]
            array[where] = value
        height = max(height, at + size)
        if limit is not None and height > limit:
            return offsets, height
    return offsets, height


def _orders(rectangles: _Rectangles) -> list[Callable[[int], tuple[int, ...]]]:
    sizes, born, dies, wraps = rectangles.sizes, rectangles.born, rectangles.dies, rectangles.wraps
    end = int(dies.max(initial=0))

    def length(i: int) -> int:
        return int(end - born[i] + dies[i] if wraps[i] else dies[i] - born[i])

    return [
        lambda i: (-int(wraps[i] or length(i) == end), int(born[i]), -int(sizes[i]), i),  # as time goes by
        lambda i: (-length(i), -int(sizes[i]), i),  # longest held first
        lambda i: (-int(sizes[i]), -length(i), i),  # largest first
        lambda i: (-int(sizes[i]) * length(i), i),  # largest area first
    ]


def _place(blocks: list[Block], end: int, capacity: int | None) -> tuple[dict[int, int], int]:
    if not blocks:
        return {}, 0
    rectangles = _Rectangles.of(blocks, end)
    best: tuple[_Ints, int] | None = None
    for key in _orders(rectangles):
        order = sorted(range(len(blocks)), key=key)
        offsets, height = _first_fit(rectangles, order, best[1] if best else None)
        if best is None or height < best[1]:
            best = (offsets, height)
        if capacity is not None and best[1] <= capacity:
            break
    offsets, height = best if best else (np.zeros(0, dtype=np.int64), 0)
    return dict(zip(rectangles.ids, (int(o) for o in offsets), strict=True)), height


def place(program: Program, capacity: int | None = None) -> Program:
    """Give each block an offset.

    Args:
        program: as lowered.
        capacity: bytes that would do; the search stops at the first order that stays within them.

    Returns:
        The program with all offsets set and ``arena_bytes`` the height reached, which may lie above
        ``capacity``: it is for the caller to compare.
    """
    end = len(program.instructions)
    small = [b for b in program.blocks if not is_large(b.bytes)]
    large = [b for b in program.blocks if is_large(b.bytes)]
    low, low_height = _place(small, end, None)
    base = round_up(low_height, PAGE_BYTES)
    high, high_height = _place(large, end, None if capacity is None else capacity - base)
    offsets = low | {block: base + offset for block, offset in high.items()}
    blocks = tuple(replace(b, offset=offsets[b.id]) for b in program.blocks)
    return replace(program, blocks=blocks, arena_bytes=base + high_height)
