"""Tests of the arena: planned addresses under real PyTorch ops."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from arena_helpers import FLOATS, floats, offset_in_arena
from torch.utils.data import DataLoader, TensorDataset

from outofcore.errors import ArenaError, StateError
from outofcore.execution.arena import AllocationRecorder, Arena, ArenaCounters, ScopeTable, as_arena_error
from outofcore.planning.placement.requests import EventKind, ResultStorage, Scratch, workspace_layout
from outofcore.units import KIB, MIB, PAGE_BYTES


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena(64 * MIB, reserve=4 * MIB) as opened:
        yield opened


def test_planned_request_gets_its_address_in_its_own_thread_only(arena: Arena) -> None:
    x = floats(arena, 0, MIB).fill_(1)
    table = ScopeTable(arena, [[(MIB, 8 * MIB)], [(MIB, 16 * MIB), (MIB, 24 * MIB)]])
    other_thread_results: list[torch.Tensor] = []
    table.begin(1)
    thread = threading.Thread(target=lambda: other_thread_results.append(torch.add(x, 5)))
    thread.start()
    thread.join()
    first, second = x + x, x * 3
    table.end()
    table.begin(0)
    third = x - x
    table.end()
    outside = x + 2
    assert [offset_in_arena(t, arena) for t in (first, second, third)] == [16 * MIB, 24 * MIB, 8 * MIB]
    assert [t[0].item() for t in (first, second, third, other_thread_results[0], outside)] == [2, 3, 0, 6, 3]
    for tensor in (other_thread_results[0], outside):
        assert not 0 <= offset_in_arena(tensor, arena) < arena.bytes
    counters = arena.counters()
    assert (counters.served, counters.large, counters.refused, counters.unclaimed) == (3, 0, 0, 0)
    assert counters.small >= 1  # the number 3 as a tensor


def test_recorded_op_runs_at_planned_addresses_bit_for_bit(arena: Arena) -> None:
    torch.manual_seed(0)
    x = floats(arena, 0, 4 * 8 * 32 * 32 * 4).view(4, 8, 32, 32).normal_()
    w = floats(arena, MIB, 16 * 8 * 9 * 4).view(16, 8, 3, 3).normal_()
    g = torch.randn(4, 16, 32, 32)

    def op() -> tuple[torch.Tensor, ...]:
        return torch.ops.aten.convolution_backward(
            g, x, w, [16], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]
        )

    expected = op()
    with AllocationRecorder() as recorder:
        out = op()
        keys = {t.untyped_storage().data_ptr(): key for key, t in enumerate(out)}
    layout = workspace_layout(recorder.events, keys)
    results = [r.placement.key for r in layout.requests if isinstance(r.placement, ResultStorage)]
    assert sorted(results) == [0, 1, 2]
    assert {t.untyped_storage().nbytes() for t in out} == {
        r.bytes for r in layout.requests if isinstance(r.placement, ResultStorage)
    }
    del out
    offsets = {key: (8 + 8 * key) * MIB for key in results}
    scope = []
    for request in layout.requests:
        placement = request.placement
        if isinstance(placement, ResultStorage):
            scope.append((request.bytes, offsets[placement.key]))
        else:
            scope.append((request.bytes, 40 * MIB + placement.offset if isinstance(placement, Scratch) else None))
    table = ScopeTable(arena, [scope])
    for _ in range(3):
        table.begin(0)
        out = op()
        table.end()
        assert [offset_in_arena(t, arena) for t in out] == [offsets[key] for key in range(3)]
        assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))
        del out
    counters = arena.counters()
    assert (counters.small, counters.large, counters.unclaimed) == (0, 0, 0)
    assert counters.served == 3 * len(layout.requests)


def test_planned_request_touches_no_memory(arena: Arena) -> None:
    table = ScopeTable(arena, [[(32 * MIB, 16 * MIB)]])
    table.begin(0)
    tensor = torch.empty(8 * FLOATS * 4)
    table.end()
    assert offset_in_arena(tensor, arena) == 16 * MIB
    assert arena.resident_bytes() == 0


def test_unplanned_requests_are_counted_and_do_not_move_planned_ones(arena: Arena) -> None:
    table = ScopeTable(arena, [[(MIB, 0), (MIB, MIB)]])
    table.begin(0)
    small = torch.empty(10)
    large = torch.empty(2 * FLOATS)
    planned = torch.empty(FLOATS)
    empty = torch.empty(0)
    table.end()
    assert offset_in_arena(planned, arena) == 0
    assert empty.numel() == 0
    assert arena.counters() == ArenaCounters(
        served=1,
        small=1,
        large=1,
        large_bytes=2 * MIB,
        live_bytes=2 * MIB,
        peak_live_bytes=2 * MIB,
        unclaimed=1,
        last_scope=0,
    )
    del small, large
    assert arena.counters().live_bytes == 0
    assert arena.counters().peak_live_bytes == 2 * MIB


def test_reserve_bounds_live_unplanned_bytes(arena: Arena) -> None:
    table = ScopeTable(arena, [[], []])
    table.begin(1)
    try:
        for _ in range(5):
            torch.empty(4 * FLOATS)  # one after the other they fit
        live = torch.empty(3 * FLOATS)
        with pytest.raises(RuntimeError) as caught:
            torch.empty(2 * FLOATS)
    finally:
        table.end()
    error = as_arena_error(caught.value)
    assert isinstance(error, ArenaError)
    for part in ("scope 1", str(2 * MIB), str(3 * MIB), str(4 * MIB)):
        assert part in str(error)
    assert as_arena_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert arena.counters().refused == 1
    arena.set_reserve(8 * MIB)
    table.begin(1)
    more = torch.empty(2 * FLOATS)
    table.end()
    assert arena.counters().live_bytes == 5 * MIB
    del live, more


def test_bytes_in_use_are_not_allocated_twice(arena: Arena) -> None:
    # The plan frees the first block before the second is allocated, but the test keeps it.
    table = ScopeTable(arena, [[(MIB, 0), (MIB, 0)]])
    table.begin(0)
    first = torch.ones(FLOATS)
    second = torch.zeros(FLOATS)
    table.end()
    assert offset_in_arena(first, arena) == 0
    assert not 0 <= offset_in_arena(second, arena) < arena.bytes
    assert bool((first == 1).all())
    del first, second
    table.begin(0)
    first = torch.empty(FLOATS)
    del first
    second = torch.empty(FLOATS)
    table.end()
    assert offset_in_arena(second, arena) == 0


def test_optional_request_is_served_by_malloc(arena: Arena) -> None:
    table = ScopeTable(arena, [[(2 * MIB, None), (MIB, 0)]])
    for present in (True, False):
        table.begin(0)
        cache = torch.empty(2 * FLOATS) if present else None
        planned = torch.empty(FLOATS)
        table.end()
        assert offset_in_arena(planned, arena) == 0
        assert cache is None or not 0 <= offset_in_arena(cache, arena) < arena.bytes
        del planned
    assert arena.counters() == ArenaCounters(served=2)


def test_unknown_scope_has_no_plan(arena: Arena) -> None:
    table = ScopeTable(arena, [[(MIB, 0)]])
    for scope in (-1, 1, 1000):
        table.begin(scope)
        tensor = torch.empty(FLOATS)
        table.end()
        assert not 0 <= offset_in_arena(tensor, arena) < arena.bytes
    table.end()  # without a scope


def test_table_with_bytes_outside_of_the_arena_is_refused(arena: Arena) -> None:
    for count, offset in ((MIB, 64 * MIB), (65 * MIB, 0), (MIB, -5), (0, 0)):
        with pytest.raises(ArenaError, match="scope 1"):
            ScopeTable(arena, [[], [(count, offset)]])


def test_view_has_its_own_storage(arena: Arena) -> None:
    view = arena.view(100, 50)
    assert view.untyped_storage().nbytes() == 50
    assert view.data_ptr() == arena.address + 100
    arena.memory(100, 2)[:] = b"\x05\x06"
    assert view[:2].tolist() == [5, 6]
    assert arena.view(0, 0).numel() == 0
    assert arena.address % (2 * MIB) == 0
    for offset, count in ((-1, 4), (0, -1), (64 * MIB, 1), (0, 64 * MIB + 1)):
        with pytest.raises(ArenaError):
            arena.memory(offset, count)


def test_pages_become_resident_on_touch_and_are_freed_by_discard(arena: Arena) -> None:
    assert arena.resident_bytes() == 0
    arena.view(0, 8 * MIB).fill_(1)
    assert 8 * MIB <= arena.resident_bytes() <= 10 * MIB
    arena.discard(4 * MIB + 1, 4 * MIB - 1)
    view = arena.view(4 * MIB, 4 * MIB)
    assert view[PAGE_BYTES:].sum().item() == 0
    assert view[0].item() == 1  # its page is not wholly within the range
    arena.discard(0, 64 * MIB)
    assert arena.resident_bytes() == 0


def test_closed_arena_raises_state_error() -> None:
    arena = Arena(1)
    assert arena.bytes == PAGE_BYTES
    arena.close()
    for use in (lambda: arena.view(0, 1), lambda: ScopeTable(arena, []), arena.counters, arena.resident_bytes):
        with pytest.raises(StateError, match="closed"):
            use()


def test_recorder_records_its_own_thread_in_order() -> None:
    recorder = AllocationRecorder()
    with recorder:
        a = torch.empty(FLOATS)
        thread = threading.Thread(target=lambda: torch.empty(3 * FLOATS))
        thread.start()
        thread.join()
        pointer = a.data_ptr()
        del a
        b = torch.empty(100 * KIB, dtype=torch.uint8)
    torch.empty(FLOATS)
    kinds = [(event.kind, event.bytes) for event in recorder.events]
    assert kinds == [(EventKind.ALLOCATE, MIB), (EventKind.FREE, 0), (EventKind.ALLOCATE, 100 * KIB)]
    assert [event.pointer for event in recorder.events] == [pointer, pointer, b.data_ptr()]
    with recorder, pytest.raises(StateError, match="recording"):
        recorder.__enter__()
    assert recorder.events == []


def test_ordinary_pytorch_works_while_an_arena_is_installed(arena: Arena, tmp_path: Path) -> None:
    tensor = torch.arange(1000.0)
    torch.save(tensor, tmp_path / "t.pt")
    assert torch.equal(torch.load(tmp_path / "t.pt"), tensor)
    assert np.array_equal(tensor.numpy(), np.arange(1000.0, dtype=np.float32))
    shared = torch.ones(1000).share_memory_()
    assert shared.is_shared()
    loader = DataLoader(TensorDataset(torch.arange(32.0)), batch_size=8, num_workers=2)
    assert sum(batch.sum().item() for (batch,) in loader) == 31 * 16
