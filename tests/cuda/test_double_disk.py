"""A disk behind host memory, on the double: the very bits, and no wait of program, engine or staging too few."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from double import FakeCuda, RaceError
from effort import is_exhaustive
from worlds import (
    CPU,
    STEPS,
    World,
    budget_of,
    compile_on_double,
    convolutional,
    dense,
    differing_tensors,
    train_eagerly,
)

from outofcore.errors import TransferError
from outofcore.execution.arena import ScopeTable
from outofcore.execution.binding import BoundCopy, BoundProgram
from outofcore.execution.cuda.engine import CudaEngine
from outofcore.execution.cuda.interface import Stream
from outofcore.execution.cuda.staging import reads_after_writes
from outofcore.graph import StepGraph
from outofcore.profiling import links
from outofcore.program import Block, CopyIn, CopyOut, Program
from outofcore.runtime.homes import DiskHome, HomeStore, HostHome
from outofcore.runtime.slots import SlotPiece
from outofcore.step import Step
from outofcore.units import KIB, MIB
from outofcore.validator import validate

# The model, the policy, the share of what it wants of the device, and bytes of host memory, too few for the rest.
CASES = [
    (dense, "offload-all", 0.0, 600 * KIB),
    (convolutional, "offload-all", 0.0, 1000 * KIB),
    (convolutional, "window", 0.1, 600 * KIB),
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
    losses, state = train_eagerly(make(CPU), STEPS)
    world, budget = make(CPU), budget_of(make, share)
    with compile_on_double(world, budget, policy, FakeCuda(bytes_per_s=rate), homes(near, tmp_path)) as step:
        torch.manual_seed(1)
        found = [step(*world.batch(index)).clone() for index in range(STEPS)]
        assert {type(copy) for copy in to_and_from_disk(step)} == {CopyIn, CopyOut}
        validate(step.captured.graph, step.planned.program, budget, step.costs)
        assert differing_tensors(world.state(), state) == []
    assert [torch.equal(a, b) for a, b in zip(found, losses, strict=True)] == [True] * STEPS
    assert differing_tensors(world.state(), state) == []


@pytest.mark.parametrize(("make", "policy", "share", "near"), CASES[:2])
def test_no_wait_can_be_left_out(
    make: Callable[[torch.device], World], policy: str, share: float, near: int, tmp_path: Path
) -> None:
    """Each wait within a step in turn, whoever asked for it: the program, the engine for a file, or a buffer."""
    world, driver = make(CPU), FakeCuda()
    with compile_on_double(world, budget_of(make, share), policy, driver, homes(near, tmp_path)) as step:
        for index in range(2):
            step(*world.batch(index))
        runner = step._session.steps.runner
        assert runner is not None
        batch, before = list(world.batch(2)), driver.waits
        runner.run(step._session.engine, batch)
        count = driver.waits - before
        news = {n for n in range(count) if driver.advanced_clock[before + n]}
        state, unseen = world.state(), set[int]()
        # The first four let the copies begin, and the last four let the ops go on: see the next test.
        # Of those between, which are alike layer by layer, every third or eleventh.
        for place in range(4, count - 4, 3 if is_exhaustive() else 11):
            driver.drop = frozenset({driver.waits + place})
            try:
                runner.run(step._session.engine, batch)
            except RaceError:
                # It is seen as the step is issued, before anything runs.
                assert differing_tensors(world.state(), state) == []
                continue
            unseen.add(place)
            state = world.state()
        # What is left are waits that tell a stream nothing that it does not know by another wait.
        assert unseen & news == set()
        assert len(news) > 0.9 * count > 100
        driver.drop = frozenset()


def back_and_forth(driver: FakeCuda, folder: Path, home: int, *, out_first: bool) -> Callable[[], int]:
    """Runs a step that copies a block out and in, or in and out, and tells how many waits that took."""
    count, lane = 64 * KIB, 2 * home
    engine = CudaEngine(driver, homes(MIB, folder), MIB, 4)
    engine_homes = [engine._home, engine._disk]
    store = engine_homes[home]
    assert store is not None
    store.ensure(count)
    arena = driver.open_arena(count, 0)
    kinds = (CopyOut, CopyIn) if out_first else (CopyIn, CopyOut)
    program = Program(tuple(kind(0, 0, home=home) for kind in kinds), (Block(0, 0, count, 0, 0, True, 0),), count)
    queues: list[tuple[BoundCopy, ...]] = [(), (), (), ()]
    for index, kind in enumerate(kinds):
        queue = lane + (kind is CopyIn)
        waits = ((2 * lane + 2 - queue, 1),) if index else ()  # for the other one, queues being numbered from 1
        queues[queue] = (BoundCopy(index, 0, home, 0, count, waits, 1, not index),)
    bound = BoundProgram(StepGraph((), (), ()), program, arena, (), tuple(queues))
    table, slots = ScopeTable(arena, []), {index: (SlotPiece(0, count),) for index in (0, 1)}

    def step() -> int:
        before = driver.waits
        engine.run(bound, table, slots, {})
        return driver.waits - before

    return step


# Of the waits around a step, by the stream that waits or is waited for, which step shows that it is needed.
BEGIN = {Stream.COPY_OUT: True, Stream.COPY_IN: False, Stream.DISK_OUT: True, Stream.READ: False}
END = {Stream.COPY_OUT: False, Stream.COPY_IN: True, Stream.WRITE: False, Stream.DISK_IN: True}
AROUND = [("begin", stream, first) for stream, first in BEGIN.items()]
AROUND += [("end", stream, first) for stream, first in END.items()]


@pytest.mark.parametrize(("side", "stream", "out_first"), AROUND)
def test_no_wait_around_a_step_can_be_left_out(side: str, stream: Stream, out_first: bool, tmp_path: Path) -> None:
    """Steps that follow each other unhindered get in each other's way, should one stream not be joined to the rest."""
    home = 0 if stream in (Stream.COPY_OUT, Stream.COPY_IN) else 1
    sides = list(BEGIN if side == "begin" else END)[: 2 * home + 2]
    driver = FakeCuda(waits_on_host=False)
    step = back_and_forth(driver, tmp_path, home, out_first=out_first)
    count = step()
    step()
    place = sides.index(stream) if side == "begin" else count - len(sides) + sides.index(stream)
    # The end of this step, or the beginning of the next.
    driver.drop = frozenset({driver.waits + place + (count if side == "begin" else 0)})
    step()
    with pytest.raises(RaceError):
        step()


def test_a_transfer_that_fails_is_told_in_the_same_step(tmp_path: Path) -> None:
    make, policy, share, near = CASES[1]
    world, driver = make(CPU), FakeCuda()
    with compile_on_double(world, budget_of(make, share), policy, driver, homes(near, tmp_path)) as step:
        step(*world.batch(0))
        driver.failing = True
        with pytest.raises(TransferError, match="no space left") as caught:
            step(*world.batch(1))
        assert any("part old and part new" in note for note in caught.value.__notes__)


def test_a_link_to_a_disk_is_measured_through_the_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_make_ops", lambda *_, **__: lambda: None)
    driver, home = FakeCuda(bytes_per_s=2e9), DiskHome(tmp_path)
    try:
        link = links.measure_link(home, driver=driver, buffer_bytes=32 * MIB, seconds=0.05)
    finally:
        home.close()
    # The double's disk takes half as long as its link to host memory up to three times as long, drawn for each buffer.
    assert 0.5e9 < link.alone.out < 2e9
    assert 0.5e9 < link.alone.into < 2e9
    assert link.name == "disk"


def test_a_read_waits_for_the_last_write_of_its_pages() -> None:
    slots: dict[int, tuple[SlotPiece, ...]] = {
        0: (SlotPiece(0, 8192), SlotPiece(16384, 4096)),
        1: (SlotPiece(8192, 4096),),
        2: (SlotPiece(0, 4096),),
        3: (SlotPiece(16384, 4096),),
        4: (SlotPiece(8192, 4096),),
        5: (SlotPiece(40960, 4096),),
        6: (SlotPiece(4096, 8192),),
        7: (SlotPiece(8192, 4096),),
    }
    order = [(0, True), (1, True), (2, True), (3, False), (4, False), (5, False), (6, True), (7, False)]
    # 3 reads a piece of what 0 wrote, 4 all of what 1 wrote, 5 what was there before, 7 a part of what 6 wrote.
    assert reads_after_writes(order, slots) == {3: 0, 4: 1, 7: 6}
    # Who has waited for 1 need not wait for 0.
    assert reads_after_writes([(0, True), (1, True), (4, False), (3, False)], slots) == {4: 1}
