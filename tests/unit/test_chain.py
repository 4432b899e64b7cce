"""The pieces of a sum, and the rounds in which they pass the processes."""

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
def test_pieces_have_every_element_once_and_in_order(tensors: list[Extent]) -> None:
    found = pieces(tensors, 4096)
    every = [(span.tensor, k) for spans in found for span in spans for k in range(span.start, span.start + span.count)]
    assert every == [(number, k) for number, extent in enumerate(tensors) for k in range(extent.elements)]
    for spans in found:
        assert len({tensors[span.tensor].dtype for span in spans}) == 1
        assert 0 < sum(span.count * tensors[span.tensor].itemsize for span in spans) <= 4096
        # What is cut begins on a page.
        assert all(span.start * tensors[span.tensor].itemsize % 4096 == 0 for span in spans)


def test_small_tensors_share_a_piece() -> None:
    assert len(pieces([Extent("f4", 4, 100)] * 10, 4096)) == 1


@given(st.integers(0, 7), st.integers(1, 6))
def test_every_process_has_every_sum_and_what_is_sent_is_awaited_one_round_later(count: int, processes: int) -> None:
    all_rounds = [list(rounds(count, processes, place)) for place in range(processes)]
    forward, back, messages = {}, {}, 0
    for place, own in enumerate(all_rounds):
        for number, one in enumerate(own):
            if one.forward is not None:
                forward[one.forward, place] = number
            if one.back is not None:
                back[one.back, place] = number
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
    # The bytes of a ring: twice over each of the links.
    assert messages == 2 * (processes - 1) * count
    assert all(own[-1].forward is not None or own[-1].back is not None for own in all_rounds if own)
