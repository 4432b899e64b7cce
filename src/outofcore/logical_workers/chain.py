"""The schedule of a sum in a fixed order: its pieces, and where each is in which round.

All processes form a chain. A piece of the sum starts at process 0 with the gradients of its workers, in their order;
each process adds its own and passes it on; the last one has the sum, which comes back the same way. Pieces follow each
other in a pipeline, one round apart, and both directions are under way at once.

So the sum has the order of the workers, however many processes there are. Each of the W - 1 links carries all bytes
once in each direction: 2 (W - 1) times the gradients altogether, which is what a ring all-reduce sends (Patarasuk and
Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009, section 3), whose order depends on
W. Exchanging slices by all-to-all first would take (N / W + 1) (W - 1) times the gradients for N workers, since
gradients of several workers of a process cannot be added up before they are sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Extent:
    """A tensor's dtype, bytes of an element, and number of elements."""

    dtype: str
    itemsize: int
    elements: int


@dataclass(frozen=True, slots=True)
class Span:
    """Elements [start, start + count) of a tensor, by its number."""

    tensor: int
    start: int
    count: int


def pieces(extents: Sequence[Extent], most_bytes: int) -> list[tuple[Span, ...]]:
    """Cut all elements of some tensors, in order, into pieces of one dtype and at most ``most_bytes``.

    Tensors are cut at multiples of ``most_bytes``, which must be a multiple of the page size.
    """
    found: list[tuple[Span, ...]] = []
    open_spans: list[Span] = []
    room, dtype = 0, ""
    for number, extent in enumerate(extents):
        step = most_bytes // extent.itemsize
        for start in range(0, extent.elements, step):
            span = Span(number, start, min(step, extent.elements - start))
            count = span.count * extent.itemsize
            if open_spans and (extent.dtype != dtype or count > room):
                found.append(tuple(open_spans))
                open_spans = []
            if not open_spans:
                room, dtype = most_bytes, extent.dtype
            open_spans.append(span)
            room -= count
    if open_spans:
        found.append(tuple(open_spans))
    return found


@dataclass(frozen=True, slots=True)
class Round:
    """What one process does in one round.

    ``forward`` is the piece that it adds its gradients to, which process p - 1 has sent in the round before; ``back``
    the piece whose sum process p + 1 has sent then.
    """

    forward: int | None
    back: int | None


def rounds(count: int, processes: int, place: int) -> Iterator[Round]:
    """Yield what the process at a place in the chain does, round by round, until it has the sum of all pieces."""
    turn = 2 * (processes - 1)
    for number in range(count + turn - place if count else 0):
        forward, back = number - place, number - turn + place
        yield Round(
            forward if 0 <= forward < count else None,
            back if place < processes - 1 and 0 <= back < count else None,
        )
