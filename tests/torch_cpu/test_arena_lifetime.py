"""Tests of the lifetime of arena memory: with its tensors, over forks, and after the allocator."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from arena_helpers import FLOATS, floats, is_mapped, offset_in_arena

from outofcore.errors import ArenaError
from outofcore.execution.arena import AllocationRecorder, Arena, ScopeTable
from outofcore.units import MIB, PAGE_BYTES


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena(64 * MIB, reserve=4 * MIB) as opened:
        yield opened


def test_memory_allocated_before_or_during_an_arena_can_be_freed_later() -> None:
    before = torch.ones(FLOATS)
    arena = Arena(8 * MIB)
    between = torch.ones(FLOATS)
    resized = torch.ones(10)
    del before
    arena.close()
    arena.close()
    del between
    resized.resize_(FLOATS)  # its storage refers to the allocator that created it
    del resized
    with Arena(8 * MIB):
        pass


def test_tensors_keep_the_arena_memory_alive_after_close() -> None:
    arena = Arena(8 * MIB)
    view = floats(arena, 0, MIB).fill_(7)
    table = ScopeTable(arena, [[(MIB, 4 * MIB)]])
    table.begin(0)
    placed = torch.full((FLOATS,), 3.0)
    table.end()
    memory = arena.memory(MIB, 4)
    address = arena.address
    arena.close()
    del table, arena
    gc.collect()
    assert is_mapped(address)
    assert placed.sum().item() == 3 * FLOATS
    assert view.sum().item() == 7 * FLOATS
    del view
    memory.release()
    assert is_mapped(address)  # the tensor that PyTorch allocated there keeps it
    del placed
    assert not is_mapped(address)


def test_unreferenced_arena_frees_its_memory_and_the_allocator() -> None:
    arena = Arena(8 * MIB)
    address = arena.address
    del arena
    gc.collect()
    assert not is_mapped(address)
    with AllocationRecorder() as recorder:
        torch.empty(10)
    assert recorder.events  # installing works again


def test_several_arenas_serve_requests_at_once() -> None:
    with Arena(8 * MIB) as first, Arena(8 * MIB) as second:
        tables = ScopeTable(first, [[(MIB, 0)]]), ScopeTable(second, [[(MIB, MIB)]])
        placed = []
        for table in tables:
            table.begin(0)
            placed.append(torch.empty(FLOATS))
            table.end()
        assert offset_in_arena(placed[0], first) == 0
        assert offset_in_arena(placed[1], second) == MIB
        first.close()
        assert second.counters().served == 1
        del placed


def test_too_many_arenas_are_refused_and_all_can_be_freed() -> None:
    for _ in range(2):
        arenas = []
        with pytest.raises(ArenaError, match="too many"):
            for _ in range(1000):
                arenas.append(Arena(PAGE_BYTES))
        assert len(arenas) >= 64
        for arena in arenas:
            arena.close()


def test_forked_child_gets_its_own_copy(arena: Arena) -> None:
    view = floats(arena, 0, MIB).fill_(1)
    table = ScopeTable(arena, [[(MIB, MIB)]])
    child = os.fork()
    if child == 0:
        status = 1
        signal.alarm(60)  # never leave a child behind
        try:
            torch.set_num_threads(1)  # as DataLoader's workers do: OpenMP's threads do not survive a fork
            table.begin(0)
            placed = torch.empty(FLOATS)
            table.end()
            right = offset_in_arena(placed, arena) == MIB and view[5].item() == 1
            view.fill_(9)
            del placed, view
            arena.close()
            status = 0 if right else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert view[5].item() == 1


def test_arena_tensors_may_live_until_the_process_exits() -> None:
    script = (
        "import torch\n"
        "from outofcore.execution.arena import Arena, ScopeTable\n"
        "arena = Arena(8 << 20)\n"
        "table = ScopeTable(arena, [[(1 << 20, 0)]])\n"
        "table.begin(0)\n"
        "torch.kept = torch.ones(1 << 18)\n"
        "table.end()\n"
        "torch.view = arena.view(0, 100)\n"
    )
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stderr) == (0, "")
