"""The schedule of a sum in a fixed order: its pieces, and which process has each piece in each round.

The processes form a chain. Each adds its gradients to a piece and sends it on; the last one has the sum, which comes
back the same way. Pieces form a pipeline, one round apart, in both directions at once. So the sum has the order of the
workers on any number W of processes. It sends 2 (W - 1) times the gradients in total, as a ring all-reduce does in an
order that depends on W. See Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
2009, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Extent:
    dtype: str
    itemsize: int
    elements: int


@dataclass(frozen=True, slots=True)
class Span:
    """A range of elements, [start, start + count), of one tensor."""

    tensor: int
    start: int
    count: int


def cut_pieces(extents: Sequence[Extent], max_bytes: int) -> list[tuple[Span, ...]]:
    """Divide tensors, in order, into pieces of at most ``max_bytes``; each piece has a single dtype."""
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
    forward: int | None  # the piece to add gradients to; process p - 1 sent it in the round before
    back: int | None  # the summed piece that process p + 1 sent


def schedule_rounds(piece_count: int, processes: int, position: int) -> Iterator[Round]:
    """Yield the rounds of a sum along a chain of processes, as seen by the process at ``position``."""
    turn = 2 * (processes - 1)
    for number in range(piece_count + turn - position if piece_count else 0):
        forward, back = number - position, number - turn + position
        yield Round(
            forward if 0 <= forward < piece_count else None,
            back if position < processes - 1 and 0 <= back < piece_count else None,
        )
