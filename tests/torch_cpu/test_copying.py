"""Tests of copies by native threads: their failures and their checksums."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from failing_model import (
    act_before_op,
    assert_same,
    assert_training_continues,
    batch,
    build_sides,
    contents,
    smallest_budget,
    two_homes,
)
from native_threads import copy_threads

import outofcore
from outofcore.errors import SpillError, StateError, TransferError
from outofcore.execution import copying
from outofcore.program import Run
from outofcore.runtime.checksums import sampled_checksum
from outofcore.runtime.file_io import MEMORY, ByteStore
from outofcore.runtime.folders import in_memory
from outofcore.runtime.native import load_native
from outofcore.units import KIB, PAGE_BYTES


@pytest.fixture(scope="module")
def smallest() -> int:
    return smallest_budget()


@pytest.fixture(params=["offload-all", "auto:polish_ops=0"])
def trainings(request: pytest.FixtureRequest, smallest: int, tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    with two_homes(request.param, smallest, tmp_path) as both:
        yield both


def only_home(step: Any) -> Any:
    (home,) = step.homes
    return home


def only_copies(step: Any) -> copying.Copies:
    (copies,) = step._session.engine._copies.values()
    result: copying.Copies = copies
    return result


def test_copy_threads_end_with_the_step(smallest: int, tmp_path: Path) -> None:
    before = copy_threads()
    with two_homes("offload-all", smallest, tmp_path) as (plain, ours):
        engine = ours[2]._session.engine
        (copies,) = engine._copies.values()
        threads = copy_threads() - before
        assert len(threads) == len(copies.arrays[-1])  # type: ignore[arg-type]
        assert_training_continues(plain, ours)
        ours[2].close()
        assert not threads & copy_threads()


def swap_spill_file(step: Any, path: str) -> Callable[[], None]:
    """Make the descriptor of the spill file refer to another file; return a function that restores it."""
    # An empty file is opened read-only: if writes made it grow, reads from its holes would return zeros.
    replacement = os.open(path, os.O_RDWR if path == "/dev/full" else os.O_RDONLY)
    descriptor = step.homes[-1].locate(0, PAGE_BYTES).descriptor
    original = os.dup(descriptor)
    os.dup2(replacement, descriptor)
    os.close(replacement)

    def undo() -> None:
        os.dup2(original, descriptor)
        os.close(original)

    return undo


@pytest.mark.parametrize(
    ("instead", "message"),
    [
        ("/dev/full", r"could not write .* No space left on device; make room"),
        ("empty", r"could not (read .* the file ends there; check that disk|write .* Bad file descriptor)"),
    ],
)
def test_failing_disk_undoes_or_tears_the_step(
    instead: str, message: str, trainings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ours = trainings
    step = ours[2]
    if instead == "empty":
        (tmp_path / "empty").touch()
        instead = str(tmp_path / "empty")
    before = contents(ours[0], ours[1])
    ops = sum(isinstance(i, Run) for i in step.planned.program.instructions)
    failed = 0
    for number in range(1, ops + 1, 5):
        undo: list[Callable[[], None]] = []
        with act_before_op(monkeypatch, number, lambda undo=undo: undo.append(swap_spill_file(step, instead))):  # type: ignore[misc]
            try:
                step(batch(9))
            except TransferError as error:
                failed += 1
                # Reads from /dev/full return zeros, which the checksums detect.
                damaged = "are not what was written there" in str(error)
                assert damaged or re.search(message, str(error))
                undo.pop()()
                if any("as they were before" in note for note in error.__notes__):
                    assert_same(contents(ours[0], ours[1]), before)
                    continue
                with pytest.raises(StateError, match=r"part old and part new"):
                    step(batch(9))
                break
            else:
                if undo:  # empty if Python calls fewer ops because native code replays them
                    undo.pop()()
                break  # no copies are left
    assert failed
    step.close()


def test_full_check_detects_damage_in_any_page(smallest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage an unsampled page in each written slot, in memory and on disk."""
    model, optimizer, step = build_sides()
    with outofcore.compile(
        step, model, optimizer, budget=smallest, home=tmp_path, host_budget="300KiB", policy="offload-all", check="full"
    ) as ours:
        ours(batch(0))
        copies = only_copies(ours)
        assert {place.descriptor >= 0 for *_, place in copies.places} == {True, False}

        def damage() -> None:
            for sums, offset in copies.summed:
                home = next(home for home in ours.homes if home.sums is sums)
                count, _ = sums.recorded.get(offset, (0, 0))
                checksum = next(f for key, f in zip(copies.summed, copies.sums, strict=True) if key == (sums, offset))
                if (pages := max(count, checksum.bytes) // PAGE_BYTES) < 5:
                    continue
                spread = [((offset // PAGE_BYTES + k) * 2654435761 % 2**32) * pages >> 32 for k in (1, 2)]
                unsampled = next(page for page in range(1, pages - 1) if page not in spread)
                ByteStore.write(home, offset + unsampled * PAGE_BYTES, memoryview(os.urandom(PAGE_BYTES)))

        noticed = 0
        for number in range(2, 40):
            with act_before_op(monkeypatch, number, damage):
                try:
                    ours(batch(1))
                except TransferError as error:
                    assert "checksum differs" in str(error)
                    noticed += 1
                    if any("as they were before" in note for note in error.__notes__):
                        continue
                break
        assert noticed


def test_checksums_of_native_writes_reach_the_home(smallest: int, tmp_path: Path) -> None:
    model, optimizer, step = build_sides()
    with outofcore.compile(step, model, optimizer, budget=smallest, home=tmp_path, policy="offload-all") as ours:
        ours(batch(0))
        home, copies = only_home(ours), only_copies(ours)
        written = {
            offset for (_, offset), checksum in zip(copies.summed, copies.sums, strict=True) if checksum.bytes >= 0
        }
        assert written
        assert written <= set(home.sums.recorded)


def test_sample_is_first_last_and_two_pages_picked_by_the_offset() -> None:
    for pages in (1, 2, 3, 17, 1000):
        memory = bytearray(os.urandom(pages * PAGE_BYTES - 100))
        for offset in (0, 7 * PAGE_BYTES, 123456 * PAGE_BYTES):
            first = sampled_checksum(memoryview(memory), offset)
            sampled_pages = set()
            for page in range(pages):
                memory[page * PAGE_BYTES] ^= 1
                if sampled_checksum(memoryview(memory), offset) != first:
                    sampled_pages.add(page)
                memory[page * PAGE_BYTES] ^= 1
            between = {((offset // PAGE_BYTES + k) * 2654435761 % 2**32) * pages >> 32 for k in (1, 2)}
            assert sampled_pages == {0, pages - 1} | between


def test_closed_home_is_not_written(smallest: int, tmp_path: Path) -> None:
    """The descriptor of a closed home may already belong to another file."""
    model, optimizer, step = build_sides()
    with outofcore.compile(step, model, optimizer, budget=smallest, home=tmp_path, policy="offload-all") as ours:
        ours(batch(0))
        copies = only_copies(ours)
        home, offset, count, place = copies.places[0]
        assert place.descriptor != MEMORY
        file, home._file = home._file, None  # type: ignore[attr-defined]
        try:
            with pytest.raises(StateError, match="not open"):
                home.locate(offset, count)
            with pytest.raises((StateError, SpillError, TransferError)):
                ours(batch(1))
        finally:
            home._file = file  # type: ignore[attr-defined]


def test_forked_child_does_not_wait_for_copy_threads(smallest: int, tmp_path: Path) -> None:
    with two_homes("offload-all", smallest, tmp_path) as (plain, ours):
        engine = ours[2]._session.engine
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            engine.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert_training_continues(plain, ours)


def test_pieces_of_all_sizes_are_copied_whole(tmp_path: Path) -> None:
    """Small pieces and the ends of large ones go through a page-aligned buffer."""
    from outofcore.runtime.homes import DiskHome  # noqa: PLC0415

    if in_memory(tmp_path):
        pytest.skip("the temporary folder is not on a disk")
    library = load_native()
    home = DiskHome(tmp_path)
    sizes = [1, 64, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 1024 * KIB, 1024 * KIB + 5, 3 * 1024 * KIB + 4097]
    for size in sizes:
        for shift in (0, 64):
            offset = home.reserve(size)
            region = torch.empty(size + 2 * PAGE_BYTES, dtype=torch.uint8)
            start = -region.data_ptr() % PAGE_BYTES + shift
            region.random_(generator=torch.Generator().manual_seed(size))
            expected = region[start : start + size].clone()
            address = region.data_ptr() + start
            for writes in (True, False):
                copy_piece(library, home, address, size, offset, writes=writes)
                if writes:
                    region[start : start + size].zero_()
            assert torch.equal(region[start : start + size], expected)
    home.close()


def copy_piece(library: Any, home: Any, address: int, size: int, offset: int, *, writes: bool) -> None:
    from array import array  # noqa: PLC0415

    place = home.locate(offset, size)
    piece = copying._Piece(address=address, slot=offset, sum=-1)
    piece.set_location(place)
    pieces = (copying._Piece * 1)(piece)
    waits, sums = (copying._Wait * 0)(), (copying._Sum * 0)()
    copies = (copying._Copy * 1)(copying._Copy(0, 1, 0, 1, 0, 0, 1, writes))
    queues = (copying._Queue * 1)()
    queues[0].number, queues[0].copies, queues[0].first = 1, 1, copies
    work = copying._Work(pieces, waits, sums, queues, 1, True)
    source = copying._Source(home, offset, writes)
    step_copies = copying.Copies({}, work, (waits, copies, queues), pieces, (), sums, (), (), (source,), ())
    threads = copying.Copying(library, 4)
    starts, ends = array("d", bytes(8)), array("d", bytes(8))
    threads.begin(step_copies, {}, starts, ends)
    threads.wait([(1, 1)])
    threads.finish()
    assert threads.failure is None
    assert 0 < starts[0] <= ends[0]
    threads.close()
