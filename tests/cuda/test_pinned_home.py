"""Host memory for a GPU, pinned by a double of its driver: in few stretches, believed, and one with the children."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest

from outofcore.errors import SpillError
from outofcore.runtime import homes, memory
from outofcore.runtime.homes import PinnedHome
from outofcore.runtime.slots import Slots
from outofcore.units import GIB, MIB


@dataclass
class Pins:
    """What was pinned, and what of it still is."""

    most: int = 1 << 62
    seen: list[int] = field(default_factory=list[int])
    now: dict[int, int] = field(default_factory=dict[int, int])

    def pin(self, address: int, count: int) -> bool:
        if sum(self.now.values()) + count > self.most:
            return False
        self.seen.append(count)
        self.now[address] = count
        return True

    def home(self, limit: int | None) -> PinnedHome:
        return PinnedHome(self.pin, self.now.pop, limit)

    def stretch_of(self, home: PinnedHome, offset: int, count: int) -> int:
        """How many stretches have a part of a slot."""
        start = home.face(offset, count).data_ptr()
        return sum(start < at + size and at < start + count for at, size in self.now.items())


def test_many_slots_lie_in_few_stretches_and_none_across_two() -> None:
    pins = Pins()
    home = pins.home(GIB)
    slots = Slots(home)
    taken = [(slots.take(count), count) for count in [3 * 4096, 5 * MIB, 70 * 1024] * 20]
    assert len(pins.seen) < 8
    assert [pins.stretch_of(home, offset, count) for offset, count in taken] == [1] * len(taken)
    for offset, count in taken[::2]:
        slots.free(offset, count)
    again = [(slots.take(9 * MIB), 9 * MIB) for _ in range(6)]
    assert [pins.stretch_of(home, offset, count) for offset, count in again] == [1] * 6
    home.close()
    del home, slots
    assert pins.now == {}


def test_what_is_known_to_be_needed_is_pinned_at_once() -> None:
    pins = Pins()
    slots = Slots(pins.home(GIB))
    slots.grow_ahead(100 * MIB)
    for _ in range(20):
        slots.take(5 * MIB)
    assert pins.seen == [100 * MIB]


def test_a_limit_that_is_given_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "available_memory_bytes", lambda: MIB)
    given = Pins().home(64 * MIB)
    given.check(64 * MIB)
    assert given.capacity == 64 * MIB
    given.ensure(8 * MIB)
    with pytest.raises(SpillError, match=r"its limit is 64\.0 MiB"):
        given.check(65 * MIB)
    with pytest.raises(SpillError, match=r"the system has 1\.00 MiB available"):
        Pins().home(None).check(8 * MIB)


def test_the_last_page_is_used_where_there_is_no_more() -> None:
    pins = Pins()
    slots = Slots(pins.home(17 * MIB))
    assert slots.take(MIB) == 0  # 16 MiB are pinned for it
    pieces = slots.take_pieces(16 * MIB)
    assert sum(piece.bytes for piece in pieces) == 16 * MIB
    assert len(pieces) == len(pins.seen) == 2
    with pytest.raises(SpillError):
        slots.take_pieces(4096)


def test_what_cannot_be_pinned_is_pageable_from_there_on() -> None:
    pins = Pins(most=20 * MIB)
    home = pins.home(GIB)
    slots = Slots(home)
    slots.take(16 * MIB)
    with pytest.warns(UserWarning, match="does not pin") as caught:
        slots.take(16 * MIB)
    assert caught[0].filename == __file__  # the user's own line
    slots.take(64 * MIB)
    assert home.edges == [16 * MIB]
    assert not home.pinned


def test_memory_that_is_not_given_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(address: int, count: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    home = Pins().home(GIB)
    home.ensure(MIB)
    with monkeypatch.context() as patch:
        patch.setattr(homes, "populate", none)
        with pytest.raises(SpillError, match=r"does not give 1\.00 MiB more of host memory"):
            home.ensure(2 * MIB)
    assert home.bytes == MIB
    assert home.edges == [MIB]
    home.ensure(2 * MIB)
    assert home.edges == [MIB, 2 * MIB]


def test_pages_are_there_before_they_are_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_RUN_BYTES", MIB)  # several threads
    home = Pins().home(64 * MIB)
    home.ensure(8 * MIB)
    assert home._open_region().resident_bytes() == 8 * MIB
    home.face(0, 4096).fill_(7)
    home.discard(0, 4096)  # a device knows pinned pages by their place
    assert int(home.face(0, 4096).min()) == 7


def test_a_fork_sees_pinned_memory_and_makes_no_copy_of_it() -> None:
    home = Pins().home(MIB)
    home.ensure(MIB)
    face = home.face(0, 8)
    face.fill_(1)
    asked, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(asked, 1)
        os._exit(int(face[0]))
    face.fill_(5)
    os.write(told, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
