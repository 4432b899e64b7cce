"""How the elements of a tensor are dealt out among processes: in chunks of one length, one after the other.

The last chunks may reach beyond the tensor, as collectives want all of them alike; what of a chunk lies in the tensor
is a process's range. It begins at a multiple of ``GRAIN`` elements: kernels work on a few elements at a time, and round
those that are left over at the end otherwise, so that a range must not end in the middle of such a group.
"""

from __future__ import annotations

from dataclasses import dataclass

from outofcore.errors import InputError
from outofcore.units import round_up

# More than any kernel takes at once, and few enough not to matter as padding.
GRAIN = 256


@dataclass(frozen=True, slots=True)
class Chunks:
    """Elements dealt out among some processes.

    Attributes:
        elements: of the tensor.
        ranks: how many processes there are.

    >>> chunks = Chunks(elements=1000, ranks=3)
    >>> chunks.each, chunks.padded
    (512, 1536)
    >>> [(chunks.start(rank), chunks.count(rank)) for rank in range(3)]
    [(0, 512), (512, 488), (1000, 0)]
    """

    elements: int
    ranks: int

    def __post_init__(self) -> None:
        if self.elements < 0 or self.ranks < 1:
            raise InputError(f"{self.elements} elements cannot be dealt out among {self.ranks} processes")

    @property
    def each(self) -> int:
        """The elements of a chunk."""
        return round_up(-(-self.elements // self.ranks), GRAIN)

    @property
    def padded(self) -> int:
        """The elements of all chunks: those of the tensor, and what the last ones reach beyond it."""
        return self.each * self.ranks

    def start(self, rank: int) -> int:
        """Where the range of a process begins."""
        return min(rank * self.each, self.elements)

    def count(self, rank: int) -> int:
        """The elements of the range of a process; none, where the tensor ends before its chunk."""
        return self.start(rank + 1) - self.start(rank)


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether elements lie one after the other, in any order of the dimensions."""
    expected = 1
    for step, size in sorted((t, s) for t, s in zip(stride, shape, strict=True) if s != 1):
        if step != expected:
            return False
        expected *= size
    return True
