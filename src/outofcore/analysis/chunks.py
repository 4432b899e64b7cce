"""Distribute the elements of a tensor among processes in consecutive chunks of equal length.

The last chunks may reach beyond the tensor; the part within it is a process's range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outofcore.errors import InputError
from outofcore.units import round_up

# Ranges begin at multiples of this number of elements, since vectorised kernels may round the elements of an incomplete
# group at the end differently. It is more than any kernel's vector width, and negligible as padding.
GRAIN = 256


@dataclass(frozen=True, slots=True)
class Chunks:
    """Elements of a tensor, distributed among ``ranks`` processes.

    >>> chunks = Chunks(elements=1000, ranks=3)
    >>> chunks.chunk_elements, chunks.padded_elements
    (512, 1536)
    >>> [(chunks.start(rank), chunks.count(rank)) for rank in range(3)]
    [(0, 512), (512, 488), (1000, 0)]
    """

    elements: int
    ranks: int

    def __post_init__(self) -> None:
        if self.elements < 0 or self.ranks < 1:
            raise InputError(
                f"cannot distribute {self.elements} elements among {self.ranks} processes: pass at least 0 elements "
                "and 1 process"
            )

    @property
    def chunk_elements(self) -> int:
        return round_up(-(-self.elements // self.ranks), GRAIN)

    @property
    def padded_elements(self) -> int:
        return self.chunk_elements * self.ranks

    def start(self, rank: int) -> int:
        return min(rank * self.chunk_elements, self.elements)

    def count(self, rank: int) -> int:
        """Return the number of elements of a process's range, without padding."""
        return self.start(rank + 1) - self.start(rank)


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements lie between a tensor's first and last element in memory, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether a tensor's elements are contiguous in some order of its dimensions."""
    expected = 1
    for step, size in sorted((t, s) for t, s in zip(stride, shape, strict=True) if s != 1):
        if step != expected:
            return False
        expected *= size
    return True
