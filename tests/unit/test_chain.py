"""Tests of the pieces of a sum and the rounds in which they pass the processes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outofcore.logical_workers.chain import Extent, pieces, rounds

extents = st.builds(
    lambda dtype, elements: Extent(dtype, {"f4": 4, "f2": 2, "f8": 8}[dtype], elements),
    st.sampled_from(["f4", "f2", "f8"]),
    st.integers(0, 5000),
)


@given(st.lists(extents, max_size=12))
def test_pieces_cover_every_element_once_in_order(tensors: list[Extent]) -> None:
    all_pieces = pieces(tensors, 4096)
    elements = [
        (span.tensor, k) for spans in all_pieces for span in spans for k in range(span.start, span.start + span.count)
    ]
    assert elements == [(number, k) for number, extent in enumerate(tensors) for k in range(extent.elements)]
    for spans in all_pieces:
        assert len({tensors[span.tensor].dtype for span in spans}) == 1
        assert 0 < sum(span.count * tensors[span.tensor].itemsize for span in spans) <= 4096
        # A cut is at a page boundary.
        assert all(span.start * tensors[span.tensor].itemsize % 4096 == 0 for span in spans)


def test_small_tensors_share_a_piece() -> None:
    assert len(pieces([Extent("f4", 4, 100)] * 10, 4096)) == 1


@given(st.integers(0, 7), st.integers(1, 6))
def test_every_process_gets_every_sum_one_round_after_it_is_sent(count: int, processes: int) -> None:
    all_rounds = [list(rounds(count, processes, place)) for place in range(processes)]
    forward, back, messages = {}, {}, 0
    for place, own_rounds in enumerate(all_rounds):
        for number, current in enumerate(own_rounds):
            if current.forward is not None:
                forward[current.forward, place] = number
            if current.back is not None:
                back[current.back, place] = number
    for piece in range(count):
        for place in range(processes):
            if place:
                assert forward[piece, place] == forward[piece, place - 1] + 1
                messages += 1
            if place < processes - 1:
                before = back if place < processes - 2 else forward
                assert back[piece, place] == before[piece, place + 1] + 1
                messages += 1
    assert len(forward) == count * processes
    assert len(back) == count * (processes - 1)
    # The traffic of a ring: each piece crosses each link twice.
    assert messages == 2 * (processes - 1) * count
    assert all(
        own_rounds[-1].forward is not None or own_rounds[-1].back is not None for own_rounds in all_rounds if own_rounds
    )
