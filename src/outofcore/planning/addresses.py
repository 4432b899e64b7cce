"""Where in the arena each block lies.

A block is a rectangle: its bytes by the instructions over which it is held (see ``packing``).

Small blocks (below 64 KiB) lie below all large ones, so that large ones stay aligned to pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outofcore.analysis.gaps import is_large
from outofcore.planning.packing import Packing, Rectangle, pack
from outofcore.program import Block, Program
from outofcore.units import PAGE_BYTES, round_up

# How much to search for a placement, in neighbours looked at (see ``packing``): policies ask for one many
# times, so a fifth of a second at most.
EFFORT = 1_000_000


def _rectangle(block: Block, end: int) -> Rectangle:
    if not block.wraps:
        return Rectangle(block.id, block.born, block.dies, block.bytes)
    gap = None if block.born == block.dies == 0 else (block.dies, block.born)
    return Rectangle(block.id, 0, end, block.bytes, gap=gap)


def _pack(blocks: Sequence[Block], end: int, capacity: int | None, effort: int) -> Packing:
    return pack([_rectangle(block, end) for block in blocks], capacity=capacity, effort=effort)


def place(program: Program, capacity: int | None = None, effort: int = EFFORT) -> Program:
    """Give each block an offset.

    Args:
        program: as lowered.
        capacity: bytes that would do; the search stops at the first placement that stays within them.
        effort: see ``packing.pack``; 0: the quick ways only.

    Returns:
        The program with all offsets set and ``arena_bytes`` the height reached, which may lie above
        ``capacity``: it is for the caller to compare.
    """
    end = len(program.instructions)
    small, low = _small(program, effort)
    large = [b for b in program.blocks if is_large(b.bytes)]
    base = round_up(low.height, PAGE_BYTES)
    high = _pack(large, end, None if capacity is None else max(capacity - base, 0), effort)
    offsets = {block.id: offset for block, offset in zip(small, low.offsets, strict=True)}
    offsets |= {block.id: base + offset for block, offset in zip(large, high.offsets, strict=True)}
    blocks = tuple(Block(b.id, b.storage, b.bytes, b.born, b.dies, b.wraps, offsets[b.id]) for b in program.blocks)
    return replace(program, blocks=blocks, arena_bytes=base + high.height)


def place_small(program: Program, effort: int = EFFORT) -> int:
    """Bytes below the large blocks, where ``place`` places the small ones."""
    return round_up(_small(program, effort)[1].height, PAGE_BYTES)


def _small(program: Program, effort: int) -> tuple[list[Block], Packing]:
    small = [b for b in program.blocks if not is_large(b.bytes)]
    return small, _pack(small, len(program.instructions), None, effort)
