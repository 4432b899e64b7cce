"""Tests of the layout of an op's scratch memory, from its allocation log."""

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


def allocate(count: int, pointer: int) -> AllocatorEvent:
    return AllocatorEvent(EventKind.ALLOCATE, count, pointer)


def free(pointer: int) -> AllocatorEvent:
    return AllocatorEvent(EventKind.FREE, 0, pointer)


def test_results_scratch_and_retained_memory_are_distinguished() -> None:
    events = [allocate(MIB, 1), allocate(2 * MIB, 2), allocate(100, 3), free(1)]
    assert workspace_layout(events, {2: 7}) == Requests(
        (Request(MIB, Scratch(0)), Request(2 * MIB, ResultStorage(7)), Request(100, Unplanned())), MIB
    )


def test_scratch_memory_with_disjoint_lifetimes_shares_bytes() -> None:
    in_sequence = [allocate(MIB, 1), free(1), allocate(MIB, 1), free(1)]
    at_once = [allocate(MIB, 1), allocate(MIB, 2), free(1), free(2)]
    assert workspace_layout(in_sequence, {}).workspace_bytes == MIB
    assert workspace_layout(at_once, {}).workspace_bytes == 2 * MIB


def test_address_may_be_scratch_memory_and_then_a_result() -> None:
    layout = workspace_layout([allocate(64, 1), free(1), allocate(64, 1)], {1: 0})
    assert [request.placement for request in layout.requests] == [Scratch(0), ResultStorage(0)]


def test_small_requests_align_to_64_bytes_and_large_ones_to_pages() -> None:
    events = [allocate(1, 1), allocate(64 * KIB, 2), allocate(64 * KIB - 1, 3), free(1), free(2), free(3)]
    layout = workspace_layout(events, {})
    offsets = {request.bytes: request.placement.offset for request in layout.requests}  # type: ignore[union-attr]
    assert offsets[64 * KIB] % PAGE_BYTES == 0
    assert offsets[64 * KIB - 1] % 64 == 0
    assert layout.workspace_bytes == 128 * KIB + 64


def test_largest_first_is_used_if_it_is_better() -> None:
    # In order of time, the second request would be behind the first, and the third behind both.
    events = [allocate(MIB, 1), allocate(MIB, 2), free(1), allocate(2 * MIB, 3), free(2), free(3)]
    assert workspace_layout(events, {}).workspace_bytes == 3 * MIB


def test_unrelated_frees_and_results_are_ignored() -> None:
    assert workspace_layout([free(9), allocate(64, 1), free(1)], {5: 0}) == Requests((Request(64, Scratch(0)),), 64)


def test_damaged_log_is_refused() -> None:
    with pytest.raises(GraphError, match="in use"):
        workspace_layout([allocate(64, 1), allocate(64, 1)], {})


@st.composite
def logs(draw: st.DrawFn) -> list[AllocatorEvent]:
    events: list[AllocatorEvent] = []
    live: list[int] = []
    for pointer in range(1, draw(st.integers(1, 12)) + 1):
        events.append(allocate(draw(st.sampled_from([1, 64, 1000, 64 * KIB, 70_000, MIB])), pointer))
        live.append(pointer)
        for _ in range(draw(st.integers(0, 2))):
            if live:
                events.append(free(live.pop(draw(st.integers(0, len(live) - 1)))))
    return events + [free(pointer) for pointer in live]


@given(logs())
def test_live_requests_are_disjoint_and_within_the_block(events: list[AllocatorEvent]) -> None:
    layout = workspace_layout(events, {})
    span_of = {}
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
        for other_pointer in live:
            assert span[1] <= span_of[other_pointer][0] or span_of[other_pointer][1] <= span[0]
        span_of[event.pointer] = span
        live.add(event.pointer)
