"""The schedule of a sum in a fixed order: its pieces, and which process has each piece in each round.

The processes form a chain. Process 0 starts a piece with the gradients of its workers, in their order. Each process
adds its own gradients and sends the piece on. The last process has the sum, which comes back the same way. Pieces form
a pipeline, one round apart, in both directions at once.

So the sum has the order of the workers on any number W of processes. Each of the W - 1 links carries all bytes once in
each direction: 2 (W - 1) times the gradients, the volume of a ring all-reduce (Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", 2009, section 3), whose order depends on W. An all-to-all exchange
of slices would take (N / W + 1) (W - 1) times the gradients for N workers, since a process cannot add up the gradients
of its workers before it sends them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Extent:
    """The dtype, bytes per element, and number of elements of a tensor."""

    dtype: str
    itemsize: int
    elements: int


@dataclass(frozen=True, slots=True)
class Span:
    """Elements [start, start + count) of a tensor, given by its number."""

    tensor: int
    start: int
    count: int


def pieces(extents: Sequence[Extent], max_bytes: int) -> list[tuple[Span, ...]]:
    """Cut all elements of some tensors, in order, into pieces of one dtype and at most ``max_bytes``.

    Tensors are cut at multiples of ``max_bytes``, which must be a multiple of the page size.
    """
    result: list[tuple[Span, ...]] = []
    open_spans: list[Span] = []
    free_bytes, dtype = 0, ""
    for number, extent in enumerate(extents):
        step = max_bytes // extent.itemsize
        for start in range(0, extent.elements, step):
            span = Span(number, start, min(step, extent.elements - start))
            count = span.count * extent.itemsize
            if open_spans and (extent.dtype != dtype or count > free_bytes):
                result.append(tuple(open_spans))
                open_spans = []
            if not open_spans:
                free_bytes, dtype = max_bytes, extent.dtype
            open_spans.append(span)
            free_bytes -= count
    if open_spans:
        result.append(tuple(open_spans))
    return result


@dataclass(frozen=True, slots=True)
class Round:
    """The work of one process in one round.

    ``forward`` is the piece to add gradients to; process p - 1 sent it in the round before. ``back`` is the piece whose
    sum process p + 1 sent.
    """

    forward: int | None
    back: int | None


def rounds(count: int, processes: int, place: int) -> Iterator[Round]:
    """Yield the rounds of the process at a place in the chain, until it has the sum of all pieces."""
    turn = 2 * (processes - 1)
    for number in range(count + turn - place if count else 0):
        forward, back = number - place, number - turn + place
        yield Round(
            forward if 0 <= forward < count else None,
            back if place < processes - 1 and 0 <= back < count else None,
        )
