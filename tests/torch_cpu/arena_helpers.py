"""Helpers of tests of the arena: offsets of tensors, and whether its memory is mapped."""

from pathlib import Path

import torch

from outofcore.execution.arena import Arena
from outofcore.units import MIB

FLOATS = MIB // 4  # in one MiB


def floats(arena: Arena, offset: int, count: int) -> torch.Tensor:
    return arena.view(offset, count).view(torch.float32)


def offset_in_arena(tensor: torch.Tensor, arena: Arena) -> int:
    return tensor.untyped_storage().data_ptr() - arena.address


def is_mapped(address: int, count: int = 8 * MIB) -> bool:
    """Return whether the whole arena is mapped: a part of its addresses may be reused at once."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= address and address + count <= last:
            return True
    return False
