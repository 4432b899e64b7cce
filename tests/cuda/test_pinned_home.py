"""Tests of pinned host memory, with a double of the driver."""

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
    capacity: int = 1 << 62
    pinned_counts: list[int] = field(default_factory=list[int])
    active: dict[int, int] = field(default_factory=dict[int, int])

    def pin(self, address: int, count: int) -> bool:
        if sum(self.active.values()) + count > self.capacity:
            return False
        self.pinned_counts.append(count)
        self.active[address] = count
        return True

    def home(self, limit: int | None) -> PinnedHome:
        return PinnedHome(self.pin, self.active.pop, limit)

    def stretch_of(self, home: PinnedHome, offset: int, count: int) -> int:
        start = home.tensor_of(offset, count).data_ptr()
        return sum(start < at + size and at < start + count for at, size in self.active.items())


def test_slots_are_in_few_stretches_and_within_one() -> None:
    pins = Pins()
    home = pins.home(GIB)
    slots = Slots(home)
    slots_taken = [(slots.take(count), count) for count in [3 * 4096, 5 * MIB, 70 * 1024] * 20]
    assert len(pins.pinned_counts) < 8
    assert [pins.stretch_of(home, offset, count) for offset, count in slots_taken] == [1] * len(slots_taken)
    for offset, count in slots_taken[::2]:
        slots.free(offset, count)
    reused = [(slots.take(9 * MIB), 9 * MIB) for _ in range(6)]
    assert [pins.stretch_of(home, offset, count) for offset, count in reused] == [1] * 6
    home.close()
    del home, slots
    assert pins.active == {}


def test_expected_bytes_are_pinned_at_once() -> None:
    pins = Pins()
    slots = Slots(pins.home(GIB))
    slots.grow_ahead(100 * MIB)
    for _ in range(20):
        slots.take(5 * MIB)
    assert pins.pinned_counts == [100 * MIB]


def test_explicit_limit_overrides_the_available_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "available_memory_bytes", lambda: MIB)
    limited = Pins().home(64 * MIB)
    limited.check(64 * MIB)
    assert limited.capacity == 64 * MIB
    limited.ensure(8 * MIB)
    with pytest.raises(SpillError, match=r"its limit is 64\.0 MiB"):
        limited.check(65 * MIB)
    with pytest.raises(SpillError, match=r"the system has 1\.00 MiB available"):
        Pins().home(None).check(8 * MIB)


def test_last_page_below_the_limit_is_used() -> None:
    pins = Pins()
    slots = Slots(pins.home(17 * MIB))
    assert slots.take(MIB) == 0  # 16 MiB are pinned for it
    pieces = slots.take_pieces(16 * MIB)
    assert sum(piece.bytes for piece in pieces) == 16 * MIB
    assert len(pieces) == len(pins.pinned_counts) == 2
    with pytest.raises(SpillError):
        slots.take_pieces(4096)


def test_home_becomes_pageable_when_pinning_fails() -> None:
    pins = Pins(capacity=20 * MIB)
    home = pins.home(GIB)
    slots = Slots(home)
    slots.take(16 * MIB)
    with pytest.warns(UserWarning, match="does not pin") as caught:
        slots.take(16 * MIB)
    assert caught[0].filename == __file__  # the user's line
    slots.take(64 * MIB)
    assert home.edges == [16 * MIB]
    assert not home.pinned


def test_memory_refused_by_the_system_raises(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_pages_are_populated_before_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_RUN_BYTES", MIB)  # several threads
    home = Pins().home(64 * MIB)
    home.ensure(8 * MIB)
    assert home._require_region().resident_bytes() == 8 * MIB
    home.tensor_of(0, 4096).fill_(7)
    home.discard(0, 4096)  # a device addresses pinned pages physically, so they must stay
    assert int(home.tensor_of(0, 4096).min()) == 7


def test_fork_shares_pinned_memory_without_a_copy() -> None:
    home = Pins().home(MIB)
    home.ensure(MIB)
    home_tensor = home.tensor_of(0, 8)
    home_tensor.fill_(1)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reader, 1)
        os._exit(int(home_tensor[0]))
    home_tensor.fill_(5)
    os.write(writer, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
