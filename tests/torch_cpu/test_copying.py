"""Copies by native threads: what fails there, and what they compare."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty import assert_same, at_op, batch, contents, goes_on, sides, smallest_budget, two_homes

import outofcore
from outofcore.errors import SpillError, StateError, TransferError
from outofcore.execution import copying
from outofcore.program import Run
from outofcore.runtime.checksums import sampled
from outofcore.runtime.file_io import MEMORY, ByteStore
from outofcore.runtime.folders import in_memory
from outofcore.runtime.native import load_native
from outofcore.units import KIB, PAGE_BYTES


@pytest.fixture(scope="module")
def smallest() -> int:
    return smallest_budget()


@pytest.fixture(params=["offload-all", "auto:polish_ops=0"])
def compiled(request: pytest.FixtureRequest, smallest: int, tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    with two_homes(request.param, smallest, tmp_path) as both:
        yield both


def copiers() -> int:
    """Native threads of this process that copy."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return names.count("outofcore-copy")


def only_home(step: Any) -> Any:
    (home,) = step.homes
    return home


def only_copies(step: Any) -> copying.Copies:
    (copies,) = step._session.engine._copies.values()
    found: copying.Copies = copies
    return found


def test_native_threads_copy_and_end_with_the_step(smallest: int, tmp_path: Path) -> None:
    before = copiers()
    with two_homes("offload-all", smallest, tmp_path) as (plain, ours):
        engine = ours[2]._session.engine
        (copies,) = engine._copies.values()
        assert copiers() - before == len(copies.parts[-1])  # type: ignore[arg-type]
        goes_on(plain, ours)
        ours[2].close()
        assert copiers() == before


def swapped(step: Any, path: str) -> Callable[[], None]:
    """Has the descriptor of the spill file be another file, and gives what undoes that."""
    # An empty file is not written: it would grow, and what is read from its holes be zeros.
    other = os.open(path, os.O_RDWR if path == "/dev/full" else os.O_RDONLY)
    descriptor = step.homes[-1].locate(0, PAGE_BYTES).descriptor
    kept = os.dup(descriptor)
    os.dup2(other, descriptor)
    os.close(other)

    def undo() -> None:
        os.dup2(kept, descriptor)
        os.close(kept)

    return undo


@pytest.mark.parametrize(
    ("instead", "message"),
    [
        ("/dev/full", r"could not write .* No space left on device; make room"),
        ("empty", r"could not (read .* the file ends there; check that disk|write .* Bad file descriptor)"),
    ],
)
def test_a_disk_that_fails_undoes_the_step_or_tears_it(
    instead: str, message: str, compiled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ours = compiled
    step = ours[2]
    if instead == "empty":
        (tmp_path / "empty").touch()
        instead = str(tmp_path / "empty")
    before = contents(ours[0], ours[1])
    ops = sum(isinstance(i, Run) for i in step.planned.program.instructions)
    failed = 0
    for number in range(1, ops + 1, 5):
        undo: list[Callable[[], None]] = []
        with at_op(monkeypatch, number, lambda undo=undo: undo.append(swapped(step, instead))):  # type: ignore[misc]
            try:
                step(batch(9))
            except TransferError as error:
                failed += 1
                # What is read from /dev/full is all zeros: damage is noticed.
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
                if undo:  # else Python calls fewer ops by now: the others are replayed
                    undo.pop()()
                break  # nothing is copied any more
    assert failed
    step.close()


def test_full_checks_see_every_page(smallest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that no sample picks is damaged in each slot that was written: in memory, or on the disk."""
    model, optimizer, step = sides()
    with outofcore.compile(
        step, model, optimizer, budget=smallest, home=tmp_path, host_budget="300KiB", policy="offload-all", check="full"
    ) as ours:
        ours(batch(0))
        copies = only_copies(ours)
        assert {place.descriptor >= 0 for *_, place in copies.places} == {True, False}

        def damage() -> None:
            for sums, offset in copies.summed:
                home = next(home for home in ours.homes if home.sums is sums)
                count, _ = sums.known.get(offset, (0, 0))
                found = next(f for key, f in zip(copies.summed, copies.sums, strict=True) if key == (sums, offset))
                if (pages := max(count, found.bytes) // PAGE_BYTES) < 5:
                    continue
                spread = [((offset // PAGE_BYTES + k) * 2654435761 % 2**32) * pages >> 32 for k in (1, 2)]
                unseen = next(page for page in range(1, pages - 1) if page not in spread)
                ByteStore.write(home, offset + unseen * PAGE_BYTES, memoryview(os.urandom(PAGE_BYTES)))

        noticed = 0
        for number in range(2, 40):
            with at_op(monkeypatch, number, damage):
                try:
                    ours(batch(1))
                except TransferError as error:
                    assert "checksum differs" in str(error)
                    noticed += 1
                    if any("as they were before" in note for note in error.__notes__):
                        continue
                break
        assert noticed


def test_what_native_code_wrote_is_known_to_who_reads_it_later(smallest: int, tmp_path: Path) -> None:
    model, optimizer, step = sides()
    with outofcore.compile(step, model, optimizer, budget=smallest, home=tmp_path, policy="offload-all") as ours:
        ours(batch(0))
        home, copies = only_home(ours), only_copies(ours)
        known = {offset for (_, offset), found in zip(copies.summed, copies.sums, strict=True) if found.bytes >= 0}
        assert known
        assert known <= set(home.sums.known)


def test_samples_are_first_and_last_page_and_two_that_the_offset_picks() -> None:
    for pages in (1, 2, 3, 17, 1000):
        memory = bytearray(os.urandom(pages * PAGE_BYTES - 100))
        for offset in (0, 7 * PAGE_BYTES, 123456 * PAGE_BYTES):
            first = sampled(memoryview(memory), offset)
            seen = set()
            for page in range(pages):
                memory[page * PAGE_BYTES] ^= 1
                if sampled(memoryview(memory), offset) != first:
                    seen.add(page)
                memory[page * PAGE_BYTES] ^= 1
            between = {((offset // PAGE_BYTES + k) * 2654435761 % 2**32) * pages >> 32 for k in (1, 2)}
            assert seen == {0, pages - 1} | between


def test_a_home_that_is_closed_is_not_copied_to(smallest: int, tmp_path: Path) -> None:
    """Its descriptor may be another file's by then."""
    model, optimizer, step = sides()
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


def test_the_child_of_a_fork_does_not_wait_for_threads_that_it_has_not(smallest: int, tmp_path: Path) -> None:
    with two_homes("offload-all", smallest, tmp_path) as (plain, ours):
        engine = ours[2]._session.engine
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            engine.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        goes_on(plain, ours)


def test_pieces_of_all_sizes_arrive_whole(tmp_path: Path) -> None:
    """Small ones and the ends of large ones go through memory that begins at a page."""
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
                moved(library, home, address, size, offset, writes=writes)
                if writes:
                    region[start : start + size].zero_()
            assert torch.equal(region[start : start + size], expected)
    home.close()


def moved(library: Any, home: Any, address: int, size: int, offset: int, *, writes: bool) -> None:
    """One copy of one piece, as a step of its own."""
    from array import array  # noqa: PLC0415

    place = home.locate(offset, size)
    piece = copying._Piece(address=address, slot=offset, sum=-1)
    piece.lies_at(place)
    pieces = (copying._Piece * 1)(piece)
    waits, sums = (copying._Wait * 0)(), (copying._Sum * 0)()
    copies = (copying._Copy * 1)(copying._Copy(0, 1, 0, 1, 0, 0, 1, writes))
    queues = (copying._Queue * 1)()
    queues[0].number, queues[0].copies, queues[0].first = 1, 1, copies
    given = copying._Work(pieces, waits, sums, queues, 1, True)
    source = copying._Source(home, offset, writes)
    made = copying.Copies({}, given, (waits, copies, queues), pieces, (), sums, (), (), (source,), ())
    threads = copying.Copying(library, 4)
    starts, ends = array("d", bytes(8)), array("d", bytes(8))
    threads.begin(made, {}, starts, ends)
    threads.wait([(1, 1)])
    threads.finish()
    assert threads.failure is None
    assert 0 < starts[0] <= ends[0]
    threads.close()
