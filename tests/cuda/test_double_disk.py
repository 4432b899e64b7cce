"""A disk behind host memory, on the double: the very bits, and no wait of program, engine or staging too few."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from double import FakeCuda, RaceError
from test_double import CPU, STEPS, budget_of, compiled
from worlds import World, convolutional, dense, eager, same

from outofcore.errors import TransferError
from outofcore.execution.cuda.files import reads_after_writes
from outofcore.execution.homes import DiskHome, HomeStore
from outofcore.execution.host import HostHome
from outofcore.execution.slots import Piece
from outofcore.profiling import device_links
from outofcore.program import CopyIn, CopyOut
from outofcore.step import Step
from outofcore.units import KIB, MIB
from outofcore.validator import validate

# The model, the policy, how much of what it wants of the device it gets, and bytes of host memory, too few for the rest.
CASES = [
    (dense, "offload-all", 0.0, 600 * KIB),
    (convolutional, "offload-all", 0.0, 1000 * KIB),
    (convolutional, "priced", 0.1, 600 * KIB),
]


def homes(near: int, folder: Path) -> list[HomeStore]:
    return [HostHome(near), DiskHome(folder)]


def to_and_from_disk(step: Step) -> list[CopyIn | CopyOut]:
    return [i for i in step.planned.program.instructions if isinstance(i, CopyIn | CopyOut) and i.home == 1]


@pytest.mark.parametrize(("make", "policy", "share", "near"), CASES)
@pytest.mark.parametrize("rate", [1e10, 2e8])
def test_the_bits_of_plain_pytorch(
    make: Callable[[torch.device], World], policy: str, share: float, near: int, rate: float, tmp_path: Path
) -> None:
    losses, state = eager(make(CPU), STEPS)
    world, budget = make(CPU), budget_of(make, share)
    with compiled(world, budget, policy, FakeCuda(bytes_per_s=rate), homes(near, tmp_path)) as step:
        torch.manual_seed(1)
        found = [step(*world.batch(index)).clone() for index in range(STEPS)]
        assert {type(copy) for copy in to_and_from_disk(step)} == {CopyIn, CopyOut}
        validate(step.captured.graph, step.planned.program, budget, step.costs)
        assert same(world.state(), state) == []
    assert [torch.equal(a, b) for a, b in zip(found, losses, strict=True)] == [True] * STEPS
    assert same(world.state(), state) == []


@pytest.mark.parametrize(("make", "policy", "share", "near"), CASES[:2])
def test_no_wait_can_be_left_out(
    make: Callable[[torch.device], World], policy: str, share: float, near: int, tmp_path: Path
) -> None:
    """Each wait within a step in turn, whoever asked for it: the program, the engine for a file, or a buffer."""
    world, driver = make(CPU), FakeCuda()
    with compiled(world, budget_of(make, share), policy, driver, homes(near, tmp_path)) as step:
        for index in range(2):
            step(*world.batch(index))
        entry = step._active
        assert entry is not None
        batch, before = list(world.batch(2)), driver.waits
        entry.runner.run(step._engine, batch)
        count = driver.waits - before
        news = {n for n in range(count) if driver.news[before + n]}
        state, unseen = world.state(), set[int]()
        # The first four let the copies begin, and the last four let the ops go on: see the next test.
        for place in range(4, count - 4):
            driver.drop = frozenset({driver.waits + place})
            try:
                entry.runner.run(step._engine, batch)
            except RaceError:
                # It is seen as the step is issued, before anything runs.
                assert same(world.state(), state) == []
                continue
            unseen.add(place)
            state = world.state()
        # What is left are waits that tell a stream nothing that it does not know by another wait.
        assert unseen & news == set()
        assert len(news) > 0.9 * count > 100
        driver.drop = frozenset()



def test_streams_are_joined_around_a_step(tmp_path: Path) -> None:
    """As for host memory: without them, steps that follow each other unhindered get in each other's way."""
    # With so little host memory, parameters are on the disk between two steps. So many buffers are used once in a step.
    make, policy, share, near = dense, "offload-all", 0.0, 256 * KIB
    world, driver = make(CPU), FakeCuda(waits_on_host=False, buffers=(MIB, 64))
    with compiled(world, budget_of(make, share), policy, driver, homes(near, tmp_path)) as step:
        for index in range(3):
            step(*world.batch(index))
        before = driver.waits
        step(*world.batch(3))
        count = driver.waits - before
        news = {n for n in range(count) if driver.news[before + n]}
    around = [0, 1, 2, 3, count - 4, count - 3, count - 2, count - 1]
    seen: set[int] = set()
    for place in around:
        world, driver = make(CPU), FakeCuda(waits_on_host=False, buffers=(MIB, 64))
        with compiled(world, budget_of(make, share), policy, driver, homes(near, tmp_path)) as step:
            step(*world.batch(0))
            driver.drop = frozenset(driver.waits + place + k * count for k in range(3))
            try:
                for index in range(1, 4):
                    step(*world.batch(index))
            except RaceError:
                seen.add(place)
    print("RESULT", around, seen, news & set(around))
    # Copies of the first home begin after something else of the program, and end before.
    assert seen >= {3, count - 2, count - 1}


def test_a_transfer_that_fails_is_told_in_the_same_step(tmp_path: Path) -> None:
    make, policy, share, near = CASES[1]
    world, driver = make(CPU), FakeCuda()
    with compiled(world, budget_of(make, share), policy, driver, homes(near, tmp_path)) as step:
        step(*world.batch(0))
        driver.failing = True
        with pytest.raises(TransferError, match="no space left") as caught:
            step(*world.batch(1))
        assert any("part old and part new" in note for note in caught.value.__notes__)


def test_a_link_to_a_disk_is_measured_through_the_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_links, "_ops", lambda *_: lambda: None)
    driver, home = FakeCuda(bytes_per_s=2e9), DiskHome(tmp_path)
    try:
        link = device_links.measure_device_link(driver, home, buffer_bytes=32 * MIB, seconds=0.05)
    finally:
        home.close()
    # The double's disk takes half as long as its link to host memory up to three times as long, drawn for each buffer.
    assert 0.5e9 < link.alone.out < 2e9
    assert 0.5e9 < link.alone.into < 2e9
    assert link.name == "disk"


def test_a_read_waits_for_the_last_write_of_its_pages() -> None:
    slots: dict[int, tuple[Piece, ...]] = {
        0: (Piece(0, 8192), Piece(16384, 4096)),
        1: (Piece(8192, 4096),),
        2: (Piece(0, 4096),),
        3: (Piece(16384, 4096),),
        4: (Piece(8192, 4096),),
        5: (Piece(40960, 4096),),
        6: (Piece(4096, 8192),),
        7: (Piece(8192, 4096),),
    }
    order = [(0, True), (1, True), (2, True), (3, False), (4, False), (5, False), (6, True), (7, False)]
    # 3 reads a piece of what 0 wrote, 4 all of what 1 wrote, 5 what was there before, 7 a part of what 6 wrote.
    assert reads_after_writes(order, slots) == {3: 0, 4: 1, 7: 6}
    # Who has waited for 1 need not wait for 0.
    assert reads_after_writes([(0, True), (1, True), (4, False), (3, False)], slots) == {4: 1}
