"""Homes: bytes that leave memory come back the same, faces agree with them, and nothing is left behind."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from homely import buffered, noise, resident

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
        buffered(monkeypatch)
    opened: HomeStore = HostHome(256 * MIB) if request.param == "host" else DiskHome(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena(64 * MIB) as opened:
        yield opened


@pytest.mark.parametrize(
    ("place", "count"),
    [
        (0, 1),
        (0, PAGE_BYTES),
        (64, 100 * KIB),  # not on a page: by way of the buffer
        (PAGE_BYTES, 100_001),  # with a tail
        (PAGE_BYTES, 20 * MIB + 4097),  # in several pieces
        (192, 3 * MIB + 5),
    ],
)
def test_bytes_come_back_the_same(
    home: HomeStore, arena: Arena, place: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_io, "CHUNK_BYTES", 8 * MIB)
    offset = 3 * PAGE_BYTES
    home.ensure(offset + count)
    outgoing, incoming = arena.memory(place, count), arena.memory(32 * MIB + place, count)
    expected = noise(outgoing, 1)
    home.write(offset, outgoing)
    home.read(offset, incoming)
    assert bytes(incoming) == expected
    assert bytes(arena.memory(32 * MIB + place + count, 8)) == bytes(8)  # nothing beyond the end


def test_a_slot_does_not_touch_its_neighbours(home: HomeStore, arena: Arena) -> None:
    sizes = [1, PAGE_BYTES, 70_000, 5, MIB]
    offsets = [0, PAGE_BYTES, 2 * PAGE_BYTES, 20 * PAGE_BYTES, 21 * PAGE_BYTES]
    home.ensure(offsets[-1] + MIB)
    expected = []
    for seed, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        expected.append(noise(arena.memory(0, size), seed))
        home.write(offset, arena.memory(0, size))
    for offset, size, before in zip(offsets, sizes, expected, strict=True):
        home.read(offset, arena.memory(MIB, size))
        assert bytes(arena.memory(MIB, size)) == before


def test_a_face_shows_what_is_written_and_what_is_stored_in_it_is_read(home: HomeStore, arena: Arena) -> None:
    count = MIB + 100
    home.ensure(2 * MIB + 8 * KIB)
    face = home.face(PAGE_BYTES, count)
    assert face.untyped_storage().nbytes() == count
    for seed in range(3):
        expected = noise(arena.memory(0, count), seed)
        home.write(PAGE_BYTES, arena.memory(0, count))
        assert bytes(face.numpy()) == expected
        face += 1  # dirty pages in the page cache, under direct I/O
        home.read(PAGE_BYTES, arena.memory(4 * MIB, count))
        assert torch.equal(arena.view(4 * MIB, count), arena.view(0, count) + 1)
        home.drop_cache(face)
        assert torch.equal(face, arena.view(0, count) + 1)
        face.fill_(seed)
        home.drop_cache(face)
        home.read(PAGE_BYTES, arena.memory(4 * MIB, count))
        assert bool((arena.view(4 * MIB, count) == seed).all())
    home.close()
    assert bool((face == 2).all())
    home.drop_cache(face)
    assert bool((face == 2).all())


def test_more_room_leaves_slots_and_faces_as_they_are(home: HomeStore, arena: Arena) -> None:
    first = home.reserve(MIB)
    face = home.face(first, MIB)
    expected = noise(arena.memory(0, MIB), 1)
    home.write(first, arena.memory(0, MIB))
    second = home.reserve(2 * MIB + 1)
    home.ensure(8 * MIB)
    home.ensure(MIB)
    assert home.bytes == 8 * MIB
    assert second >= first + MIB
    home.write(second, arena.memory(MIB, 2 * MIB))
    home.read(first, arena.memory(8 * MIB, MIB))
    assert bytes(arena.memory(8 * MIB, MIB)) == bytes(face.numpy()) == expected
    assert int(home.face(4 * MIB, MIB).sum()) == 0  # fresh room reads as zeros
    assert home.capacity > home.bytes
    assert home.face(0, 0).numel() == 0


def test_what_is_not_a_slot_is_refused(home: HomeStore, arena: Arena) -> None:
    with pytest.raises((TransferError, StateError)):
        home.write(0, arena.memory(0, PAGE_BYTES))
    home.ensure(MIB)
    memory = arena.memory(0, PAGE_BYTES)
    for offset in (100, -PAGE_BYTES, MIB):
        for use in (home.write, home.read):
            with pytest.raises(TransferError, match="fault of the plan"):
                use(offset, memory)
        with pytest.raises(TransferError, match="fault of the plan"):
            home.face(offset, PAGE_BYTES)


def test_a_closed_home_says_so(home: HomeStore, arena: Arena) -> None:
    home.ensure(MIB)
    home.close()
    home.close()
    for use in (
        lambda: home.write(0, arena.memory(0, 64)),
        lambda: home.read(0, arena.memory(0, 64)),
        lambda: home.face(0, 64),
        lambda: home.ensure(2 * MIB),
    ):
        with pytest.raises(StateError):
            use()


def test_copies_run_while_python_does(home: HomeStore, arena: Arena) -> None:
    home.ensure(32 * MIB)
    expected = [noise(arena.memory(i * 8 * MIB, 8 * MIB), i) for i in range(4)]

    def there_and_back(index: int) -> None:
        memory = arena.memory(index * 8 * MIB, 8 * MIB)
        for _ in range(3):
            home.write(index * 8 * MIB, memory)
            torch.frombuffer(memory, dtype=torch.uint8).zero_()
            home.read(index * 8 * MIB, memory)

    threads = [threading.Thread(target=there_and_back, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [bytes(arena.memory(i * 8 * MIB, 8 * MIB)) for i in range(4)] == expected


def test_a_read_only_source_can_be_written(home: HomeStore, arena: Arena) -> None:
    home.ensure(MIB)
    home.write(0, memoryview(b"abc" * 5000))
    home.read(0, arena.memory(0, 15000))
    assert bytes(arena.memory(0, 15000)) == b"abc" * 5000


# The disk.


def test_the_host_home_takes_up_memory_only_as_it_is_written() -> None:
    home = HostHome(1 << 36)
    home.ensure(256 * MIB)
    before = resident()
    region = Region(map_anonymous(4 * MIB), 4 * MIB)
    home.write(0, region.memory(0, 4 * MIB))
    assert resident() - before < 64 * MIB
    home.close()


# An open home, as users have it


@pytest.fixture(params=["disk", "host"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[outofcore.OpenHome]:
    with outofcore.open_home(request.param if request.param == "host" else tmp_path, check="full") as home:
        yield home


@pytest.mark.parametrize("part", [slice(0, 4096), slice(1024, 5120), slice(1000, 3000), slice(90_112, 100_001)])
def test_copy_moves_a_part_of_a_row(opened: outofcore.OpenHome, part: slice) -> None:
    """Whole pages, pages with a tail, and what shares its pages with others."""
    row, wanted = opened.empty(100_001, torch.float32), torch.arange(100_001, dtype=torch.float32)
    opened.copy(wanted, row)
    opened.copy(-wanted[part], row[part])
    wanted[part] *= -1
    assert torch.equal(row, wanted)
    found = torch.empty_like(wanted[part])
    opened.copy(row[part], found)
    assert torch.equal(found, wanted[part])


def test_copy_sees_what_was_written_through_the_row(opened: outofcore.OpenHome) -> None:
    row, found = opened.empty(100_000, torch.bfloat16), torch.empty(100_000, dtype=torch.bfloat16)
    opened.copy(torch.zeros(100_000, dtype=torch.bfloat16), row)
    row.fill_(3)
    opened.copy(row, found)
    assert torch.equal(found, row)
    assert found[-1] == 3


def test_copy_takes_other_layouts_and_rows_of_one_home(opened: outofcore.OpenHome) -> None:
    table, other = opened.empty(200 * 300, torch.float32).view(200, 300), opened.empty(200 * 300, torch.float32)
    numbers = torch.arange(60_000.0).view(300, 200)
    opened.copy(numbers.t(), table)
    assert torch.equal(table, numbers.t())
    opened.copy(table.view(-1), other)
    found = torch.empty(300, 200)
    opened.copy(other.view(200, 300), found.t())
    assert torch.equal(found, numbers)


def test_copy_goes_past_the_page_cache(tmp_path: Path) -> None:
    with outofcore.open_home(tmp_path) as home:
        row = home.empty(64 * MIB, torch.uint8)
        before = resident()
        piece = torch.ones(MIB, dtype=torch.uint8)
        for start in range(0, 64 * MIB, MIB):
            home.copy(piece, row[start : start + MIB])
            home.copy(row[start : start + MIB], piece)
        assert resident() - before < 16 * MIB
