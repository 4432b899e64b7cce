"""Tests of homes: copies, slots, home tensors and growth."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from home_helpers import fill_with_noise, refuse_direct_io, resident_bytes

import outofcore
from outofcore.errors import StateError, TransferError
from outofcore.execution.arena import Arena
from outofcore.runtime import file_io
from outofcore.runtime.homes import DiskHome, HomeStore, HostHome
from outofcore.runtime.memory import Region, map_anonymous
from outofcore.units import KIB, MIB, PAGE_BYTES


@pytest.fixture(params=["disk", "disk, buffered", "host"])
def home(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HomeStore]:
    if request.param == "disk, buffered":
        refuse_direct_io(monkeypatch)
    store: HomeStore = HostHome(256 * MIB) if request.param == "host" else DiskHome(tmp_path)
    yield store
    store.close()


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena(64 * MIB) as region:
        yield region


@pytest.mark.parametrize(
    ("place", "count"),
    [
        (0, 1),
        (0, PAGE_BYTES),
        (64, 100 * KIB),  # not page-aligned: copied through the buffer
        (PAGE_BYTES, 100_001),  # with a tail
        (PAGE_BYTES, 20 * MIB + 4097),  # in several chunks
        (192, 3 * MIB + 5),
    ],
)
def test_written_bytes_are_read_back(
    home: HomeStore, arena: Arena, place: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_io, "CHUNK_BYTES", 8 * MIB)
    offset = 3 * PAGE_BYTES
    home.ensure(offset + count)
    outgoing, incoming = arena.memory(place, count), arena.memory(32 * MIB + place, count)
    expected = fill_with_noise(outgoing, 1)
    home.write(offset, outgoing)
    home.read(offset, incoming)
    assert bytes(incoming) == expected
    assert bytes(arena.memory(32 * MIB + place + count, 8)) == bytes(8)  # no write beyond the end


def test_slot_does_not_touch_its_neighbours(home: HomeStore, arena: Arena) -> None:
    sizes = [1, PAGE_BYTES, 70_000, 5, MIB]
    offsets = [0, PAGE_BYTES, 2 * PAGE_BYTES, 20 * PAGE_BYTES, 21 * PAGE_BYTES]
    home.ensure(offsets[-1] + MIB)
    expected = []
    for seed, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        expected.append(fill_with_noise(arena.memory(0, size), seed))
        home.write(offset, arena.memory(0, size))
    for offset, size, before in zip(offsets, sizes, expected, strict=True):
        home.read(offset, arena.memory(MIB, size))
        assert bytes(arena.memory(MIB, size)) == before


def test_face_shares_its_bytes_with_writes_and_reads(home: HomeStore, arena: Arena) -> None:
    count = MIB + 100
    home.ensure(2 * MIB + 8 * KIB)
    home_tensor = home.tensor_of(PAGE_BYTES, count)
    assert home_tensor.untyped_storage().nbytes() == count
    for seed in range(3):
        expected = fill_with_noise(arena.memory(0, count), seed)
        home.write(PAGE_BYTES, arena.memory(0, count))
        assert bytes(home_tensor.numpy()) == expected
        home_tensor += 1  # dirty pages in the page cache, under direct I/O
        home.read(PAGE_BYTES, arena.memory(4 * MIB, count))
        assert torch.equal(arena.view(4 * MIB, count), arena.view(0, count) + 1)
        home.drop_cache(home_tensor)
        assert torch.equal(home_tensor, arena.view(0, count) + 1)
        home_tensor.fill_(seed)
        home.drop_cache(home_tensor)
        home.read(PAGE_BYTES, arena.memory(4 * MIB, count))
        assert bool((arena.view(4 * MIB, count) == seed).all())
    home.close()
    assert bool((home_tensor == 2).all())
    home.drop_cache(home_tensor)
    assert bool((home_tensor == 2).all())


def test_growth_keeps_slots_and_home_tensors(home: HomeStore, arena: Arena) -> None:
    first = home.reserve(MIB)
    home_tensor = home.tensor_of(first, MIB)
    expected = fill_with_noise(arena.memory(0, MIB), 1)
    home.write(first, arena.memory(0, MIB))
    second = home.reserve(2 * MIB + 1)
    home.ensure(8 * MIB)
    home.ensure(MIB)
    assert home.bytes == 8 * MIB
    assert second >= first + MIB
    home.write(second, arena.memory(MIB, 2 * MIB))
    home.read(first, arena.memory(8 * MIB, MIB))
    assert bytes(arena.memory(8 * MIB, MIB)) == bytes(home_tensor.numpy()) == expected
    assert int(home.tensor_of(4 * MIB, MIB).sum()) == 0  # new room reads as zeros
    assert home.capacity > home.bytes
    assert home.tensor_of(0, 0).numel() == 0


def test_invalid_slot_is_refused(home: HomeStore, arena: Arena) -> None:
    with pytest.raises((TransferError, StateError)):
        home.write(0, arena.memory(0, PAGE_BYTES))
    home.ensure(MIB)
    memory = arena.memory(0, PAGE_BYTES)
    for offset in (100, -PAGE_BYTES, MIB):
        for use in (home.write, home.read):
            with pytest.raises(TransferError, match="fault of the plan"):
                use(offset, memory)
        with pytest.raises(TransferError, match="fault of the plan"):
            home.tensor_of(offset, PAGE_BYTES)


def test_closed_home_raises_state_error(home: HomeStore, arena: Arena) -> None:
    home.ensure(MIB)
    home.close()
    home.close()
    for use in (
        lambda: home.write(0, arena.memory(0, 64)),
        lambda: home.read(0, arena.memory(0, 64)),
        lambda: home.tensor_of(0, 64),
        lambda: home.ensure(2 * MIB),
    ):
        with pytest.raises(StateError):
            use()


def test_copies_of_several_threads_keep_their_bytes(home: HomeStore, arena: Arena) -> None:
    home.ensure(32 * MIB)
    expected = [fill_with_noise(arena.memory(i * 8 * MIB, 8 * MIB), i) for i in range(4)]

    def write_and_read(index: int) -> None:
        memory = arena.memory(index * 8 * MIB, 8 * MIB)
        for _ in range(3):
            home.write(index * 8 * MIB, memory)
            torch.frombuffer(memory, dtype=torch.uint8).zero_()
            home.read(index * 8 * MIB, memory)

    threads = [threading.Thread(target=write_and_read, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [bytes(arena.memory(i * 8 * MIB, 8 * MIB)) for i in range(4)] == expected


def test_read_only_source_can_be_written(home: HomeStore, arena: Arena) -> None:
    home.ensure(MIB)
    home.write(0, memoryview(b"abc" * 5000))
    home.read(0, arena.memory(0, 15000))
    assert bytes(arena.memory(0, 15000)) == b"abc" * 5000


def test_host_home_takes_memory_only_for_written_bytes() -> None:
    home = HostHome(1 << 36)
    home.ensure(256 * MIB)
    before = resident_bytes()
    region = Region(map_anonymous(4 * MIB), 4 * MIB)
    home.write(0, region.memory(0, 4 * MIB))
    assert resident_bytes() - before < 64 * MIB
    home.close()


# The public open home.


@pytest.fixture(params=["disk", "host"])
def open_home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[outofcore.OpenHome]:
    with outofcore.open_home(request.param if request.param == "host" else tmp_path, check="full") as home:
        yield home


@pytest.mark.parametrize("part", [slice(0, 4096), slice(1024, 5120), slice(1000, 3000), slice(90_112, 100_001)])
def test_copy_moves_a_slice_of_a_row(open_home: outofcore.OpenHome, part: slice) -> None:
    """The slices are whole pages, pages with a tail, and parts of pages."""
    row, expected = open_home.empty(100_001, torch.float32), torch.arange(100_001, dtype=torch.float32)
    open_home.copy(expected, row)
    open_home.copy(-expected[part], row[part])
    expected[part] *= -1
    assert torch.equal(row, expected)
    copied = torch.empty_like(expected[part])
    open_home.copy(row[part], copied)
    assert torch.equal(copied, expected[part])


def test_copy_sees_writes_through_the_row(open_home: outofcore.OpenHome) -> None:
    row, copied = open_home.empty(100_000, torch.bfloat16), torch.empty(100_000, dtype=torch.bfloat16)
    open_home.copy(torch.zeros(100_000, dtype=torch.bfloat16), row)
    row.fill_(3)
    open_home.copy(row, copied)
    assert torch.equal(copied, row)
    assert copied[-1] == 3


def test_copy_takes_strided_layouts_and_rows_of_one_home(open_home: outofcore.OpenHome) -> None:
    table, second = open_home.empty(200 * 300, torch.float32).view(200, 300), open_home.empty(200 * 300, torch.float32)
    numbers = torch.arange(60_000.0).view(300, 200)
    open_home.copy(numbers.t(), table)
    assert torch.equal(table, numbers.t())
    open_home.copy(table.view(-1), second)
    copied = torch.empty(300, 200)
    open_home.copy(second.view(200, 300), copied.t())
    assert torch.equal(copied, numbers)


def test_copy_bypasses_the_page_cache(tmp_path: Path) -> None:
    with outofcore.open_home(tmp_path) as home:
        row = home.empty(64 * MIB, torch.uint8)
        before = resident_bytes()
        piece = torch.ones(MIB, dtype=torch.uint8)
        for start in range(0, 64 * MIB, MIB):
            home.copy(piece, row[start : start + MIB])
            home.copy(row[start : start + MIB], piece)
        assert resident_bytes() - before < 16 * MIB
