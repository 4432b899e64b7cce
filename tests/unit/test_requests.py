"""The layout of one op's scratch memory from its allocation log."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outofcore.errors import GraphError
from outofcore.planning.placement.requests import (
    AllocatorEvent,
    EventKind,
    Request,
    Requests,
    ResultStorage,
    Scratch,
    Unplanned,
    workspace_layout,
)
from outofcore.units import KIB, MIB, PAGE_BYTES


def took(count: int, pointer: int) -> AllocatorEvent:
    return AllocatorEvent(EventKind.ALLOCATE, count, pointer)


def gave(pointer: int) -> AllocatorEvent:
    return AllocatorEvent(EventKind.FREE, 0, pointer)


def test_a_result_is_told_from_scratch_memory_and_from_what_a_library_keeps() -> None:
    events = [took(MIB, 1), took(2 * MIB, 2), took(100, 3), gave(1)]
    assert workspace_layout(events, {2: 7}) == Requests(
        (Request(MIB, Scratch(0)), Request(2 * MIB, ResultStorage(7)), Request(100, Unplanned())), MIB
    )


def test_scratch_memory_with_lifetimes_that_do_not_meet_shares_bytes() -> None:
    one_after_the_other = [took(MIB, 1), gave(1), took(MIB, 1), gave(1)]
    at_once = [took(MIB, 1), took(MIB, 2), gave(1), gave(2)]
    assert workspace_layout(one_after_the_other, {}).workspace_bytes == MIB
    assert workspace_layout(at_once, {}).workspace_bytes == 2 * MIB


def test_the_same_address_may_be_scratch_memory_first_and_a_result_later() -> None:
    layout = workspace_layout([took(64, 1), gave(1), took(64, 1)], {1: 0})
    assert [request.placement for request in layout.requests] == [Scratch(0), ResultStorage(0)]


def test_small_requests_are_placed_on_64_bytes_and_large_ones_on_pages() -> None:
    events = [took(1, 1), took(64 * KIB, 2), took(64 * KIB - 1, 3), gave(1), gave(2), gave(3)]
    layout = workspace_layout(events, {})
    offsets = {request.bytes: request.placement.offset for request in layout.requests}  # type: ignore[union-attr]
    assert offsets[64 * KIB] % PAGE_BYTES == 0
    assert offsets[64 * KIB - 1] % 64 == 0
    assert layout.workspace_bytes == 128 * KIB + 64


def test_largest_first_is_used_where_it_is_better() -> None:
    # In order of time the second request must lie behind the first, and the third behind both.
    events = [took(MIB, 1), took(MIB, 2), gave(1), took(2 * MIB, 3), gave(2), gave(3)]
    assert workspace_layout(events, {}).workspace_bytes == 3 * MIB


def test_frees_and_results_of_others_are_ignored() -> None:
    assert workspace_layout([gave(9), took(64, 1), gave(1)], {5: 0}) == Requests((Request(64, Scratch(0)),), 64)


def test_a_damaged_log_is_refused() -> None:
    with pytest.raises(GraphError, match="in use"):
        workspace_layout([took(64, 1), took(64, 1)], {})


@st.composite
def logs(draw: st.DrawFn) -> list[AllocatorEvent]:
    events: list[AllocatorEvent] = []
    live: list[int] = []
    for pointer in range(1, draw(st.integers(1, 12)) + 1):
        events.append(took(draw(st.sampled_from([1, 64, 1000, 64 * KIB, 70_000, MIB])), pointer))
        live.append(pointer)
        for _ in range(draw(st.integers(0, 2))):
            if live:
                events.append(gave(live.pop(draw(st.integers(0, len(live) - 1)))))
    return events + [gave(pointer) for pointer in live]


@given(logs())
def test_no_two_requests_in_use_at_once_share_bytes_and_none_leaves_the_block(events: list[AllocatorEvent]) -> None:
    layout = workspace_layout(events, {})
    where = {}
    requests = iter(layout.requests)
    live: set[int] = set()
    for event in events:
        if event.kind is EventKind.FREE:
            live.remove(event.pointer)
            continue
        placement = next(requests).placement
        assert isinstance(placement, Scratch)
        span = (placement.offset, placement.offset + event.bytes)
        assert span[1] <= layout.workspace_bytes
        for other in live:
            assert span[1] <= where[other][0] or where[other][1] <= span[0]
        where[event.pointer] = span
        live.add(event.pointer)
